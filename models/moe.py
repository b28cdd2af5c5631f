"""The mixture-of-experts layer: router, dispatch of tokens to experts, experts, and the way back.

Shapes: T tokens, D model width, E experts, k experts a token goes to, R = T k rows (one a routed token), I
expert width.

All shapes are static and nothing waits for the device: no token is dropped, however uneven the experts' loads
are. Each sum has a fixed order; in particular no gradient here is a scatter-add.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxoff
from models.config import Config
from models.layers import MLP, fan_out, fence, logsumexp, normal, pin, sum_of_exp
from pallas_kernels import Implementation, choose_implementation, grouped_mlp


class RouterStats(NamedTuple):
    """What a router says about its own work.

    Attributes:
      aux: scalar float32, load-balancing loss; 1 where experts are used evenly.
      z: scalar float32, mean squared log-partition of the router's logits.
      load: (E,) int32, tokens sent to each expert; sums to T k.
    """

    aux: jax.Array
    z: jax.Array
    load: jax.Array


class Routing(NamedTuple):
    """Which token goes where.

    Attributes:
      probs: (T, k) float32, weight of each chosen expert.
      experts: (T, k) int32, the chosen experts, highest score first.
      scores: (T, E) float32, all scores, summing to 1 a token.
    """

    probs: jax.Array
    experts: jax.Array
    scores: jax.Array


def choose_experts(logits_TE: jax.Array, config: Config) -> Routing:
    """Scores experts and keeps each token's best `top_k`.

    Args:
      logits_TE: (T, E) float32.
      config: `router`, `top_k`, `norm_topk_probs` and `routed_scaling` count.

    Returns:
      The routing; its probabilities and choices bear the name `moe.probs`.
    """
    sigmoid = config.router == "sigmoid"
    if sigmoid:
        scores = jax.nn.sigmoid(logits_TE)
    else:
        exponentials, total, _ = sum_of_exp(logits_TE)
        scores = exponentials / total
    # The choice bears the name of its weight, so that one is never recomputed alone: it could then be paired
    # with another expert.
    experts = jaxoff.name(lax.top_k(lax.stop_gradient(scores), config.top_k)[1], "moe.probs")
    # A select and a sum, not a gather, whose gradient would be a scatter-add.
    chosen = experts[:, :, None] == lax.broadcasted_iota(jnp.int32, (1, 1, scores.shape[1]), 2)
    probs = fence(jnp.sum(jnp.where(chosen, scores[:, None, :], 0.0), axis=2))
    if config.norm_topk_probs:
        probs = probs / jnp.maximum(fence(jnp.sum(probs, axis=1, keepdims=True)), 1e-20)
    probs = jaxoff.name(probs * config.routed_scaling, "moe.probs")
    if sigmoid:
        scores = scores / jnp.maximum(fence(jnp.sum(scores, axis=1, keepdims=True)), 1e-20)
    return Routing(probs, experts, scores)


def router_stats(logits_TE: jax.Array, routing: Routing) -> RouterStats:
    """Computes the router's losses.

    `aux = E sum_e f_e P_e`, where f_e is the share of the routed tokens that expert e gets (a count, no
    gradient) and P_e the mean of its scores. `z = mean_t logsumexp_e(logits)^2`.

    References:
      Fedus et al., Switch Transformers, 2021 (aux). Zoph et al., ST-MoE, 2022 (z).
    """
    experts = logits_TE.shape[1]
    load = expert_load(routing.experts, experts)
    share = load.astype(jnp.float32) / routing.experts.size
    aux = experts * jnp.sum(share * jnp.mean(routing.scores, axis=0))
    return RouterStats(aux, jnp.mean(jnp.square(logsumexp(logits_TE))), load)


def expert_load(experts: jax.Array, num_experts: int) -> jax.Array:
    """Counts how often each expert occurs in an array of int32: (E,) int32."""
    flat = experts.reshape(-1)
    return jnp.sum(flat[:, None] == lax.iota(jnp.int32, num_experts)[None, :], axis=0, dtype=jnp.int32)


class Permutation(NamedTuple):
    """The order that sorts rows by expert.

    Attributes:
      order: (R,) int32, for each sorted row, which of the T k token copies it is; copy t k + j is the j-th of
        token t.
      inverse: (R,) int32, for each copy, its sorted row.
    """

    order: jax.Array
    inverse: jax.Array


def sort_by_expert(experts_Tk: jax.Array) -> Permutation:
    """Sorts token copies by expert; copies for the same expert keep their order."""
    order = jnp.argsort(experts_Tk.reshape(-1), stable=True).astype(jnp.int32)
    return Permutation(order, jnp.argsort(order).astype(jnp.int32))


def _spread(x, permutation, k):
    return x[permutation.order // k]


def _gather_sum(rows, permutation, k):
    copies = rows[permutation.inverse].reshape(-1, k, *rows.shape[1:])
    return pin(jnp.sum(copies.astype(jnp.float32), axis=1).astype(rows.dtype))


@jax.custom_vjp
def dispatch(x_TD: jax.Array, permutation: Permutation) -> jax.Array:
    """Copies each token to its rows: (R, D), sorted by expert.

    The gradient gathers a token's rows and adds them in float32.
    """
    return _spread(x_TD, permutation, permutation.order.size // x_TD.shape[0])


def _dispatch_forward(x_TD, permutation):
    return _spread(x_TD, permutation, permutation.order.size // x_TD.shape[0]), (permutation, x_TD.shape[0])


def _dispatch_backward(residuals, grad_RD):
    permutation, tokens = residuals
    return _gather_sum(grad_RD, permutation, permutation.order.size // tokens), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(rows_RD: jax.Array, permutation: Permutation, k: int) -> jax.Array:
    """Adds each token's k rows in float32: (T, D). The gradient copies a token's gradient to its rows."""
    return _gather_sum(rows_RD, permutation, k)


combine.defvjp(
    lambda rows_RD, permutation, k: (_gather_sum(rows_RD, permutation, k), permutation),
    lambda k, permutation, grad_TD: (_spread(grad_TD, permutation, k), None),
)


def _spread_copies(copies, permutation):
    return copies.reshape(-1)[permutation.order]


@jax.custom_vjp
def dispatch_probs(probs_Tk: jax.Array, permutation: Permutation) -> jax.Array:
    """Brings the experts' weights into the order of the rows: (R,) float32. The gradient gathers, too."""
    return _spread_copies(probs_Tk, permutation)


def _dispatch_probs_backward(residuals, grad_R):
    permutation, shape = residuals
    return grad_R[permutation.inverse].reshape(shape), None


dispatch_probs.defvjp(
    lambda probs_Tk, permutation: (_spread_copies(probs_Tk, permutation), (permutation, probs_Tk.shape)),
    _dispatch_probs_backward,
)


def experts_implementation(config: Config, tokens: int) -> Implementation | None:
    """Says which implementation of the grouped MLP serves a layer's experts, and why.

    Args:
      config: of the model.
      tokens: how many tokens T enter the layer at once.

    Returns:
      The implementation with its reason; None for a model without experts.

    Example:
      >>> from models import Config
      >>> from models.moe import experts_implementation
      >>> experts_implementation(Config.preset("tiny", dtype="float32"), tokens=64).name
      'reference'
    """
    c = config
    if not c.num_moe_layers + c.mtp_layers:
        return None
    x = jax.ShapeDtypeStruct((tokens * c.top_k, c.d_model), c.dtype)
    w1 = jax.ShapeDtypeStruct((c.num_experts, c.d_model, c.d_expert), c.dtype)
    return choose_implementation(x, w1)


class MoE(nnx.Module):
    """Sends each token to its `top_k` experts, adds what they return, and adds the shared expert's output if
    there is one.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from models import Config, MoE
      >>> out, stats = MoE(Config.preset("tiny"), rngs=nnx.Rngs(0))(jnp.ones((6, 128), jnp.bfloat16))
      >>> out.shape, int(stats.load.sum())
      ((6, 128), 12)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = self.config = config
        self.router = normal(rngs, (c.d_model, c.num_experts), c.d_model**-0.5, c)
        self.w1 = normal(rngs, (c.num_experts, c.d_model, c.d_expert), c.d_model**-0.5, c)
        out_scale = c.d_expert**-0.5 / (2 * c.num_layers) ** 0.5
        self.w2 = normal(rngs, (c.num_experts, c.d_expert, c.d_model), out_scale, c)
        self.shared = MLP(c, c.d_shared, "moe.shared_act", rngs=rngs) if c.d_shared else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, RouterStats]:
        """Maps (..., D) in the compute dtype to (..., D), and says what the router did."""
        c, shape = self.config, x.shape
        # The shared expert's input is what the router and the experts read, too: one value, one name.
        x_TD = x.reshape(-1, c.d_model)
        x_TD = jaxoff.name(x_TD, "moe.shared_fc1_in") if self.shared is not None else pin(x_TD)
        for_router, for_experts, for_shared = fan_out(x_TD)

        router = self.router[...].astype(jnp.float32)
        logits_TE = jnp.dot(for_router.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
        logits_TE = jaxoff.name(logits_TE, "moe.router_logits")
        routing = choose_experts(logits_TE, c)
        stats = router_stats(logits_TE, routing)

        permutation = sort_by_expert(routing.experts)
        w1, w2 = (pin(w[...].astype(c.dtype)) for w in (self.w1, self.w2))
        probs_R = dispatch_probs(routing.probs, permutation)
        rows_RD = grouped_mlp(dispatch(for_experts, permutation), w1, w2, stats.load, probs=probs_R)
        out_TD: jax.Array = jaxoff.name(combine(rows_RD, permutation, c.top_k), "moe.combined")
        if self.shared is not None:
            both = out_TD.astype(jnp.float32) + self.shared(for_shared).astype(jnp.float32)
            out_TD = pin(both.astype(c.dtype))
        return out_TD.reshape(shape), stats
