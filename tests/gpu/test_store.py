"""Values in float8 by `jaxoff.policy(store=...)` on a GPU."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._jaxpr.float8 import compress, restore

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, HIDDEN, ROWS = 4, 1024, 4096, 8192
FLOAT8 = {"h": "float8_e4m3fn"}


def make_step(style, policy):
    def layer(x, w):
        h = jaxoff.name(x @ w["up"], "h")
        return x + jax.nn.gelu(h) @ w["down"], None

    body = jax.checkpoint(layer, policy=policy, prevent_cse=style == "list")

    def loss(w, x):
        if style == "scan":
            return jax.lax.scan(body, x, w)[0].astype(jnp.float32).var()
        for i in range(LAYERS):
            x, _ = body(x, jax.tree.map(lambda a, i=i: a[i], w))
        return x.astype(jnp.float32).var()

    return jaxoff.jit(jax.value_and_grad(loss), recipe="concurrent" if style == "scan" else "ordered")


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (ROWS, WIDTH)
    up, down, x = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    return {"up": up / 32, "down": down / 64}, x


@pytest.mark.filterwarnings("ignore:offload-vanished:UserWarning")  # of a list XLA leaves most in place
@pytest.mark.parametrize("style", ["scan", "list"])
def test_values_in_float8_are_the_same_in_both_memories(style):
    offloads, saves = jaxoff.policy(offload=["h"], store=FLOAT8), jaxoff.policy(save=["h"], store=FLOAT8)
    args = make_arguments()
    steps = [make_step(style, policy) for policy in (offloads, saves, jaxoff.policy(save=["h"]))]
    (loss, moved), (saved_loss, saved), (exact_loss, exact) = (step(*args) for step in steps)
    assert loss == saved_loss
    assert jnp.allclose(loss, exact_loss, rtol=1e-3)
    for a, b, wide in zip(*map(jax.tree.leaves, (moved, saved, exact)), strict=True):
        a, b, wide = (x.astype(jnp.float32) for x in (a, b, wide))
        assert jnp.linalg.norm(a - b) < 2e-3 * jnp.linalg.norm(b)
        assert 1e-3 < jnp.linalg.norm(a - wide) / jnp.linalg.norm(wide) < 0.05


def test_measure_says_the_error_and_the_link_carries_half_of_the_bytes():
    args = make_arguments()
    step = make_step("scan", jaxoff.policy(offload=["h"], store=FLOAT8))
    taken = jaxoff.measure(step, *args, repeats=2, warmup=1, traced=1)
    (gpu,) = taken.gpus
    stack = LAYERS * ROWS * HIDDEN * (1 + 4 / 128)
    sent = gpu.d2h.nbytes
    assert (LAYERS - 1) / LAYERS * stack <= sent <= 1.01 * stack
    h = args[1] @ args[0]["up"][0]
    error = jnp.linalg.norm((h - restore(*compress(h), h.dtype)).astype(jnp.float32))
    first = float(error / jnp.linalg.norm(h.astype(jnp.float32)))
    assert taken.store_errors["h"] == pytest.approx(first, rel=0.2)
