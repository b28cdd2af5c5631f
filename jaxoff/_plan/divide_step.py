"""A whole train step divided into its parts and the rest, as a planner sees them.

A step differentiates inside, so its program holds two passes of each layer, and a planner has to find them
again. Under a policy that keeps nothing, a layer's backward pass begins with all that it needs of the forward
pass, made again: that tells what there is to place. What it takes from outside is an argument of the step,
the layer's input, or a cotangent: what the backward pass of the step makes.
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
from jaxoff._jaxpr.inline import Renamed, inlined, now
from jaxoff._jaxpr.per_device import of_one_device
from jaxoff._jaxpr.primitives import VIEWS
from jaxoff._jaxpr.scopes import find_layer_number, is_layer_loop, is_transposed
from jaxoff._plan.divide_loss import Divided, numbers_of
from jaxoff._plan.layer_profile import LayerPasses, layer_of
from jaxoff._plan.timeline import Call, Loop, Timeline
from jaxoff._policy.policy import Policy


def is_train_step(jaxpr: Jaxpr) -> bool:
    """Whether a program differentiates checkpointed layers inside."""
    return any(
        compat.is_backward(eqn) or any(map(is_train_step, compat.sub_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def divide_step(closed: ClosedJaxpr, device: Device) -> Divided:
    """Divides a train step into parts and the rest.

    Results take the memory of arguments that the step's `jax.jit` or `jaxoff.jit` donates.

    Of a step over a mesh, one device's share: see `jaxoff._jaxpr.per_device`.

    Raises:
      ValueError: for layers whose policy keeps something, and for layers that are differentiated only inside
        of cond or while.
    """
    _refuse_what_keeps(closed.jaxpr)
    whole, donated = _unwrapped(closed.jaxpr)
    jaxpr, devices = of_one_device(whole)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    steps = _Steps()
    timeline = steps.timeline(jaxpr, inputs, _in_place(jaxpr, donated))
    if not steps.found:
        raise ValueError(
            "A plan places what is inside of differentiated layers; got a step that differentiates them only "
            "inside of cond, while or a jax.jit with shardings of its own. Hand jaxoff.plan the loss of one "
            "device instead."
        )
    keys: dict[Any, int] = {}
    kind_of = {part: keys.setdefault(found.key, len(keys)) for part, found in steps.found.items()}
    first = [next(p for p, k in kind_of.items() if k == kind) for kind in keys.values()]
    counts = collections.Counter(kind_of.values())
    layers = [layer_of(steps.found[part].iteration, device) for part in first]
    # The forward pass of a layer that is in no loop is not told apart: it is in the time of the rest.
    twice = sum(
        layer.forward_ms * counts[kind] * steps.found[part].runs
        for kind, (layer, part) in enumerate(zip(layers, first, strict=True))
        if steps.found[part].iteration.forward is None
    )
    return Divided(
        layers=tuple(layers),
        counts=tuple(counts[kind] for kind in range(len(layers))),
        # What is found comes in the order of the pass back.
        numbers=numbers_of((kind_of[part], steps.found[part].number) for part in reversed(kind_of)),
        runs=tuple(steps.found[part].runs for part in first),
        points=tuple(timeline.points(kind_of)),
        argument_nbytes=compat.nbytes_of(inputs),
        outside_ms=max(0.0, timeline.ms(device) - twice),
        devices=devices,
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """A part of a step.

    Attributes:
      iteration: what one iteration computes.
      runs: how often the part runs in a step.
      number: in its `jaxoff.layers`, or None.
      key: the same for parts that are alike.
    """

    iteration: LayerPasses
    runs: int
    number: int | None
    key: Any


class _Steps:
    """Finds the parts of a step.

    Attributes:
      found: by number.
    """

    def __init__(self):
        self.found: dict[int, _Found] = {}

    def timeline(self, jaxpr: Jaxpr, inputs: set[Var], in_place: Iterable[int], runs: int = 1) -> Timeline:
        """The timeline of a program, and of the loops in it that are not over layers.

        Args:
          jaxpr: the program.
          inputs: its arguments.
          in_place: the results that take the memory of an argument, by number.
          runs: how often it runs in a step.
        """
        program = _Flat.of(jaxpr, checkpoints=False)
        calls: dict[int, Call] = {}
        loops: dict[int, Loop] = {}
        for i, eqn in enumerate(program.eqns):
            layout = compat.scan_in(eqn)
            if compat.is_backward(eqn):
                calls[i] = self._layer(program, eqn, inputs, runs)
            elif layout is not None and is_train_step(body := compat.as_open(eqn.params["jaxpr"])):
                if _is_backward(eqn):
                    calls |= self._loop(program, eqn, layout, runs)
                    continue
                arguments = {*body.invars, *body.constvars}
                iteration = self.timeline(body, arguments, range(layout.num_carry), runs * layout.length)
                rows = body.invars[layout.num_consts + layout.num_carry :]
                nbytes = compat.nbytes_of(rows)
                loops[i] = Loop(layout.length, iteration, nbytes, _carry(eqn))
        outs = frozenset(program.results)
        reused = {v for k in in_place if isinstance(v := program.outs[k], Var)}
        return Timeline(program.eqns, inputs, outs, calls, in_place=frozenset(reused), loops=loops)

    def _add(self, iteration: LayerPasses, runs: int, number: int | None, *like: Any) -> int:
        key = *like, iteration.iterations, runs, number is None
        self.found[len(self.found)] = _Found(iteration, runs, number, key)
        return len(self.found) - 1

    def _layer(self, program: _Flat, eqn: JaxprEqn, inputs: set[Var], runs: int) -> Call:
        """A layer that is in no loop."""
        renamed: Renamed = {}
        eqns = tuple(inlined([eqn], renamed))
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        cotangents = tuple(v for v in operands if _is_backward(program.maker(v)))
        kept = tuple(v for v in operands if v not in cotangents and not program.is_view(v, inputs))
        results = (now(renamed, v) for v in eqn.outvars)
        iteration = LayerPasses(
            iterations=1,
            eqns=eqns,
            carried=kept,
            cotangents=cotangents,
            results=frozenset(),
            gradients=frozenset(v for v in results if isinstance(v, Var)),
            source=compat.source_line(eqn),
        )
        roles = tuple((v in cotangents, v in kept) for v in eqn.invars)
        part = self._add(iteration, runs, find_layer_number(eqn), str(eqn.params["jaxpr"]), roles)
        return Call(part, True, frozenset(kept), frozenset(cotangents))

    def _loop(self, program: _Flat, eqn: JaxprEqn, layout: ScanLayout, runs: int) -> dict[int, Call]:
        """A loop over layers: the one back, and the one forward whose stacks it reads."""
        back = _Flat.of(compat.as_open(eqn.params["jaxpr"]))
        first = layout.num_consts + layout.num_carry
        stacks: set[int] = set()
        cotangents, forward = {*range(layout.num_consts, first)}, None
        for k, v in enumerate(eqn.invars[first:], first):
            maker = program.maker(v)
            if _is_backward(maker):
                cotangents.add(k)
            elif maker is not None and _is_stack(maker, v) and program.reads[v] == 1:
                stacks.add(k)
                forward = maker
        iteration = LayerPasses(
            iterations=layout.length,
            eqns=tuple(back.eqns),
            carried=tuple(back.inputs[k] for k in sorted(stacks)),
            cotangents=tuple(back.inputs[k] for k in sorted(cotangents)),
            results=frozenset(),
            gradients=frozenset(back.results),
            source=compat.source_line(eqn),
            rows=tuple(v for k, v in enumerate(back.inputs) if k >= first and k not in stacks | cotangents),
            in_order=is_layer_loop(eqn),
        )
        like = [str(eqn.params["jaxpr"]), tuple(stacks), tuple(cotangents)]
        kept = frozenset(eqn.invars[k] for k in stacks)
        if forward is not None:
            iteration = dataclasses.replace(iteration, forward=_forward(forward, kept))
            like.append(str(forward.params["jaxpr"]))
        part = self._add(iteration, runs, None, *like)
        calls = {program.number[id(eqn)]: Call(part, True, kept, _carry(eqn))}
        if forward is not None:
            calls[program.number[id(forward)]] = Call(part, False, handed_on=_carry(forward))
        return calls


def _forward(eqn: JaxprEqn, kept: frozenset[Any]) -> LayerPasses:
    """An iteration of a loop forward, but for what it keeps."""
    program, layout = _Flat.of(compat.as_open(eqn.params["jaxpr"])), compat.scan_in(eqn)
    assert layout is not None
    pairs = zip(program.outs, eqn.outvars, strict=True)
    results = {v for v, out in pairs if isinstance(v, Var) and out not in kept}
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
class _Flat:
    """A program with its calls inlined, but for backward passes of layers at its top.

    Attributes:
      inputs, eqns, outs: as of a jaxpr.
    """

    inputs: list[Var]
    eqns: list[JaxprEqn]
    outs: list[Any]

    @staticmethod
    def of(jaxpr: Jaxpr, *, checkpoints: bool = True) -> _Flat:
        renamed: Renamed = {}
        eqns = list(inlined(jaxpr.eqns, renamed, checkpoints=checkpoints))
        return _Flat(list(jaxpr.invars), eqns, [now(renamed, v) for v in jaxpr.outvars])

    @property
    def results(self) -> list[Var]:
        """The results that are not constants."""
        return [v for v in self.outs if isinstance(v, Var)]

    @functools.cached_property
    def number(self) -> dict[int, int]:
        """The place of an equation, by its id."""
        return {id(eqn): i for i, eqn in enumerate(self.eqns)}

    @functools.cached_property
    def reads(self) -> collections.Counter[Any]:
        """How often each value is read, as a result, too."""
        return count_reads(self.eqns, self.outs)

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return map_makers(self.eqns)

    def maker(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes a value, or None for an input or a constant."""
        return self._makers.get(atom) if isinstance(atom, Var) else None

    def is_view(self, v: Var, inputs: set[Var]) -> bool:
        """Whether a value is an input, or a view of one, such as a layer's weights."""
        while (eqn := self.maker(v)) is not None and eqn.primitive.name in VIEWS and variables(eqn):
            v = variables(eqn)[0]
        return v in inputs


def _carry(eqn: JaxprEqn) -> frozenset[Any]:
    """The operands of a loop that go from iteration to iteration."""
    layout = compat.scan_in(eqn)
    assert layout is not None
    operands = eqn.invars[layout.num_consts : layout.num_consts + layout.num_carry]
    return frozenset(v for v in operands if isinstance(v, Var))


def _is_backward(eqn: JaxprEqn | None) -> bool:
    """Whether an equation belongs to the pass back of what the step differentiates."""
    return eqn is not None and is_transposed(eqn)


def _is_stack(eqn: JaxprEqn, v: Any) -> bool:
    """Whether a value is what a loop has stacked."""
    layout = compat.scan_in(eqn)
    return layout is not None and v in eqn.outvars[layout.num_carry :]


def _unwrapped(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """The program in a step's `jax.jit`, and which of its arguments are donated."""
    donated = [False] * len(jaxpr.invars)
    while len(jaxpr.eqns) == 1 and (inner := compat.jit_in(jaxpr.eqns[0])) is not None:
        (eqn,) = jaxpr.eqns
        is_all = {*eqn.outvars} >= {*jaxpr.outvars} and all(isinstance(v, Var) for v in eqn.invars)
        if not is_all or inner.consts:
            break
        results: dict[Any, Any] = dict(zip(eqn.outvars, inner.jaxpr.outvars, strict=True))
        given = {v for v, outer in zip(jaxpr.invars, donated, strict=True) if outer}
        pairs = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        donated = [here or v in given for v, here in pairs if isinstance(v, Var)]
        jaxpr = inner.jaxpr.replace(outvars=[results[v] for v in jaxpr.outvars])
    return jaxpr, donated


def _in_place(jaxpr: Jaxpr, donated: Sequence[bool]) -> list[int]:
    """The results that take the memory of a donated argument of their shape."""
    free = collections.Counter(_like(v) for v, given in zip(jaxpr.invars, donated, strict=True) if given)
    found = []
    for k, v in enumerate(jaxpr.outvars):
        if isinstance(v, Var) and free[_like(v)] > 0:
            free[_like(v)] -= 1
            found.append(k)
    return found


def _like(v: Any) -> Any:
    return v.aval.shape, v.aval.dtype


def _refuse_what_keeps(jaxpr: Jaxpr) -> None:
    """Raises where the backward pass of a layer does not begin with all of the layer."""
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
            _refuse_what_keeps(inner)


def _keeps_nothing(policy: Any) -> bool:
    if isinstance(policy, Policy):
        return policy.unmarked == "recompute" and not (policy.save or policy.offload)
    return policy is None or policy is jax.checkpoint_policies.nothing_saveable
