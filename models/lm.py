"""The language model: embedding, scanned layers, head, and the loss.

Shapes: B batch, S sequence, L = S + 1 tokens with the last target, D model width, V vocabulary, E experts.

A model has two stacks of equal layers, dense layers and layers with experts. A stack's parameters are a
single tree with a leading axis of layers, made by `nnx.vmap` over a layer's constructor; a scan runs the
layer's program over this axis. With a policy, each layer, the head and the multi-token-prediction head is a
`jax.checkpoint` of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxoff
from models.config import Config
from models.layers import MLP, Attention, RMSNorm, logsumexp, matmul, normal, pin
from models.moe import Division, MoE, RouterStats

type Whole = Callable[[nnx.State], nnx.State]


class Block(nnx.Module):
    """Attention and an MLP, dense or of experts, each after a norm and added to its input.

    The input is named inside (`attn.norm_in`), so a policy can place the input; unnamed inputs of a
    checkpointed function stay on the device.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from models import Block, Config
      >>> block = Block(Config.preset("tiny"), moe=True, rngs=nnx.Rngs(0))
      >>> out, stats = block(jnp.ones((2, 16, 128), jnp.bfloat16))
      >>> out.shape
      (2, 16, 128)
    """

    def __init__(self, config: Config, *, moe: bool, rngs: nnx.Rngs, division: Division | None = None):
        self.attn_norm, self.mlp_norm = RMSNorm(config), RMSNorm(config)
        self.attention = Attention(config, rngs=rngs, context=division.context if division else None)
        if moe:
            self.mlp = MoE(config, rngs=rngs, division=division)
        else:
            options: dict[str, Any] = {"activation": config.mlp_activation, "chunk": config.mlp_chunk}
            self.mlp = MLP(config, config.d_ff, "mlp.act", **options, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, RouterStats | None]:
        """Maps (B, S, D) in the compute dtype to (B, S, D) and the router's stats, None without experts."""
        dtype = x_BSD.dtype
        # Both the norm and the sum read the named value, widened once: their gradients meet in float32, too.
        x = jaxoff.name(x_BSD, "attn.norm_in").astype(jnp.float32)
        x = x + self.attention(self.attn_norm(x)).astype(jnp.float32)
        x = jaxoff.name(x.astype(dtype), "mlp.norm_in").astype(jnp.float32)
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            out, stats = self.mlp(normed)
        else:
            out, stats = self.mlp(jaxoff.name(normed, "mlp.fc1_in")), None
        return pin((x + out.astype(jnp.float32)).astype(dtype)), stats


class MTP(nnx.Module):
    """Predicts the token after the next from a position's hidden state and the next token's embedding.

    References:
      DeepSeek-V3 technical report, 2024, section 2.2.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, division: Division | None = None):
        self.hidden_norm, self.embed_norm = RMSNorm(config), RMSNorm(config)
        self.proj = normal(rngs, (2 * config.d_model, config.d_model), (2 * config.d_model) ** -0.5, config)
        self.block = Block(config, moe=True, rngs=rngs, division=division)
        self.norm = RMSNorm(config)

    def __call__(
        self, hidden_BSD: jax.Array, next_embed_BSD: jax.Array
    ) -> tuple[jax.Array, RouterStats | None]:
        """Returns the hidden state (B, S, D) for the shared head, before the norm, and the router's stats."""
        hidden, embed = jaxoff.name((hidden_BSD, next_embed_BSD), "mtp.norm_in")
        both = jnp.concatenate([self.hidden_norm(hidden), self.embed_norm(embed)], axis=-1)
        return self.block(matmul(jaxoff.name(both, "mtp.proj_in"), self.proj[...]))


class LM(nnx.Module):
    """A decoder-only mixture-of-experts language model.

    Args:
      config: numbers of the model.
      policy: hashable checkpoint policy of each layer, e.g. a `jaxoff.policy`; None checkpoints nothing.
      rngs: source of the initial parameters; `nnx.Rngs(0)` by default.
      division: division of tokens and experts between devices; None on a single device.

    Raises:
      TypeError: the policy cannot be called or hashed.

    Example:
      >>> import jax.numpy as jnp
      >>> from models import LM, Config
      >>> model = LM(Config.preset("tiny"))
      >>> model(jnp.zeros((2, 16), jnp.int32)).shape
      (2, 16, 256)
    """

    def __init__(
        self,
        config: Config,
        *,
        policy: Callable[..., Any] | None = None,
        rngs: nnx.Rngs | None = None,
        division: Division | None = None,
    ):
        _check_policy(policy)
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config, self.policy, self.division = config, policy, division
        self.embedding = normal(rngs, (config.vocab_size, config.d_model), 1.0, config)
        self.dense = _stack(config, config.num_dense_layers, moe=False, rngs=rngs, division=division)
        self.experts = _stack(config, config.num_moe_layers, moe=True, rngs=rngs, division=division)
        self.norm = RMSNorm(config)
        # Logits start small: the first loss is close to log V, the loss of a uniform guess.
        self.head = normal(rngs, (config.d_model, config.vocab_size), 1 / config.d_model, config)
        self.mtp = MTP(config, rngs=rngs, division=division) if config.mtp_layers else None

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns the logits (B, S, V) float32 of each position's next token, for (B, S) integer tokens."""
        return _logits(self.norm, self.head, self.hidden(tokens_BS)[0])

    def embed(self, tokens_BS: jax.Array) -> jax.Array:
        # The gradient of this look-up adds in the parameters' dtype, since the cast comes after the look-up.
        return self.embedding[...][tokens_BS].astype(self.config.dtype)

    def hidden(
        self, tokens_BS: jax.Array, whole: Whole | None = None
    ) -> tuple[jax.Array, RouterStats | None]:
        """Runs the layers: (B, S, D) before the final norm, and the routers' stats, stacked over layers.

        `whole`, if given, maps a layer's slice of the stack to the layer's parameters, inside the loop.
        """
        _check_tokens(tokens_BS, self.config.max_seq_len)
        x, stats = self.embed(tokens_BS), None
        if self.dense is not None:
            x, _ = _scan_layers(self.dense, x, self.policy, whole)
        if self.experts is not None:
            x, stats = _scan_layers(self.experts, x, self.policy, whole)
        return x, stats


def _logits(norm: RMSNorm, head: nnx.Param, x_BSD: jax.Array) -> jax.Array:
    normed = norm(jaxoff.name(x_BSD, "head.norm_in"))
    return jaxoff.name(matmul(normed, head[...], jnp.float32), "head.logits")


def _stack(
    config: Config, layers: int, *, moe: bool, rngs: nnx.Rngs, division: Division | None = None
) -> Block | None:
    if not layers:
        return None
    make = nnx.vmap(lambda keys: Block(config, moe=moe, rngs=keys, division=division), in_axes=0, out_axes=0)
    return make(rngs.split(layers))


def _scan_layers(stack: Block, x_BSD: jax.Array, policy, whole: Whole | None = None) -> tuple[jax.Array, Any]:
    graph, params = nnx.split(stack)

    def layer(x, params):
        return nnx.merge(graph, params if whole is None else whole(params))(x)

    return scan_under(policy, layer, x_BSD, params)


def scan_under(policy, body: Callable[..., Any], init: Any, xs: Any) -> tuple[Any, Any]:
    """Scans `body` with each iteration checkpointed under `policy`; without a policy a plain scan."""
    return lax.scan(body, init, xs) if policy is None else jaxoff.scan(body, init, xs, policy=policy)


def _checkpoint(function: Callable[..., Any], policy) -> Callable[..., Any]:
    if isinstance(policy, jaxoff.FirstLayers):
        policy = policy.rest
    return function if policy is None else jax.checkpoint(function, policy=policy)


def _check_policy(policy) -> None:
    try:
        fits = policy is None or (callable(policy) and isinstance(hash(policy), int))
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(
            "LM: policy must be None, or callable and hashable: jaxoff.policy(...) or one of "
            f"jax.checkpoint_policies; got {policy!r} of type {type(policy).__name__}."
        )


def _check_tokens(tokens, limit: int) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers of shape (batch, sequence), got {tokens.dtype} of shape {tokens.shape}."
        )
    if not 0 < tokens.shape[1] <= limit:
        raise ValueError(f"a sequence must have 1 to max_seq_len = {limit} tokens, got {tokens.shape[1]}.")


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Computes `logsumexp(logits) - logits[target]` in float32: (B, S)."""
    logits = logits_BSV.astype(jnp.float32)
    # A select and a sum, not a gather, whose gradient would be a scatter-add.
    is_target = lax.broadcasted_iota(targets_BS.dtype, (1, 1, logits.shape[-1]), 2) == targets_BS[:, :, None]
    return logsumexp(logits) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


def loss_fn(
    model: LM, tokens_BL: jax.Array, whole: Whole | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the training loss of next-token prediction.

    `loss = ce + aux_loss_coef aux + z_loss_coef z + mtp_weight mtp`, terms as in the metrics.

    Args:
      model: the model; `model.config` holds the coefficients.
      tokens_BL: (B, S + 1) integers. The first S are read, the last S are predicted.
      whole: as for `LM.hidden`.

    Returns:
      The loss, a float32 scalar, and metrics: `ce` mean cross entropy in nats, `aux` and `z` the routers'
      losses averaged over layers, `mtp` the mean cross entropy of the multi-token-prediction head (each zero
      in a model without the part), and `expert_load` (layers, E) int32, the number of tokens of each expert;
      the multi-token-prediction head's own layer comes last.

    Raises:
      ValueError: the tokens are not integers of two axes, or too many or too few for the model.

    Example:
      >>> import jax.numpy as jnp
      >>> from models import LM, Config, loss_fn
      >>> loss, metrics = loss_fn(LM(Config.preset("tiny")), jnp.zeros((2, 17), jnp.int32))
      >>> sorted(metrics)
      ['aux', 'ce', 'expert_load', 'mtp', 'z']
    """
    check_sequences(model.config, tokens_BL)
    hidden, stats = model.hidden(tokens_BL[:, :-1], whole)
    if stats is None:
        stats = no_stats(model.config)
    ce, mtp, last = head_losses(model, hidden, tokens_BL)
    if last is not None:
        stats = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), stats, last)
    layers = max(stats.aux.shape[0], 1)
    metrics = {"ce": ce, "aux": jnp.sum(stats.aux) / layers, "z": jnp.sum(stats.z) / layers, "mtp": mtp}
    if model.division is not None:
        metrics["overflow"] = jnp.sum(stats.overflow).astype(jnp.float32)
    return total_loss(model.config, metrics), metrics | {"expert_load": stats.load}


def check_sequences(config: Config, tokens_BL: jax.Array) -> None:
    """Raises ValueError for tokens unfit for training: wrong axes or dtype, too many or too few."""
    _check_tokens(tokens_BL, config.max_seq_len + 1)
    if tokens_BL.shape[1] < 2 + config.mtp_layers:
        raise ValueError(
            f"loss_fn needs at least {2 + config.mtp_layers} tokens in a sequence, got {tokens_BL.shape[1]}."
        )


def no_stats(config: Config) -> RouterStats:
    """Makes the stats of zero layers."""
    none, load = jnp.zeros((0,), jnp.float32), jnp.zeros((0, config.num_experts), jnp.int32)
    return RouterStats(none, none, load, jnp.zeros((0,), jnp.int32))


def head_losses(
    model: LM, hidden_BSD: jax.Array, tokens_BL: jax.Array
) -> tuple[jax.Array, jax.Array, RouterStats | None]:
    """Computes the mean cross entropies of both heads, and the stats of the multi-token-prediction head."""
    ce = jnp.mean(_head_loss(model, model.norm, hidden_BSD, tokens_BL[:, 1:]))
    if model.mtp is None:
        return ce, jnp.zeros((), jnp.float32), None
    return ce, *_mtp_loss(model, model.mtp, hidden_BSD, tokens_BL)


def total_loss(config: Config, metrics: dict[str, jax.Array]) -> jax.Array:
    """Adds the weighted terms of the loss."""
    c, m = config, metrics
    return m["ce"] + c.aux_loss_coef * m["aux"] + c.z_loss_coef * m["z"] + c.mtp_weight * m["mtp"]


def _head_loss(model: LM, norm: RMSNorm, x_BSD: jax.Array, targets_BS: jax.Array) -> jax.Array:
    graph, params = nnx.split((norm, model.head))

    def loss(params, x, targets):
        return cross_entropy(_logits(*nnx.merge(graph, params), x), targets)

    length, chunk = x_BSD.shape[1], model.config.logits_chunk
    if not 0 < chunk < length:
        return _checkpoint(loss, model.policy)(params, x_BSD, targets_BS)
    # Checkpointed without a policy, too: otherwise the backward pass would keep the logits of all chunks.
    policy = model.policy or jax.checkpoint_policies.nothing_saveable
    whole = length - length % chunk

    def chunks(values):
        divided = values[:, :whole].reshape(values.shape[0], -1, chunk, *values.shape[2:])
        return jnp.moveaxis(divided, 1, 0)

    def compute_chunk(_, chunk):
        return (), loss(params, *chunk)

    _, losses_NBC = scan_under(policy, compute_chunk, (), (chunks(x_BSD), chunks(targets_BS)))
    losses = [jnp.moveaxis(losses_NBC, 0, 1).reshape(-1, whole)]
    if whole < length:
        losses.append(_checkpoint(loss, policy)(params, x_BSD[:, whole:], targets_BS[:, whole:]))
    return jnp.concatenate(losses, axis=1)


def _mtp_loss(model: LM, mtp: MTP, hidden_BSD: jax.Array, tokens_BL: jax.Array) -> tuple[jax.Array, Any]:
    graph, params = nnx.split(mtp)

    def head(params, hidden, embed):
        return nnx.merge(graph, params)(hidden, embed)

    # Position i has seen token i, receives token i + 1, and predicts token i + 2: the last position has no
    # target and is left out.
    run = _checkpoint(head, model.policy)
    hidden, stats = run(params, hidden_BSD[:, :-1], model.embed(tokens_BL[:, 1:-1]))
    return jnp.mean(_head_loss(model, mtp.norm, hidden, tokens_BL[:, 2:])), stats
