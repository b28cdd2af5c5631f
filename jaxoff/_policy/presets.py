"""The registry of presets, and `policy`, which makes a Policy from a preset, lists, or both."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxoff._policy.policy import Policy
from jaxoff._report.near_miss import near_miss

DEFAULT_MIN_BYTES = 512 * 1024

# Megatron-Core's module names (`--offload-modules`, `--recompute-modules`) and the names that cover the
# activations that those modules save.
MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attn_norm": ("attn.norm_in",),
        "qkv_linear": ("attn.qkv_in", "attn.qkv"),
        "core_attn": ("attn.core",),
        "attn_proj": ("attn.proj_in",),
        "mlp_norm": ("mlp.norm_in",),
        "router": ("moe.router_logits",),
        "expert_fc1": ("moe.dispatched",),
        "moe_act": ("moe.act",),
        "shared_experts": ("moe.shared_fc1_in", "moe.shared_act"),
    }
)


def te_v1() -> Policy:
    """Opt in: what `mark_offload` marks goes to the host; the rest stays, as autograd saves it."""
    return Policy(unmarked="save", preset="te_v1")


def te_v2() -> Policy:
    """Opt out.

    Every anchor of at least 512 KiB goes to the host unless `mark_not_offload` keeps it; cheap values are
    recomputed.
    """
    return Policy(unmarked="offload", min_bytes=DEFAULT_MIN_BYTES, preset="te_v2")


def megatron(modules: Iterable[str]) -> Policy:
    """Offloads what Megatron-Core's fine-grained offloading moves for these module names; the rest is saved.

    Args:
      modules: names out of `MEGATRON_MODULES`, e.g. ["core_attn", "expert_fc1"].

    References:
      Megatron-Core, fine-grained activation offloading, `--fine-grained-activation-offloading
      --offload-modules`.
    """
    modules = (modules,) if isinstance(modules, str) else tuple(modules)
    if not modules:
        raise ValueError(f"megatron needs at least one module of {', '.join(MEGATRON_MODULES)}, got none.")
    for module in modules:
        if module not in MEGATRON_MODULES:
            raise ValueError(
                f"A Megatron module is one of {', '.join(MEGATRON_MODULES)}, got "
                f"{module!r}.{near_miss(module, MEGATRON_MODULES)}"
            )
    return Policy(
        offload=tuple(n for m in modules for n in MEGATRON_MODULES[m]), unmarked="save", preset="megatron"
    )


def save_all() -> Policy:
    """Saves on the device what autograd saves, except views and what is marked."""
    return Policy(unmarked="save", preset="save_all")


def recompute_all() -> Policy:
    """Recomputes everything from the inputs; only marks are honoured."""
    return Policy(unmarked="recompute", preset="recompute_all")


def dots() -> Policy:
    """Saves the outputs of dots and convolutions on the device; recomputes the rest."""
    return Policy(unmarked="dots", preset="dots")


def plan() -> Policy:
    """What `jaxoff.plan` found, given as lists; the rest is recomputed. "auto" keeps nothing first."""
    return Policy(preset="plan")


_PRESETS: dict[str, Callable[..., Policy]] = {}


def register(name: str, factory: Callable[..., Policy]) -> None:
    """Adds a preset to the registry, for `jaxoff.policy(name, **options)`.

    Args:
      name: how the preset is called.
      factory: a function of keyword options that returns a `Policy`.

    Raises:
      TypeError: if `name` is not a string or `factory` cannot be called.
      ValueError: if `name` is empty or taken.

    Example:
      >>> import jaxoff
      >>> jaxoff.register("experts", lambda: jaxoff.policy(offload=["moe.*"], save=["attn.core"]))
      >>> jaxoff.policy("experts")
      jaxoff.policy('experts', offload=['moe.*'], save=['attn.core'])
    """
    if not isinstance(name, str) or not callable(factory):
        raise TypeError(
            f"register takes a name and a function that returns a jaxoff.Policy, got {name!r} and "
            f"{factory!r}."
        )
    if not name:
        raise ValueError("A preset's name must not be empty.")
    if name in _PRESETS:
        raise ValueError(
            f"A preset's name must be new, got {name!r}, which is taken. Registered: {', '.join(_PRESETS)}."
        )
    _PRESETS[name] = factory


def policies() -> Mapping[str, Callable[..., Policy]]:
    """The registered presets: a read-only mapping from name to factory."""
    return types.MappingProxyType(dict(_PRESETS))


for _factory in (te_v1, te_v2, megatron, save_all, recompute_all, dots, plan):
    register(_factory.__name__, _factory)


def policy(
    preset: str | None = None,
    *,
    offload: str | Iterable[str] = (),
    save: str | Iterable[str] = (),
    recompute: str | Iterable[str] = (),
    unmarked: str | None = None,
    min_bytes: int | None = None,
    memory_kind: str | None = None,
    **options: Any,
) -> Policy:
    """Makes a policy for `jax.checkpoint`, from lists of names, a preset, or a preset and lists that
    change it.

    Precedence, for each value: `mark_not_offload` > `recompute`, `save`, `offload` lists in that order >
      `mark_offload` > `unmarked`.

    Args:
      preset: a name out of `jaxoff.policies()`, or None.
      offload: names or globs (`fnmatch`) of values to keep in pinned host memory.
      save: names or globs of values to keep on the device.
      recompute: names or globs of values to compute again in the backward pass. A name listed here or in
        another list leaves the preset's.
      unmarked: "recompute" (the default without a preset), "save", "dots", "offload_dots" or "offload";
        see `Policy`.
      min_bytes: smaller values that a list or `unmarked` would move stay on the device. Bytes of one
        layer's value. Default 0.
      memory_kind: "pinned_host" (the default), or "device" for a policy that keeps on the device what it
        would move.
      **options: what the preset takes, e.g. `modules=` of "megatron".

    Returns:
      A frozen, hashable `Policy`.

    Raises:
      ValueError: for an unknown preset, module, `unmarked` or `memory_kind`, a name in two lists, or a
        negative `min_bytes`.
      TypeError: for options that the preset does not take, or lists of something other than names.

    Example:
      >>> import jaxoff
      >>> jaxoff.policy(offload=["moe.*"], save=["attn.core"])
      jaxoff.policy(offload=['moe.*'], save=['attn.core'])
      >>> jaxoff.policy("megatron", modules=["core_attn"])
      jaxoff.policy('megatron', offload=['attn.core'], unmarked='save')
    """
    base = Policy() if preset is None else _make(preset, options)
    if preset is None and options:
        raise TypeError(
            f"jaxoff.policy takes no {', '.join(map(repr, options))} without a "
            f"preset.{near_miss(next(iter(options)), _FIELDS)}"
        )
    lists = Policy(offload=offload, save=save, recompute=recompute)  # type: ignore[arg-type]
    taken = {*lists.offload, *lists.save, *lists.recompute}
    merged = {
        f: (*(p for p in getattr(base, f) if p not in taken), *getattr(lists, f))
        for f in ("offload", "save", "recompute")
    }
    given = {"unmarked": unmarked, "min_bytes": min_bytes, "memory_kind": memory_kind}
    return dataclasses.replace(base, **merged, **{k: v for k, v in given.items() if v is not None})


_FIELDS = ("offload", "save", "recompute", "unmarked", "min_bytes", "memory_kind")


def _make(preset: str, options: dict[str, Any]) -> Policy:
    if preset not in _PRESETS:
        raise ValueError(
            f"A preset is one of {', '.join(_PRESETS)}, got {preset!r}.{near_miss(preset, _PRESETS)} "
            "jaxoff.register adds more."
        )
    factory = _PRESETS[preset]
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise TypeError(
            f"The preset {preset!r} takes {inspect.signature(factory)}, got {options!r}: {error}."
        ) from None
    made = factory(**options)
    if not isinstance(made, Policy):
        raise TypeError(f"A preset's factory returns a jaxoff.Policy, got {made!r} from {preset!r}.")
    return dataclasses.replace(made, preset=preset)
