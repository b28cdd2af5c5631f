"""The registry of presets, and `policy`: a `Policy` from a preset, lists, or both."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxoff._policy.policy import LISTS, Policy
from jaxoff._report.near_miss import near_miss

DEFAULT_MIN_BYTES = 512 * 1024
"""Bytes. The least offload of the preset "te_v2", and the least un-named residual worth a finding."""

# Megatron-Core's module (`--offload-modules`, `--recompute-modules`) -> names of the activations it saves.
MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attn_norm": ("attn.norm_in",),
        "qkv_linear": ("attn.qkv_in", "attn.qkv"),
        "core_attn": ("attn.core",),
        "attn_proj": ("attn.proj_in",),
        "mlp_norm": ("mlp.norm_in",),
        "router": ("moe.router_logits",),
        "expert_fc1": ("moe.[di]*",),  # moe.dispatched, or moe.in: rows, or tokens that a kernel gathers
        "moe_act": ("moe.act",),
        "shared_experts": ("moe.shared_fc1_in", "moe.shared_act"),
    }
)


def te_v1() -> Policy:
    """Opt in: values under `mark_offload` are offloaded; other residuals of autograd are saved.

    References:
      TransformerEngine, cpu_offload v1.
    """
    return Policy(unmarked="save", preset="te_v1")


def te_v2() -> Policy:
    """Opt out: anchors of at least 512 KiB are offloaded, except under `mark_not_offload`.

    Cheap values are recomputed. `Policy.unmarked` says which values are anchors.

    References:
      TransformerEngine, cpu_offload v2.
    """
    return Policy(unmarked="offload", min_bytes=DEFAULT_MIN_BYTES, preset="te_v2")


def megatron(modules: Iterable[str]) -> Policy:
    """Offloads the activations of Megatron-Core's modules; other residuals of autograd are saved.

    Args:
      modules: names of modules, e.g. ["core_attn", "expert_fc1"], out of attn_norm, qkv_linear, core_attn,
        attn_proj, mlp_norm, router, expert_fc1, moe_act and shared_experts.

    Raises:
      ValueError: for an unknown module, or none.

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
    """Saves the residuals of autograd on the device, except views. Marks are honoured."""
    return Policy(unmarked="save", preset="save_all")


def recompute_all() -> Policy:
    """Recomputes every value from the inputs of the checkpoint. Marks are honoured."""
    return Policy(unmarked="recompute", preset="recompute_all")


def dots() -> Policy:
    """Saves the outputs of dots and convolutions on the device; recomputes the rest."""
    return Policy(unmarked="dots", preset="dots")


_PRESETS: dict[str, Callable[..., Policy]] = {}


def register(name: str, factory: Callable[..., Policy]) -> None:
    """Adds a preset to the registry, for `jaxoff.policy(name, **options)`.

    Args:
      name: the name of the preset.
      factory: a function from keyword options to a `Policy`.

    Raises:
      TypeError: if `name` is not a string or `factory` is not callable.
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
    """Returns the registered presets.

    Returns:
      A read-only mapping: name -> factory.

    Example:
      >>> import jaxoff
      >>> "te_v2" in jaxoff.policies()
      True
    """
    return types.MappingProxyType(dict(_PRESETS))


for _factory in (te_v1, te_v2, megatron, save_all, recompute_all, dots):
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
    store: Mapping[str, Any] | None = None,
    **options: Any,
) -> Policy:
    """Makes a policy for `jax.checkpoint`: from lists of names, a preset, or a preset changed by lists.

    Precedence, for each value: `mark_not_offload` > `recompute`, `save`, `offload` lists in that order >
      `mark_offload` > `unmarked`.

    Args:
      preset: a name out of `jaxoff.policies()`, or None.
      offload: names or globs (`fnmatch`) of values to keep in pinned host memory.
      save: names or globs of values to keep on the device.
      recompute: names or globs of values to recompute in the backward pass. A name in any of the three lists
        is taken out of the preset's lists.
      unmarked: "recompute" (the default without a preset), "save", "dots", "offload_dots" or "offload";
        see `Policy`.
      min_bytes: the least bytes of an offload by a list or `unmarked`, counted for one layer. Smaller values
        stay on the device. Default 0.
      memory_kind: "pinned_host" (the default), or "device" for the saved twin: saves in place of offloads.
      store: name or glob -> "float8_e4m3fn": `jaxoff.jit` stores kept values with such a name in float8, with
        a float32 scale for each block of 128 along the last axis: 0.516 of the bytes of bfloat16, on the
        device, on the link and on the host. The forward pass reads the exact values; the backward pass reads
        the rounded ones, which changes gradients. `jaxoff.measure` says each name's error.
      **options: the options of the preset, e.g. `modules=` of "megatron".

    Returns:
      A frozen, hashable `Policy`.

    Raises:
      ValueError: for an unknown preset, module, `unmarked` or `memory_kind`, a name in two lists, a
        negative `min_bytes`, or another dtype in `store`.
      TypeError: for options unknown to the preset, or entries of lists other than strings.

    Example:
      >>> import jaxoff
      >>> jaxoff.policy(offload=["moe.*"], save=["attn.core"])
      jaxoff.policy(offload=['moe.*'], save=['attn.core'])
      >>> jaxoff.policy("megatron", modules=["core_attn"])
      jaxoff.policy('megatron', offload=['attn.core'], unmarked='save')
    """
    base = Policy() if preset is None else _call_factory(preset, options)
    if preset is None and options:
        raise TypeError(
            f"jaxoff.policy takes no {', '.join(map(repr, options))} without a "
            f"preset.{near_miss(next(iter(options)), _FIELDS)}"
        )
    lists = Policy(offload=offload, save=save, recompute=recompute)  # type: ignore[arg-type]
    taken = {*lists.offload, *lists.save, *lists.recompute}
    merged = {f: (*(p for p in getattr(base, f) if p not in taken), *getattr(lists, f)) for f in LISTS}
    given = {"unmarked": unmarked, "min_bytes": min_bytes, "memory_kind": memory_kind, "store": store}
    return dataclasses.replace(base, **merged, **{k: v for k, v in given.items() if v is not None})


_FIELDS = (*LISTS, "unmarked", "min_bytes", "memory_kind", "store")


def _call_factory(preset: str, options: dict[str, Any]) -> Policy:
    if not isinstance(preset, str):
        raise TypeError(
            f"The first argument of jaxoff.policy is a preset's name, one of {', '.join(_PRESETS)}; got "
            f"{preset!r}. Lists of names have keywords: jaxoff.policy(offload=[...], save=[...])."
        )
    if preset not in _PRESETS:
        raise ValueError(
            f"A preset is one of {', '.join(_PRESETS)}, got {preset!r}.{near_miss(preset, _PRESETS)} "
            "jaxoff.register adds more."
        )
    factory = _PRESETS[preset]
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = " and ".join(signature.parameters) or "no option"
        got = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
        raise TypeError(f"The preset {preset!r} takes {takes}, got {got}: {error}.") from None
    made = factory(**options)
    if not isinstance(made, Policy):
        raise TypeError(f"A preset's factory returns a jaxoff.Policy, got {made!r} from {preset!r}.")
    return dataclasses.replace(made, preset=preset)
