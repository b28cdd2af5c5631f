"""Training within a budget of device memory, in which `jaxoff.jit` places each value."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxoff
from models import planning, train
from models.options import Options, parse_overrides
from models.program import Program

SETTINGS = ["d_model=32", "num_layers=2", "first_k_dense=0", "num_heads=2", "num_kv_heads=1", "head_dim=16"]
SETTINGS += ["num_experts=4", "d_expert=16", "d_shared=0"]
NUMBERS = dict(steps=2, batch=4, seq=32, accum=1, eval_batches=1)


def make_program(device_bytes=None, device=None):
    options = Options.of("tiny", overrides=parse_overrides(SETTINGS), **NUMBERS)
    return Program(options, None, device_bytes, device)


@pytest.fixture(scope="module")
def budget():
    """Bytes of a device that hold a step with room to spare."""
    return 10 * make_program().state_bytes


@pytest.mark.long
def test_a_step_within_a_budget_is_the_step_without(budget):
    within, plain = make_program(budget), make_program()
    plan = within.plan
    assert plan is not None
    assert plan.peak_bytes <= budget
    assert {"attn.norm_in", "attn.qkv"} <= {v.value for v in plan.values}
    tokens = np.zeros(plain.tokens_shape.shape, plain.tokens_shape.dtype)
    losses = [program.step(program.init(), tokens)[1]["loss"] for program in (within, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert plain.plan is None


def run(capsys, tmp_path, *words):
    text = tmp_path / "text.py"
    text.write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
    numbers = [word for k, v in NUMBERS.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    model = [word for field in SETTINGS for word in ("--set", field)]
    status = train.main([*model, *numbers, "--data", str(text), "--no-compare", "--keep", "0", *words])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    "mesh",
    [(), pytest.param(("--mesh", "fsdp=2,expert=4", "--batch", "8"), marks=pytest.mark.long)],
    ids=["alone", "mesh"],
)
def test_training_prints_the_plan_and_what_came_of_it(capsys, tmp_path, budget, mesh):
    out = tmp_path / "run"
    status, said = run(capsys, tmp_path, *mesh, "--device-gb", str(budget / 1e9), "--out", str(out))
    assert status == 0, said.err
    assert "compiled peak" in said.out
    on_cpu = r"; peak [\d.]+ [MG]B of [\d.]+ [MG]B; a CPU measures neither"
    measured = on_cpu if jax.default_backend() == "cpu" else r", [\d.]+ ms \([-+]"
    assert re.search(rf"predicted, measured +step [\d.]+ ms on NVIDIA H200{measured}", said.out)
    result = json.loads((out / "summary.json").read_text())
    assert result["summary"]["predicted"]["budget_bytes"] == pytest.approx(budget, abs=1)
    assert np.isfinite(result["summary"]["held_out"][-1][1])


@pytest.mark.long
def test_a_budget_that_is_too_small_is_one_line(capsys, tmp_path):
    status, said = run(capsys, tmp_path, "--device-gb", "0.000001", "--out", str(tmp_path / "none"))
    assert status == 2
    assert said.err.count("\n") == 1
    assert re.search("--device-gb 1e-06: no program fits", said.err)


def test_a_budget_and_a_policy_exclude_each_other(capsys, tmp_path):
    status, said = run(capsys, tmp_path, "--device-gb", "1", "--policy", "te_v2")
    assert status == 2
    assert "takes no --policy" in said.err


def test_a_run_is_planned_for_the_device_that_is_named(capsys, tmp_path, budget):
    slow = dataclasses.replace(jaxoff.Device.of("h200"), name="slow link", d2h_gbps=1e-3, h2d_gbps=1e-3)
    slow.save(tmp_path / "slow.json")
    plan = make_program(budget, planning.profile_of(str(tmp_path / "slow.json"))).plan
    assert plan is not None
    assert "ms on slow link" in str(plan)
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
    assert "leave one out" in capsys.readouterr().err
