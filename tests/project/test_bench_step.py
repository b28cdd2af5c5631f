"""The step benchmark: its models, its variants, its whole program at a tiny size."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    step,
    step_checks,
    step_limits,
    step_models,
    step_peaks,
    step_variants,
)
from bench.step_models import FORMS, KINDS, Workload
from bench.step_variants import VARIANTS, Program
from models import Config

DENSE = Workload("dense", batch=2, layers=2, tiny=True)
NANO = Workload("nano", batch=2, layers=2, tiny=True)


@pytest.fixture(autouse=True)
def allocator_settings(monkeypatch):
    """What the program would set for the process."""
    for key, value in {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64",
    }.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(scope="module")
def programs():
    """A few variants of the dense layer, compiled."""
    names = ("saved", "stock_offload", "captured", "auto")
    return step_variants.compile_all(DENSE, {n: step_variants.step_of(DENSE, VARIANTS[n]) for n in names}, 2)


# Workloads


def test_a_workload_is_read_from_its_name():
    workload = Workload.parse("nano_act-b16-l48")
    assert workload == Workload("nano_act", batch=16, layers=48)
    assert workload.name == "nano_act-b16-l48"


@pytest.mark.parametrize("text", ["dense", "dense-b4", "dense-b0-l4", "sparse-b4-l4", "dense-b4-l12-x"])
def test_another_name_is_refused_with_the_rule(text):
    with pytest.raises(ValueError, match=r"KIND-bBATCH-lLAYERS.*dense, nano, nano_act.*got '"):
        Workload.parse(text)


def test_the_dense_workload_has_the_sizes_of_the_bar():
    weights, x = Workload.parse("dense-b4-l12").shapes("scanned")
    assert x.shape == (4, 4096, 4096)
    assert {name: w.shape for name, w in weights.items()} == {
        "qkv": (12, 4096, 12288), "proj": (12, 4096, 4096),
        "up": (12, 4096, 16384), "down": (12, 16384, 4096),
    }  # fmt: skip
    assert {w.dtype for w in weights.values()} == {jnp.bfloat16.dtype}


@pytest.mark.parametrize(("kind", "width"), [("nano", 2688), ("mixtral", 4096)])
def test_a_moe_workload_is_the_block_of_the_model(kind, width):
    weights, x = Workload.parse(f"{kind}-b4-l4").shapes("unrolled")
    counts = Config.preset(kind, num_layers=4).param_counts()
    assert len(weights) == 4
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    outside = 2 * counts.embedding + width  # with the head, and the last norm
    assert parameters == counts.total - outside
    assert x.shape == (4, 4096, width)


@pytest.mark.parametrize("workload", [DENSE, NANO], ids=["dense", "nano"])
@pytest.mark.some_cases(1)
def test_both_forms_have_the_same_numbers(workload):
    stacked, listed = workload.weights("scanned"), workload.weights("unrolled")
    restacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *listed)
    jax.tree.map(np.testing.assert_array_equal, stacked, restacked)


def test_seeds_give_other_inputs_and_weights():
    assert not np.array_equal(DENSE.inputs(0), DENSE.inputs(1))
    first, second = (DENSE.weights("scanned", seed)["up"] for seed in (0, 1))
    assert not np.array_equal(first, second)


# Variants


def moved_bytes(workload, variant):
    return step_limits.planned_host_bytes(workload, VARIANTS[variant])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] * (kind != "dense"))
        for kind in sorted(KINDS.keys() - {"mixtral"})  # tiny, that is nano
    ],
)
def test_every_way_to_offload_moves_as_much(kind):
    workload = Workload(kind, batch=2, layers=2, tiny=True)
    want = moved_bytes(workload, "stock_offload")
    assert want > 0
    for variant in ("stock_offload_unrolled", "maxtext", "captured", "ordered", "auto"):
        assert moved_bytes(workload, variant) == want, variant


@pytest.mark.long
def test_the_narrow_values_of_the_moe_block_are_what_the_link_can_take():
    workload = Workload.parse("nano-b4-l1")
    assert moved_bytes(workload, "captured") == 16384 * 2 * (2688 + 4096 + 2688)
    assert moved_bytes(dataclasses.replace(workload, kind="nano_act"), "captured") == 16384 * 6 * 1856 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "names"),
    [
        pytest.param(DENSE, tuple(VARIANTS), id="dense", marks=pytest.mark.long),
        pytest.param(DENSE, ("no_remat", "auto", "ordered"), id="dense, a few"),
        pytest.param(NANO, ("no_remat", "maxtext", "captured", "ordered"), id="nano", marks=pytest.mark.long),
    ],
)
def test_all_variants_compute_the_same_step(workload, names):
    steps = {name: step_variants.step_of(workload, VARIANTS[name]) for name in names}
    compiled = step_variants.compile_all(workload, steps, 2)
    assert set(compiled) == set(names)
    arguments = {form: workload.arguments(form) for form in FORMS}

    def results(name):
        loss, (weights, x) = compiled[name].call(*arguments[compiled[name].form])
        if compiled[name].form == "unrolled":
            weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
        return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves((loss, weights, x))]

    want = results("no_remat")
    for name in names:
        for got, right in zip(results(name), want, strict=True):
            assert np.linalg.norm(got - right) <= 2e-2 * np.linalg.norm(right), name


def test_equal_programs_are_compiled_once(programs):
    assert programs["auto"].same_as == "captured"
    assert programs["auto"].call is programs["captured"].call
    assert programs["captured"].same_as is programs["saved"].same_as is None


def test_what_fails_to_trace_or_compile_is_told_and_the_rest_goes_on():
    def fails(weights, x):
        raise NotImplementedError("no such kernel")

    good = step_variants.step_of(DENSE, VARIANTS["saved"])
    unknown = step_variants.step_of(DENSE, VARIANTS["saved"], {"no_such_option": True})
    steps = {"bad": dataclasses.replace(good, jitted=jax.jit(fails)), "unknown": unknown, "good": good}
    told = {}
    compiled = step_variants.compile_all(DENSE, steps, 2, told.__setitem__)
    assert set(compiled) == {"good"}
    assert told["bad"] == {"error": "NotImplementedError: no such kernel"}
    assert "no_such_option" in told["unknown"]["error"]
    assert told["good"] is compiled["good"]


# Time


def fake(log, name, form="scanned"):
    def call(*arguments):
        log.append(name)
        return jnp.zeros(())

    return Program(call, form, 0.0, 0.0)


def test_variants_take_turns_and_rows_are_saved_after_each_round():
    log, saved, rows = [], [], {"a": {}, "b": {}}
    step.time_variants(
        {name: fake(log, name) for name in "ab"}, {"scanned": ()}, rows, 4, 0.0, lambda: False,
        lambda: saved.append(json.dumps(rows)),
    )  # fmt: skip
    assert log == ["a"] * 3 + ["b"] * 3 + list("abbaabba")
    assert len(set(saved)) >= 4
    for row in rows.values():
        assert row["repeats"] == 4
        assert row["min_ms"] <= row["q1_ms"] <= row["ms"] <= row["q3_ms"] <= row["max_ms"]


def test_timing_ends_when_time_is_up_and_a_failing_variant_stops_nobody():
    def fail(*arguments):
        raise RuntimeError("out of\nmemory")

    rows = {"bad": {}, "good": {}}
    programs = {"bad": Program(fail, "scanned", 0.0, 0.0), "good": fake([], "good")}  # type: ignore
    step.time_variants(programs, {"scanned": ()}, rows, 9, 0.0, lambda: True, lambda: None)
    assert rows["bad"] == {"error": "RuntimeError: out of memory"}
    assert rows["good"]["repeats"] == 1


# Memory


def test_what_cannot_fit_is_told_before_it_is_compiled():
    deep = Workload.parse("dense-b16-l48")
    # Weights, input and their gradients are 39.7 GB; three residuals of 537 MB in each layer and the last
    # layer's result 77.8 GB.
    assert step_limits.residual_bytes(deep, VARIANTS["saved"]) == (3 * 48 + 1) * 16 * 4096 * 4096 * 2
    assert "at least 117.6 GB" in step_limits.too_large(deep, "saved", 100 * 10**9)
    assert step_limits.too_large(deep, "saved", 118 * 10**9) is None
    assert step_limits.too_large(deep, "full_remat", 100 * 10**9) is None
    reason = step_limits.too_large(deep, "captured", 100 * 10**9)
    assert reason == (
        "skipped: needs 77.3 GB of pinned host memory, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB allows 68.7 GB"
    )


def test_forms_part_where_a_program_fits_only_without_the_others_weights(monkeypatch):
    def needing(form, nbytes):
        memory = types.SimpleNamespace(output_size_in_bytes=0, temp_size_in_bytes=nbytes)
        return Program(types.SimpleNamespace(memory_analysis=lambda: memory), form, 0.0, 0.0)  # type: ignore

    one = step_limits.nbytes_of(DENSE.shapes("scanned"))
    programs = {"saved": needing("scanned", 100), "ordered": needing("unrolled", 300)}
    hopeless = programs | {"no_remat": needing("scanned", 10**9)}

    def grouped(given, limit):
        monkeypatch.setattr(step_limits, "device_limit", lambda: limit)
        return step_limits.groups(DENSE, given)

    assert grouped(programs, None) == [["saved", "ordered"]]
    assert grouped(programs, 2 * one + 300) == [["saved", "ordered"]]
    assert grouped(programs, 2 * one + 299) == [["saved"], ["ordered"]]
    # What fits nowhere does not part the others.
    assert grouped(hopeless, 2 * one + 300) == [["saved", "ordered", "no_remat"]]
    reasons = step_limits.too_large_beside(DENSE, hopeless)
    assert set(reasons) == {"no_remat"}
    assert reasons["no_remat"].startswith("skipped: needs 1.0 GB of device memory")


def test_a_child_that_dies_leaves_its_last_words(monkeypatch):
    monkeypatch.setattr(step_peaks.sys, "executable", "/bin/false")
    rows = []
    step_peaks.measure_peaks(DENSE, ["saved"], 1, lambda: False, rows.append)
    assert rows == [{"workload": "dense-b2-l2", "variant": "saved", "error": "exit status 1: "}]


# Bits


def test_a_program_has_the_bits_of_itself_and_trains(programs):
    told = []
    found = step_checks.compare_bits(
        DENSE, programs["saved"], programs["saved"], 3, 1, lambda so_far: told.append(so_far["steps"])
    )
    assert found["ok"]
    assert found["equal_steps"] == found["steps"] == found["losses"] == 3
    assert found["first_difference"] is None
    assert found["last_loss"] != found["first_loss"]
    assert told == [1, 2, 3]


def test_one_bit_and_one_nan_are_found(programs):
    saved = programs["saved"]

    def changed(change):
        def call(*arguments):
            loss, (weights, x) = saved.call(*arguments)
            return loss, (weights, change(x))

        return dataclasses.replace(saved, call=call)

    def negated_zero(x):
        return x.at[0, 0, 0].set(-x[0, 0, 0])

    found = step_checks.compare_bits(DENSE, changed(negated_zero), saved, 2, 0)
    assert not found["ok"]
    assert found["equal_steps"] == 0
    assert found["first_difference"] == {"step": 0, "elements": {"[1][1]": 1}}
    broken = changed(lambda x: x.at[0, 0, 0].set(jnp.nan))
    found = step_checks.compare_bits(DENSE, broken, broken, 1, 0)
    assert found["equal_steps"] == 1
    assert not found["ok"] and not found["finite"]


@pytest.mark.long
def test_the_two_orders_differ_in_the_mode_alone():
    steps = step_checks.order_steps(DENSE, VARIANTS["captured"])
    assert "SERIALIZE" in steps["serialize"].options
    assert "SERIALIZE" not in steps["chosen"].options
    assert all("xla_gpu_deterministic_ops" in s.options for s in steps.values())
    compiled = step_variants.compile_all(DENSE, steps, 2)  # without the warning of jaxoff.jit
    assert compiled["serialize"].same_as is None


@pytest.mark.long
def test_host_memory_that_grows_is_found(programs):
    kept = []

    def leaking(*arguments):
        kept.append(np.ones(16 * 2**20, np.uint8))
        return programs["saved"].call(*arguments)

    leak = dataclasses.replace(programs["saved"], call=leaking)
    found = step_checks.steady(DENSE, leak, 10, lambda so_far: None)
    assert not found["ok"]
    # From the middle of the second fifth to that of the last: six steps.
    assert found["host_growth_bytes"] == pytest.approx(6 * 16 * 2**20, rel=0.2)
    kept.clear()
    found = step_checks.steady(DENSE, programs["saved"], 10, lambda so_far: None)
    assert found["ok"]
    assert [sample["step"] for sample in found["samples"]] == list(range(1, 11))


# The whole program


def run(tmp_path, words):
    out = tmp_path / "out.json"
    step.main(["--out", str(out), "--tiny", "--sample-ms", "1", "--jobs", "2", *words.split()])
    return json.loads(out.read_text())


@pytest.mark.long
def test_the_program_measures_every_variant_it_is_asked_for(tmp_path):
    found = run(
        tmp_path,
        "--workloads dense-b2-l2 --variants saved,stock_offload,captured,ordered,auto --repeats 2 --no-peaks",
    )
    assert {"date", "device", "versions", "commit", "command", "flags"} <= set(found)
    rows = {entry["variant"]: entry for entry in found["rows"]}
    assert list(rows) == ["saved", "stock_offload", "captured", "ordered", "auto"]
    for entry in rows.values():
        assert entry["ms"] > 0 and entry["compile_s"] > 0 and entry["repeats"] == 2
        assert entry["device_peak_bytes"] > entry["temp_bytes"] > 0
        if found["device"].endswith("cpu"):
            only_gpu = ("peak_bytes", "exposed_ms", "d2h_bytes", "r")
            assert [entry[key] for key in only_gpu] == [None] * len(only_gpu)
    assert rows["captured"]["overhead"] == pytest.approx(rows["captured"]["ms"] / rows["saved"]["ms"] - 1)
    assert rows["auto"]["same_as"] == "captured" and rows["auto"]["first_step_s"] is None
    assert rows["ordered"]["overhead"] is None  # no unrolled twin was asked for
    assert rows["ordered"]["overhead_any"] is not None


@pytest.mark.long  # compiles in processes of its own; test_all_variants_compute_the_same_step does in one
def test_each_variant_runs_in_a_process_of_its_own(tmp_path):
    found = run(tmp_path, "--workloads dense-b1-l1 --variants captured --no-times")
    (peak,) = found["peaks"]
    assert (peak["workload"], peak["variant"]) == ("dense-b1-l1", "captured")
    assert "error" not in peak
    assert peak["cold_first_step_s"] > 0 and peak["cold_second_step_s"] > 0
    assert "peak_bytes" in peak
    assert found["rows"] == []


@pytest.mark.long
def test_the_moe_block_keeps_its_bits_in_every_strategy(tmp_path):
    found = run(tmp_path, "--workloads nano-b2-l2 --bits 2 --seeds 0,1")
    assert [(r["variant"], r["seed"]) for r in found["bits"]] == [
        (variant, seed) for variant in ("captured", "ordered", "auto") for seed in (0, 1)
    ]
    assert all(r["ok"] and r["equal_steps"] == 2 and r["losses"] == 2 for r in found["bits"])


@pytest.mark.long
def test_the_program_compares_orders_and_watches_memory(tmp_path):
    found = run(tmp_path, "--workloads dense-b1-l1 --variants captured --order 2 --steady 10 --seeds 3")
    (order,), (steady,) = found["order"], found["steady"]
    assert order["ok"] and order["equal_steps"] == 2 and order["seed"] == 3
    assert steady["steps"] == 10 and len(steady["samples"]) == 10
    assert found["rows"] == found["peaks"] == []


@pytest.mark.long
def test_a_check_that_cannot_be_compiled_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(step_checks, "SERIALIZE", {"no_such_option": "1"})
    found = run(tmp_path, "--workloads dense-b1-l1 --variants captured --order 1 --steady 5")
    assert "no_such_option" in found["order"][0]["error"]
    assert found["order"][0]["ok"] is False
    assert found["steady"][0]["steps"] == 5


def test_when_time_is_up_nothing_more_starts(tmp_path):
    found = run(tmp_path, "--workloads dense-b1-l1 --variants saved --limit-s 0")
    assert found["rows"] == found["peaks"] == []
    assert found["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x", "--workloads", "dense-4-12"], "KIND-bBATCH-lLAYERS"),
        (["--out", "x", "--variants", "svaed"], "unknown: svaed; choose from no_remat, "),
        (
            ["--out", "x", "--bits", "5", "--variants", "saved"],
            "compare captured, ordered, auto, auto_early, auto_float8, products, products_float8; got saved",
        ),
        (["--out", "x", "--repeats", "0"], "--repeats and --jobs must be at least 1"),
        (["--out", "x", "--seeds", "one"], "invalid literal for int"),
        ([], "--out is needed"),
    ],
)
def test_the_command_line_says_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit):
        step.parse(words)
    assert message in capsys.readouterr().err


def test_the_default_run_is_the_bar():
    o = step.parse(["--out", "x"])
    names = [workload.name for workload in o.workloads]
    assert names[:4] == ["dense-b4-l12", "dense-b16-l12", "dense-b4-l48", "dense-b16-l48"]
    assert o.variants == tuple(VARIANTS)
    assert {workload.kind for workload in o.workloads} == set(step_models.KINDS) - {"mixtral", "mlp"}
