"""Programs rewritten so that the copies of their residuals overlap with compute."""

from __future__ import annotations

import dataclasses

from jaxoff import _compat
from jaxoff._compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jaxoff._cost import Device
from jaxoff._inline import Renamed, inlined, now
from jaxoff._order import LARGE_NBYTES, Straight, dependents, ordered
from jaxoff._scan import PLAIN_SCOPE


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program whose copies overlap.

    Attributes:
      jaxpr: the program.
      scanned: how many loops in it move residuals.
      flat: whether it moves residuals outside of loops.
    """

    jaxpr: ClosedJaxpr
    scanned: int
    flat: bool


def rewrite(closed: ClosedJaxpr, device: Device, large_nbytes: int = LARGE_NBYTES) -> Rewritten:
    """Orders the bodies of all scans that move residuals, and what moves residuals outside of them.

    Args:
      closed: a program that nothing differentiates any more.
      device: speeds of what it will run on.
      large_nbytes: from how many bytes on a value has a place in the order.

    Returns:
      A program of the same arguments, results and effects.
    """
    rewriter = _Rewriter(device, large_nbytes)
    jaxpr = _compat.with_equations(closed.jaxpr, rewriter.loop)
    flat = "H2D" in _transfers(jaxpr)
    if flat and not jaxpr.effects:
        jaxpr = rewriter.flat(jaxpr)
    return Rewritten(closed.replace(jaxpr=jaxpr), rewriter.scanned, flat)


class _Rewriter:
    def __init__(self, device: Device, large_nbytes: int):
        self._device, self._large_nbytes = device, large_nbytes
        self.scanned = 0

    def loop(self, eqn: JaxprEqn) -> JaxprEqn:
        """Orders the body of a scan that moves residuals; other equations stay as they are."""
        layout = _compat.scan_in(eqn)
        if layout is None or PLAIN_SCOPE in str(eqn.source_info.name_stack):
            return eqn
        body = eqn.params["jaxpr"].jaxpr
        moved = _transfers(body)
        if not moved:
            return eqn
        self.scanned += "H2D" in moved
        if body.effects:
            return eqn
        carry = body.invars[layout.num_consts : layout.num_consts + layout.num_carry]
        renamed: Renamed = {}
        eqns = list(inlined(body.eqns, renamed))
        ordered_body = self._ordered(body, eqns, renamed, dependents(eqns, set(carry)), holds_copies=False)
        closed = eqn.params["jaxpr"].replace(jaxpr=ordered_body)
        return eqn.replace(params={**eqn.params, "jaxpr": closed})

    def flat(self, jaxpr: Jaxpr) -> Jaxpr:
        """Orders a program whose layers are not in a loop.

        Its backward pass begins where the first differentiated `jax.checkpoint` stands. From there on, what
        does not depend on that checkpoint's newest operand, the cotangent, is computed again.
        """
        renamed: Renamed = {}
        outer = list(inlined(jaxpr.eqns, renamed, checkpoints=False))
        backward = next((i for i, eqn in enumerate(outer) if _compat.is_backward(eqn)), len(outer))
        made = {v: i for i, eqn in enumerate(outer) for v in eqn.outvars}
        head = list(inlined(outer[:backward], renamed))
        newest: set[Var] = set()
        if backward < len(outer):
            operands = [v for v in outer[backward].invars if isinstance(v, Var)]
            newest = {now(renamed, max(operands, key=lambda v: made.get(v, -1)))}
        tail = list(inlined(outer[backward:], renamed))
        in_order = [True] * len(head) + dependents(tail, newest)
        return self._ordered(jaxpr, head + tail, renamed, in_order, holds_copies=True)

    def _ordered(self, jaxpr, eqns, renamed, in_order, *, holds_copies) -> Jaxpr:
        outs = [now(renamed, v) for v in jaxpr.outvars]
        results = frozenset(v for v in outs if isinstance(v, Var))
        program = Straight(tuple(eqns), results, tuple(in_order), holds_copies)
        return jaxpr.replace(eqns=ordered(program, self._device, self._large_nbytes), outvars=outs)


def _transfers(jaxpr: Jaxpr) -> set[str]:
    """The ways, "D2H" and "H2D", in which a program copies, in what it calls too but not in its loops."""
    found = set()
    for eqn in jaxpr.eqns:
        if kind := _compat.transfer_in(eqn):
            found.add(kind)
        elif call := _compat.inlinable_call(eqn):
            found |= _transfers(call.jaxpr)
    return found
