"""A decoder unlike those the planner's model was made with: SwiGLU, grouped queries, a head in chunks."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxoff

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, VOCABULARY = 16, 4, 4096, 4096, 14336, 32000
HEADS, KV_HEADS, HEAD, CHUNKS = 32, 8, 128, 8
OPTIMIZER = optax.adamw(1e-4)
SHAPES = {
    "q": (WIDTH, HEADS * HEAD),
    "k": (WIDTH, KV_HEADS * HEAD),
    "v": (WIDTH, KV_HEADS * HEAD),
    "out": (HEADS * HEAD, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "norms": (2, WIDTH),
}


def norm(x, gain):
    wide = x.astype(jnp.float32)
    mean = lax.optimization_barrier(jnp.mean(wide * wide, -1, keepdims=True))
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype) * gain


def rotated(x):
    angle = jnp.arange(LENGTH)[:, None] * 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    even, odd = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape).astype(x.dtype)


def layer(x, w):
    x = jaxoff.name(x, "block_in")
    h = norm(x, w["norms"][0])
    q, k, v = ((h @ w[n]).reshape(BATCH, LENGTH, -1, HEAD) for n in "qkv")
    q, k, v = jaxoff.name(rotated(q), "q"), jaxoff.name(rotated(k), "k"), jaxoff.name(v, "v")
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + jaxoff.name(attended.reshape(x.shape), "attended") @ w["out"]
    x = jaxoff.name(x, "mid")
    h = norm(x, w["norms"][1])
    gate, up = jaxoff.name(h @ w["gate"], "gate"), jaxoff.name(h @ w["up"], "up")
    return x + (jax.nn.silu(gate) * up) @ w["down"], None


def loss(params, tokens, policy):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens[:, :-1]]
    x = norm(jaxoff.scan(layer, x, params["layers"], policy=policy)[0], params["norm"])

    @jax.checkpoint
    def chunk(total, rows):
        logits = (rows[0] @ params["head"]).astype(jnp.float32)
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, rows[1]).sum(), None

    rows = (x, tokens[:, 1:])
    rows = jax.tree.map(
        lambda r: r.reshape(BATCH, CHUNKS, LENGTH // CHUNKS, *r.shape[2:]).swapaxes(0, 1), rows
    )
    return lax.scan(chunk, 0.0, rows)[0] / tokens.size


def train_step(state, tokens, policy):
    params, moments = state
    value, grads = jax.value_and_grad(functools.partial(loss, policy=policy))(params, tokens)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def arguments():
    """The state of a train step in float32, and tokens."""

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "layers": {name: struct(LAYERS, *shape) for name, shape in SHAPES.items()},
        "embedding": struct(VOCABULARY, WIDTH),
        "head": struct(WIDTH, VOCABULARY),
        "norm": struct(WIDTH),
    }
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return (params, jax.eval_shape(OPTIMIZER.init, params)), tokens
