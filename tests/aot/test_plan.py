"""The planner's predicted peak against that of programs compiled for an H200."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff

pytestmark = pytest.mark.aot

LAYERS, BATCH, LENGTH, WIDTH = 12, 4, 4096, 4096
# Within so much of the compiled program's.
PRECISION = 0.03


def norm(x):
    wide = x.astype(jnp.float32)
    mean = lax.optimization_barrier(jnp.mean(wide * wide, -1, keepdims=True))
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def layer(x, w):
    """A dense block with the sizes of one with attention; its sum over the sequence stands for that."""
    x = jaxoff.name(x, "x_in")
    q, k, v = jnp.split(jaxoff.name(norm(x) @ w["qkv"], "qkv"), 3, -1)
    mixed = q * jax.nn.sigmoid(k) + jnp.cumsum(v.astype(jnp.float32), 1).astype(v.dtype)
    x = jaxoff.name(x + jaxoff.name(mixed, "attn") @ w["proj"], "mlp_in")
    pre = jaxoff.name(norm(x) @ w["up"], "pre")
    return x + jnp.square(jax.nn.relu(pre)) @ w["down"], None


def arguments():
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "proj": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return {k: struct(LAYERS, *v) for k, v in shapes.items()}, struct(BATCH, LENGTH, WIDTH)


def loss(policy):
    def compute(w, x):
        return jnp.mean(jnp.square(jaxoff.scan(layer, x, w, policy=policy)[0].astype(jnp.float32)))

    return compute


def planned(**fixed):
    everything = dict.fromkeys(("x_in", "qkv", "attn", "mlp_in", "pre", "(dots)"), "recompute")
    return jaxoff.plan(loss(jaxoff.policy()), *arguments(), device_bytes=1e12, fixed=everything | fixed)


def compiled(policy):
    step = jaxoff.jit(jax.value_and_grad(loss(policy), (0, 1)))
    memory = jaxoff.target("h200").compile(step, *arguments()).memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes, memory.host_temp_size_in_bytes


SAVE, MOVE = "save", "offload"


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        dict(x_in=SAVE, qkv=SAVE, attn=SAVE, mlp_in=SAVE, pre=SAVE),
        dict(x_in=MOVE, attn=MOVE, mlp_in=MOVE),
        dict(x_in=MOVE, mlp_in=MOVE, pre=SAVE, attn=SAVE),
        pytest.param(dict(x_in=SAVE, pre=SAVE), marks=pytest.mark.long),
        pytest.param(dict(x_in=MOVE, qkv=MOVE), marks=pytest.mark.long),
        pytest.param(dict(x_in=SAVE, pre=MOVE), marks=pytest.mark.long),
        pytest.param(dict(qkv=SAVE, x_in=MOVE, attn=MOVE, mlp_in=MOVE), marks=pytest.mark.long),
    ],
    ids=lambda fixed: ",".join(f"{name}={choice}" for name, choice in fixed.items()) or "recompute",
)
def test_the_peak_is_that_of_the_compiled_program(fixed):
    found = planned(**fixed)
    peak, host = compiled(found.policy)
    assert found.peak_bytes == pytest.approx(peak, rel=PRECISION)
    assert found.host_bytes == host


@pytest.mark.parametrize("gigabytes", [13, pytest.param(20, marks=pytest.mark.long)])
def test_what_is_planned_fits_its_budget(gigabytes):
    found = jaxoff.plan(loss(jaxoff.policy()), *arguments(), device_bytes=gigabytes * 1e9)
    assert "offload" in {row.choice for row in found.rows}
    assert compiled(found.policy)[0] <= gigabytes * 1e9
