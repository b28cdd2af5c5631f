"""Programs of `jax_remat3`, the coming rewrite of `jax.checkpoint`, in terms of the present one."""

from __future__ import annotations

import jax

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.compat import JaxprEqn


def is_enabled() -> bool:
    """Whether `jax_remat3` is on."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.checkpoint` under `jax_remat3`."""
    return eqn.primitive is not compat.remat_p and compat.checkpoint_in(eqn) is not None


def write_name(eqn: JaxprEqn) -> JaxprEqn:
    """The equation; a name that `jax_remat3` binds as one of `checkpoint_name` without it."""
    if compat.is_name(eqn.primitive) or (name := compat.name_in(eqn)) is None:
        return eqn
    return eqn.replace(primitive=compat.name_p, params={"name": name})
