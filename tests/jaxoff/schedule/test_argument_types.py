"""What tells the programs of two calls apart, and how little of it a call in a training loop computes."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from jaxoff._schedule import argument_types
from jaxoff._schedule.argument_types import ArgumentTypes

X = np.ones((4, 2), np.float32)


def key_of(*leaves, types=None, others=()):
    return (types or ArgumentTypes(ignores_host=False)).make_key(leaves, others)[0]


def on_host(x):
    return jax.device_put(x, jax.memory.Space.Host)


def test_arrays_of_numpy_of_jax_and_described_have_one_type():
    described = jax.ShapeDtypeStruct(X.shape, X.dtype)
    keys = {key_of(x) for x in (X, jnp.asarray(X), jax.device_put(X), described, 2 * X)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    "make_other",
    [
        lambda: X[:2],
        lambda: X.astype(np.int32),
        lambda: 1.0,
        lambda: jnp.sin(1.0) * jnp.ones((4, 2)) + 0.0,
        lambda: on_host(X),
        lambda: jax.device_put(X, jax.devices()[1]),
        lambda: jax.device_put(X, jax.NamedSharding(jax.make_mesh((2,), ("d",)), jax.P("d"))),
    ],
    ids=["shape", "dtype", "number", "same", "host", "device", "sharding"],
)
def test_what_makes_another_program_makes_another_key(make_other, request):
    other = make_other()
    types = ArgumentTypes(ignores_host=False)
    first, second, third = (key_of(x, types=types) for x in (jnp.asarray(X), other, jnp.asarray(X)))
    assert (first == second) is ("same" in request.node.callspec.id)
    assert first == third and hash(first) == hash(third)
    assert second == key_of(other)


def test_weak_types_trees_and_static_values_tell_calls_apart():
    weak = jnp.asarray(1.0) * 1.0, jnp.ones(())
    assert weak[0].weak_type and key_of(weak[0]) != key_of(weak[1])
    types = ArgumentTypes(ignores_host=False)
    assert key_of(X, types=types, others=1) != key_of(X, types=types, others=2)
    assert key_of(X, X, types=types) != key_of(X, types=types)


def test_within_a_budget_the_memory_of_an_array_is_no_type():
    types = ArgumentTypes(ignores_host=True)
    (device, none), (host, some) = types.make_key([jnp.asarray(X)], ()), types.make_key([on_host(X)], ())
    assert device == host and (none, some) == (False, True)
    assert types.make_key([jnp.asarray(X)], ())[1] is False


def test_a_loop_computes_the_types_of_new_arrays_alone(monkeypatch):
    computed = []
    type_of = argument_types._type_of
    monkeypatch.setattr(
        argument_types, "_type_of", lambda leaf, **kw: (computed.append(leaf), type_of(leaf, **kw))[1]
    )
    step = jaxoff.jit(lambda state, batch: ([x + batch.sum() for x in state], batch.sum()))
    state = [jnp.ones(n) for n in range(1, 9)]
    for _ in range(3):
        state, _ = step(state, jnp.asarray(X))
    computed.clear()
    step(state, jnp.asarray(X))
    assert len(computed) <= 1  # of the batch


def test_the_latest_batch_is_not_kept():
    types, batch = ArgumentTypes(ignores_host=False), X.copy()
    types.make_key([batch], ())
    kept = weakref.ref(batch)
    del batch
    assert kept() is None
