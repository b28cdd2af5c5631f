"""State on the host in the program compiled for a GPU: copies by the link's engines, in place."""

import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxoff
from bench import largest
from tests.aot.programs import TRITON

pytestmark = pytest.mark.aot

LAYERS, ROWS, WIDTH = 4, 1024, 2048
MOMENTS_NBYTES = 2 * LAYERS * WIDTH * WIDTH * 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def step(state, x):
    def loss(w):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w.astype(h.dtype)), None))
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()

    w, optimizer_state = state
    value, grads = jax.value_and_grad(loss)(w)
    changes, optimizer_state = OPTIMIZER.update(grads, optimizer_state, w)
    return (optax.apply_updates(w, changes), optimizer_state), value


@pytest.mark.parametrize("devices", [1, 2])
def test_moments_rest_on_the_host_and_are_copied_in_place_by_dma(devices):
    """On two GPUs each holds half of the moments, weights and rows, divided by the compiler."""
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    args = (w, jax.eval_shape(OPTIMIZER.init, w)), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    target = jaxoff.target("h100", devices=devices)
    mesh = target.mesh((devices,), ("data",))

    def divide(leaf):
        axes = [None] * (leaf.ndim - 2) + ["data", None][: leaf.ndim]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args = jax.tree.map(divide, args) if devices > 1 else args
    of_a_device = MOMENTS_NBYTES // devices
    budget = 1.9 * of_a_device if devices > 1 else 1.4 * MOMENTS_NBYTES  # less than the state takes
    within = jaxoff.jit(step, donate_argnums=0, device_bytes=budget, compiler_options=TRITON)
    compiled = target.compile(within, *args)
    facts = jaxoff.verify(compiled, compiler_options=within.options)
    assert facts.device_peak_bytes <= budget
    assert within.plan.host_bytes == MOMENTS_NBYTES
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == of_a_device
    assert memory.host_temp_size_in_bytes == 0  # nothing is copied within host memory
    assert facts.d2h_bytes == facts.h2d_bytes == of_a_device
    in_loops = [copy for copy in facts.copies if copy.loop]
    assert {copy.via for copy in in_loops} == {"dma"}
    assert not any(copy.captured for copy in in_loops)  # in graphs they would run one after the other
    # XLA dissolves the loop that reads the first of 16 blocks, and reads it by a kernel.
    assert sum(copy.nbytes * copy.count for copy in in_loops) == (1 + 15 / 16) * of_a_device
    whole = rf"f32\[{LAYERS},{WIDTH // devices},{WIDTH}\]\{{2,1,0:S\(5\)\}} copy"
    assert not re.findall(whole, str(compiled.as_text()))


def test_moments_are_copied_beside_the_backward_pass_where_nothing_clips_the_gradients():
    layers, optimizer = 16, optax.adamw(1e-3)

    def step(state, x):
        def loss(w):
            layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w.astype(h.dtype)), None))
            return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()

        w, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(w)
        changes, optimizer_state = optimizer.update(grads, optimizer_state, w)
        return (optax.apply_updates(w, changes), optimizer_state), value

    w = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    args = (w, jax.eval_shape(optimizer.init, w)), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    row = WIDTH * WIDTH * 4
    budget = 2.2 * layers * row  # the state takes three
    within = jaxoff.jit(step, donate_argnums=0, device_bytes=budget)
    compiled = jaxoff.target("h100").compile(within, *args)
    facts = jaxoff.verify(compiled, compiler_options=within.options)
    assert facts.device_peak_bytes <= budget
    assert within.plan.host_bytes == 2 * layers * row
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 2 * layers * row
    assert memory.host_temp_size_in_bytes == 0
    rows = [copy for copy in facts.copies if copy.loop and copy.nbytes == row]
    assert {(copy.direction, copy.count) for copy in rows if copy.count != 1} == {
        ("D2H", layers),
        ("H2D", layers),
    }
    assert {copy.via for copy in rows} == {"dma"}
    whole = rf"f32\[{layers},{WIDTH},{WIDTH}\]\{{2,1,0:S\(5\)\}} copy"
    assert not re.findall(whole, str(compiled.as_text()))


@pytest.mark.long
def test_the_benchmark_of_the_largest_decoder_ends_at_the_first_that_does_not_fit(tmp_path):
    out = tmp_path / "largest.json"
    largest.main(["--layers", "1", "2", "3", "--tokens", "1024", "--device-gb", "30", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    found = [(row["variant"], row["layers"], row["peak_bytes"] <= 30e9) for row in rows]
    without = [("device", 1, True), ("device", 2, False)]
    assert found == without + [("budget", layers, True) for layers in (1, 2, 3)]
    assert rows[-1]["host_bytes"] > 0
