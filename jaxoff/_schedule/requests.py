"""Unmet requests of a traced program: offloads of its policies that do not happen, orders and updates lost.

A differentiated program holds the policies of its checkpoints, in the equations of their backward passes, and
the names of its values. A backward pass with operands in host memory reads offloaded residuals. So one walk
over the program compares the offloads of the policies with the offloads in the program.

In: a traced program. Out: findings; a program without a policy that offloads has none.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Var
from jaxoff._jaxpr.primitives import DOTS, LEAVES, is_condition, num_shards
from jaxoff._jaxpr.tag import Tag
from jaxoff._policy.combinators import KeepFirst, unwrap_keep_first
from jaxoff._policy.decision import RuleKind
from jaxoff._policy.marks import key_of_tag, record_labels
from jaxoff._policy.policy import Policy
from jaxoff._policy.protocol import ask_about
from jaxoff._report.finding import Finding, FindingCode
from jaxoff._report.tables import format_nbytes
from jaxoff._residuals.findings.finding import (
    STOCK_OFFLOADED,
    Entry,
    list_entries,
    list_sides,
    read_attributes,
)

_EXPLAIN = "jaxoff.explain(loss, *args) lists every residual, its placement and the rule behind it."


@dataclasses.dataclass(frozen=True)
class Named:
    """A `checkpoint_name` equation outside of backward passes.

    Attributes:
      eqn: the equation.
      count: how often the program runs the equation.
      is_in_branch: whether the equation is in a branch of a condition. Branches share buffers of residuals.
    """

    eqn: JaxprEqn
    count: int
    is_in_branch: bool

    @property
    def tag(self) -> Tag:
        """The tag that the equation binds."""
        return Tag.of(compat.name_in(self.eqn) or "")


@dataclasses.dataclass
class Requests:
    """Policies and names of a program, and the residuals that it offloads.

    Attributes:
      policies: pairs without repeats: a policy, and whether it stands in a backward pass.
      labels: the names in the program.
      named: the named values, outside of backward passes.
      dots: the products, outside of backward passes.
      copied: identities of the equations whose results are copied to host memory.
      has_host_residuals: whether a backward pass reads host memory.
      has_copies: whether values are copied between device and host memory, for any reason.
      offloads_in_groups: whether a loop in a backward pass stacks values on the host, for the backward pass
        of the same group of layers.
    """

    policies: list[tuple[Any, bool]] = dataclasses.field(default_factory=list)
    labels: set[str] = dataclasses.field(default_factory=set)
    named: list[Named] = dataclasses.field(default_factory=list)
    dots: list[JaxprEqn] = dataclasses.field(default_factory=list)
    copied: set[int] = dataclasses.field(default_factory=set)
    has_host_residuals: bool = False
    has_copies: bool = False
    offloads_in_groups: bool = False

    @classmethod
    def read(cls, jaxpr: Jaxpr) -> Requests:
        """Reads a program."""
        requests = cls()
        requests._walk(jaxpr, 1, in_backward=False, in_branch=False)
        return requests

    def _walk(self, jaxpr: Jaxpr, count: int, *, in_backward: bool, in_branch: bool) -> None:
        made: dict[Var, JaxprEqn] = {}  # named value -> its equation
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in LEAVES:
                continue
            if eqn.primitive.name in DOTS:
                if not in_backward:
                    self.dots.append(eqn)
                continue
            name, way = compat.name_in(eqn), compat.transfer_in(eqn)
            self.has_copies |= way is not None
            if name is not None:
                self._add_name(Named(eqn, count, in_branch), in_backward=in_backward)
                made[eqn.outvars[0]] = eqn
            elif way == "D2H" and not in_backward and eqn.invars[0] in made:
                self.copied.add(id(made[eqn.invars[0]]))
            backward = self._add_checkpoint(eqn, in_backward=in_backward)
            layout = compat.scan_in(eqn)
            if in_backward and layout:
                self.offloads_in_groups |= any(compat.is_host(v.aval) for v in eqn.outvars)
            for inner in compat.sub_jaxprs(eqn):
                self._walk(
                    inner,
                    count * (layout.length if layout else num_shards(eqn)),
                    in_backward=in_backward or backward,
                    in_branch=in_branch or is_condition(eqn),
                )

    def _add_name(self, named: Named, *, in_backward: bool) -> None:
        if named.tag.label:
            self.labels.add(named.tag.label)
        if not in_backward and compat.is_name(named.eqn.primitive):
            self.named.append(named)

    def _add_checkpoint(self, eqn: JaxprEqn, *, in_backward: bool) -> bool:
        """Adds the policy of a checkpoint. Returns whether the equation is a backward pass."""
        checkpoint = compat.checkpoint_in(eqn)
        if checkpoint is None:
            return False
        backward = compat.is_backward(eqn)
        if backward and not in_backward:
            self.has_host_residuals |= any(compat.is_host(v.aval) for v in eqn.invars)
        if checkpoint.policy is not None and (checkpoint.policy, backward) not in self.policies:
            self.policies.append((checkpoint.policy, backward))
        return backward

    @property
    def plain_policies(self) -> list[Any]:
        """The policies, a `KeepFirst` left out."""
        return [policy for policy, _ in self.policies if not isinstance(policy, KeepFirst)]

    @property
    def store_entries(self) -> list[Entry]:
        """The entries of `store` in the policies, without repeats."""
        policies = (policy for policy, _ in self.policies)
        return [e for e in dict.fromkeys(e for p in policies for e in list_entries(p)) if e.field == "store"]

    @property
    def offloading(self) -> list[tuple[Any, bool]]:
        """The pairs of `policies` whose policy offloads; a `KeepFirst` counts as the policy inside."""
        found: list[tuple[Any, bool]] = []
        for policy, backward in self.policies:
            plain = unwrap_keep_first(policy)
            if (plain, backward) not in found and self._offloads(plain):
                found.append((plain, backward))
        return found

    def _offloads(self, policy: Any) -> bool:
        if any(map(_is_offloading, list_sides(policy))):
            return True
        eqns = [named.eqn for named in self.named if named.tag.mark == "offload"]
        if any(not isinstance(side, Policy) for side in list_sides(policy)):
            eqns = [*(named.eqn for named in self.named), *self.dots]
        return any(ask_about(policy, eqn).placement == "offload" for eqn in eqns)


def _is_offloading(policy: Any) -> bool:
    """Whether a policy offloads by its lists or its default; marks in the program are left out."""
    if isinstance(policy, Policy):
        asks = policy.offload or policy.unmarked.startswith("offload") or policy.preset == "te_v1"
        return bool(asks) and policy.memory_kind != "device"
    return bool(read_attributes(policy).get(STOCK_OFFLOADED))


def find_unmet_requests(requests: Requests) -> Iterator[Finding]:
    """Finds offloads of a program's policies that do not happen.

    Rules without a match, memory kinds other than pinned host, listed or marked values on the device, and
    programs without any offload.

    Args:
      requests: of the differentiated program. Without gradients, only rules and memory kinds are checked.
    """
    offloading = requests.offloading
    entries = (entry for policy, _ in offloading for entry in list_entries(policy))
    for entry in dict.fromkeys((*entries, *requests.store_entries)):
        yield from entry.find_unmatched(requests.labels, "in the program")
    for policy, _ in offloading:
        yield from _find_wrong_kinds(policy, requests)
    # `keep_first` keeps all offloaded values of a single layer; only its policy is in such a program.
    late = [policy for policy, backward in offloading if backward and policy in requests.plain_policies]
    yield from _find_lost_exemptions(requests)
    if requests.has_host_residuals:
        yield from map(_describe_stayed, _list_stayed(requests))
    elif late and requests.has_copies and not requests.offloads_in_groups:
        yield Finding(
            FindingCode.CHECKPOINT_OVERRIDDEN,
            f"the policy {_describe_policy(late[0])} belongs to a jax.checkpoint inside another, which "
            "decides: values are recomputed, and only then copied to the host and back within the backward "
            "pass, which frees nothing. Give the outer jax.checkpoint this policy, or drop one of the two. "
            f"{_EXPLAIN}",
        )
    elif late and not requests.has_copies:
        yield _describe_nothing(late, list(_list_stayed(requests)))


def _find_lost_exemptions(requests: Requests) -> Iterator[Finding]:
    """Finds offloaded values under `mark_not_offload`: policies from elsewhere do not know marks."""
    for named in requests.named:
        if named.tag.mark == "not_offload" and id(named.eqn) in requests.copied:
            yield Finding(
                FindingCode.EXEMPTION_LOST,
                f"{_name_of([named])} is offloaded although it is under mark_not_offload: policies of "
                "jax.checkpoint_policies know names, and no marks. Use jaxoff.policy(...), or take the name "
                "out of the list.",
                compat.source_line(named.eqn),
            )
            return


def _find_wrong_kinds(policy: Any, requests: Requests) -> Iterator[Finding]:
    for named in requests.named:
        rule = ask_about(policy, named.eqn).rule
        if rule.kind is RuleKind.WRONG_MEMORY_KIND:
            yield Finding(
                FindingCode.WRONG_MEMORY_KIND,
                f"{str(named.tag)!r} is not offloaded: {rule}. Only 'pinned_host' is the host.",
                compat.source_line(named.eqn),
            )
            return


type _Stayed = tuple[Any, list[Named]]
"""The rule behind a request, and the values with one tag that stay on the device."""


def _list_stayed(requests: Requests) -> Iterator[_Stayed]:
    """Lists named and marked values with an explicit request, and without a copy to the host, by source line.

    A line may make a value twice, and a gradient need one of them: of a student, and not of its teacher.
    Globs and defaults are no explicit requests: they may cover values without a reader in a backward pass.
    """
    groups: dict[Any, list[Named]] = {}
    for named in requests.named:
        if not named.is_in_branch:
            groups.setdefault((key_of_tag(named.tag), compat.source_line(named.eqn)), []).append(named)
    policies = [policy for policy, backward in requests.policies if backward]
    for group in groups.values():
        if any(id(named.eqn) in requests.copied for named in group):
            continue
        for policy in policies:
            rule = _explicit_rule(policy, group)
            if rule is not None:
                yield rule, group
                break


def _explicit_rule(policy: Any, group: list[Named]) -> Any:
    """The rule by which a policy offloads values with one tag, unless it is a glob or a default."""
    for named in group:
        decision = ask_about(policy, named.eqn)
        if decision.placement == "offload":
            by_name = decision.rule.kind is RuleKind.LIST and decision.rule.pattern == named.tag.label
            if by_name or decision.rule.kind is RuleKind.MARK or _is_listed(policy, named.tag):
                return decision.rule
    return None


def _is_listed(policy: Any, tag: Tag) -> bool:
    return any(entry.field == STOCK_OFFLOADED and entry.matches(tag) for entry in list_entries(policy))


def _describe_stayed(stayed: _Stayed) -> Finding:
    rule, group = stayed
    nbytes = sum(named.count * compat.nbytes(named.eqn.outvars[0].aval) for named in group)
    return Finding(
        FindingCode.OFFLOAD_NOT_DONE,
        f"{_name_of(group)} ({format_nbytes(nbytes)}) is not offloaded, though {rule} asks for it: no "
        "backward pass reads the value, or it stands outside of the jax.checkpoint with the policy, or is a "
        f"result of it that code outside reads, or an outer jax.checkpoint decides otherwise. {_EXPLAIN}",
        compat.source_line(group[0].eqn),
    )


def _name_of(group: list[Named]) -> str:
    tag = group[0].tag
    return repr(tag.label) if tag.label else f"The value under mark_{tag.mark}"


def _describe_nothing(policies: list[Any], stayed: list[_Stayed]) -> Finding:
    names = ", ".join(dict.fromkeys(_name_of(group) for _, group in stayed))
    floors = [s.min_bytes for p in policies for s in list_sides(p) if isinstance(s, Policy) and s.min_bytes]
    why = f"No backward pass of its checkpoints reads {names}. " if names else ""
    if floors and not names:
        why = f"Values smaller than min_bytes={min(floors)} stay on the device. "
    return Finding(
        FindingCode.NOTHING_OFFLOADED,
        f"the program offloads no residual, though its policy {_describe_policy(policies[0])} asks for it. "
        f"{why}{_EXPLAIN}",
    )


def _describe_policy(policy: Any) -> str:
    return getattr(policy, "__name__", None) or repr(policy)


def find_lost_order(jaxpr: Jaxpr, name: str, *, has_budget: bool) -> Iterator[Finding]:
    """Finds a program of copies, or with a budget, called inside another transformation: both are lost.

    Args:
      jaxpr: the program of the inner call.
      name: the name of the function.
      has_budget: whether the function has a budget of memory.
    """
    requests = Requests.read(jaxpr)
    if has_budget:
        yield Finding(
            FindingCode.CALLED_INSIDE_TRANSFORM,
            f"jaxoff.jit(device_bytes=...) has to be the outermost transformation, and {name} was called "
            "inside another, such as jax.jit, jax.grad or jax.vmap: there it is a plain jax.jit, and its "
            "budget is not kept. Put the budget on the outer function: jaxoff.jit(step, device_bytes=...).",
        )
        return
    lost = []
    if requests.has_copies or requests.offloading:
        lost.append("its copies get no order and no compiler options, so they may stall the step")
    if requests.store_entries:
        lost.append("it stores no value in float8")
    if lost:
        yield Finding(
            FindingCode.CALLED_INSIDE_TRANSFORM,
            f"jaxoff.jit has to be the outermost transformation, and {name} was called inside another, such "
            "as jax.jit, jax.grad or jax.vmap: there it is a plain jax.jit, and "
            f"{', and '.join(lost)}. Put jaxoff.jit in place of the outer jax.jit: "
            "jaxoff.jit(jax.value_and_grad(loss)), jaxoff.jit(step).",
        )


class Watch:
    """A context around the trace of a user's function by `jaxoff.jit`; `call` calls the function inside.

    Calls of other `jaxoff.jit` functions inside the context are part of this program.
    """

    def __init__(self):
        self._recording = record_labels()
        self._loses: list[str] = []

    def __enter__(self) -> Watch:
        self._recording.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recording.__exit__(*error)

    def call(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function, and notes the objects of flax.nnx among its arguments with lost updates."""
        objects = _find_nnx_objects((args, kwargs))
        before = [jax.tree.leaves(x) for x in objects]
        results = fun(*args, **kwargs)
        if objects:
            returned = {id(leaf) for leaf in jax.tree.leaves(results)}
            for x, old in zip(objects, before, strict=True):
                known = {id(leaf) for leaf in old} | returned
                if any(id(leaf) not in known for leaf in jax.tree.leaves(x)):
                    self._loses.append(type(x).__name__)
        return results

    def find(self, requests: Requests) -> tuple[Finding, ...]:
        """Finds the unmet requests of the traced program, and the lost updates."""
        found = list(find_unmet_requests(requests))
        if self._loses:
            found.append(
                Finding(
                    FindingCode.UPDATES_LOST,
                    f"the function updates {', '.join(dict.fromkeys(self._loses))} in place, and jaxoff.jit, "
                    "like jax.jit, does not take updates of flax.nnx objects out of the function: they are "
                    "lost. Use jaxoff.nnx_jit, the counterpart of nnx.jit, or return the objects.",
                )
            )
        return tuple(dict.fromkeys(found))


def _find_nnx_objects(tree: Any) -> list[Any]:
    """Finds modules, optimizers and other objects of flax.nnx in a pytree, without an import of flax."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    kinds = tuple(x for name in ("Pytree", "Object") if isinstance(x := getattr(nnx, name, None), type))
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]
