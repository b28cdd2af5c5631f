"""State on the host on a GPU: the bits of the same program with its state on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_program
from jaxoff._state.stream import list_streamable, stream_updates
from jaxoff._state.updates import find_updates

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
# 403 MB of state, large beside 33.6 MB: the scratch of a product by cuBLAS, if autotuning chooses it.
LAYERS, ROWS, WIDTH, VOCABULARY = 4, 512, 2048, 8192
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def initialize(key):
    keys = jax.random.split(key)
    params = {
        "embed": 0.02 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
    }
    return params, OPTIMIZER.init(params)


def step(state, tokens):
    def loss(params):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w.astype(h.dtype)), None))
        x = params["embed"].astype(jnp.bfloat16)[tokens]
        x, _ = jax.lax.scan(layer, x, params["w"])
        logits = (x @ params["embed"].astype(jnp.bfloat16).T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1)).mean()

    params, optimizer_state = state
    value, grads = jax.value_and_grad(loss)(params)
    changes, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
    return (optax.apply_updates(params, changes), optimizer_state), value


@pytest.mark.gpu
def test_fifty_steps_have_the_bits_of_state_on_the_device():
    state, tokens = jax.jit(initialize)(jax.random.key(0)), jnp.arange(ROWS) % 97
    leaves = jax.tree.leaves((state, tokens))
    closed = compat.map_open(jax.make_jaxpr(step)(state, tokens), inline_program)
    updates = list_streamable(find_updates(closed.jaxpr, [*[True] * (len(leaves) - 1), False]))
    assert sum(len(update.states) for update in updates) == 4
    streamed = stream_updates(closed, updates)

    def run(program):
        donated = tuple(range(len(leaves) - 1))
        function = jax.jit(
            compat.jaxpr_as_fun(program), donate_argnums=donated, compiler_options=DETERMINISTIC
        )
        on_host = [compat.is_host(v.aval) for v in program.jaxpr.invars]
        values = jax.tree.leaves((jax.jit(initialize)(jax.random.key(0)), tokens))
        host = values[0].sharding.with_memory_kind("pinned_host")
        values = [jax.device_put(x, host) if rests else x for x, rests in zip(values, on_host, strict=True)]
        losses = []
        for _ in range(50):
            *values[:-1], loss = function(*values)
            losses.append(float(loss))
        assert [x.sharding.memory_kind == "pinned_host" for x in values] == on_host
        return losses, [np.asarray(x) for x in values]

    (losses, values), (expected, others) = run(streamed), run(closed)
    assert losses == expected
    assert losses[-1] < losses[0]
    for ours, theirs in zip(values, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu
def test_a_step_within_a_budget_keeps_its_moments_on_the_host():
    state, tokens = jax.jit(initialize)(jax.random.key(0)), jnp.arange(ROWS) % 97
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    within = jaxoff.jit(step, donate_argnums=0, device_bytes=nbytes)
    plain, other = jax.jit(step), jax.jit(initialize)(jax.random.key(0))
    for _ in range(4):
        (other, expected), (state, value) = plain(other, tokens), within(state, tokens)
        np.testing.assert_allclose(value, expected, rtol=2e-3)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state[1]) if x.ndim}
    assert kinds == {"pinned_host"}
    assert within.plan.peak_bytes <= nbytes
    # NumPy arrays that share the memory of the state, as a checkpoint that is being written has them.
    held = jax.device_get(state)
    copies = jax.tree.map(np.array, held)
    (other, expected), (after, value) = plain(other, tokens), within(state, tokens)
    np.testing.assert_allclose(value, expected, rtol=2e-3)
    jax.tree.map(np.testing.assert_array_equal, held, copies)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(after[1]) if x.ndim} == {"pinned_host"}
    assert np.any(np.asarray(jax.tree.leaves(after[1])[-1]) != jax.tree.leaves(held[1])[-1])


@pytest.mark.multi_gpu(2)
def test_two_gpus_keep_their_parts_of_the_moments_on_the_host():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, P(*[None] * (leaf.ndim - 2), *["data", None][: leaf.ndim])),
        jax.eval_shape(initialize, jax.random.key(0)),
    )
    tokens = jax.device_put(jnp.arange(ROWS) % 97, NamedSharding(mesh, P("data")))

    def make():
        return jax.jit(initialize, out_shardings=shardings)(jax.random.key(0))

    state, other = make(), make()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state)) / 2
    keywords = {"donate_argnums": 0, "out_shardings": (shardings, None), "compiler_options": DETERMINISTIC}
    within, plain = jaxoff.jit(step, device_bytes=1.2 * nbytes, **keywords), jax.jit(step, **keywords)
    for _ in range(10):
        (other, expected), (state, value) = plain(other, tokens), within(state, tokens)
        np.testing.assert_allclose(value, expected, rtol=2e-3)
    hosted = [leaf for leaf in jax.tree.leaves(state[1]) if leaf.sharding.memory_kind == "pinned_host"]
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state[1]))
    assert within.plan.host_bytes == sum(leaf.nbytes for leaf in hosted) > moments / 4  # as little as needed
    assert within.plan.peak_bytes <= 1.2 * nbytes
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert ours.sharding.with_memory_kind("device").is_equivalent_to(theirs.sharding, ours.ndim)


@pytest.mark.gpu
def test_moments_updated_in_the_backward_pass_are_those_of_the_step_on_the_device():
    optimizer = optax.adamw(1e-3)  # nothing clips the gradients

    def step(state, x):
        def loss(w):
            layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w.astype(h.dtype)), None))
            return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()

        w, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(w)
        changes, optimizer_state = optimizer.update(grads, optimizer_state, w)
        return (optax.apply_updates(w, changes), optimizer_state), value

    def initialize():
        w = jax.random.normal(jax.random.key(0), (16, WIDTH, WIDTH)) / WIDTH
        return w, optimizer.init(w)

    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    options = {"donate_argnums": 0, "compiler_options": DETERMINISTIC}
    plain, (state, other) = jax.jit(step, **options), (initialize(), initialize())
    memory = plain.lower(state, x).compile().memory_analysis()
    moments = 2 * 16 * WIDTH * WIDTH * 4
    budget = memory.argument_size_in_bytes + memory.temp_size_in_bytes - 0.6 * moments
    within = jaxoff.jit(step, device_bytes=budget, **options)
    for _ in range(10):
        (state, value), (other, expected) = within(state, x), plain(other, x)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    hosted = {value.source for value in within.plan.values if value.placement == "offload"}
    assert hosted == {"state, updated in the backward pass"}
    assert within.plan.host_bytes == moments
    assert sum(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state)) == 2
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-2, atol=1e-6)
