"""When copies of loops start, and what they cost in memory: compiled for an H200."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._compiled import hlo
from jaxoff._runtime.flags import PROFILE
from tests.aot.programs import QUICK

pytestmark = pytest.mark.aot


# By XLA's estimate a turn of the backward pass takes longer than a copy, for which it has 5 ms.
ROWS = 1 << 21


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def compile_and_verify(step, *args, **options):
    jitted = jaxoff.jit(step, compiler_options=QUICK, **options)
    compiled = jaxoff.target("h200").compile(jitted, *args)
    return jitted, compiled, jaxoff.verify(compiled, compiler_options=jitted.options)


def gated_layer(x, w):
    """The gradients of its scale are the last and least of a turn of the backward pass."""
    x = jaxoff.name(x, "x_in")
    normed = (
        x * lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(x.dtype) * w["scale"]
    )
    gate, up = (jaxoff.name(normed @ w[name], "act") for name in ("gate", "up"))
    return x + (jax.nn.gelu(gate) * up) @ w["down"], None


def gated_loss(w, x):
    body = jax.checkpoint(gated_layer, policy=jaxoff.policy(offload=["x_in", "act"]), prevent_cse=False)
    return jax.lax.scan(body, x, w)[0].astype(jnp.float32).var()


def gated_arguments():
    w = {"gate": struct(6, 512, 1024), "up": struct(6, 512, 1024), "down": struct(6, 1024, 512)}
    return w | {"scale": struct(6, 512)}, struct(ROWS, 512)


@pytest.fixture(scope="module")
def gated():
    """The copies from the host by a recipe, and the options: recipe -> (facts, options)."""

    def compile_by(recipe):
        step, _, facts = compile_and_verify(jax.grad(gated_loss), *gated_arguments(), recipe=recipe)
        return [copy for copy in facts.copies if copy.direction == "H2D"], step.options

    return {recipe: compile_by(recipe) for recipe in ("early", "ordered")}


def test_early_copies_start_as_soon_as_the_order_lets_them(gated):
    beside = {
        recipe: [sum(compute.kind == "gemm" for compute in copy.overlaps) for copy in copies]
        for recipe, (copies, _) in gated.items()
    }
    assert len(beside["early"]) == 3
    assert min(beside["early"]) >= 2
    assert sum(beside["early"]) > sum(beside["ordered"])
    assert all(copy.via == "dma" and copy.is_async for copy in gated["early"][0])


def test_the_profile_of_early_copies_is_an_option_and_a_users_profile_wins(gated):
    (_, early), (_, ordered) = gated.values()
    profile = pathlib.Path(early[PROFILE]).read_text()
    assert profile.count("costs {") == 6  # each copy of the two loops
    assert PROFILE not in ordered
    given = QUICK | {PROFILE: early[PROFILE]}
    step = jaxoff.jit(jax.grad(gated_loss), compiler_options=given)
    jaxoff.target("h200").lower(step, *gated_arguments())
    assert step.options[PROFILE] == early[PROFILE] and step.recipe != "early"


def test_no_loop_changes_the_layout_of_a_saved_stack():
    """Attention reads heads first. XLA would turn each stack of projections round, between the loops."""
    layers, batch, length, heads, head = 4, 8, 512, 8, 64
    width = heads * head

    def body(x, w):
        x = jaxoff.name(x, "x_in")
        q, k, v = (jaxoff.name((x @ w[n]).reshape(batch, length, heads, head), "qkv") for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(x.dtype), v)
        return x + mixed.reshape(x.shape) @ w["o"], None

    policy = jaxoff.policy(offload=["x_in"], save=["qkv"])

    def loss(w, x):
        block = jax.checkpoint(body, policy=policy, prevent_cse=False)
        return jax.lax.scan(block, x, w)[0].astype(jnp.float32).var()

    args = {name: struct(layers, width, width) for name in "qkvo"}, struct(batch, length, width)
    _, compiled, _ = compile_and_verify(jax.grad(loss), *args, recipe="concurrent")
    entry = hlo.parse(compiled.as_text()).entry
    stack = 2 * layers * batch * length * width
    turned = [i.name for i in entry.instructions if "transpose" in i.name and i.shape.nbytes >= stack]
    assert not turned


def test_a_loop_in_a_layer_leaves_the_starts_of_copies_to_the_early_recipe():
    def inner(x, w):
        return x + jnp.tanh(x @ w) @ w.T, None

    def outer(x, w):
        x = jaxoff.name(x, "x_in")
        x, _ = jax.lax.scan(jax.checkpoint(inner, prevent_cse=False), x, w["inner"])
        return x + jaxoff.name(jnp.square(jax.nn.relu(x @ w["up"])), "act") @ w["down"], None

    body = jax.checkpoint(outer, policy=jaxoff.policy(offload=["x_in", "act"]), prevent_cse=False)

    def loss(w, x):
        return jax.lax.scan(body, x, w)[0].astype(jnp.float32).var()

    w = {"inner": struct(4, 3, 512, 512), "up": struct(4, 512, 1024), "down": struct(4, 1024, 512)}
    step = jaxoff.jit(jax.grad(loss), compiler_options=QUICK)
    jaxoff.target("h200").lower(step, w, struct(32768, 512))
    assert step.recipe == "early"  # the first to be tried
    _, _, facts = compile_and_verify(jax.grad(loss), w, struct(32768, 512), recipe="early")
    copies = [copy for copy in facts.copies if copy.direction == "H2D"]
    assert copies and all(any(c.kind in ("gemm", "loop") for c in copy.overlaps) for copy in copies)
