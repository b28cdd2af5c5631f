"""State on the host of steps that the compiler divides over devices: each device updates its own parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._state import stream

LAYERS, WIDTH = 8, 256
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
MOMENTS_NBYTES = 2 * 2 * LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(stream, "_BLOCK_NBYTES", 1 << 17)


def step(state, x):
    def loss(params):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w["in"]) @ w["out"], None))
        return lax.scan(layer, x, params)[0].var()

    params, optimizer_state = state
    value, grads = jax.value_and_grad(loss)(params)
    changes, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
    return (optax.apply_updates(params, changes), optimizer_state), value


def manual_step(state, x):
    """The step on a device's rows of the weights and of the batch."""

    def loss(params):
        @jax.checkpoint
        def layer(h, w):
            whole = jax.tree.map(lambda rows: lax.all_gather(rows, "data", axis=0, tiled=True), w)
            return h + jnp.tanh(h @ whole["in"]) @ whole["out"], None

        return lax.scan(layer, x, params)[0].var()

    params, optimizer_state = state
    value, grads = jax.value_and_grad(loss)(params)
    changes, optimizer_state = optax.adamw(1e-2).update(grads, optimizer_state, params)
    return (optax.apply_updates(params, changes), optimizer_state), lax.pmean(value, "data")


class Divided:
    """Arguments over a mesh: weights and moments by a specification each."""

    def __init__(self, mesh, weights, moments, is_manual=False):
        self.mesh, self._weights, self._moments = mesh, weights, moments
        self._optimizer, self.step = (optax.adamw(1e-2), self._map) if is_manual else (OPTIMIZER, step)

    def _map(self, *args):
        specs = jax.tree.map(lambda sharding: sharding.spec, self.shardings)
        return jax.shard_map(manual_step, in_specs=specs, out_specs=(specs[0], P()), mesh=self.mesh)(*args)

    def make(self):
        keys = dict(zip(("in", "out"), jax.random.split(jax.random.key(0)), strict=True))
        params = {
            name: jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5 for name, key in keys.items()
        }
        state = jax.device_put((params, self._optimizer.init(params)), self.shardings[0])
        x = jnp.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)
        return state, jax.device_put(x, self.shardings[1])

    @property
    def shardings(self):
        def place(spec):
            return NamedSharding(self.mesh, spec)

        shape = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
        params = {"in": shape, "out": shape}
        moments = jax.tree.map(
            lambda leaf: place(self._moments if leaf.ndim else P()),
            jax.eval_shape(self._optimizer.init, params),
        )
        first, *_ = self.mesh.axis_names
        return (jax.tree.map(lambda _: place(self._weights), params), moments), place(P(first, None))


def make_mesh(*sizes, axis_type=AxisType.Auto):
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(axis_type,) * len(sizes))


ROWS = P(None, "data", None)


def make_fsdp():
    return Divided(make_mesh(2), ROWS, ROWS)


# Made by the tests, not here: where these tests are collected there may be one device only.
CASES = {
    "fsdp": (make_fsdp, ()),
    "first-axis": (lambda: Divided(make_mesh(2), P("data"), P("data")), ()),
    "explicit": (lambda: Divided(make_mesh(2, axis_type=AxisType.Explicit), ROWS, ROWS), ()),
    "two-axes": (lambda: Divided(make_mesh(2, 2), *[P(None, "data", "model")] * 2), ("in", "out")),
    "moments-alone": (lambda: Divided(make_mesh(2), P(), ROWS), ("out",)),
    "manual": (lambda: Divided(make_mesh(2), ROWS, ROWS, is_manual=True), ()),
    "one-device": (lambda: Divided(make_mesh(1), ROWS, ROWS), ("in", "out")),
}


def keywords_of(divided, given):
    """The keywords of `jit`, with the shardings named in `given`."""
    state, x = divided.shardings
    known = {"in": {"in_shardings": (state, x)}, "out": {"out_shardings": (state, None)}}
    return {"donate_argnums": 0} | {name: value for which in given for name, value in known[which].items()}


def count_on_a_device(tree, kind="device"):
    """Bytes of the shards of arrays in a memory of the first device."""
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(shard.nbytes for shard in shards if shard.sharding.memory_kind == kind)


SHORT = ("two-axes", "manual")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_each_device_keeps_its_part_of_the_moments_in_host_memory(name):
    make, given = CASES[name]
    divided = make()
    keywords = keywords_of(divided, given)
    with jax.set_mesh(divided.mesh):
        (state, x), (other, _) = divided.make(), divided.make()
        whole, moments = count_on_a_device(state), count_on_a_device(state[1])
        plain = jax.jit(divided.step, **keywords).lower(state, x).compile()
        memory = plain.memory_analysis()
        own = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        within = jaxoff.jit(divided.step, device_bytes=own - 0.4 * moments, **keywords)
        for _ in range(3):
            (state, value), (other, expected) = within(state, x), plain(other, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert within.plan.peak_bytes <= own - 0.4 * moments
    assert not within.findings
    hosted = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == "pinned_host"]
    nbytes = sum(leaf.nbytes for leaf in hosted)
    assert within.plan.host_bytes == nbytes >= MOMENTS_NBYTES / 2  # as little as needed
    assert count_on_a_device(hosted, "pinned_host") == nbytes // divided.mesh.size
    assert count_on_a_device(state) == whole - nbytes // divided.mesh.size
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert ours.sharding.with_memory_kind("device").is_equivalent_to(theirs.sharding, ours.ndim)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        (lambda _: {"out_shardings": P()}, "give a NamedSharding"),
        (
            lambda mesh: {
                "in_shardings": None,
                "out_shardings": NamedSharding(mesh, P()),
                "static_argnums": 2,
            },
            "static",
        ),
    ],
)
def test_an_error_says_why_state_stays_on_the_devices(keywords, reason):
    divided = make_fsdp()
    with jax.set_mesh(divided.mesh):
        args = jax.eval_shape(divided.make)
        keywords = keywords(divided.mesh)
        within = jaxoff.jit(lambda state, x, _=0: step(state, x), device_bytes=1e6, **keywords)
        with pytest.raises(jaxoff.BudgetError, match=reason):
            within.lower(*args)


@pytest.mark.long
def test_arrays_without_a_sharding_stay_on_the_devices():
    """`jax.jit` divides them as its shardings say; their state is not known to be divided."""
    divided = make_fsdp()
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(divided.make))
    within = jaxoff.jit(step, device_bytes=MOMENTS_NBYTES / 2, **keywords_of(divided, ("in", "out")))
    with pytest.raises(jaxoff.BudgetError, match="with a NamedSharding"):
        within.lower(*args)
