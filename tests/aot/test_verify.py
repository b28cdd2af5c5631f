"""Every finding of `verify` has a program that shows it and one that does not, compiled for an H200."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._compiled.verify import verify
from jaxoff._device.target import target
from tests.aot import programs
from tests.aot.programs import BOTH, CONCURRENT, STACK_NBYTES, TRITON, arguments, scanned, step, unrolled

pytestmark = pytest.mark.aot

PROGRAMS = {
    "scanned": step(scanned(BOTH)),
    "scanned, saved": step(scanned(BOTH.on_device())),
    "scanned, two names": step(
        scanned(jaxoff.policy(offload=["x_in", "out"]), programs.layer_with_two_names)
    ),
    "scanned, one of two names": step(scanned(jaxoff.policy(offload=["out"]), programs.layer_with_two_names)),
    "unrolled": step(unrolled(BOTH)),
    "unrolled, saved": step(unrolled(BOTH.on_device())),
    "unrolled, folded": step(unrolled(BOTH, prevent_cse=False)),
    "affine index": programs.fetched_by(lambda i: programs.LAYERS - 1 - i),
    "clamped index": programs.fetched_by(lambda i: jnp.maximum(programs.LAYERS - 2 - i, 0)),
    "index from xs": programs.fetched_by_xs,
    "nothing between": lambda w, x: (x, jax.device_put(x, programs.HOST)),
}


@functools.cache  # each takes a second
def compiled(name, concurrent=True):
    options = TRITON | CONCURRENT if concurrent else TRITON
    return target("h200").compile(PROGRAMS[name], *arguments(), compiler_options=options)


def facts_of(name, concurrent=True, **expected):
    return verify(compiled(name, concurrent), compiler_options=CONCURRENT if concurrent else None, **expected)


def codes(facts):
    return [finding.code for finding in facts.findings]


def test_a_scan_moves_what_explain_says_by_dma_beside_compute():
    report = jaxoff.explain(scanned(BOTH), *arguments())
    facts = facts_of("scanned", report=report, saved_twin=compiled("scanned, saved"))
    assert facts.findings == ()
    assert facts.host_bytes == facts.d2h_bytes == facts.h2d_bytes == report.host_bytes == 2 * STACK_NBYTES
    assert facts.device_peak_bytes + 0.5 * report.host_bytes < (facts.twin_peak_bytes or 0)
    assert sorted(copy.direction for copy in facts.copies) == ["D2H", "D2H", "H2D", "H2D"]
    for copy in facts.copies:
        assert (copy.via, copy.is_async, copy.captured) == ("dma", True, True)
        assert (copy.count, copy.nbytes) == (programs.LAYERS, STACK_NBYTES // programs.LAYERS)
        assert copy.loop.startswith("while")
        assert any(compute.kind == "gemm" for compute in copy.overlaps)


def test_the_first_value_that_is_made_has_the_most_compute_beside_it():
    facts = facts_of("scanned")
    x_in, act = sorted(
        (copy for copy in facts.copies if copy.direction == "D2H"), key=lambda c: -len(c.overlaps)
    )
    assert set(act.overlaps) < set(x_in.overlaps)


def test_facts_point_at_the_line_that_made_the_value():
    sources = {copy.source.partition(":")[0] for copy in facts_of("scanned").copies}
    assert all(source.endswith("programs.py") for source in sources)


def test_nothing_moves_in_the_saved_twin():
    facts = facts_of("scanned, saved")
    assert (facts.copies, facts.host_bytes, facts.findings) == ((), 0, ())
    assert "Nothing moves" in str(facts)


def test_an_offload_that_vanished():
    report = jaxoff.explain(unrolled(BOTH, prevent_cse=False), *arguments())
    assert report.host_bytes == 2 * STACK_NBYTES
    facts = facts_of("unrolled, folded", concurrent=False, report=report)
    assert codes(facts) == ["offload-vanished"]
    assert "to copy 12.58 MB to the host; the compiled program copies nothing" in facts.findings[0].message
    assert "prevent_cse=True" in facts.findings[0].message
    kept = facts_of("unrolled", concurrent=False, report=report)
    assert kept.d2h_bytes == report.host_bytes
    assert "offload-vanished" not in codes(kept)


def test_a_part_that_vanished():
    facts = facts_of("scanned", expected_host_bytes=2 * STACK_NBYTES + 1)
    assert codes(facts) == ["offload-vanished"]
    assert "compiled program copies 12.58 MB" in facts.findings[0].message
    assert facts_of("scanned", expected_host_bytes=2 * STACK_NBYTES).findings == ()


def test_an_offload_that_vanished_is_seen_beside_its_twin_too():
    twin = compiled("scanned, saved")
    facts = verify(twin, saved_twin=twin, compiler_options=CONCURRENT)
    assert codes(facts) == ["offload-vanished", "device-memory-not-lower"]


def test_device_memory_that_offload_does_not_lower():
    facts = facts_of("unrolled", concurrent=False, saved_twin=compiled("unrolled, saved", concurrent=False))
    assert facts.device_peak_bytes > facts.twin_peak_bytes
    assert "device-memory-not-lower" in codes(facts)
    scan = facts_of("scanned", concurrent=False, saved_twin=facts_of("scanned, saved", concurrent=False))
    assert scan.device_peak_bytes < scan.twin_peak_bytes
    assert "device-memory-not-lower" not in codes(scan)


def test_copies_in_line_with_the_kernels():
    facts = facts_of("scanned", concurrent=False)
    assert codes(facts) == ["copy-not-overlapped"]
    assert "'CONCURRENT'" in facts.findings[0].message
    assert all(copy.captured and copy.overlaps == () for copy in facts.copies)
    assert facts.scheduling_mode == "LHS" and "FUSION" in facts.captured_commands
    assert facts_of("scanned").findings == ()


def test_outside_of_cuda_graphs_copies_overlap_what_stands_between_start_and_done():
    options = {"xla_gpu_enable_command_buffer": ""}
    program = target("h200").compile(PROGRAMS["scanned"], *arguments(), compiler_options=options)
    facts = verify(program, compiler_options=options)
    assert facts.captured_commands == ()
    assert not any(copy.captured for copy in facts.copies)
    assert any(copy.overlaps for copy in facts.copies if copy.direction == "D2H")


def test_the_options_of_a_compilation_are_known(monkeypatch):
    assert verify(compiled("scanned")).scheduling_mode == "CONCURRENT"
    assert verify(compiled("scanned"), compiler_options={}).scheduling_mode == "LHS"
    jitted = jax.jit(PROGRAMS["nothing between"], compiler_options=CONCURRENT)
    assert verify(target("h200").compile(jitted, *arguments())).scheduling_mode == "CONCURRENT"
    jitted = jaxoff.jit(PROGRAMS["scanned"], recipe="concurrent", compiler_options=TRITON)
    assert verify(target("h200").lower(jitted, *arguments()).compile()).scheduling_mode == "CONCURRENT"


def test_copies_have_the_names_and_lines_of_the_users_values():
    jitted = jaxoff.jit(step(scanned(BOTH)), compiler_options=TRITON)
    facts = verify(target("h200").compile(jitted, *arguments()))
    assert sorted((c.label, c.direction) for c in facts.copies) == [
        (name, direction) for name in ("act", "x_in") for direction in ("D2H", "H2D")
    ]
    assert all("programs.py:" in copy.source for copy in facts.copies)
    assert "\nx_in  H2D" in str(facts) and "start" not in str(facts).partition("to the host")[0]


def test_the_processs_flags_are_read_beneath_the_options(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert verify(compiled("scanned"), compiler_options={}).findings == ()
    options = {"xla_gpu_command_buffer_scheduling_mode": "LHS"}
    assert codes(verify(compiled("scanned"), compiler_options=options)) == ["copy-not-overlapped"]


def test_a_copy_whose_end_is_awaited_at_once():
    facts = facts_of("nothing between")
    assert codes(facts) == ["copy-not-overlapped"]
    (copy,) = facts.copies
    assert (copy.direction, copy.captured, copy.loop, copy.count) == ("D2H", False, "", 1)


def test_unrolled_layers_have_copies_with_compute_beside_them_and_copies_without():
    facts = facts_of("unrolled", concurrent=False)
    assert {copy.captured for copy in facts.copies} == {False}
    alone = [copy for copy in facts.copies if not copy.overlaps]
    assert 0 < len(alone) < len(facts.copies)
    assert set(codes(facts)) == {"copy-not-overlapped"}
    assert all(copy.name in str(facts.findings) for copy in alone[:1])


@pytest.mark.parametrize("name", ["clamped index", "index from xs"])
def test_a_kernel_that_reads_host_memory(name):
    facts = facts_of(name)
    assert "kernel-touches-host" in codes(facts)
    assert {copy.direction: copy.via for copy in facts.copies} == {"D2H": "dma", "H2D": "kernel"}
    assert facts.h2d_bytes == STACK_NBYTES  # the slices, not the whole stack each time
    affine = facts_of("affine index")
    assert "kernel-touches-host" not in codes(affine)
    assert {copy.direction: copy.via for copy in affine.copies} == {"D2H": "dma", "H2D": "dma"}


def test_one_value_under_two_names():
    facts = facts_of("scanned, two names")
    assert facts.d2h_bytes == 2 * STACK_NBYTES
    assert "value-copied-twice" in codes(facts)
    once = facts_of("scanned, one of two names")
    assert once.d2h_bytes == STACK_NBYTES
    assert "value-copied-twice" not in codes(once)
    assert "value-copied-twice" not in codes(facts_of("unrolled", concurrent=False))


def test_a_loop_in_a_loop_multiplies_what_it_moves():
    def micro_batches(w, xs):
        def body(total, x):
            value, gradient = jax.value_and_grad(scanned(BOTH))(w, x)
            return total + gradient, value

        return jax.lax.scan(body, jnp.zeros_like(w), xs)

    w, x = arguments()
    program = target().compile(micro_batches, w, jax.ShapeDtypeStruct((3, *x.shape), x.dtype))
    facts = verify(program, expected_host_bytes=3 * 2 * STACK_NBYTES)
    assert {copy.count for copy in facts.copies} == {3 * programs.LAYERS}
    assert facts.d2h_bytes == 3 * 2 * STACK_NBYTES
    assert facts.host_bytes == 2 * STACK_NBYTES


def test_each_of_two_devices_moves_its_share():
    where = target("h200", devices=2)
    rows = jax.sharding.NamedSharding(where.mesh(), jax.sharding.PartitionSpec("devices"))
    w, x = arguments()
    program = where.compile(
        PROGRAMS["scanned"],
        w,
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
        compiler_options=CONCURRENT,
    )
    report = jaxoff.explain(scanned(BOTH), w, x)
    facts = verify(program, report=report, compiler_options=CONCURRENT)
    assert facts.d2h_bytes == report.host_bytes // 2
    assert "offload-vanished" not in codes(facts)


def test_collectives_that_are_not_captured_split_the_graph():
    where = target("h200", devices=2)
    mesh = where.mesh()
    specs = jax.sharding.PartitionSpec(None, "devices"), jax.sharding.PartitionSpec("devices")
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for a, spec in zip(arguments(), specs, strict=True)
    ]
    commands = ",".join(facts_of("scanned").captured_commands)
    for captured, options in {
        False: CONCURRENT,
        True: {**CONCURRENT, "xla_gpu_enable_command_buffer": f"{commands},COLLECTIVES"},
    }.items():
        program = where.compile(PROGRAMS["scanned"], *args, compiler_options=options)
        assert "all-gather" in program.as_text()
        copies = verify(program, compiler_options=options).copies
        assert any(not copy.captured for copy in copies) == (not captured)
        assert any(compute.kind == "collective" for copy in copies for compute in copy.overlaps)


def test_the_peak_counts_donated_arguments_once():
    w, _ = arguments()
    grow = jax.jit(lambda w: w * 2, donate_argnums=0)
    kept, donated = (verify(target().compile(fun, w)) for fun in (lambda w: w * 2, grow))
    nbytes = w.size * w.dtype.itemsize
    assert (kept.device_peak_bytes, donated.device_peak_bytes) == (2 * nbytes, nbytes)


def test_facts_print_as_a_table_and_convert_to_json():
    facts = facts_of("scanned", concurrent=False, saved_twin=compiled("scanned, saved", concurrent=False))
    lines = str(facts).splitlines()
    assert lines[0].split() == ["copy", "way", "count", "bytes", "via", "runs", "in", "beside", "source"]
    assert sum("async dma" in line for line in lines) == 4
    assert "to the host 12.58 MB, back 12.58 MB; host memory 12.58 MB" in str(facts)
    assert "saved twin" in str(facts) and "! copy-not-overlapped" in str(facts)
    assert max(map(len, lines)) <= 160
    read = json.loads(json.dumps(facts.to_dict()))
    assert read["d2h_bytes"] == facts.d2h_bytes
    assert [copy["name"] for copy in read["copies"]] == [copy.name for copy in facts.copies]
    assert read["findings"][0]["code"] == "copy-not-overlapped"
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.host_bytes = 0
