"""The mixture-of-experts layer: router, dispatch of tokens to experts, experts, and the sum of their outputs.

Shapes: T tokens, D model width, E experts, k experts of a token, R = T k rows (a row is a copy of a token for
one of its experts), I expert width.

All shapes are static and the host never waits for the device. On a single device no token is dropped, however
uneven the experts' loads are. Where experts are divided between devices, two all-to-all collectives carry
rows to their experts and back, padded to a stated capacity; rows beyond the capacity are left out and
counted. Each sum has a fixed order; in particular no gradient here is a scatter-add.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxoff
from models.config import Config
from models.layers import MLP, fan_out, fence, logsumexp, normal, pin, sum_of_exp
from pallas_kernels import Implementation, choose_implementation, grouped_mlp, moe


class RouterStats(NamedTuple):
    """The losses and loads of a router; `z`, `load` and `overflow` are of this device's tokens.

    Attributes:
      aux: scalar float32, load-balancing loss; 1 for evenly used experts.
      z: scalar float32, mean squared log-partition of the router's logits.
      load: (E,) int32, tokens sent to each expert; sums to T k.
      overflow: scalar int32, rows left out for lack of room on the way to their expert's device; always 0 on
        a single device.
    """

    aux: jax.Array
    z: jax.Array
    load: jax.Array
    overflow: jax.Array


class Routing(NamedTuple):
    """The experts of each token.

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
      config: supplies `router`, `top_k`, `norm_topk_probs` and `routed_scaling`.

    Returns:
      The routing; its probabilities and choices bear the name `moe.probs`.
    """
    sigmoid = config.router == "sigmoid"
    if sigmoid:
        scores = jax.nn.sigmoid(logits_TE)
    else:
        exponentials, total, _ = sum_of_exp(logits_TE)
        scores = exponentials / total
    # A choice and its weight share a name, so a policy places both alike: a weight recomputed without its
    # choice could be paired with another expert.
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


def router_stats(logits_TE: jax.Array, routing: Routing, axes: tuple[str, ...] = ()) -> RouterStats:
    """Computes the router's losses.

    `aux = E sum_e f_e P_e`, where f_e is expert e's share of the routed tokens (a count, without a gradient)
    and P_e the mean of its scores. `z = mean_t logsumexp_e(logits)^2`.

    Args:
      logits_TE: (T, E) float32.
      routing: routing chosen from the logits.
      axes: mesh axes that divide tokens; f_e and P_e are means over all tokens.

    References:
      Fedus et al., Switch Transformers, 2021 (aux). Zoph et al., ST-MoE, 2022 (z).
    """
    experts = logits_TE.shape[1]
    load = expert_load(routing.experts, experts)
    share = load.astype(jnp.float32) / routing.experts.size
    score = jnp.mean(routing.scores, axis=0)
    if axes:
        share, score = lax.pmean((share, score), axes)
    share = fence(share)  # otherwise XLA may divide after the product instead of before, with other bits
    aux = experts * jnp.sum(share * score)
    return RouterStats(aux, jnp.mean(jnp.square(logsumexp(logits_TE))), load, jnp.int32(0))


def expert_load(experts: jax.Array, num_experts: int) -> jax.Array:
    """Counts how often each expert occurs in an array of int32: (E,) int32."""
    flat = experts.reshape(-1)
    return jnp.sum(flat[:, None] == lax.iota(jnp.int32, num_experts)[None, :], axis=0, dtype=jnp.int32)


class Permutation(NamedTuple):
    """The order that sorts rows by expert.

    Attributes:
      order: (R,) int32, sorted row -> token copy; copy t k + j is the j-th copy of token t.
      inverse: (R,) int32, token copy -> sorted row.
    """

    order: jax.Array
    inverse: jax.Array


def sort_by_expert(experts_Tk: jax.Array) -> Permutation:
    """Sorts token copies by expert; copies for the same expert keep their order."""
    order = jnp.argsort(experts_Tk.reshape(-1), stable=True).astype(jnp.int32)
    rows = lax.iota(jnp.int32, order.size)
    return Permutation(order, jnp.zeros_like(order).at[order].set(rows, unique_indices=True))


class Slots(NamedTuple):
    """Like a `Permutation`, with empty rows, and copies without a row.

    Attributes:
      order: (S,) int32, row -> copy; R for an empty row.
      inverse: (R,) int32, copy -> row; S for a copy without a row.
    """

    order: jax.Array
    inverse: jax.Array


def _take_rows(x, index, order):
    """Gathers rows of x; zeros for an index past the end, which only `Slots` contain."""
    return x.at[index].get(mode="fill", fill_value=0) if isinstance(order, Slots) else x[index]


def _spread(x, order, k):
    return _take_rows(x, order.order // k, order)


def _gather_sum(rows, order, k):
    copies = _take_rows(rows, order.inverse, order).reshape(-1, k, *rows.shape[1:])
    return pin(jnp.sum(copies.astype(jnp.float32), axis=1).astype(rows.dtype))


@jax.custom_vjp
def dispatch(x_TD: jax.Array, order: Permutation | Slots) -> jax.Array:
    """Copies each token to its rows: (R, D), sorted by expert, or (S, D).

    The gradient gathers a token's rows and adds them in float32.
    """
    return _spread(x_TD, order, order.inverse.size // x_TD.shape[0])


def _dispatch_forward(x_TD, order):
    return _spread(x_TD, order, order.inverse.size // x_TD.shape[0]), (order, x_TD.shape[0])


def _dispatch_backward(residuals, grad_RD):
    order, tokens = residuals
    return _gather_sum(grad_RD, order, order.inverse.size // tokens), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(rows_RD: jax.Array, order: Permutation | Slots, k: int) -> jax.Array:
    """Adds each token's k rows in float32: (T, D). The gradient copies a token's gradient to its rows."""
    return _gather_sum(rows_RD, order, k)


combine.defvjp(
    lambda rows_RD, order, k: (_gather_sum(rows_RD, order, k), order),
    lambda k, order, grad_TD: (_spread(grad_TD, order, k), None),
)


def _spread_copies(copies, order):
    return _take_rows(copies.reshape(-1), order.order, order)


@jax.custom_vjp
def dispatch_probs(probs_Tk: jax.Array, order: Permutation | Slots) -> jax.Array:
    """Brings the experts' weights into the order of the rows: (R,) or (S,) float32. Its gradient gathers."""
    return _spread_copies(probs_Tk, order)


def _dispatch_probs_backward(residuals, grad_R):
    order, shape = residuals
    return _take_rows(grad_R, order.inverse, order).reshape(shape), None


dispatch_probs.defvjp(
    lambda probs_Tk, order: (_spread_copies(probs_Tk, order), (order, probs_Tk.shape)),
    _dispatch_probs_backward,
)


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a layer between devices, in the body of a `jax.shard_map`.

    Each device has its own tokens, and E / n experts, where n is the size of the experts' axis.

    Attributes:
      tokens: mesh axes that divide tokens.
      experts: mesh axis that divides experts.
      capacity: room for the rows from one device to another, in multiples of R / n, the number of rows sent
        by an even router. n or more is room for all rows.
      context: mesh axis that divides each sequence; None for whole sequences.
    """

    tokens: tuple[str, ...]
    experts: str
    capacity: float
    context: str | None = None

    @property
    def parts(self) -> int:
        return lax.axis_size(self.experts)

    def rows(self, total: int) -> int:
        """Computes how many of a device's R rows may go to each device."""
        return min(total, math.ceil(self.capacity * total / self.parts))


class SendPlan(NamedTuple):
    """The rows that a device sends to each of n devices.

    Attributes:
      slots: rows ordered by target device, C for each device.
      load: (n, E / n) int32, number of rows for each expert of each device.
    """

    slots: Slots
    load: jax.Array


def plan_sends(experts_Tk: jax.Array, load_E: jax.Array, parts: int, rows: int) -> SendPlan:
    """Assigns token copies to rows on the way to their experts.

    Args:
      experts_Tk: (T, k) int32, the chosen experts.
      load_E: (E,) int32, number of copies for each expert.
      parts: number of devices n that divide the experts.
      rows: most copies C for each device. Copies beyond C, in the order of experts and tokens, get no row.
    """
    copies = experts_Tk.size
    sorted_ = sort_by_expert(experts_Tk)
    load = load_E.reshape(parts, -1)
    # Copies before each expert, among the copies for the same device, and before each device.
    before = jnp.cumsum(load, axis=1) - load
    total = jnp.sum(load, axis=1)
    start = jnp.cumsum(total) - total
    place = lax.iota(jnp.int32, rows)[None, :]
    row = jnp.where(place < total[:, None], start[:, None] + place, copies)  # (n, C), rows of `sorted_`
    order = sorted_.order.at[row.reshape(-1)].get(mode="fill", fill_value=copies)
    part = experts_Tk.reshape(-1) // load.shape[1]
    place = sorted_.inverse - start[part]
    inverse = jnp.where(place < rows, part * rows + place, parts * rows)
    return SendPlan(Slots(order, inverse), jnp.clip(rows - before, 0, load))


def experts_implementation(config: Config, tokens: int) -> Implementation | None:
    """Chooses the implementation of the grouped MLP for a layer's experts, and says why.

    Args:
      config: numbers of the model.
      tokens: number T of tokens in the layer's input.

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
    """Sends each token to its `top_k` experts and adds their outputs and the shared expert's, if any.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from models import Config, MoE
      >>> out, stats = MoE(Config.preset("tiny"), rngs=nnx.Rngs(0))(jnp.ones((6, 128), jnp.bfloat16))
      >>> out.shape, int(stats.load.sum())
      ((6, 128), 12)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, division: Division | None = None):
        c = self.config = config
        self.division = division
        self.router = normal(rngs, (c.d_model, c.num_experts), c.d_model**-0.5, c)
        self.w1 = normal(rngs, (c.num_experts, c.d_model, c.d_expert), c.d_model**-0.5, c)
        out_scale = c.d_expert**-0.5 / (2 * c.num_layers) ** 0.5
        self.w2 = normal(rngs, (c.num_experts, c.d_expert, c.d_model), out_scale, c)
        self.shared = MLP(c, c.d_shared, "moe.shared_act", rngs=rngs) if c.d_shared else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, RouterStats]:
        """Maps (..., D) in the compute dtype to (..., D) and the router's stats."""
        c, shape = self.config, x.shape
        # The shared expert, the router and the experts read the same value, under a single name.
        x_TD = x.reshape(-1, c.d_model)
        x_TD = jaxoff.name(x_TD, "moe.shared_fc1_in") if self.shared is not None else pin(x_TD)
        for_router, for_experts, for_shared = fan_out(x_TD)

        router = self.router[...].astype(jnp.float32)
        logits_TE = jnp.dot(for_router.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
        logits_TE = jaxoff.name(logits_TE, "moe.router_logits")
        routing = choose_experts(logits_TE, c)
        stats = router_stats(logits_TE, routing, self.division.tokens if self.division else ())
        if self.division is None or self.division.parts == 1:
            out_TD: jax.Array = moe(for_experts, routing.probs, routing.experts, *self._weights())
        else:
            out_TD, overflow = self._divide_experts(for_experts, routing, stats.load, self.division)
            stats = stats._replace(overflow=overflow)
        out_TD: jax.Array = jaxoff.name(out_TD, "moe.combined")
        if self.shared is not None:
            both = out_TD.astype(jnp.float32) + self.shared(for_shared).astype(jnp.float32)
            out_TD = pin(both.astype(c.dtype))
        return out_TD.reshape(shape), stats

    def _weights(self) -> tuple[jax.Array, jax.Array]:
        """Returns w1 and w2 in the compute dtype."""
        w1, w2 = (pin(w[...].astype(self.config.dtype)) for w in (self.w1, self.w2))
        return w1, w2

    def _divide_experts(
        self, x_TD: jax.Array, routing: Routing, load_E: jax.Array, division: Division
    ) -> tuple[jax.Array, jax.Array]:
        """Sends rows to their experts' devices and back; returns the tokens' sums and the rows left out."""
        n, copies = division.parts, routing.experts.size
        slots, load = plan_sends(routing.experts, load_E, n, rows := division.rows(copies))

        def all_to_all(x):  # first axis: target devices of the input, source devices of the result
            return lax.all_to_all(x, division.experts, 0, 0, tiled=True)

        rows_SD, probs_S = all_to_all(dispatch(x_TD, slots)), all_to_all(dispatch_probs(routing.probs, slots))
        came = all_to_all(load)
        # Rows from each device are sorted by expert; empty rows are sorted behind the last expert.
        place = lax.iota(jnp.int32, rows)[None, :, None]
        expert_S = jnp.sum(place >= jnp.cumsum(came, axis=1)[:, None, :], axis=2, dtype=jnp.int32)
        local = sort_by_expert(expert_S)
        probs = dispatch_probs(probs_S, local)
        load_E = jnp.sum(came, axis=0, dtype=jnp.int32)
        out = grouped_mlp(dispatch(rows_SD, local), *self._weights(), load_E, probs=probs)
        back = all_to_all(combine(out, local, 1))
        return combine(back, slots, self.config.top_k), copies - jnp.sum(load, dtype=jnp.int32)
