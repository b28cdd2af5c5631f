"""Lowered programs: the memories of arguments and results, and callbacks for GPUs that are not there."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
from jax._src import effects as _effects
from jax._src.interpreters import mlir as _mlir
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


class _Uncalled(list[Any]):
    """Callbacks which a program numbers and no client gets: a program for an absent GPU never runs."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@functools.cache
def lower_callbacks_for_absent_gpus() -> None:
    """Lets JAX lower callbacks, such as `jax.debug.print`, for GPUs that are not there, from now on.

    JAX asks for the GPU's client before it lowers a callback, makes no use of the client, and raises without.
    """
    context: Any = _mlir.ModuleContext
    find_client = context.get_backend

    @functools.wraps(find_client)
    def get_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find_client(self, *args, **kwargs)
        except RuntimeError:  # no such platform in this process
            self.host_callbacks = _Uncalled()
            return None

    context.get_backend = get_backend
