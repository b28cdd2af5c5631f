"""A `jax.shard_map` that is differentiated from outside, with its forward and backward pass in one.

`jax.grad` of a loss in a `jax.shard_map` traces two: the results of the first are the residuals that the
second reads. In one, the residuals are values inside, whose layers a budget can place and an order can hide.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.inline import instantiate, trace_call, write_otherwise
from jaxoff._jaxpr.primitives import is_shard_map

# Primitives of scalars: equal on all devices where their operands are.
_OF_SCALARS = frozenset(
    {"add", "convert_element_type", "div", "exp", "integer_pow", "log", "max", "min", "mul", "neg", "pow",
     "rsqrt", "select_n", "sqrt", "square", "sub"}
)  # fmt: skip


class _Inside(NamedTuple):
    """A value inside of a `jax.shard_map`, and how its devices divide the array outside."""

    value: Any
    spec: P

    def differs(self) -> bool:
        """Whether the devices have different parts."""
        return any(axes is not None for axes in self.spec)


def merge_shard_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program in which a `jax.shard_map` that reads results of another is one with it.

    Both divide these results in the same way, over the same mesh. Scalars computed in between from results
    that are equal on all devices, such as a number of tokens, are computed inside. What else lies in between
    stays between two.

    Returns:
      The program; the given one where nothing is merged.
    """
    merges = False

    def merge(program: Jaxpr) -> Jaxpr:
        nonlocal merges
        if not any(map(_holds_shard_map, program.eqns)):
            return program
        level = write_otherwise(program, _write_call)
        eqns = (eqn if is_shard_map(eqn) else compat.map_programs(eqn, merge) for eqn in level.eqns)
        level = compat.replace_equations(level, eqns)
        merged = _merge_level(level)
        merges |= merged is not level
        return merged

    merged = compat.map_open(closed, merge)
    return merged if merges else closed


def _holds_shard_map(eqn: JaxprEqn) -> bool:
    return is_shard_map(eqn) or any(
        any(map(_holds_shard_map, program.eqns)) for program in compat.sub_jaxprs(eqn)
    )


def _write_call(eqn: JaxprEqn) -> JaxprEqn | tuple[list[JaxprEqn], list[Any]]:
    """The equations of a call that holds a `jax.shard_map`, and its results; other equations as they are."""
    call = compat.inlinable_call(eqn)
    if call is None or call.checkpoint or not any(map(_holds_shard_map, call.jaxpr.eqns)):
        return eqn
    program = write_otherwise(call.jaxpr, _write_call)
    return instantiate(program, eqn.invars, like=eqn)


def _merge_level(program: Jaxpr) -> Jaxpr:
    """A program with its own `jax.shard_map`s merged; the program itself where none is."""
    eqns, rest, merges = list[JaxprEqn](), list(program.eqns), False
    while rest:
        first = rest.pop(0)
        group = _Group(first) if is_shard_map(first) and not _has_effects(first) else None
        before, behind = group.take(rest) if group else ([], [])
        if group is None or not group.is_merged:
            eqns.append(first)
            continue
        read = {v for v in program.outvars if isinstance(v, Var)}.union(*map(variables, behind))
        eqns += [*before, group.emit(read)]
        rest, merges = behind, True
    return program.replace(eqns=eqns) if merges else program


def _has_effects(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects) or any(map(compat.has_side_effects, compat.sub_jaxprs(eqn)))


class _Group:
    """A `jax.shard_map` that takes over others that read its results.

    Attributes:
      is_merged: whether it took over any.
    """

    def __init__(self, first: JaxprEqn):
        self._first, self._eqns, self.is_merged = first, list[JaxprEqn](), False
        self._effects = first.params["jaxpr"].effects
        self._arguments: dict[Any, _Inside] = {}  # (operand, its division) -> the argument
        self._results: dict[Var, _Inside] = {}
        self._add(first)

    def take(self, eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Takes over what it can of the equations behind it.

        Returns:
          The equations that go before it, and those that stay behind it.
        """
        before, behind, late = list[JaxprEqn](), list[JaxprEqn](), set[Var]()
        for i, eqn in enumerate(eqns):
            if _has_effects(eqn):
                return before, [*behind, *eqns[i:]]
            reads = variables(eqn)
            if late.isdisjoint(reads) and self._results.keys().isdisjoint(reads):
                before.append(eqn)
            elif not late.isdisjoint(reads) or not self._takes_over(eqn):
                behind.append(eqn)
                late.update(eqn.outvars)
        return before, behind

    def emit(self, read: Container[Var]) -> JaxprEqn:
        """The `jax.shard_map`, with its results among the variables `read`."""
        arguments, body = self._arguments.values(), self._first.params["jaxpr"]
        outs = {v: inside for v, inside in self._results.items() if v in read}
        jaxpr = body.replace(
            invars=[argument.value for argument in arguments],
            eqns=self._eqns,
            outvars=[inside.value for inside in outs.values()],
            effects=self._effects,
            debug_info=body.debug_info.with_unknown_names(),
        )
        divisions = {
            "in_specs": tuple(argument.spec for argument in arguments),
            "out_specs": tuple(inside.spec for inside in outs.values()),
        }
        return self._first.replace(
            invars=[operand for operand, _ in self._arguments],
            outvars=[*outs],
            params=self._first.params | divisions | {"jaxpr": jaxpr},
        )

    def _takes_over(self, eqn: JaxprEqn) -> bool:
        """Takes over an equation that reads its results; returns whether it can."""
        if not is_shard_map(eqn):
            return self._compute_inside(eqn)
        alike = all(
            value == eqn.params.get(key)
            for key, value in self._first.params.items()
            if key not in ("in_specs", "out_specs", "jaxpr")
        )
        places = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        if not alike or any(
            isinstance(v, Var) and v in self._results and self._results[v].spec != spec for v, spec in places
        ):
            return False
        self._add(eqn)
        self.is_merged = True
        return True

    def _add(self, eqn: JaxprEqn) -> None:
        body = eqn.params["jaxpr"]
        places = zip(eqn.invars, eqn.params["in_specs"], body.invars, strict=True)
        made, values = instantiate(body, [self._find(v, spec, like.aval) for v, spec, like in places], eqn)
        self._eqns += made
        self._effects |= body.effects
        self._results |= {
            v: _Inside(value, spec)
            for v, value, spec in zip(eqn.outvars, values, eqn.params["out_specs"], strict=True)
        }

    def _find(self, operand: Any, spec: Any, aval: Any) -> Any:
        """The value inside of an operand: a result's, or the argument of the type `aval`."""
        if isinstance(operand, Var) and operand in self._results:
            return self._results[operand].value
        key = operand, spec
        if key not in self._arguments:
            self._arguments[key] = _Inside(Var(aval), spec)
        return self._arguments[key].value

    def _compute_inside(self, eqn: JaxprEqn) -> bool:
        """Computes scalars of scalars that are equal on all devices; returns whether an equation is such."""
        atoms = (*eqn.invars, *eqn.outvars)
        is_scalar = not any(compat.shape_of(v.aval) for v in atoms) and not compat.sub_jaxprs(eqn)
        read = [self._results[v] for v in variables(eqn) if v in self._results]
        if not (is_scalar and eqn.primitive.name in _OF_SCALARS) or any(map(_Inside.differs, read)):
            return False
        operands = [v if isinstance(v, Literal) else self._find(v, P(), v.aval) for v in eqn.invars]
        made, values = trace_call(
            lambda *xs: eqn.primitive.bind(*xs, **eqn.params), operands, like=self._eqns[0]
        )
        self._eqns += made
        self._results |= {v: _Inside(value, P()) for v, value in zip(eqn.outvars, values, strict=True)}
        return True
