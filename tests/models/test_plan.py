"""Training within a budget of device memory, whose policy is planned."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes
from models import planning, policy_text, train
from models.options import Options, parse_overrides
from models.program import Program

SETTINGS = ["d_model=32", "num_layers=2", "first_k_dense=1", "num_heads=2", "num_kv_heads=1", "head_dim=16"]
SETTINGS += ["num_experts=4", "d_expert=16", "d_shared=16"]
NUMBERS = dict(steps=2, batch=4, seq=64, accum=2, eval_batches=1)
# What is compiled.
ONE_LAYER = [
    "num_layers=1",
    "first_k_dense=0",
    "d_shared=0",
    *(s for s in SETTINGS if not s.startswith(("num_layers", "first", "d_shared"))),
]
SMALLER = NUMBERS | dict(accum=1, seq=32)


@pytest.fixture(scope="module")
def program():
    return Program(Options.of("tiny", overrides=parse_overrides(SETTINGS), **NUMBERS), None)


@pytest.fixture(scope="module")
def budget(program):
    """Bytes of a device that hold a step with room to spare."""
    return 10 * program.state_bytes


def test_a_plan_for_the_smallest_budget(program):
    """The peak counts the state and the sum of gradients; rows bear the model's names; text gives it back."""
    with pytest.raises(jaxoff.BudgetError) as caught:
        program.plan(1)
    smallest = caught.value.smallest_bytes
    tight = program.plan(smallest)
    peak = tight.peak
    params = program.state_shapes["params"]
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert peak.arguments == pytest.approx(program.state_bytes, rel=0.01)
    assert peak.alive > nbytes
    names = {row.name for row in tight.rows}
    assert {"attn.norm_in", "attn.qkv", "mlp.norm_in", "mlp.act", "moe.act", "moe.dispatched"} <= names
    assert policy_text.parse(policy_text.render(tight.policy)) == tight.policy
    loose = program.plan(10 * smallest)
    assert loose.step_ms < tight.step_ms
    assert loose.peak.residuals > tight.peak.residuals


@pytest.mark.long
def test_between_two_placements_the_first_layers_are_placed_otherwise():
    settings = [s for s in SETTINGS if not s.startswith(("num_layers", "first_k_dense"))]
    overrides = parse_overrides([*settings, "num_layers=8", "first_k_dense=0"])
    program = Program(Options.of("tiny", overrides=overrides, **SMALLER), None)
    with pytest.raises(jaxoff.BudgetError) as caught:
        program.plan(1)
    least = caught.value.smallest_bytes
    assert least is not None
    mixed = program.plan(1.05 * least)
    assert mixed.first_layers
    text = policy_text.render(mixed.policy)
    assert text.startswith(f"first={mixed.first_layers}|plan;")
    assert policy_text.parse(text) == mixed.policy
    tokens = np.zeros(program.tokens_shape.shape, program.tokens_shape.dtype)
    under = Program(dataclasses.replace(program.options, policy=text), mixed.policy)
    state, metrics = under.step(under.init(), tokens)
    windows = np.zeros((1, *tokens.shape[1:]), tokens.dtype)
    losses = metrics["loss"], under.compile_held_out(windows)(state["params"], windows[0])
    assert losses[1] < losses[0] < np.inf, "a step on these bytes makes them more likely"


def run(capsys, tmp_path, *words):
    text = tmp_path / "text.py"
    text.write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
    numbers = [word for k, v in SMALLER.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    model = [word for field in ONE_LAYER for word in ("--set", field)]
    status = train.main([*model, *numbers, "--data", str(text), "--no-compare", "--keep", "0", *words])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    "mesh",
    [pytest.param((), marks=pytest.mark.long), ("--mesh", "fsdp=2,expert=4", "--batch", "8")],
    ids=["alone", "mesh"],
)
def test_training_prints_the_plan_and_what_came_of_it(capsys, tmp_path, budget, mesh):
    out = tmp_path / "run"
    status, said = run(capsys, tmp_path, *mesh, "--device-gb", str(budget / 1e9), "--out", str(out))
    assert status == 0, said.err
    assert "device peak" in said.out
    assert re.search(r"predicted, measured +step [\d.]+ ms on NVIDIA H200, [\d.]+ ms \([-+]", said.out)
    result = json.loads((out / "summary.json").read_text())
    assert result["summary"]["predicted"]["budget_bytes"] == pytest.approx(budget, abs=1)
    assert result["policy"].startswith("plan;")
    assert np.isfinite(result["summary"]["held_out"][-1][1])


def test_a_budget_that_is_too_small_is_one_line(capsys, tmp_path):
    status, said = run(capsys, tmp_path, "--device-gb", "0.000001", "--out", str(tmp_path / "none"))
    assert status == 2
    assert said.err.count("\n") == 1
    assert re.search("--device-gb 1e-06: .* the smallest budget is", said.err)


def test_a_budget_and_a_policy_exclude_each_other(capsys, tmp_path):
    status, said = run(capsys, tmp_path, "--device-gb", "1", "--policy", "te_v2")
    assert status == 2
    assert "takes no --policy" in said.err


def test_a_run_is_planned_for_the_device_that_is_named(capsys, tmp_path, program, budget):
    slow = dataclasses.replace(jaxoff.Device.of("h200"), name="slow link", d2h_gbps=1e-3, h2d_gbps=1e-3)
    slow.save(tmp_path / "slow.json")
    named, _ = planning.plan_within(
        budget / 1e9, program, planning.profile_of(str(tmp_path / "slow.json")), compiled=False
    )
    assert named.device == slow
    assert named.compiled_bytes is None
    assert not any(row.choice == "offload" for row in named.rows)
    assert "on slow link: kernels" in named.table()
    for device, message in (("h20", "Did you mean 'h200'?"), (str(tmp_path / "none.json"), "No such file")):
        status, said = run(capsys, tmp_path, "--device-gb", "1", "--device", device)
        assert (status, said.err.count("\n")) == (2, 1)
        assert message in said.err


def test_a_device_goes_with_a_budget(capsys, tmp_path):
    status, said = run(capsys, tmp_path, "--device", "h200")
    assert status == 2
    assert "give --device-gb, too" in said.err


def test_a_comparison_comes_before_the_device_is_in_use(capsys, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("x" * 1000)
    assert train.main(["--device-gb", "1", "--compare", "--data", str(text)]) == 2
    assert "Give --compare with the --policy" in capsys.readouterr().err


def test_a_plan_is_checked_by_the_step_that_is_then_taken():
    program = Program(Options.of("tiny", overrides=parse_overrides(ONE_LAYER), **SMALLER), None)
    budget = 10 * program.state_bytes
    plan, planned = planning.plan_within(budget / 1e9, program, compiled=True)
    step = planned.__dict__["compiled_step"]  # compiled already
    assert plan.compiled_bytes == program_nbytes(step) <= budget
    assert planned.policy == plan.policy
    assert planned.options.policy == policy_text.render(plan.policy)
