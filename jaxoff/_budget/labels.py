"""The words for a value of a layer in tables and in the patterns of callers."""

from __future__ import annotations

import re
from typing import Any

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
from jaxoff._jaxpr.dataflow import map_makers
from jaxoff._jaxpr.inline import inline_program
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


def label(graph: JointGraph, v: Var, maker: JaxprEqn | None) -> str:
    """The name of a value, else its path and operation; "carry" for an input of the layer.

    A result of a loop or a condition has the operation in it, too: "scan/dot_general".
    """
    if maker is None:
        return find_name(graph, v) or "carry"
    inner = find_maker_inside(maker, v)
    return find_name(graph, v) or _describe(maker) + (f"/{inner.primitive.name}" if inner else "")


def find_maker_inside(eqn: JaxprEqn, v: Var) -> JaxprEqn | None:
    """The equation in a loop or a condition that makes a result of it; None for other equations.

    Of a condition's branches, one that makes the result of other values: the others fill it with zeros.
    """
    if compat.control_flow(eqn) is None:
        return None
    place, found = eqn.outvars.index(v), list[JaxprEqn]()
    for program in map(inline_program, compat.sub_jaxprs(eqn)):
        result = program.outvars[place] if len(program.outvars) == len(eqn.outvars) else None
        maker = map_makers(program.eqns).get(result) if isinstance(result, Var) else None
        if maker is not None and isinstance(result, Var):
            found.append(find_maker_inside(maker, result) or maker)
    return min(found, key=lambda maker: maker.primitive.name == "broadcast_in_dim", default=None)


def _describe(eqn: JaxprEqn) -> str:
    """A value without a name: its path in the user's scopes, and its operation."""
    scopes = _TRANSFORMS.sub("", str(eqn.source_info.name_stack)).replace("(", "").replace(")", "")
    path = "/".join(part for part in scopes.split("/") if part)
    return f"{path}:{eqn.primitive.name}" if path else eqn.primitive.name
