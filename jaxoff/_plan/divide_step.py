"""Divides a whole train step into layer groups and the rest.

A train step differentiates its loss inside, so its program holds both passes of each layer, and the planner
finds the passes in the program. Under a policy that keeps nothing, the backward pass of a layer starts with
the recomputation of all required values of the forward pass: these are the values to place. Each
operand of the backward pass is an argument of the step, the layer's input, or a cotangent, which the backward
pass of the step computes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, ScanLayout, Var
from jaxoff._jaxpr.dataflow import count_reads, map_makers, variables
from jaxoff._jaxpr.inline import Renamed, inline_calls, inline_program, resolve
from jaxoff._jaxpr.per_device import extract_device_program
from jaxoff._jaxpr.primitives import VIEWS
from jaxoff._jaxpr.scopes import find_layer_number, is_layer_loop, is_transposed
from jaxoff._plan.divided import DividedStep, ProgramKey, collect_numbers
from jaxoff._plan.layer_profile import LayerPasses, read_layer
from jaxoff._plan.timeline import GroupLoop, PassCall, Timeline
from jaxoff._policy.policy import Policy


def is_train_step(jaxpr: Jaxpr) -> bool:
    """Whether a program differentiates checkpointed layers inside."""
    return any(
        compat.is_backward(eqn) or any(map(is_train_step, compat.sub_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def divide_step(closed: ClosedJaxpr, device: Device) -> DividedStep:
    """Divides a train step into layer groups and the rest.

    Results reuse the buffers of arguments that the step's `jax.jit` or `jaxoff.jit` donates. Of a step over a
    mesh, the share of one device is divided; see `jaxoff._jaxpr.per_device`.

    Raises:
      ValueError: for layers whose policy keeps a value, and for a step with differentiated layers only inside
        of cond or while.
    """
    _check_nothing_kept(closed.jaxpr)
    whole, donated = _unwrap_jit(closed.jaxpr)
    jaxpr, devices = extract_device_program(whole)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    finder = _GroupFinder()
    timeline = finder.build_timeline(jaxpr, inputs, _find_in_place(jaxpr, donated))
    groups = finder.groups
    if not groups:
        raise ValueError(
            "A plan places what is inside of differentiated layers; got a step that differentiates them only "
            "inside of cond, while or a jax.jit with shardings of its own. Hand jaxoff.plan the loss of one "
            "device instead."
        )
    keys: dict[Any, int] = {}
    kind_of = {number: keys.setdefault(group.key, len(keys)) for number, group in groups.items()}
    first = [next(number for number, k in kind_of.items() if k == kind) for kind in keys.values()]
    counts = collections.Counter(kind_of.values())
    layers = [read_layer(groups[number].passes, device) for number in first]
    # The forward pass of a layer outside of loops is not found in the program: its time counts as time
    # outside.
    counted_twice = sum(
        layer.forward_ms * counts[kind] * groups[number].runs
        for kind, (layer, number) in enumerate(zip(layers, first, strict=True))
        if groups[number].passes.forward is None
    )
    return DividedStep(
        layers=tuple(layers),
        counts=tuple(counts[kind] for kind in range(len(layers))),
        # The finder yields groups in the order of the backward pass.
        numbers=collect_numbers((kind_of[number], groups[number].position) for number in reversed(kind_of)),
        runs=tuple(groups[number].runs for number in first),
        points=tuple(timeline.points(kind_of)),
        argument_nbytes=compat.nbytes_of(inputs),
        outside_ms=max(0.0, timeline.outside_ms(device) - counted_twice),
        devices=devices,
    )


@dataclasses.dataclass(frozen=True)
class _FoundGroup:
    """A layer group of a step.

    Attributes:
      passes: both passes of one iteration.
      runs: how often a step runs the group.
      position: position of the group in its `jaxoff.layers`, or None.
      key: equal for groups of one kind.
    """

    passes: LayerPasses
    runs: int
    position: int | None
    key: Any


class _GroupFinder:
    """Finds the layer groups of a step.

    Attributes:
      groups: number of a group -> group, in the order of the backward pass.
    """

    def __init__(self):
        self.groups: dict[int, _FoundGroup] = {}

    def build_timeline(
        self, jaxpr: Jaxpr, inputs: set[Var], in_place: Iterable[int], runs: int = 1
    ) -> Timeline:
        """Builds the timeline of a program, and of its loops over anything but layers.

        Args:
          jaxpr: the program.
          inputs: arguments of the program.
          in_place: indices of results in the buffer of an argument.
          runs: how often a step runs the program.
        """
        program = _FlatProgram.of(jaxpr, checkpoints=False)
        calls: dict[int, PassCall] = {}
        loops: dict[int, GroupLoop] = {}
        for i, eqn in enumerate(program.eqns):
            layout = compat.scan_in(eqn)
            if compat.is_backward(eqn):
                calls[i] = self._add_layer(program, eqn, inputs, runs)
            elif layout is not None and is_train_step(body := compat.as_open(eqn.params["jaxpr"])):
                if _is_backward(eqn):
                    calls |= self._add_loop(program, eqn, layout, runs)
                    continue
                arguments = {*body.invars, *body.constvars}
                iteration = self.build_timeline(
                    body, arguments, range(layout.num_carry), runs * layout.length
                )
                rows = body.invars[layout.num_consts + layout.num_carry :]
                nbytes = compat.nbytes_of(rows)
                loops[i] = GroupLoop(layout.length, iteration, nbytes, _find_carry(eqn))
        outs = frozenset(program.results)
        reused = {v for k in in_place if isinstance(v := program.outs[k], Var)}
        return Timeline(program.eqns, inputs, outs, calls, in_place=frozenset(reused), loops=loops)

    def _add(self, passes: LayerPasses, runs: int, position: int | None, *like: Any) -> int:
        key = *like, passes.iterations, runs, position is None
        self.groups[len(self.groups)] = _FoundGroup(passes, runs, position, key)
        return len(self.groups) - 1

    def _add_layer(self, program: _FlatProgram, eqn: JaxprEqn, inputs: set[Var], runs: int) -> PassCall:
        """Adds a layer outside of loops, given the equation of its backward pass."""
        renamed: Renamed = {}
        eqns = tuple(inline_calls([eqn], renamed))
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        cotangents = tuple(v for v in operands if _is_backward(program.find_maker(v)))
        residuals = tuple(v for v in operands if v not in cotangents and not program.is_view(v, inputs))
        results = (resolve(renamed, v) for v in eqn.outvars)
        passes = LayerPasses(
            iterations=1,
            eqns=eqns,
            carried=residuals,
            cotangents=cotangents,
            results=frozenset(),
            gradients=frozenset(v for v in results if isinstance(v, Var)),
            source=compat.source_line(eqn),
        )
        roles = tuple((v in cotangents, v in residuals) for v in eqn.invars)
        number = self._add(passes, runs, find_layer_number(eqn), ProgramKey.of(eqn.params["jaxpr"]), roles)
        return PassCall(number, True, frozenset(residuals), frozenset(cotangents))

    def _add_loop(
        self, program: _FlatProgram, eqn: JaxprEqn, layout: ScanLayout, runs: int
    ) -> dict[int, PassCall]:
        """Adds a loop over layers: the backward loop, and the forward loop with its stacks."""
        back = _FlatProgram.of(compat.as_open(eqn.params["jaxpr"]))
        first = layout.num_consts + layout.num_carry
        stacks: set[int] = set()
        cotangents, forward = {*range(layout.num_consts, first)}, None
        for k, v in enumerate(eqn.invars[first:], first):
            maker = program.find_maker(v)
            if _is_backward(maker):
                cotangents.add(k)
            elif maker is not None and _is_stack(maker, v) and program.reads[v] == 1:
                stacks.add(k)
                forward = maker
        passes = LayerPasses(
            iterations=layout.length,
            eqns=tuple(back.eqns),
            carried=tuple(back.inputs[k] for k in sorted(stacks)),
            cotangents=tuple(back.inputs[k] for k in sorted(cotangents)),
            results=frozenset(),
            gradients=frozenset(back.results),
            source=compat.source_line(eqn),
            rows=tuple(v for k, v in enumerate(back.inputs) if k >= first and k not in stacks | cotangents),
            is_ordered=is_layer_loop(eqn),
        )
        like = [ProgramKey.of(eqn.params["jaxpr"]), tuple(stacks), tuple(cotangents)]
        residuals = frozenset(eqn.invars[k] for k in stacks)
        if forward is not None:
            passes = dataclasses.replace(passes, forward=_read_forward(forward, residuals))
            like.append(ProgramKey.of(forward.params["jaxpr"]))
        number = self._add(passes, runs, None, *like)
        calls = {program.index[id(eqn)]: PassCall(number, True, residuals, _find_carry(eqn))}
        if forward is not None:
            calls[program.index[id(forward)]] = PassCall(number, False, reusable=_find_carry(forward))
        return calls


def _read_forward(eqn: JaxprEqn, residuals: frozenset[Any]) -> LayerPasses:
    """Returns an iteration of a forward loop. Stacks of residuals are not among the results."""
    program, layout = _FlatProgram.of(compat.as_open(eqn.params["jaxpr"])), compat.scan_in(eqn)
    assert layout is not None
    pairs = zip(program.outs, eqn.outvars, strict=True)
    results = {v for v, out in pairs if isinstance(v, Var) and out not in residuals}
    return LayerPasses(
        iterations=layout.length,
        eqns=tuple(program.eqns),
        carried=(),
        cotangents=(),
        results=frozenset(results),
        gradients=frozenset(),
        source=compat.source_line(eqn),
    )


@dataclasses.dataclass(frozen=True)
class _FlatProgram:
    """A program with its calls inlined, with or without the calls of checkpointed layers.

    Attributes:
      inputs, eqns, outs: as of a jaxpr.
    """

    inputs: list[Var]
    eqns: list[JaxprEqn]
    outs: list[Any]

    @staticmethod
    def of(jaxpr: Jaxpr, *, checkpoints: bool = True) -> _FlatProgram:
        """Inlines a program.

        Args:
          jaxpr: the program.
          checkpoints: whether to inline backward passes of checkpointed layers, too.
        """
        jaxpr = inline_program(jaxpr, checkpoints=checkpoints)
        return _FlatProgram(list(jaxpr.invars), list(jaxpr.eqns), list(jaxpr.outvars))

    @property
    def results(self) -> list[Var]:
        """The results other than constants."""
        return [v for v in self.outs if isinstance(v, Var)]

    @functools.cached_property
    def index(self) -> dict[int, int]:
        """The id of an equation -> its index."""
        return {id(eqn): i for i, eqn in enumerate(self.eqns)}

    @functools.cached_property
    def reads(self) -> collections.Counter[Any]:
        """Value -> number of reads, as an operand or as a result."""
        return count_reads(self.eqns, self.outs)

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return map_makers(self.eqns)

    def find_maker(self, atom: Any) -> JaxprEqn | None:
        """Returns the maker of a value, or None for an input or a constant."""
        return self._makers.get(atom) if isinstance(atom, Var) else None

    def is_view(self, v: Var, inputs: set[Var]) -> bool:
        """Whether a value is an input or a view of an input, such as a layer's weights."""
        while (eqn := self.find_maker(v)) is not None and eqn.primitive.name in VIEWS and variables(eqn):
            v = variables(eqn)[0]
        return v in inputs


def _find_carry(eqn: JaxprEqn) -> frozenset[Any]:
    """Finds the carried operands of a loop."""
    layout = compat.scan_in(eqn)
    assert layout is not None
    operands = eqn.invars[layout.num_consts : layout.num_consts + layout.num_carry]
    return frozenset(v for v in operands if isinstance(v, Var))


def _is_backward(eqn: JaxprEqn | None) -> bool:
    """Whether an equation belongs to the backward pass of the step."""
    return eqn is not None and is_transposed(eqn)


def _is_stack(eqn: JaxprEqn, v: Any) -> bool:
    """Whether a value is a stacked result of a loop."""
    layout = compat.scan_in(eqn)
    return layout is not None and v in eqn.outvars[layout.num_carry :]


def _unwrap_jit(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """Returns the program inside of a step's `jax.jit`, and for each argument whether it is donated."""
    donated = [False] * len(jaxpr.invars)
    while len(jaxpr.eqns) == 1 and (inner := compat.jit_in(jaxpr.eqns[0])) is not None:
        (eqn,) = jaxpr.eqns
        is_all = {*eqn.outvars} >= {*jaxpr.outvars} and all(isinstance(v, Var) for v in eqn.invars)
        if not is_all:
            break
        results: dict[Any, Any] = dict(zip(eqn.outvars, inner.jaxpr.outvars, strict=True))
        given = {v for v, outer in zip(jaxpr.invars, donated, strict=True) if outer}
        pairs = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        # Arrays over which the step closes are arguments like others, never donated.
        closed_over = inner.jaxpr.constvars
        donated = [False] * len(closed_over) + [here or v in given for v, here in pairs if isinstance(v, Var)]
        jaxpr = inner.jaxpr.replace(
            constvars=(),
            invars=[*closed_over, *inner.jaxpr.invars],
            outvars=[results[v] for v in jaxpr.outvars],
        )
    return jaxpr, donated


def _find_in_place(jaxpr: Jaxpr, donated: Sequence[bool]) -> list[int]:
    """Finds the indices of results in the buffer of a donated argument of equal shape and dtype."""
    free = collections.Counter(_type_of(v) for v, given in zip(jaxpr.invars, donated, strict=True) if given)
    found = []
    for k, v in enumerate(jaxpr.outvars):
        if isinstance(v, Var) and free[_type_of(v)] > 0:
            free[_type_of(v)] -= 1
            found.append(k)
    return found


def _type_of(v: Any) -> Any:
    return v.aval.shape, v.aval.dtype


def _check_nothing_kept(jaxpr: Jaxpr) -> None:
    """Raises where the backward pass of a layer does not start with the recomputation of the whole layer."""
    for eqn in jaxpr.eqns:
        checkpoint = compat.checkpoint_in(eqn)
        policy = None if checkpoint is None else checkpoint.policy
        if compat.is_backward(eqn) and not _keeps_nothing(policy):
            raise ValueError(
                "A train step is planned with layers under jaxoff.policy(), which keeps nothing, so that it "
                f"holds all that there is to place; got layers under {policy}. Let the step take its policy "
                "as an argument: jaxoff.plan(functools.partial(step, policy=jaxoff.policy()), ...)."
            )
        if compat.transfer_in(eqn) == "H2D":
            raise ValueError(
                "A train step is planned with nothing on the host; got a value that jaxoff.mark_offload or "
                "the step itself moves there. Take it out, and fix its name as 'offload' instead."
            )
        for inner in compat.sub_jaxprs(eqn):
            _check_nothing_kept(inner)


def _keeps_nothing(policy: Any) -> bool:
    if isinstance(policy, Policy):
        return policy.unmarked == "recompute" and not (policy.save or policy.offload)
    return policy is None or policy is jax.checkpoint_policies.nothing_saveable
