"""The numbers of a model, their presets, and the count of its parameters."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

_ROUTERS = ("sigmoid", "softmax")
_ATTENTION = ("auto", "cudnn", "xla")
_MLP_ACTIVATIONS = ("squared_relu", "swiglu")
_DTYPES = ("bfloat16", "float32")
_POSITIVE = (
    "vocab_size",
    "d_model",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_seq_len",
    "rope_theta",
    "rms_eps",
)
_NOT_NEGATIVE = (
    "num_experts",
    "d_shared",
    "first_k_dense",
    "aux_loss_coef",
    "z_loss_coef",
    "mtp_weight",
    "logits_chunk",
    "mlp_chunk",
)


@dataclasses.dataclass(frozen=True)
class ParamCounts:
    """Number of parameters by part of the model.

    Attributes:
      embedding, attention, dense_mlp, router, experts, shared_experts, norms, head: parameters of each kind
        outside the multi-token-prediction head.
      mtp: parameters of the multi-token-prediction head, its block included.
      total: sum of the above.
      active: parameters used for a token in training: `total` without the experts that the router leaves out.
    """

    embedding: int
    attention: int
    dense_mlp: int
    router: int
    experts: int
    shared_experts: int
    norms: int
    head: int
    mtp: int
    total: int
    active: int

    def __str__(self) -> str:
        return "\n".join(
            f"{name.replace('_', ' '):<16}{count:>18,}" for name, count in dataclasses.asdict(self).items()
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """The numbers of a decoder-only language model, with mixture-of-experts layers or dense.

    The constructor checks all fields. `Config.preset` makes known models; `dataclasses.replace` changes
    fields.

    Attributes:
      vocab_size: tokens V.
      d_model: width D of the residual stream.
      num_layers: layers L, dense ones included.
      num_heads, num_kv_heads, head_dim: query heads N, key-value heads K, each shared by N / K query heads,
        and the width H of a head.
      num_experts, top_k, d_expert: experts E of a layer, experts k chosen for a token, hidden width I of an
        expert. Without experts, `num_experts=0`, all layers are dense.
      d_shared: hidden width of the shared expert, which sees every token; 0 leaves the shared expert out.
      d_ff: hidden width of a dense layer's MLP; only read where there are dense layers.
      first_k_dense: number of layers, from the first on, with a dense MLP instead of experts.
      mlp_activation: activation of the dense MLPs, "squared_relu" or "swiglu". Experts have a squared ReLU.
      router: function from logits to scores, "sigmoid" or "softmax".
      norm_topk_probs: whether the chosen experts' scores are divided by their sum.
      routed_scaling: factor on the routed experts' output.
      aux_loss_coef, z_loss_coef: weights in the loss of the layers' mean load-balancing loss and mean router
        z-loss.
      mtp_layers: multi-token-prediction heads, 0 or 1.
      mtp_weight: weight of its cross entropy in the loss.
      rope_theta, rms_eps: base of the rotary embedding's wavelengths; term added to the mean square in norms.
      max_seq_len: longest sequence accepted by the model.
      logits_chunk: tokens of each sequence with logits in memory at a time, 0 for all tokens. Chunks run in
        sequence and are recomputed for the gradient. Smaller chunks take less memory and add to the gradient
        of the head's weights more often.
      mlp_chunk: tokens of each sequence in a dense MLP at a time (`jaxoff.tiled`), 0 for all tokens. Longer
        sequences are cut into the least number of equal chunks. The backward pass computes a chunk again.
      dtype: dtype of activations and products, "bfloat16" or "float32".
      param_dtype: dtype of parameters, which are cast where used. `models.train` keeps float32 masters beside
        parameters of "bfloat16".
      attention: "cudnn", "xla", or "auto" for cuDNN on a GPU where it supports the shapes, XLA elsewhere.

    Raises:
      ValueError: a number is out of its range or contradicts another.

    Example:
      >>> from models import Config
      >>> Config.preset("nano", num_layers=2).num_experts
      128
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    top_k: int = 0
    d_expert: int = 0
    d_shared: int = 0
    d_ff: int = 0
    first_k_dense: int = 0
    mlp_activation: str = "squared_relu"
    router: str = "sigmoid"
    norm_topk_probs: bool = True
    routed_scaling: float = 1.0
    aux_loss_coef: float = 1e-2
    z_loss_coef: float = 1e-3
    mtp_layers: int = 0
    mtp_weight: float = 0.3
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    max_seq_len: int = 8192
    logits_chunk: int = 0
    mlp_chunk: int = 0
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        for field in ("dtype", "param_dtype"):
            # Text hashes, compares and goes into JSON.
            object.__setattr__(self, field, _dtype_name(field, getattr(self, field)))
        _check_numbers(self)
        _check_choice("router", self.router, _ROUTERS)
        _check_choice("attention", self.attention, _ATTENTION)
        _check_choice("mlp_activation", self.mlp_activation, _MLP_ACTIVATIONS)
        _check_fit(self)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "Config":
        """Makes a known configuration.

        Args:
          name: "tiny", "nano", "mixtral", "dsv3", "llama3_8b" or "llama3_1b".
          **overrides: fields to set otherwise.

        Returns:
          The configuration.

        Raises:
          ValueError: the preset is unknown, or the result is not valid.
          TypeError: an override is not a field.
        """
        _check_choice("preset", name, tuple(PRESETS))
        fields = tuple(field.name for field in dataclasses.fields(cls))
        for field in overrides:
            if field not in fields:
                raise TypeError(
                    f"Config has no field {field!r}{_near(field, fields)} The fields are {', '.join(fields)}."
                )
        return cls(**(PRESETS[name] | overrides))

    @property
    def num_dense_layers(self) -> int:
        return self.first_k_dense if self.num_experts else self.num_layers

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def param_counts(self) -> ParamCounts:
        """Counts the parameters without making any."""
        d, dense, moe, mtp = self.d_model, self.num_dense_layers, self.num_moe_layers, self.mtp_layers
        matrices = 3 if self.mlp_activation == "swiglu" else 2
        attention = (
            d * self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.num_heads * self.head_dim * d
        )
        expert, router, shared = 2 * d * self.d_expert, d * self.num_experts, 2 * d * self.d_shared
        # The multi-token-prediction head has a block with experts, a norm for each of its two inputs and a
        # norm before the logits.
        mtp_rest = mtp * (attention + router + shared + 2 * d * d + 5 * d)
        parts = {
            "embedding": self.vocab_size * d,
            "attention": self.num_layers * attention,
            "dense_mlp": dense * matrices * d * self.d_ff,
            "router": moe * router,
            "experts": moe * self.num_experts * expert,
            "shared_experts": moe * shared,
            "norms": (2 * self.num_layers + 1) * d,
            "head": self.vocab_size * d,
            "mtp": mtp_rest + mtp * self.num_experts * expert,
        }
        total = sum(parts.values())
        idle = (moe + mtp) * (self.num_experts - self.top_k) * expert
        return ParamCounts(**parts, total=total, active=total - idle)


_LLAMA3: dict[str, Any] = dict(
    vocab_size=128_256,
    mlp_activation="swiglu",
    aux_loss_coef=0.0,
    z_loss_coef=0.0,
    rope_theta=5e5,
    max_seq_len=1 << 21,
    logits_chunk=2048,
    mlp_chunk=8192,
    param_dtype="bfloat16",
)
PRESETS: dict[str, dict[str, Any]] = {
    # Bytes as tokens, small enough to train on a processor: three hundred steps in about a minute.
    "tiny": dict(
        vocab_size=256,
        d_model=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        top_k=2,
        d_expert=128,
        d_shared=128,
        d_ff=512,
        first_k_dense=1,
        max_seq_len=1024,
    ),
    # NVIDIA Nemotron 3 Nano 30B-A3B (arXiv:2512.20848): width, heads, experts, shared expert, squared ReLU,
    # sigmoid router, scaling 2.5 and vocabulary are the paper's. Nemotron has 52 layers: 23 of Mamba-2, 23 of
    # experts, 6 of attention without RoPE. Here each layer has attention with RoPE and experts; memory
    # limits their number.
    "nano": dict(
        vocab_size=131_072,
        d_model=2688,
        num_layers=4,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        num_experts=128,
        top_k=6,
        d_expert=1856,
        d_shared=3712,
        routed_scaling=2.5,
        aux_loss_coef=1e-4,
    ),
    # Mixtral 8x7B (arXiv:2401.04088): everything but the activation, which is SwiGLU there, and the depth,
    # which is 32.
    "mixtral": dict(
        vocab_size=32_000,
        d_model=4096,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_experts=8,
        top_k=2,
        d_expert=14_336,
        router="softmax",
        aux_loss_coef=2e-2,
        z_loss_coef=0.0,
        rope_theta=1e6,
        max_seq_len=32_768,
    ),
    # DeepSeek-V3 (arXiv:2412.19437): widths, router, scaling, shared expert and the multi-token-prediction
    # head are the paper's, the activation (SwiGLU there) is not. DeepSeek-V3 has 61 layers, 3 of them dense,
    # and 256 experts; here a single layer is dense, and the 8 experts are the share of a device out of 32.
    # Grouped-query attention, 128 query heads over 8 key-value heads, replaces the latent attention.
    "dsv3": dict(
        vocab_size=129_280,
        d_model=7168,
        num_layers=3,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        num_experts=8,
        top_k=8,
        d_expert=2048,
        d_shared=2048,
        d_ff=18_432,
        first_k_dense=1,
        routed_scaling=2.5,
        aux_loss_coef=1e-4,
        z_loss_coef=0.0,
        mtp_layers=1,
        rms_eps=1e-6,
    ),
    # Llama 3.1 8B (arXiv:2407.21783), dense: everything but the scaling of RoPE for long contexts. Chunks and
    # parameters in 16 bits are for long sequences.
    "llama3_8b": _LLAMA3
    | dict(d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14_336),
    # Llama 3.2 1B: as above, and its head has weights of its own here.
    "llama3_1b": _LLAMA3
    | dict(d_model=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, d_ff=8192),
}


def _near(got: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(got), list(choices), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


def _check_choice(field: str, got: Any, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ValueError(
            f"{field} must be one of {', '.join(map(repr, choices))}, got {got!r}{_near(got, choices)}"
        )


def _dtype_name(field: str, got: Any) -> str:
    try:
        name = jnp.dtype(got).name
    except TypeError:
        name = str(got)
    if name not in _DTYPES:
        raise ValueError(
            f"{field} must be one of {', '.join(map(repr, _DTYPES))}, got {got!r}{_near(name, _DTYPES)}"
        )
    return name


def _check_numbers(config: Config) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{field.name} must be an integer, got {value!r}.")
        if field.name in _POSITIVE and value <= 0:
            raise ValueError(f"{field.name} must be greater than 0, got {value!r}.")
        if field.name in _NOT_NEGATIVE and value < 0:
            raise ValueError(f"{field.name} must be at least 0, got {value!r}.")


def _check_fit(config: Config) -> None:
    c = config
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {c.num_heads} and {c.num_kv_heads}."
        )
    if c.head_dim % 2:
        raise ValueError(
            f"head_dim must be even, since RoPE turns pairs of features, got head_dim={c.head_dim}."
        )
    if c.first_k_dense > c.num_layers:
        raise ValueError(
            f"first_k_dense must be at most num_layers, got {c.first_k_dense} and {c.num_layers}."
        )
    if c.num_dense_layers and c.d_ff <= 0:
        raise ValueError(
            f"d_ff, the width of the dense layers' MLP, must be set for {c.num_dense_layers} of them, got "
            f"{c.d_ff}."
        )
    if c.mtp_layers not in (0, 1):
        raise ValueError(f"mtp_layers must be 0 or 1, got mtp_layers={c.mtp_layers}.")
    if c.num_moe_layers or c.mtp_layers:
        if c.num_experts <= 0 or c.d_expert <= 0:
            raise ValueError(
                f"num_experts and d_expert must be greater than 0, got {c.num_experts} and {c.d_expert}."
            )
        if not 0 < c.top_k <= c.num_experts:
            raise ValueError(
                f"top_k must be from 1 to num_experts, got top_k={c.top_k} and num_experts={c.num_experts}."
            )
