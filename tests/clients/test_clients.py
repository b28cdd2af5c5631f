"""Whole train steps in other people's styles: `jaxoff.jit` computes what `jax.jit` and the saved twin do."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from bench.client_steps import PROGRAMS

# XLA may leave out a rounding to bfloat16 between operations that it fuses, and barriers change its fusions.
# With these options each program rounds every value, so that results are equal to the bit.
ROUNDED = {"xla_allow_excess_precision": False, "xla_disable_hlo_passes": "algsimp"}

# Styles close to another's: bits of whole steps on demand.
LONG = {
    "accumulation",
    "autoencoder",
    "decoder-python",
    "dit",
    "dpo",
    "encoder-decoder",
    "equinox",
    "equimo",
    "groups",
    "haiku",
    "inner-jit",
    "layer-axis",
    "linen-scan",
    "lora",
    "mamba2",
    "moe-linen",
    "nnx-list",
    "nnx-scan",
    "retention",
    "ssm",
    "ssm-chunks",
    "unet",
    "vit",
}
# Programs that are traced with and without offloads; traces of the others take seconds or run the same lines.
TRACED_TWICE = {
    "accumulation",
    "decoder-python",
    "equimo",
    "haiku",
    "layer-axis",
    "linen-scan",
    "mamba2",
    "moe-linen",
    "nnx-list",
    "ssm",
    "vit",
}


def build(name, **options):
    pytest.importorskip(PROGRAMS[name].package)
    program = PROGRAMS[name].shrink()
    layers = 4 if name == "groups" else 2
    return program.build(dataclasses.replace(program.sizes, layers=layers), attention="xla", **options)


def run(step, transform, state):
    """The state and the loss after a step from a state on the host, on the host."""
    jitted = step.jit(transform, compiler_options=ROUNDED)
    state = jax.tree.map(jnp.asarray, state)
    return jitted, jax.tree.map(np.asarray, jitted(state, step.make_batch(jax.random.key(1))))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in PROGRAMS],
)
def test_a_step_keeps_its_bits_and_its_function_runs_once(name):
    offloading, calls = build(name), []

    def counted(state, batch):
        calls.append(1)
        return offloading.fun(state, batch)

    initial = jax.tree.map(np.asarray, jax.jit(offloading.initialize)(jax.random.key(0)))
    jitted, (state, loss) = run(dataclasses.replace(offloading, fun=counted), jaxoff.jit, initial)
    assert len(calls) == 1
    assert jitted.findings == ()
    _, (stock_state, stock_loss) = run(offloading, jax.jit, initial)
    _, (saved_state, saved_loss) = run(build(name, offloads=False), jax.jit, initial)
    assert np.isfinite(loss)
    assert loss == stock_loss == saved_loss
    assert jax.tree.structure(state) == jax.tree.structure(stock_state)
    for ours, *others in zip(*map(jax.tree.leaves, (state, stock_state, saved_state)), strict=True):
        for other in others:
            np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in TRACED_TWICE)) for name in PROGRAMS]
)
def test_a_step_offloads_and_its_twin_does_not(name):
    def count_transfers(step, transform):
        text = str(step.jit(transform).trace(step.state, step.batch).jaxpr)
        return len(re.findall(r"<host>.* = device_put|:\w+<host>\[", text))

    offloading, saving = build(name), build(name, offloads=False)
    assert jax.tree.structure(offloading.state) == jax.tree.structure(saving.state)
    assert count_transfers(offloading, jax.jit) > 0
    assert count_transfers(offloading, jaxoff.jit) > 0
    assert count_transfers(saving, jax.jit) == 0


def test_checkpoints_in_an_inner_jit_whose_last_result_is_its_own():
    def layer(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    def run(ws, x):
        for w in ws:
            x = jax.checkpoint(layer, policy=jaxoff.policy(unmarked="offload_dots"))(w, x)
        return x

    weights, x = [jnp.full((8, 8), 0.1)] * 3, jnp.ones((4, 8))
    step = jax.value_and_grad(lambda ws, x: jax.jit(run)(ws, x).sum())
    stock = jax.jit(step, compiler_options=ROUNDED)(weights, x)
    ours = jaxoff.jit(step, compiler_options=ROUNDED)(weights, x)
    jax.tree.map(np.testing.assert_array_equal, ours, stock)
