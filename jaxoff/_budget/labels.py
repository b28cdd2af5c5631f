"""The words for a value of a layer in tables and in the patterns of callers."""

from __future__ import annotations

import re
from typing import Any

from jaxoff._budget.joint_graph import JointGraph
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn, Var
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
    """The name of a value, else its path and operation; "carry" for an input of the layer."""
    return find_name(graph, v) or ("carry" if maker is None else _describe(maker))


def _describe(eqn: JaxprEqn) -> str:
    """A value without a name: its path in the user's scopes, and its operation."""
    scopes = _TRANSFORMS.sub("", str(eqn.source_info.name_stack)).replace("(", "").replace(")", "")
    path = "/".join(part for part in scopes.split("/") if part)
    return f"{path}:{eqn.primitive.name}" if path else eqn.primitive.name
