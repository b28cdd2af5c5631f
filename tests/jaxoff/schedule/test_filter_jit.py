"""`jaxoff.filter_jit`: what `equinox.filter_jit` computes, by the program of `jaxoff.jit`."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes
from jaxoff._state import stream
from tests.jaxoff.policy.matrix import assert_close

WIDTH, HIDDEN, LAYERS, ROWS = 8, 32, 3, 16
POLICY = jaxoff.policy(offload=["act"])
OPTIMIZER = optax.adamw(1e-2)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[..., jax.Array] = jnp.tanh

    def __call__(self, x):
        return x + self.down(jaxoff.name(self.activation(self.up(x)), "act"))


class Model(eqx.Module):
    """A stack of blocks under the policy, with a function and a text among its leaves."""

    blocks: Block
    title: str = "a model"

    def __init__(self, key, width=WIDTH, hidden=HIDDEN, layers=LAYERS):
        def make(key):
            up, down = jax.random.split(key)
            return Block(eqx.nn.Linear(width, hidden, key=up), eqx.nn.Linear(hidden, width, key=down))

        self.blocks = eqx.filter_vmap(make)(jax.random.split(key, layers))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def body(x, arrays):
            return jax.vmap(eqx.combine(arrays, rest))(x), None

        return jax.lax.scan(jax.checkpoint(body, policy=POLICY, prevent_cse=False), x, arrays)[0]

    @jaxoff.filter_jit
    def loss(self, x, *, power=2):
        return jnp.mean(self(x) ** power)


def make_state(key=0, **sizes):
    model = Model(jax.random.key(key), **sizes)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def take_step(state, x, scale=1.0):
    model, optimizer_state = state
    loss, grads = eqx.filter_value_and_grad(lambda model: scale * jnp.mean(model(x) ** 2))(model)
    updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, eqx.filter(model, eqx.is_array))
    return (eqx.apply_updates(model, updates), optimizer_state), {"loss": loss, "scale": scale}


def make_x():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


@pytest.mark.parametrize("donate", ["all", "none"])
def test_losses_and_state_of_several_steps_are_those_of_equinox(donate):
    def train(filter_jit):
        state, losses, traces = make_state(), [], []

        def counted(state, x, scale):
            traces.append(x)
            return take_step(state, x, scale)

        step = filter_jit(counted, donate=donate)
        for scale in (1.0, 1.0, 0.5):
            state, results = step(state, make_x(), scale)
            assert results["scale"] == scale and isinstance(results["scale"], float)
            losses.append(results["loss"])
        assert len(traces) == 2  # one for each scale, which is static
        assert state[0].title == "a model" and state[0].blocks.activation is jnp.tanh
        return losses, jax.tree.leaves(eqx.filter(state, eqx.is_array))

    (losses, arrays), (want, want_arrays) = train(jaxoff.filter_jit), train(eqx.filter_jit)
    assert losses[1] < losses[0]
    assert_close(losses, want)
    assert_close(arrays, want_arrays)


def test_residuals_of_the_step_are_offloaded():
    step = jaxoff.filter_jit(take_step)
    text = str(step.trace(make_state(), make_x()).jaxpr)
    assert text.count("MemorySpace.Host") == 2  # the stack's allocation and a layer's copy
    assert step.findings == () and step.recipe == "concurrent"


@pytest.mark.parametrize(
    ("donate", "first", "second"),
    [
        ("all", True, True),
        ("warn-except-first", False, True),
        ("all-except-first", False, True),
        ("none", False, False),
    ],
)
def test_the_arguments_to_donate_are_donated(donate, first, second):
    def swap(x, y):
        return y + 1, x + 1

    x, y = jnp.ones(3), jnp.zeros(3)
    jaxoff.filter_jit(swap, donate=donate)(x, y)
    assert (x.is_deleted(), y.is_deleted()) == (first, second)


def test_jax_warns_of_memory_that_was_of_no_use_where_asked():
    def total(x):
        return x.sum()

    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        jaxoff.filter_jit(total, donate="warn")(jnp.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxoff.filter_jit(lambda x: x.sum(), donate="all")(jnp.ones(4))


def test_methods_and_functions_that_hold_arrays_are_traced_once_for_all_weights():
    x, models = make_x(), [Model(jax.random.key(key)) for key in range(2)]
    for model in models:
        assert_close(model.loss(x), jnp.mean(model(x) ** 2))
        assert_close(model.loss(x=x, power=3), jnp.mean(model(x) ** 3))
    called = jaxoff.filter_jit(models[0], donate="none")
    assert_close(called(x), models[0](x))
    assert Model.loss.jitted._cache_size() == 2  # one for each power
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        models[0].loss()


def test_numpy_arrays_and_scalars_are_traced_and_python_numbers_are_not():
    types = []

    @jaxoff.filter_jit
    def collect(*values, **more):
        types.extend(isinstance(value, jax.Array) for value in (*values, *more.values()))
        return values, more

    (array, scalar, number, nothing), more = collect(np.ones(2), np.float32(3), 4, None, key=jnp.ones(1))
    assert types == [True, True, False, False, True]
    assert isinstance(array, jax.Array) and float(scalar) == 3.0 and number == 4 and nothing is None
    assert more["key"].shape == (1,)


def test_it_is_an_inner_function_of_another_one_and_of_a_gradient():
    model, x = Model(jax.random.key(0)), make_x()
    inner = jaxoff.filter_jit(lambda model, x: jnp.mean(model(x) ** 2))
    with pytest.warns(UserWarning, match="outermost"):
        grads = eqx.filter_grad(inner)(model, x)
    assert_close(
        grads.blocks.up.weight, eqx.filter_grad(lambda m: jnp.mean(m(x) ** 2))(model).blocks.up.weight
    )


def test_state_on_the_host_is_named_by_its_path(monkeypatch):
    monkeypatch.setattr(stream, "_BLOCK_NBYTES", 1 << 18)
    state: Any = make_state(width=128, hidden=512, layers=6)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    x = jax.random.normal(jax.random.key(1), (64, 128))
    step = jaxoff.filter_jit(take_step, donate="all", device_bytes=0.9 * nbytes)
    losses = []
    for _ in range(2):
        state, results = step(state, x)
        losses.append(results["loss"])
    assert losses[1] < losses[0]
    on_host = [
        leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state[1]) if leaf.ndim == 3
    ]
    assert on_host == 4 * [True]
    assert "state/1/0/mu/blocks/up/weight " in str(step.plan)


def test_a_step_within_a_budget_has_a_plan():
    step = jaxoff.filter_jit(take_step, donate="all", device_bytes="100kB")
    state, results = step(make_state(), make_x())
    assert float(results["loss"]) > 0 and 0 < step.plan.peak_bytes <= 100e3
    least = jaxoff.filter_jit(take_step, donate="all", device_bytes="1kB")
    with pytest.raises(jaxoff.BudgetError, match="no program fits"):
        least(state, make_x())


def test_what_it_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"donate is one of .*; got 'first'"):
        jaxoff.filter_jit(take_step, donate="first")
    with pytest.raises(ValueError, match="takes no donate_argnums"):
        jaxoff.filter_jit(take_step, donate_argnums=0)
    with pytest.raises(ValueError, match="recipe is one of"):
        jaxoff.filter_jit(take_step, recipe="fast")
    assert repr(jaxoff.filter_jit(take_step)) == f"jaxoff.filter_jit({take_step!r})"
    assert jaxoff.filter_jit(take_step).__name__ == "take_step"


@pytest.mark.aot
def test_structs_compile_for_a_gpu_that_is_not_there():
    rows, hidden, layers = 8192, 2048, 6
    state = eqx.filter_eval_shape(lambda: make_state(width=512, hidden=hidden, layers=layers))
    x = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
    target = jaxoff.target("h200")

    def compile_step(**options):
        donating = dict(donate="all-except-first") | options
        return target.compile(jaxoff.filter_jit(lambda x, s: take_step(s, x), **donating), x, state)

    compiled, saved = compile_step(), compile_step(recipe="saved")
    offloaded = 4 * rows * hidden * layers
    assert offloaded <= compiled.memory_analysis().host_temp_size_in_bytes <= (1 + 1 / layers) * offloaded
    assert program_nbytes(saved) - program_nbytes(compiled) >= 0.6 * offloaded
