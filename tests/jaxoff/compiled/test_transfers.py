"""What moves between the memories, in programs written by hand: the cases that XLA makes seldom."""

import dataclasses
import json

import pytest

from jaxoff._compiled import hlo
from jaxoff._compiled.checks import find_faults
from jaxoff._compiled.cuda_graphs import GraphCapture, GraphOptions
from jaxoff._compiled.facts import CompiledFacts
from jaxoff._compiled.transfers import find_transfers
from jaxoff._compiled.value_identity import identify_value
from jaxoff._compiled.verify import find_recomputed, list_host_copies

DEVICE, HOST = "bf16[8,4096]{1,0}", "bf16[8,4096]{1,0:S(5)}"
NBYTES = 8 * 4096 * 2
STACK = "bf16[6,8,4096]{2,1,0:S(5)}"
SLICE = "bf16[1,8,4096]{2,1,0}"
CONFIG = 'backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"65536"}}'
KERNEL = f"%k (p: f32[]) -> f32[] {{\n  ROOT %p = {DEVICE} parameter(0)\n}}\n"


def program(body, *, computations="", parameters=(DEVICE, HOST, STACK)):
    """A program of an entry whose parameters are %d, %h and %s, and of what else is given."""
    lines = [
        f"  %{n} = {shape} parameter({i})" for i, (n, shape) in enumerate(zip("dhs", parameters, strict=True))
    ]
    lines += [f"  {line.strip()}" for line in body.strip().splitlines()]
    entry = "\n".join(lines)
    return hlo.parse(
        f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
    )


def moved(module):
    return [
        (t.start.name, t.direction, t.nbytes, t.is_dma, t.done is not None) for t in find_transfers(module)
    ]


def overlaps(module, mode="LHS", captured=()):
    found = tuple(find_transfers(module))
    schedule = GraphCapture(module, GraphOptions(mode, frozenset(captured)), found)
    return {t.start.name: [compute.name for compute in schedule.overlaps(t)] for t in found}


def test_synchronous_copies():
    module = program(f"""
        %up = {DEVICE} copy(%h)
        %down = {HOST} copy(%d)
        %again = {HOST} copy(%down)
        ROOT %local = {DEVICE} copy(%up)
    """)
    assert moved(module) == [
        ("up", "H2D", NBYTES, True, False),
        ("down", "D2H", NBYTES, True, False),
        ("again", "H2H", NBYTES, True, False),
    ]
    assert overlaps(module) == {"up": [], "down": [], "again": []}


def test_a_copy_that_transposes_is_a_kernel():
    module = program("ROOT %up = bf16[8,4096]{0,1} copy(%h)")
    assert moved(module) == [("up", "H2D", NBYTES, False, False)]


def test_a_fused_copy_that_transposes_is_a_kernel():
    turned = "bf16[8,4096]{0,1} copy(%q)"
    fused = f"%f (p: f32[]) -> f32[] {{\n  %q = {HOST} parameter(0)\n  ROOT %r = {turned}\n}}\n"
    module = program("ROOT %up = bf16[8,4096]{0,1} fusion(%h), kind=kLoop, calls=%f", computations=fused)
    assert moved(module) == [("up", "H2D", NBYTES, False, False)]


def test_asynchronous_copies_of_every_spelling():
    fused = f"%f (p: f32[]) -> f32[] {{\n  %q = {HOST} parameter(0)\n  ROOT %r = {DEVICE} copy(%q)\n}}\n"
    wrapped = (
        fused
        + f"%w (p: f32[]) -> f32[] {{\n  %q2 = {HOST} parameter(0)\n  ROOT %g = {DEVICE} fusion(%q2), \
kind=kLoop, calls=%f\n}}\n"
    )
    module = program(
        f"""
        %a = ({DEVICE}, {HOST}, u32[]) copy-start(%h)
        %a.done = {DEVICE} copy-done(%a)
        %b = (({HOST}), {DEVICE}, u32[]) fusion-start(%h), kind=kLoop, calls=%f
        %b.done = {DEVICE} fusion-done(%b)
        %c = (({HOST}), {DEVICE}, u32[]) async-start(%h), calls=%w
        %c.next = (({HOST}), {DEVICE}, u32[]) async-update(%c)
        ROOT %c.done = {DEVICE} async-done(%c.next)
        """,
        computations=wrapped,
    )
    assert moved(module) == [(name, "H2D", NBYTES, True, True) for name in "abc"]


@pytest.mark.parametrize(("config", "is_dma"), [(f", {CONFIG}", True), ("", False)])
def test_slices_are_copied_by_dma_only_with_an_offset_that_xla_knows(config, is_dma):
    computations = f"""%take (p: f32[]) -> f32[] {{
  %p0 = {STACK} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = {SLICE} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={{1,8,4096}}{config}
}}

%put (p: f32[]) -> f32[] {{
  %p0 = {STACK} parameter(0)
  %p1 = {DEVICE} parameter(1)
  %p2 = s32[] parameter(2)
  %b = {SLICE} bitcast(%p1)
  ROOT %update = {STACK} dynamic-update-slice(%p0, %b, %p2, %p2, %p2){config}
}}
"""
    module = program(
        f"""
        %i = s32[] constant(3)
        %out = {SLICE} fusion(%s, %i), kind=kLoop, calls=%take
        ROOT %in = {STACK} fusion(%s, %d, %i), kind=kLoop, calls=%put
        """,
        computations=computations,
    )
    assert moved(module) == [("out", "H2D", NBYTES, is_dma, False), ("in", "D2H", NBYTES, is_dma, False)]
    stored = next(t for t in find_transfers(module) if t.direction == "D2H")
    assert stored.operand.name == "d"


def test_kernels_that_touch_host_memory():
    computations = f"""%f (p: f32[]) -> f32[] {{
  %p0 = {HOST} parameter(0)
  %p1 = {DEVICE} parameter(1)
  ROOT %sum = {HOST} add(%p0, %p1)
}}
"""
    module = program(
        f"""
        %both = {HOST} fusion(%h, %d), kind=kLoop, calls=%f
        %room = {HOST} custom-call(), custom_call_target="AllocateBuffer"
        ROOT %call = {DEVICE} custom-call(%d, %both), custom_call_target="kernel"
        """,
        computations=computations,
    )
    assert moved(module) == [
        ("both", "H2D", NBYTES, False, False),
        ("both", "D2H", NBYTES, False, False),
        ("call", "H2D", NBYTES, False, False),
    ]


def test_the_hosts_own_compute_is_no_transfer():
    computations = f"""%on_host (p: f32[]) -> f32[] {{
  %p0 = {HOST} parameter(0)
  ROOT %twice = {HOST} add(%p0, %p0)
}}, execution_thread="host"
"""
    module = program(
        f"""
        %a = (({HOST}), {HOST}, u32[]) async-start(%h), async_execution_thread="host", calls=%on_host
        ROOT %b = {HOST} async-done(%a), async_execution_thread="host"
        """,
        computations=computations,
    )
    assert moved(module) == []


LOOP = f"""%body (p: f32[]) -> f32[] {{
  %p = (s32[], {DEVICE}, {DEVICE}, {HOST}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {DEVICE} get-tuple-element(%p), index=1
  %same = {DEVICE} get-tuple-element(%p), index=2
  %room = {HOST} get-tuple-element(%p), index=3
  %new = {DEVICE} custom-call(%x), custom_call_target="step"
  %b = {DEVICE} bitcast(%new)
  %before = {HOST} copy(%x)
  %after = {HOST} copy(%b)
  %constant = {HOST} copy(%same)
  ROOT %t = (s32[], {DEVICE}, {DEVICE}, {HOST}) tuple(%i, %new, %same, %after)
}}

%cond (p: f32[]) -> f32[] {{
  ROOT %yes = pred[] constant(true)
}}
"""


@pytest.mark.parametrize(
    ("config", "count"), [(', backend_config={"known_trip_count":{"n":"6"}}', 6), ("", None)]
)
def test_loops_count_where_they_tell_how_often_they_run(config, count):
    module = program(
        f"""
        %zero = s32[] constant(0)
        %init = (s32[], {DEVICE}, {DEVICE}, {HOST}) tuple(%zero, %d, %d, %h)
        ROOT %loop = (s32[], {DEVICE}, {DEVICE}, {HOST}) while(%init), condition=%cond, body=%body{config}
        """,
        computations=LOOP,
    )
    found = {t.start.name: t for t in find_transfers(module)}
    assert {(t.execution.count, t.execution.loop) for t in found.values()} == {(count, "loop")}
    before, after, constant = (
        identify_value(found[n].execution, found[n].operand) for n in ("before", "after", "constant")
    )
    assert before == after  # what a loop carries is what its body made of it
    assert (constant.computation, constant.name, constant.invariant_in) == ("main", "d", "loop")
    assert before.invariant_in == ""


def test_a_value_that_came_back_is_the_value_it_was():
    module = program(f"""
        %there = {HOST} copy(%d)
        %back = {DEVICE} copy(%there)
        %pair = ({DEVICE}, {DEVICE}) tuple(%back, %d)
        %ordered = ({DEVICE}, {DEVICE}) opt-barrier(%pair)
        %one = {DEVICE} get-tuple-element(%ordered), index=0
        ROOT %again = {HOST} copy(%one)
    """)
    there, again = (
        identify_value(t.execution, t.operand) for t in find_transfers(module) if t.direction == "D2H"
    )
    assert there == again and there.name == "d"


GRAPH = f"""
    %a = {DEVICE} fusion(%d), kind=kLoop, calls=%k
    %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%a), kind=kLoop, calls=%send
    %b = {DEVICE} fusion(%a), kind=kLoop, calls=%k
    %tiny = s32[] fusion(%zero), kind=kLoop, calls=%k
    %done = {HOST} fusion-done(%start)
    %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
    EXTRA
    ROOT %e = {DEVICE} fusion(%c), kind=kLoop, calls=%k
"""
SEND = (
    f"%send (p: f32[]) -> f32[] {{\n  %q = {DEVICE} parameter(0)\n  ROOT %r = {HOST} copy(%q)\n}}\n" + KERNEL
)
ALL = ("FUSION", "DYNAMIC_SLICE_FUSION")


def graph(extra=""):
    return program(f"%zero = s32[] constant(0)\n{GRAPH.replace('EXTRA', extra)}", computations=SEND)


def test_outside_of_graphs_what_stands_between_start_and_done_overlaps():
    assert overlaps(graph()) == {"start": ["b"]}


def test_inside_of_graphs_it_depends_on_their_order():
    assert overlaps(graph(), "LHS", ALL) == {"start": []}
    assert overlaps(graph(), "SERIALIZE", ALL) == {"start": []}
    assert overlaps(graph(), "CONCURRENT", ALL) == {"start": ["b", "c", "e"]}


def test_what_is_not_captured_splits_a_graph():
    collective = f"%all = {DEVICE} all-reduce(%c), to_apply=%k"
    assert overlaps(graph(collective), "CONCURRENT", ALL) == {"start": ["b", "c"]}
    assert overlaps(graph(collective), "CONCURRENT", (*ALL, "COLLECTIVES")) == {
        "start": ["b", "c", "all", "e"]
    }


@pytest.mark.parametrize(
    ("target", "beside"),
    [("xla.gpu.ext.cub_sort_pairs", ["b", "c"]), ("mosaic_gpu_v2", ["b", "c", "k", "e"])],
)
def test_a_sort_of_cub_splits_a_graph_and_a_kernel_does_not(target, beside):
    call = f'%k = {DEVICE} custom-call(%c), custom_call_target="{target}"'
    assert overlaps(graph(call), "CONCURRENT", (*ALL, "CUSTOM_CALL")) == {"start": beside}


def test_a_copy_whose_end_lies_behind_an_uncaptured_command_is_not_captured():
    text = f"""
        %zero = s32[] constant(0)
        %a = {DEVICE} fusion(%d), kind=kLoop, calls=%k
        %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%a), kind=kLoop, calls=%send
        %all = {DEVICE} all-reduce(%a), to_apply=%k
        %b = {DEVICE} fusion(%all), kind=kLoop, calls=%k
        %done = {HOST} fusion-done(%start)
        %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
        ROOT %e = {DEVICE} fusion(%c), kind=kLoop, calls=%k
    """
    assert overlaps(program(text, computations=SEND), "CONCURRENT", ALL) == {"start": ["all", "b"]}


@pytest.mark.parametrize(
    ("target", "codes"), [("xla.gpu.ext.cub_sort_keys", ["graph-cut"]), ("mosaic_gpu_v2", [])]
)
def test_a_sort_of_cub_in_a_loop_is_found(target, codes):
    text = f"""
        %zero = s32[] constant(0)
        %a = {DEVICE} fusion(%d), kind=kLoop, calls=%k
        %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%a), kind=kLoop, calls=%send
        %sort = {DEVICE} custom-call(%a), custom_call_target="{target}"
        %b = {DEVICE} fusion(%sort), kind=kLoop, calls=%k
        %done = {HOST} fusion-done(%start)
        %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
        ROOT %e = {DEVICE} fusion(%c), kind=kLoop, calls=%k
    """
    module = program(text, computations=SEND)
    graphs = GraphOptions("CONCURRENT", frozenset({*ALL, "CUSTOM_CALL"}))
    (copy,) = (dataclasses.replace(copy, loop="while") for copy in list_host_copies(module, graphs))
    assert (copy.captured, copy.cut_by) == ((False, "sort") if codes else (True, ""))
    facts = CompiledFacts(NBYTES, 0, 0, None, graphs.mode, tuple(graphs.captured), (copy,))
    assert [finding.code for finding in find_faults(facts, NBYTES)] == codes
    in_order = dataclasses.replace(facts, scheduling_mode="LHS")
    assert "graph-cut" not in [finding.code for finding in find_faults(in_order, NBYTES)]


def test_the_end_of_a_copy_that_is_not_captured_splits_a_graph():
    text = f"""
        %zero = s32[] constant(0)
        %first = ({HOST}, {DEVICE}, u32[]) fusion-start(%d), kind=kLoop, calls=%send
        %all = {DEVICE} all-reduce(%d), to_apply=%k
        %a = {DEVICE} fusion(%all), kind=kLoop, calls=%k
        %b = {DEVICE} fusion(%a), kind=kLoop, calls=%k
        %second = ({HOST}, {DEVICE}, u32[]) fusion-start(%a), kind=kLoop, calls=%send
        %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
        %first.done = {HOST} fusion-done(%first)
        %second.done = {HOST} fusion-done(%second)
        %e = {DEVICE} fusion(%c), kind=kLoop, calls=%k
        ROOT %f = {DEVICE} fusion(%e), kind=kLoop, calls=%k
    """
    assert overlaps(program(text, computations=SEND), "CONCURRENT", ALL) == {
        "first": ["all", "a", "b", "c"],
        "second": ["c"],
    }


def test_few_commands_make_no_graph():
    text = f"""
        %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%d), kind=kLoop, calls=%send
        %b = {DEVICE} fusion(%d), kind=kLoop, calls=%k
        %done = {HOST} fusion-done(%start)
        ROOT %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
    """
    assert overlaps(program(text, computations=SEND), "CONCURRENT", ALL) == {"start": ["b"]}


def findings(module):
    copies = list_host_copies(module, GraphOptions("LHS", frozenset()))
    facts = CompiledFacts(0, 0, 0, None, "LHS", (), copies)
    return [(finding.code, finding.message) for finding in find_faults(facts, 0)]


def test_synchronous_copies_and_copies_within_the_host_are_found():
    (up, down, inside) = findings(
        program(f"""
            %up = {DEVICE} copy(%h)
            %down = {HOST} copy(%d)
            ROOT %again = {HOST} copy(%down)
        """)
    )[:3]
    assert up[0] == down[0] == "copy-not-overlapped"
    assert "They are synchronous" in up[1] and "up (1 instruction, 65.54 kB a call)" in up[1]
    assert "down (1 instruction" in down[1] and inside[0] == "copy-not-overlapped"
    codes = [code for code, _ in findings(program(f"ROOT %again = {HOST} copy(%h)"))]
    assert codes == ["copy-not-overlapped", "value-copied-twice"]


def test_what_a_loop_leaves_as_it_is_needs_one_copy():
    module = program(
        f"""
        %zero = s32[] constant(0)
        %init = (s32[], {DEVICE}, {DEVICE}, {HOST}) tuple(%zero, %d, %d, %h)
        ROOT %loop = (s32[], {DEVICE}, {DEVICE}, {HOST}) while(%init), condition=%cond, body=%body
        """,
        computations=LOOP,
    )
    messages = [message for code, message in findings(module) if code == "value-copied-twice"]
    assert "constant copies 65.54 kB in every iteration of the loop loop" in messages[0]
    assert "goes there 2 times: before, after" in messages[1]
    assert len(messages) == 2


def test_small_copies_are_no_trouble():
    small = "bf16[8]{0:S(5)}"
    assert findings(program("ROOT %up = bf16[8]{0} copy(%h)", parameters=(DEVICE, small, STACK))) == []


def test_what_xla_computes_again_by_itself_is_found():
    module = program(
        f"""
        %a.remat = {DEVICE} fusion(%d), kind=kLoop, calls=%inner
        %b.remat2.1 = {DEVICE} fusion(%a.remat), kind=kLoop, calls=%inner
        %small.remat = f32[8]{{0}} fusion(%d), kind=kLoop, calls=%inner
        %view.remat = {DEVICE} bitcast(%a.remat)
        %remat.3 = {DEVICE} fusion(%d), kind=kLoop, calls=%inner
        ROOT %rematted = {DEVICE} fusion(%remat.3), kind=kLoop, calls=%inner
        """,
        computations=f"%inner (p: f32[8]) -> f32[8] {{\n  ROOT %part.remat = {DEVICE} negate(%p)\n}}\n",
    )
    names = find_recomputed(module)
    assert names == ("a.remat", "b.remat2.1")
    facts = CompiledFacts(0, 0, 0, None, "LHS", (), (), names)
    (finding,) = find_faults(facts, 0)
    assert finding.code == "computed-again" and "a.remat, b.remat2.1 (2 in all)" in finding.message
    assert json.loads(json.dumps(facts.to_dict()))["computed_again"] == list(names)


@pytest.mark.parametrize(
    ("placed_by", "codes"),
    [(None, ["offload-vanished"]), ("recipe", ["recipe-replaced"]), ("budget", [])],
)
def test_residuals_that_jaxoff_jit_saves_by_choice_have_not_vanished(placed_by, codes):
    nothing = CompiledFacts(0, 0, 0, None, "LHS", (), ())
    found = list(find_faults(nothing, 1000, placed_by))
    assert [f.code for f in found] == codes
    assert not found or ("no long kernel stands between" in found[0].message) == (placed_by is None)


@pytest.mark.parametrize("target", ["__cublas$lt$matmul", "__cublas$gemm", "mosaic_gpu_v2"])
def test_a_product_that_reads_the_row_of_a_stack_in_place_runs_beside_a_copy(target):
    """A cuBLAS call returns its product and its workspace: a tuple, which is no scalar of an offset."""
    product = f"({DEVICE}, s8[33554432]{{0}})"
    in_place = f"""%inside (w: f32[]) -> f32[] {{
  %w = bf16[6,8,4096]{{2,1,0}} parameter(0)
  %x = {DEVICE} parameter(1)
  %i = s32[] parameter(2)
  %row = {SLICE} dynamic-slice(%w, %i), dynamic_slice_sizes={{1,8,4096}}, {CONFIG}
  ROOT %call = {product} custom-call(%x, %row), custom_call_target="{target}"
}}
{SEND}"""
    module = program(
        f"""
        %at = s32[] constant(0)
        %stack = bf16[6,8,4096]{{2,1,0}} constant(0)
        %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%d), kind=kLoop, calls=%send
        %beside = {product} fusion(%stack, %d, %at), kind=kCustom, calls=%inside
        %done = {HOST} fusion-done(%start)
        ROOT %end = {DEVICE} get-tuple-element(%beside), index=0
        """,
        computations=in_place,
    )
    (transfer,) = find_transfers(module)
    (compute,) = GraphCapture(module, GraphOptions("LHS", frozenset()), (transfer,)).overlaps(transfer)
    assert (compute.name, compute.kind) == ("beside", "fusion" if "mosaic" in target else "gemm")
