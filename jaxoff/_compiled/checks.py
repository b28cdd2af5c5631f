"""Finds faults of a compiled program's offload."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxoff._compiled.cuda_graphs import SMALL_NBYTES
from jaxoff._compiled.facts import CompiledFacts, HostCopy
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.tables import format_nbytes
from jaxoff._runtime.flags import COMMAND_BUFFER, DISABLED_PASSES, SCHEDULING_MODE, PlacedBy


def find_faults(
    facts: CompiledFacts, expected_host_bytes: int, placed_by: PlacedBy | None = None
) -> Iterator[Finding]:
    """Finds each kind of fault. Copies of less than `SMALL_NBYTES` cost nothing and are left out.

    Args:
      facts: of the program, without findings.
      expected_host_bytes: the fewest bytes for a call to copy to the host.
      placed_by: what placed the residuals in the place of the policies, as `jaxoff.jit` notes it.
    """
    large = [copy for copy in facts.copies if copy.nbytes >= SMALL_NBYTES]
    if placed_by is None:
        yield from _check_vanished(facts, expected_host_bytes)
    elif placed_by == "recipe":
        yield Finding(
            FindingCode.RECIPE_REPLACED,
            "jaxoff.jit saves the residuals of this program on the device, by its recipe 'saved': nothing is "
            "offloaded. Where jaxoff.jit chose the recipe, `findings` of the function say why.",
        )
    yield from _check_memory(facts)
    yield from _check_kernels(large)
    yield from _check_overlap(facts, large)
    yield from _check_cut(facts, large)
    yield from _check_copied_twice(large)
    yield from _check_recomputed(facts)


def _check_vanished(facts: CompiledFacts, expected: int) -> Iterator[Finding]:
    unknown = any(copy.count is None for copy in facts.copies)
    is_twin_of_itself = facts.twin_peak_bytes is not None and not facts.copies
    if (facts.d2h_bytes >= expected or unknown) and not is_twin_of_itself:
        return
    copied = format_nbytes(facts.d2h_bytes) if facts.d2h_bytes else "nothing"
    wanted = format_nbytes(expected) if expected else "residuals"
    yield Finding(
        FindingCode.OFFLOAD_VANISHED,
        f"A call is to copy {wanted} to the host; the compiled program copies {copied}. XLA "
        "folds a send to the host with its reload where no loop, no barrier and no long kernel stands "
        "between the two: keep prevent_cse=True in jax.checkpoint around layers outside of a scan, scan the "
        "layers, or give each more work.",
    )


def _check_memory(facts: CompiledFacts) -> Iterator[Finding]:
    twin = facts.twin_peak_bytes
    if twin is None or facts.device_peak_bytes < twin:
        return
    yield Finding(
        FindingCode.DEVICE_MEMORY_NOT_LOWER,
        f"Offload is to lower device memory: the program holds {format_nbytes(facts.device_peak_bytes)}, its "
        f"twin that saves the same residuals on the device {format_nbytes(twin)}. Where layers are not "
        "scanned XLA starts copies to the host late and keeps the device's buffers until then: scan the "
        "layers, or order the copies with jax.lax.optimization_barrier.",
    )


def _check_kernels(copies: list[HostCopy]) -> Iterator[Finding]:
    for direction, group in _group_by_direction(copy for copy in copies if copy.via == "kernel"):
        verb, preposition = ("reads", "from") if direction == "H2D" else ("writes", "to")
        yield Finding(
            FindingCode.KERNEL_TOUCHES_HOST,
            f"A copy engine is to move values {preposition} the host; here a kernel {verb} host memory "
            f"itself, over the bus: {_list_copies(group)}. XLA uses the copy engine for whole arrays and for "
            "slices whose index is an affine function of the loop's own counter, such as length - 1 - i. It "
            "is not where it is read from xs, clamped as in maximum(i - 1, 0), or a constant outside of a "
            "loop.",
            group[0].source,
        )


def _check_overlap(facts: CompiledFacts, copies: list[HostCopy]) -> Iterator[Finding]:
    alone = [copy for copy in copies if copy.via == "dma" and not copy.overlaps]
    in_line = [copy for copy in alone if copy.captured and facts.scheduling_mode != "CONCURRENT"]
    if in_line:
        yield Finding(
            FindingCode.COPY_NOT_OVERLAPPED,
            "Compute is to run beside host copies; these are in a CUDA graph that keeps the order of the "
            f"program ({SCHEDULING_MODE}={facts.scheduling_mode}), in line with the kernels: "
            f"{_list_copies(in_line)}. Compile with compiler_options={{{SCHEDULING_MODE!r}: 'CONCURRENT'}}; "
            "if the program was compiled so, pass verify the same compiler_options.",
            in_line[0].source,
        )
    for direction, group in _group_by_direction(copy for copy in alone if copy not in in_line):
        yield Finding(
            FindingCode.COPY_NOT_OVERLAPPED,
            f"Compute is to run beside host copies; beside these nothing can: {_list_copies(group)}. "
            + _explain_alone(facts, group, direction),
            group[0].source,
        )


def _explain_alone(facts: CompiledFacts, group: list[HostCopy], direction: str) -> str:
    if not all(copy.is_async for copy in group):
        return "They are synchronous: the device waits for each."
    if any(copy.captured for copy in group):
        needed = "is made from the value, or the value from it" if direction == "D2H" else "needs the value"
        return (
            f"All other work of the same CUDA graph {needed}. Keep the value that the backward pass needs "
            "first on the device (save=), or let the graph hold more of the layer: collectives split it "
            f"unless {COMMAND_BUFFER} names COLLECTIVES."
        )
    if direction == "D2H":
        return "Their end is awaited before any other work starts: wait for a copy one layer later."
    return (
        "The value is needed as soon as the copy starts: start it one layer earlier, or keep the value that "
        "the backward pass needs first on the device (save=)."
    )


def _check_cut(facts: CompiledFacts, copies: list[HostCopy]) -> Iterator[Finding]:
    out = [copy for copy in copies if copy.loop and copy.overlaps and copy.cut_by]
    if facts.scheduling_mode == "CONCURRENT" and out:
        commands = dict.fromkeys(copy.cut_by for copy in out)
        names = ", ".join(commands)
        remedies = []
        if any(map(_is_in_no_graph, commands)):
            remedies.append(
                "Loops inside of the loop and Fourier transforms are in no graph: compile by recipe='early'."
            )
        if not all(map(_is_in_no_graph, commands)):
            remedies.append(
                "Leave CUB's sorts out (compiler_options={'xla_gpu_enable_cub_radix_sort': False}), and name "
                f"COLLECTIVES in {COMMAND_BUFFER}, as jaxoff.jit does."
            )
        yield Finding(
            FindingCode.GRAPH_CUT,
            "Copies of a loop are to be in the CUDA graph of its iteration; between the start and the end of "
            f"these stands a command that no graph holds ({names}): {_list_copies(out)}. XLA starts copies "
            "outside of graphs on a few streams, where small copies wait for large copies, and kernels for "
            f"copies. {' '.join(remedies)}",
            out[0].source,
        )


def _is_in_no_graph(command: str) -> bool:
    return command.startswith(("while", "fft"))


def _check_copied_twice(copies: list[HostCopy]) -> Iterator[Finding]:
    for copy in copies:
        value = copy.value
        if value is not None and value.invariant_in and copy.loop and copy.count != 1:
            yield Finding(
                FindingCode.VALUE_COPIED_TWICE,
                f"A value is to go to the host once; {copy.title} copies {format_nbytes(copy.nbytes)} in "
                f"every iteration of the loop {copy.loop}, which does not change them. Name the value "
                "outside of the loop, or do not offload it.",
                copy.source,
            )
    values = [copy for copy in copies if copy.value is not None]
    for _, found in itertools.groupby(sorted(values, key=_value_key), key=_value_key):
        group = list(found)
        if len(group) > 1:
            yield Finding(
                FindingCode.VALUE_COPIED_TWICE,
                f"A value is to go to the host once; the same value goes there {len(group)} times: "
                f"{_list_copies(group)}. It has two names, such as a layer's output that is the next layer's "
                "input, or it was fetched and sent again: offload one of them.",
                group[0].source,
            )
    inside = [copy for copy in copies if copy.direction == "H2H"]
    if inside:
        yield Finding(
            FindingCode.VALUE_COPIED_TWICE,
            "A value is to go to the host once; these copy host memory to host memory: "
            f"{_list_copies(inside)}. Use each offloaded value in one loop only.",
            inside[0].source,
        )


def _check_recomputed(facts: CompiledFacts) -> Iterator[Finding]:
    if names := facts.computed_again:
        yield Finding(
            FindingCode.COMPUTED_AGAIN,
            "Policies are to say which values are recomputed; near the device's memory limit XLA also chose "
            f"by itself: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} ({len(names)} in "
            "all). That can take more memory than it frees, beside a policy. Compile with "
            f"compiler_options={{{DISABLED_PASSES!r}: 'rematerialization'}}, as jaxoff.jit does.",
        )


def _value_key(copy: HostCopy) -> tuple[str, str, int]:
    value = copy.value
    return ("", "", 0) if value is None else (value.computation, value.name, value.element)


def _group_by_direction(copies) -> Iterator[tuple[str, list[HostCopy]]]:
    groups: dict[str, list[HostCopy]] = {}
    for copy in copies:
        groups.setdefault(copy.direction, []).append(copy)
    yield from groups.items()


def _list_copies(copies: list[HostCopy]) -> str:
    """Lists the names of the first three copies, and the bytes of all copies in a call."""
    names = ", ".join(copy.title for copy in copies[:3]) + (" and others" if len(copies) > 3 else "")
    total = format_nbytes(sum(copy.total_bytes for copy in copies))
    return f"{names} ({len(copies)} instruction{'s' * (len(copies) > 1)}, {total} a call)"
