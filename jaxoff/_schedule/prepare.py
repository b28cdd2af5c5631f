"""The first steps with a traced program: known branches, float8, merged loops and maps, refused offloads.

In: the traced program. Out: the program to rewrite, and findings of unmet requests.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterable, Iterator, Mapping

from jaxoff._jaxpr import compat, remat3
from jaxoff._jaxpr.compat import ClosedJaxpr, JaxprEqn
from jaxoff._jaxpr.constants import lift_constants
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._jaxpr.float8 import LEAST_BLOCK, can_compress
from jaxoff._jaxpr.float8_residuals import OnRounding, store_in_float8
from jaxoff._jaxpr.host_values import split_copies
from jaxoff._jaxpr.joined_maps import join_maps
from jaxoff._jaxpr.merged_maps import merge_shard_maps
from jaxoff._jaxpr.nested_loops import merge_nested_loops
from jaxoff._jaxpr.refused_offloads import save_refused
from jaxoff._jaxpr.settled import choose_known_branches, roll_loops_with_copies
from jaxoff._jaxpr.sharded_calls import constrain_calls
from jaxoff._policy.combinators import stores_in_float8
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.tables import format_nbytes
from jaxoff._residuals.findings.finding import Entry
from jaxoff._runtime.garbage import collector_paused
from jaxoff._schedule.call import Place
from jaxoff._schedule.faults import describe_fault
from jaxoff._schedule.requests import Named, Requests, Watch

_on_rounding: contextvars.ContextVar[OnRounding | None] = contextvars.ContextVar("on_rounding", default=None)


@contextlib.contextmanager
def watch_rounding(on_rounding: OnRounding) -> Iterator[None]:
    """Programs traced inside call `on_rounding` at each run of a rounding; as for `store_in_float8`."""
    token = _on_rounding.set(on_rounding)
    try:
        yield
    finally:
        _on_rounding.reset(token)


@collector_paused()
def prepare(closed: ClosedJaxpr, watch: Watch, place: Place) -> tuple[ClosedJaxpr, tuple[Finding, ...]]:
    """A traced program ready to be rewritten, and findings of unmet requests.

    Args:
      closed: the program.
      watch: the context of its trace.
      place: where the program runs.

    Returns:
      The program and the findings; after a fault of jaxoff the program as it is, and the fault.
    """
    try:
        return _prepare(closed, watch, place)
    except (ValueError, *FAULTS) as fault:  # ValueError: of JAX, over a program that is not well formed
        return closed, (describe_fault(fault, "reading its program"),)


def _prepare(closed: ClosedJaxpr, watch: Watch, place: Place) -> tuple[ClosedJaxpr, tuple[Finding, ...]]:
    closed = split_copies(lift_constants(constrain_calls(closed)))
    if place.are_gpus:
        closed = roll_loops_with_copies(choose_known_branches(closed, "cuda"))
    requests = Requests.read(compat.as_open(closed))
    findings = list(watch.find(requests))
    closed, unmet = _store_by_policies(closed, requests)
    if requests.has_copies:
        closed = join_maps(merge_shard_maps(closed))
    closed = merge_nested_loops(closed, with_copies=True)
    if place.are_gpus and requests.has_copies:
        closed, refused = save_refused(closed, one_device=place.devices == 1)
        unmet += [_describe_refused(refused, requests.named)] if refused else []
    return closed, (*findings, *unmet)


def _describe_refused(sends: list[JaxprEqn], named: Iterable[Named]) -> Finding:
    by_value = {n.eqn.outvars[0]: n for n in named}
    found = [by_value[v] for eqn in sends if (v := eqn.invars[0]) in by_value]
    labels = ", ".join(dict.fromkeys(repr(n.tag.label) for n in found)) or f"{len(sends)} values"
    nbytes = sum(n.count * compat.nbytes(n.eqn.outvars[0].aval) for n in found)
    total = f" ({format_nbytes(nbytes)} in all)" if len(found) == len(sends) else ""
    return Finding(
        FindingCode.OFFLOAD_IN_NESTED_SCAN,
        f"{labels}{total}, to be offloaded, stay on the device: XLA does not compile offloads in a loop "
        "inside of a loop (offload values of the outer loop, or write the inner layers as a Python loop) or "
        "in a condition of which not every branch has such a value (name its operands instead).",
        compat.source_line(found[0].eqn if found else sends[0]),
    )


def _store_by_policies(closed: ClosedJaxpr, requests: Requests) -> tuple[ClosedJaxpr, list[Finding]]:
    """A differentiated program, with residuals in float8 by the `store` of its policies.

    Returns:
      The program, and findings of names in `store` without a residual in float8.
    """
    entries, is_differentiated = requests.store_entries, any(backward for _, backward in requests.policies)
    if entries and remat3.is_enabled():
        text = (
            "jax_remat3 is on, whose backward passes jaxoff does not rewrite: no value is stored in float8. "
            'Switch it off: jax.config.update("jax_remat3", False).'
        )
        return closed, [Finding(FindingCode.STORE_NOT_DONE, text)]
    if not entries or not is_differentiated:  # without a backward pass nothing is kept
        return closed, []

    chooses = functools.partial(stores_in_float8, [policy for policy, _ in requests.policies])
    try:
        narrowed = store_in_float8(closed, chooses, _on_rounding.get())
    except FAULTS as fault:
        return closed, [describe_fault(fault, "storing its residuals in float8")]
    done = {stored.label for stored in narrowed.stored}
    findings: list[Finding] = []
    for entry in entries:
        named = [n for n in requests.named if n.tag.label and entry.matches(n.tag.label)]
        if named and not any(map(entry.matches, done)):
            findings.append(_describe_unmet(entry, named, narrowed.exact))
        elif exact := sorted(filter(entry.matches, narrowed.exact)):
            findings.append(_describe_exact(exact[0], narrowed.exact[exact[0]]))
    return narrowed.closed, findings


def _describe_exact(label: str, choice: JaxprEqn) -> Finding:
    return Finding(
        FindingCode.STORE_NOT_DONE,
        f"{label!r} is not stored in float8, though store asks for it: a backward pass computes a choice "
        f"({choice.primitive.name}) from it again, and by rounded values the choice may be another. Name the "
        "choice's operand, such as a router's probabilities, and list that name in save.",
        compat.source_line(choice),
    )


def _describe_unmet(entry: Entry, named: list[Named], exact: Mapping[str, JaxprEqn]) -> Finding:
    if chosen := next(filter(entry.matches, exact), None):
        return _describe_exact(chosen, exact[chosen])
    wide = [n for n in named if not can_compress(n.eqn.outvars[0].aval)]
    if wide:
        aval = wide[0].eqn.outvars[0].aval
        why = (
            f"its type is {aval}, and only floating-point numbers of two bytes or more are stored so, with a "
            f"last axis divisible by {LEAST_BLOCK}."
        )
    else:
        why = (
            "no jax.checkpoint keeps it, or something else than the backward pass of the jax.checkpoint "
            "reads what is kept. List it in save or offload of the policy around it."
        )
    return Finding(
        FindingCode.STORE_NOT_DONE,
        f"{entry.pattern!r} is not stored in float8, though store asks for it: {why}",
        compat.source_line(named[0].eqn),
    )
