"""The words for a value of a layer in tables and in the patterns of callers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers, variables
from jaxoff._jaxpr.inline import inline_program
from jaxoff._jaxpr.primitives import CONSTRAINTS
from jaxoff._jaxpr.tag import Tag

# Words of JAX's transformations in scopes.
_TRANSFORMS = re.compile(r"\b(jvp|transpose|vmap|checkpoint|rematted_computation|closed_call|while|body)\b")


def format_type(aval: Any, dtype: Any = None) -> str:
    """The dtype and shape of a value, e.g. "bfloat16[4, 128]", with its own dtype or the given dtype."""
    return f"{dtype or compat.struct_of(aval).dtype}{list(compat.shape_of(aval))}"


def find_name(graph: JointGraph, v: Var) -> str | None:
    """The name of a value in the model, if it has one."""
    name = graph.names.get(v)
    return (Tag.of(name).label or None) if name else None


def label(graph: JointGraph, v: Var, makers: Mapping[Var, JaxprEqn], inside: Mapping[Var, JaxprEqn]) -> str:
    """The name of a value, else its path and operation; "carry" for an input of the layer.

    Args:
      graph, v: the layer and the value.
      makers: value -> the equation that makes the value.
      inside: result of a loop or a condition -> the equation inside, whose operation is shown, too.
    """
    origin = find_origin(v, makers)
    if (name := find_name(graph, v) or find_name(graph, origin)) or origin not in makers:
        return name or "carry"
    inner = inside.get(origin)
    return _describe(makers[origin]) + (f"/{inner.primitive.name}" if inner else "")


def find_origin(v: Var, makers: Mapping[Var, JaxprEqn]) -> Var:
    """A value before the constraints of its sharding and layout."""
    while (maker := makers.get(v)) is not None and maker.primitive.name in CONSTRAINTS:
        (v,) = variables(maker)
    return v


def map_makers_inside(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Results of loops and conditions -> the equations inside that make them.

    Of a condition's branches, the first that makes the result of other values: some fill it with zeros.
    """
    found: dict[Var, JaxprEqn] = {}
    for eqn in eqns:
        if compat.control_flow(eqn) is None:
            continue
        for program in map(inline_program, compat.sub_jaxprs(eqn)):
            if len(program.outvars) != len(eqn.outvars):  # the condition of a `while`
                continue
            makers = map_makers(program.eqns) | map_makers_inside(program.eqns)
            for v, result in zip(eqn.outvars, program.outvars, strict=True):
                maker = makers.get(result) if isinstance(result, Var) else None
                if maker is not None and maker.primitive.name != "broadcast_in_dim":
                    found.setdefault(v, maker)
    return found


def _describe(eqn: JaxprEqn) -> str:
    """A value without a name: its path in the user's scopes, and its operation."""
    scopes = _TRANSFORMS.sub("", str(eqn.source_info.name_stack)).replace("(", "").replace(")", "")
    path = "/".join(part for part in scopes.split("/") if part)
    return f"{path}:{eqn.primitive.name}" if path else eqn.primitive.name
