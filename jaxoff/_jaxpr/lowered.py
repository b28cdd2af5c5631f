"""Lowered programs: the memories of their arguments and results."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from jax._src import effects as _effects
from jax.extend.mlir import ir

# The memory kind of pinned host memory, and the attribute with an argument's kind.
HOST = "pinned_host"
_KIND = "mhlo.memory_kind"


def has_ordered_effects(closed: Any) -> bool:
    """Whether a program has effects in order, such as `io_callback(..., ordered=True)`.

    JAX does not lower a program with both ordered effects and copies to another memory.
    """
    return bool(_effects.ordered_effects.filter_in(closed.effects))


def mark_host_memory(
    lowered: jax.stages.Lowered, arguments: Collection[int], count: int, results: Collection[int]
) -> None:
    """Marks arguments and results in host memory in a lowered program.

    JAX does so for arrays of a device that is there; the shardings of a described device have no memory kind.

    Args:
      lowered: a program that keeps its unused arguments.
      arguments: positions of arguments in host memory.
      count: the number of arguments; the program may have constants before them.
      results: positions of results in host memory.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        constants = len(main.attributes["arg_attrs"]) - count
        for name, places, shift in (("arg_attrs", arguments, constants), ("res_attrs", results, 0)):
            marked = []
            for i, given in enumerate(main.attributes[name]):
                kind = ir.StringAttr.get(HOST if i - shift in places else "device")
                attributes: Any = {item.name: item.attr for item in given} | {_KIND: kind}
                marked.append(ir.DictAttr.get(attributes))
            main.attributes[name] = ir.ArrayAttr.get(marked)
