"""The models of `bench.step`: stacks of equal layers, weights and inputs, and the values they offload.

Four layers. `dense`: attention and a squared-ReLU MLP, width 4096, bf16, sequence 4096. `mlp`: the MLP of
`dense` alone, with few enough values to measure all placements. `nano`: the block of the `nano` model
(`models`), attention and 128 experts, whose grouped MLP is the fused kernel on a GPU; `nano_act` is `nano`
with another choice of values. `mixtral`: the block of the `mixtral` model, 8 wide experts.
A workload is written `dense-b4-l12`: layer, batch, layers.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from models import Block, Config
from models.layers import traced_platform

# A loop over layers takes weights stacked; layers in a Python loop take weights as a list.
type Form = Literal["scanned", "unrolled"]
# `pinned`: names that pin the rounding of their values (`jaxoff.name`). `plain`: stock names.
# `maxtext`: stock names, as MaxText gives them. `planned`: pinned, and every product has a name.
type Naming = Literal["pinned", "plain", "maxtext", "planned"]
type Carry = tuple[jax.Array, jax.Array]
type Layer = Callable[[Any, Carry], Carry]

FORMS: tuple[Form, ...] = ("scanned", "unrolled")


@dataclasses.dataclass(frozen=True)
class PlacedNames:
    """Names of offloaded values, and of saved values; all other values are recomputed."""

    offload: tuple[str, ...]
    save: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer, and the names of its offloaded and saved values.

    Attributes:
      names: the names under `jaxoff` and stock policies.
      maxtext: MaxText's names of the same values, or of values of equal bytes and equal cost.
    """

    names: PlacedNames
    maxtext: PlacedNames


_MOE_SAVED = ("moe.probs", "moe.act")
_MOE = Kind(
    PlacedNames(("attn.norm_in", "attn.proj_in", "mlp.norm_in"), _MOE_SAVED),
    PlacedNames(("decoder_layer_input", "attn.proj_in", "mlp.norm_in"), _MOE_SAVED),
)
KINDS = {
    # MaxText has no name for the sum before the MLP: MaxText keeps the projection and adds again.
    "dense": Kind(
        PlacedNames(("x_in", "attn", "mlp_in")), PlacedNames(("decoder_layer_input", "context", "out_proj"))
    ),
    # The narrow values: 310 MB a layer at batch 4, about 6 ms of link.
    "nano": _MOE,
    # Only the wide value: the activations of the experts, 365 MB.
    "nano_act": Kind(
        PlacedNames(("moe.act",), ("attn.norm_in", "mlp.norm_in", "moe.probs")),
        PlacedNames(("moe.act",), ("decoder_layer_input", "mlp.norm_in", "moe.probs")),
    ),
    # 403 MB a layer at batch 4.
    "mixtral": _MOE,
    "mlp": Kind(PlacedNames(("x_in",)), PlacedNames(("decoder_layer_input",))),
}
_MAXTEXT_NAMES = {"x_in": "decoder_layer_input", "attn": "context", "out_proj": "out_proj"}
_PLANNED_NAMES = ("qkv", "out_proj", "up_in", "pre", "act", "down")
_PATTERN = re.compile(r"([a-z_]+)-b(\d+)-l(\d+)")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A stack of layers with a batch of inputs.

    Attributes:
      kind: a key of `KINDS`.
      batch: sequences B.
      layers: how many.
      tiny: widths and lengths for a CPU.
    """

    kind: str
    batch: int
    layers: int
    tiny: bool = False

    @classmethod
    def parse(cls, text: str, *, tiny: bool = False) -> Workload:
        """Reads `dense-b4-l12`.

        Raises:
          ValueError: for another form, an unknown layer, or numbers below 1.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or match[1] not in KINDS or not min(int(match[2]), int(match[3])):
            raise ValueError(
                f"a workload is KIND-bBATCH-lLAYERS, such as dense-b4-l12, with one of {', '.join(KINDS)} "
                f"and numbers of at least 1; got {text!r}"
            )
        return cls(match[1], int(match[2]), int(match[3]), tiny)

    @property
    def name(self) -> str:
        return f"{self.kind}-b{self.batch}-l{self.layers}"

    def placed_names(self, naming: Naming) -> PlacedNames:
        kind = KINDS[self.kind]
        return kind.maxtext if naming == "maxtext" else kind.names

    def layer(self, naming: Naming) -> Layer:
        """(weights, (x (B, S, D), sum of losses)) -> the same after the layer."""
        if self.kind == "dense":
            return functools.partial(_dense_layer, _name_function(naming), 2 if self.tiny else 32)
        if self.kind == "mlp":
            return functools.partial(_mlp_layer, _name_function(naming))
        return functools.partial(_moe_layer, self._config, self._graph, naming)

    def weights(self, form: Form, seed: int = 0) -> Any:
        """The weights, the same numbers stacked or listed."""
        keys = jax.random.split(jax.random.key(seed), self.layers)
        if form == "scanned":
            return self._makers["scanned"](keys)
        return [self._makers["unrolled"](key) for key in keys]

    def inputs(self, seed: int = 0) -> jax.Array:
        """x (B, S, D) bfloat16; another for each seed."""
        return self._make_inputs(jax.random.fold_in(jax.random.key(1), seed))

    def arguments(self, form: Form, seed: int = 0) -> tuple[Any, jax.Array]:
        return self.weights(form, seed), self.inputs(seed)

    def shapes(self, form: Form) -> tuple[Any, jax.ShapeDtypeStruct]:
        """The shapes of `arguments`, without values."""
        return jax.eval_shape(lambda: self.arguments(form))

    @functools.cached_property
    def _makers(self) -> dict[Form, Callable[[jax.Array], Any]]:
        """Makers of weights: of all layers at once, and of one; kept, so that each compiles once."""
        make = self._dense_weights if self._is_dense else self._moe_weights
        return {"scanned": jax.jit(jax.vmap(make)), "unrolled": jax.jit(make)}

    @functools.cached_property
    def _make_inputs(self) -> Callable[[jax.Array], jax.Array]:
        shape = (self.batch, *((16, 32) if self.tiny else (4096, 4096)))
        if not self._is_dense:
            shape = (*shape[:2], self._config.d_model)
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))

    def _dense_weights(self, key):
        width, hidden = (32, 64) if self.tiny else (4096, 16384)
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        if self.kind == "dense":
            shapes = {"qkv": (width, 3 * width), "proj": (width, width), **shapes}
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, shape, jnp.bfloat16) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    @property
    def _is_dense(self) -> bool:
        return self.kind in ("dense", "mlp")

    @property
    def _config(self) -> Config:
        if self.tiny:
            return Config.preset("tiny", num_layers=self.layers, first_k_dense=0)
        return Config.preset(self.kind.removesuffix("_act"), num_layers=self.layers)

    @functools.cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: Block(self._config, moe=True, rngs=nnx.Rngs(0))))

    def _moe_weights(self, key):
        block = Block(self._config, moe=True, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(block, nnx.Param))


def loss(
    workload: Workload, naming: Naming, stack: Callable[[Layer, Carry, Any], Carry]
) -> Callable[..., Any]:
    """The loss of a stack of layers, `(weights, x) -> mean(out^2) + losses of the routers`.

    Args:
      workload: gives the layer.
      naming: the way to name values.
      stack: `(layer, carry, weights) -> carry`: applies the layers one after the other.
    """

    def compute(weights, x_BSD):
        start = x_BSD, jnp.zeros((), jnp.float32)
        x_BSD, losses = stack(workload.layer(naming), start, weights)
        return jnp.mean(jnp.square(x_BSD.astype(jnp.float32))) + losses

    return compute


def _name_function(naming: Naming) -> Callable[[jax.Array, str], jax.Array]:
    def rename(x, label):
        return checkpoint_name(x, _MAXTEXT_NAMES[label]) if label in _MAXTEXT_NAMES else x

    def plain(x, label):
        return x if label in _PLANNED_NAMES else checkpoint_name(x, label)

    def pin(x, label):
        return x if label in _PLANNED_NAMES else jaxoff.name(x, label)

    return {"maxtext": rename, "plain": plain, "pinned": pin, "planned": jaxoff.name}[naming]


def _rms_norm(x):
    wide = x.astype(jnp.float32)
    # A barrier gives a recomputed statistic the same bits everywhere.
    mean = lax.optimization_barrier(jnp.mean(wide * wide, -1, keepdims=True))
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def _dense_layer(name, heads, weights, carry):
    x_BSD, losses = carry
    B, S, D = x_BSD.shape
    x = name(x_BSD, "x_in")
    qkv = name(_rms_norm(x) @ weights["qkv"], "qkv").reshape(B, S, 3 * heads, D // heads)
    q, k, v = jnp.split(qkv, 3, axis=2)
    kernel = "cudnn" if traced_platform() == "gpu" else "xla"
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
    x = x + name(name(attention.reshape(B, S, D), "attn") @ weights["proj"], "out_proj")
    x = name(x, "mlp_in")
    pre = name(_rms_norm(x) @ weights["up"], "pre")
    return x + name(jnp.square(jax.nn.relu(pre)) @ weights["down"], "down"), losses


def _mlp_layer(name, weights, carry):
    x_BSD, losses = carry
    x = name(x_BSD, "x_in")
    pre = name(name(_rms_norm(x), "up_in") @ weights["up"], "pre")
    return x + name(name(jnp.square(jax.nn.relu(pre)), "act") @ weights["down"], "down"), losses


def _moe_layer(config, graph, naming, weights, carry):
    x_BSD, losses = carry
    if naming == "maxtext":
        x_BSD = checkpoint_name(x_BSD, "decoder_layer_input")
    out, stats = nnx.merge(graph, weights)(x_BSD)
    return out, losses + config.aux_loss_coef * stats.aux + config.z_loss_coef * stats.z
