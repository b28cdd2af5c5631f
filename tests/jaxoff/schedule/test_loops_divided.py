"""Layer loops whose values the compiler divides over devices (axes of type Auto)."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr.shares import apply_to_shares, record_sharding
from jaxoff._schedule import rewrite as rewriting
from jaxoff._schedule import sharding_marks
from tests.recipes import jit_in_order

LAYERS, ROWS, WIDTH = 4, 16, 32


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def train(weights, x, policy):
    def layer(x, w):
        x = jaxoff.name(x, "x_in")
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(weights):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return (jax.lax.scan(body, x, weights)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


def make_arguments(mesh, spec):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)),
        "down": 0.1 * jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)),
    }
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    shardings = {"up": NamedSharding(mesh, P(None, *spec)), "down": NamedSharding(mesh, P(None, *spec[::-1]))}
    return jax.device_put(weights, shardings), jax.device_put(x, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize(
    "spec", [("data", "model"), ("data", None), (None, "model")], ids=["both", "fsdp", "tp"]
)
@pytest.mark.some_cases(1)
def test_host_stacks_are_handed_over_and_the_step_is_the_same(mesh, spec, monkeypatch):
    found = []
    original = rewriting.find_host_stacks
    monkeypatch.setattr(
        rewriting, "find_host_stacks", lambda *args: found.extend(original(*args)) or original(*args)
    )
    step = functools.partial(train, policy=jaxoff.policy(offload=["x_in"]))
    arguments = make_arguments(mesh, spec)
    ours, theirs = jit_in_order(step), jax.jit(step)
    compiled = ours.lower(*arguments).compile()
    assert [stack.prefetched for stack in found] == [True]
    value, weights = compiled(*arguments)
    expected, expected_weights = theirs(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), weights, expected_weights
    )
    # Each device waits for its own share: no communication but that of the program as given.
    exchanged = count_exchanged(compiled)
    assert exchanged == count_exchanged(theirs.lower(*arguments).compile())
    assert exchanged["all-reduce"] > 0
    # The loops have the shardings of the program as given.
    assert "CustomSPMDPartitioning" in ours.lower(*arguments).as_text()


def count_exchanged(compiled):
    """The elements that each kind of collective exchanges; XLA may combine several collectives into one."""
    found = re.findall(
        r"= (\(?[^()=]*\)?) (all-gather|all-reduce|reduce-scatter|all-to-all)\(", compiled.as_text()
    )
    counts = collections.Counter()
    for types, kind in found:
        shapes = re.findall(r"\[([\d,]*)\]", re.sub(r"\{[^}]*\}|/\*.*?\*/", "", types))
        counts[kind] += sum(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)
    return counts


def test_marks_record_what_the_compiler_chooses(mesh):
    step = functools.partial(train, policy=jaxoff.policy(offload=["x_in"]))
    arguments = make_arguments(mesh, ("data", None))
    closed = jax.make_jaxpr(step)(*arguments)
    compiled = []

    def lower_program(marked):
        lowered = jax.jit(jax.extend.core.jaxpr_as_fun(marked)).lower(*jax.tree.leaves(arguments))
        return lambda: compiled.append(lowered.compile())

    shardings = sharding_marks.find_loop_shardings(closed, lower_program)
    assert not compiled  # the last mark ends the compilation
    forward, backward = shardings[0], shardings[1]
    assert forward.carry[0].spec == P("data", None)
    assert forward.ys[0].spec == P("data", None)
    assert backward.carry[0].spec == P("data", None)


def test_a_program_without_loops_is_not_compiled_for_its_shardings(mesh):
    closed = jax.make_jaxpr(lambda x: x * 2)(1.0)
    refuse = pytest.fail
    assert sharding_marks.find_loop_shardings(closed, refuse) == {}


def test_each_device_applies_the_function_to_its_share(mesh):
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("data", "model")))

    @jax.jit
    def double_first(x):
        return apply_to_shares(
            lambda share, *, shape: share.at[0, 0].multiply(2), [x], like=lambda x: x, follows_first=True
        )

    doubled = np.argwhere(np.asarray(double_first(x)) != np.asarray(x))
    # The first element of each of four shares; the first of all is 0.
    np.testing.assert_array_equal(doubled, [[0, 2], [2, 0], [2, 2]])


def test_a_mark_changes_nothing(mesh):
    recorded = []
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("data", "model")))
    y = jax.jit(lambda x: record_sharding(x, recorded.append))(x)
    np.testing.assert_array_equal(y, x)
    assert {sharding.spec for sharding in recorded} == {P("data", "model")}
