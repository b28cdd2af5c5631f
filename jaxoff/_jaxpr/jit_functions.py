"""What a function of `jax.jit` was given."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding


def jit_keywords(fun: Any) -> dict[str, Any]:
    """The static and donated arguments of a function of `jax.jit`, as its keywords; {} of others."""
    info = getattr(fun, "_jit_info", None)
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return {} if info is None else {name: getattr(info, name) for name in names}


def compiler_options_of(fun: Any) -> dict[str, Any]:
    """The options given to `jax.jit`, or chosen by `jaxoff.jit` for its latest program; {} of others."""
    info = getattr(fun, "_jit_info", None)
    return dict(getattr(fun, "options", {}) if info is None else info.compiler_options_kvs)


def statics_of(fun: Any) -> dict[str, Any]:
    """`static_argnums` and `static_argnames` of a function of `jax.jit` or `jaxoff.jit`; {} of others."""
    return {k: v for k, v in jit_keywords(getattr(fun, "_inner", fun)).items() if k.startswith("static")}


def add_shardings(fun: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, of which structs without a sharding get that of `in_shardings`.

    Args:
      fun: a function; of `jax.jit`, its shardings may be those of the devices.
      args: positional arguments, pytrees of arrays or structs.

    Returns:
      The arguments, as they are where `fun` has static arguments or no `in_shardings`.
    """
    info = getattr(getattr(fun, "_inner", fun), "_jit_info", None)
    if info is None or not info.user_specified_in_shardings or any(statics_of(fun).values()):
        return args
    given = jax.tree.unflatten(info.in_shardings_treedef, info.in_shardings_leaves)
    shardings = jax.tree.broadcast(given, args, is_leaf=lambda s: s is None)

    def add(sharding: Any, leaf: Any) -> Any:
        is_bare = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
        return leaf.update(sharding=sharding) if is_bare and isinstance(sharding, NamedSharding) else leaf

    return jax.tree.map(add, shardings, args, is_leaf=lambda s: s is None)
