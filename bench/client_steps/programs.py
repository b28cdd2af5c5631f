"""The train steps by name: how each is built, its policy with the saved twin, and sizes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax

import jaxoff
from bench.client_steps.step import ClientStep, Sizes, offload, save

WITHOUT_ATTENTION = ("autoencoder", "haiku_stack", "mamba2", "retention", "ssm")
NAMES = ("block_in", "attn")
TINY = Sizes(
    layers=4,
    width=64,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_size=16,
    vocabulary=512,
    batch=4,
    length=64,
    source_length=96,
    experts=4,
)
DECODER = Sizes()
SHORT = dataclasses.replace(DECODER, layers=6)
TWO_BATCHES = dataclasses.replace(SHORT, batch=4)
VIT = Sizes(
    layers=32,
    width=1536,
    hidden=6144,
    heads=12,
    kv_heads=12,
    head_size=128,
    vocabulary=1000,
    batch=128,
    length=256,
)
SSM = Sizes(layers=28, width=2048, hidden=4096, vocabulary=50304, batch=4, length=8192)
SPEECH = Sizes(
    layers=24,
    width=1280,
    hidden=5120,
    heads=20,
    kv_heads=20,
    head_size=64,
    vocabulary=51866,
    batch=48,
    length=448,
    source_length=1500,
)
DIFFUSION = Sizes(
    layers=12,
    width=2304,
    hidden=9216,
    heads=18,
    kv_heads=18,
    head_size=128,
    vocabulary=1000,
    batch=160,
    length=256,
)
EXPERTS = Sizes(
    layers=8,
    width=2048,
    hidden=4096,
    heads=16,
    kv_heads=16,
    head_size=128,
    vocabulary=32000,
    batch=4,
    length=4096,
    experts=8,
)
LORA = Sizes(layers=32, batch=4, length=2048)
UNET = Sizes(layers=4, width=256, heads=8, vocabulary=1, batch=144, length=128)
PAIRS = Sizes(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8, head_size=64, batch=4, length=2048)
PICTURES = Sizes(layers=12, width=768, hidden=3072, heads=12, head_size=64, batch=768, length=196)
RETENTION = Sizes(
    layers=12, width=2560, hidden=8960, heads=20, head_size=128, vocabulary=65536, batch=4, length=4096
)
HAIKU = Sizes(
    layers=12, width=2048, hidden=8192, heads=16, head_size=128, vocabulary=32768, batch=32, length=2048
)
MAMBA2 = Sizes(layers=12, width=1536, hidden=3072, head_size=64, vocabulary=50304, batch=48, length=2048)
EQUIMO = dataclasses.replace(VIT, layers=12, batch=384)
TE_V2 = jaxoff.policy("te_v2")
DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
SAVED_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@dataclasses.dataclass(frozen=True)
class Program:
    """A train step in a style.

    Attributes:
      module: the module of the builder, in this package.
      builder: the builder's name.
      offloads: the policy, of JAX or of jaxoff.
      saves: the policy of the saved twin.
      sizes: sizes that fill an 80 GB card.
      options: further keywords of the builder.
      package: a module that has to be installed, beside those of the group `models`.
    """

    module: str
    builder: str
    offloads: Any
    saves: Any
    sizes: Sizes = DECODER
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    package: str = "jax"

    def build(self, sizes: Sizes | None = None, *, offloads: bool = True, attention: Any) -> ClientStep:
        """The step, its residuals offloaded or saved.

        Raises:
          ModuleNotFoundError: if the style's library is not installed.
        """
        builder = getattr(importlib.import_module(f"bench.client_steps.{self.module}"), self.builder)
        options = self.options | ({} if self.module in WITHOUT_ATTENTION else {"attention": attention})
        return builder(sizes or self.sizes, self.offloads if offloads else self.saves, **options)

    def shrink(self) -> Program:
        """The program at tiny sizes; its policy offloads residuals of any size."""
        policies = [
            dataclasses.replace(p, min_bytes=0) if isinstance(p, jaxoff.Policy) else p
            for p in (self.offloads, self.saves)
        ]
        return dataclasses.replace(self, offloads=policies[0], saves=policies[1], sizes=TINY)


def _by_names(module: str, builder: str, *names: str, **keywords: Any) -> Program:
    names = names or NAMES
    return Program(module, builder, offload(*names), save(*names), **keywords)


def _by_policy(module: str, builder: str, policy: jaxoff.Policy, **keywords: Any) -> Program:
    return Program(module, builder, policy, policy.on_device(), **keywords)


PROGRAMS = {
    "decoder-scan": _by_names("decoder", "build_decoder", options={"loop": "scan"}),
    "decoder-python": _by_names("decoder", "build_decoder", options={"loop": "python"}, sizes=SHORT),
    "layer-axis": _by_names("layer_axis", "build_layer_axis", sizes=SHORT),
    "groups": _by_names("groups", "build_groups", sizes=SHORT),
    "accumulation": _by_names("accumulation", "build_accumulation", sizes=TWO_BATCHES),
    "inner-jit": Program("inner_jit", "build_inner_jit", DOTS, SAVED_DOTS, SHORT),
    "linen-scan": _by_names("linen", "build_linen"),
    "nnx-list": _by_policy("nnx", "build_nnx", TE_V2, options={"stacked": False}, sizes=SHORT),
    "nnx-scan": _by_policy(
        "nnx",
        "build_nnx",
        jaxoff.policy(offload="block_in", save="attn"),
        sizes=SHORT,
        options={"stacked": True},
    ),
    "equinox": _by_policy("stacked_equinox", "build_equinox", TE_V2, package="equinox"),
    "vit": _by_policy("vit", "build_vit", jaxoff.policy(offload="vit.*"), sizes=VIT),
    "ssm": _by_names("ssm", "build_ssm", "ssm.block_in", "ssm.in", sizes=SSM),
    "ssm-chunks": _by_policy(
        "ssm",
        "build_ssm",
        jaxoff.policy(offload=["ssm.block_in", "ssm.in"], save="ssm.states"),
        sizes=SSM,
        options={"recurrence": "chunks"},
    ),
    "encoder-decoder": _by_names(
        "encoder_decoder",
        "build_encoder_decoder",
        *("enc.in", "enc.attn", "dec.in", "dec.attn", "dec.cross"),
        sizes=SPEECH,
    ),
    "dit": _by_names("dit", "build_dit", "dit.in", "dit.qkv", "dit.attn", sizes=DIFFUSION),
    "moe-linen": _by_policy(
        "moe_linen",
        "build_moe_linen",
        jaxoff.policy(offload=["block_in", "moe.*"], save="attn"),
        sizes=EXPERTS,
    ),
    "lora": _by_names("lora", "build_lora", sizes=LORA),
    "unet": _by_names("unet", "build_unet", "unet.in", "unet.conv", sizes=UNET),
    "dpo": _by_names("dpo", "build_dpo", sizes=PAIRS),
    "autoencoder": _by_names(
        "autoencoder", "build_autoencoder", "mae.in", "mae.attn", sizes=PICTURES, package="equinox"
    ),
    "retention": _by_policy(
        "retention", "build_retention", jaxoff.policy(offload=["block_in", "mix.*"]), sizes=RETENTION
    ),
    "haiku": _by_names("haiku_stack", "build_haiku", "block_in", "attn", "up", sizes=HAIKU, package="haiku"),
    "mamba2": _by_policy(
        "mamba2", "build_mamba2", jaxoff.policy(offload="block_in"), sizes=MAMBA2, package="mamba2_jax"
    ),
    "equimo": _by_policy(
        "equimo_vit",
        "build_equimo",
        jaxoff.policy(offload="block_in", unmarked="offload_dots"),
        sizes=EQUIMO,
        package="equimo",
    ),
}
