"""`jaxoff.plan` of a train step over a mesh: all of its figures are those of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._plan.calibrations import MARGIN, WIDE_MARGIN
from jaxoff._runtime.pinned_pool import POOL_VARIABLE
from tests.jaxoff.plan.planned import (
    LAYERS,
    ROWS,
    W_NBYTES,
    WIDTH,
    X_NBYTES,
    arguments,
    layer,
    placed,
    scanned,
)
from tests.jaxoff.plan.test_plan_step import CHOICES, NOTHING, planner

WEIGHTS_NBYTES = LAYERS * 2 * W_NBYTES
ROWS_OF_WEIGHTS = {"up": P(None, "data"), "down": P(None, "data")}


@functools.cache
def mesh(devices=2):
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])


def gradients(policy, w, x):
    return jax.grad(scanned(policy=policy))(w, x)


def data_parallel(devices=2, policy=NOTHING):
    """Gradients of each device's rows, added up over the devices."""

    def local(w, x):
        return jax.tree.map(lambda g: lax.psum(g, "data"), gradients(policy, w, x))

    return jax.shard_map(local, mesh=mesh(devices), in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def whole(devices=2):
    """The arguments of all devices, each of which has those of `arguments`."""
    w, _ = arguments()
    return w, jax.ShapeDtypeStruct((devices * ROWS, WIDTH), jnp.float32)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_device_of_a_mesh_does_what_one_alone_would(choice, devices):
    alone = planner(functools.partial(gradients, NOTHING), arguments()).model
    divided = planner(jax.jit(data_parallel(devices)), whole(devices)).model
    assert divided.argument_nbytes == alone.argument_nbytes == WEIGHTS_NBYTES + X_NBYTES
    a, b = alone.cost(placed(choice)), divided.cost(placed(choice))
    assert [kind.layer for kind in divided.layers] == [kind.layer for kind in alone.layers]
    assert (b.peak.working, b.peak.residuals, b.host_nbytes) == (
        a.peak.working,
        a.peak.residuals,
        a.host_nbytes,
    )
    assert b.peak.nbytes == pytest.approx(a.peak.nbytes, rel=0.02)
    assert b.times.recomputed == a.times.recomputed
    assert b.times.total >= a.times.total  # collectives take their time


def with_moments(w, moments, x):
    """A step whose weights and moments are divided, and whose optimizer stands outside of the shard_map."""

    def local(w, x):
        def loss(w, x):
            return scanned(stage, policy=NOTHING)(w, x)

        return jax.grad(loss)(w, x)

    def stage(x, w):
        return layer(x, jax.tree.map(lambda part: lax.all_gather(part, "data", axis=0, tiled=True), w))

    specs = ROWS_OF_WEIGHTS, P("data")
    grads = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=ROWS_OF_WEIGHTS, check_vma=False)(
        w, x
    )
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    norm = sum(jnp.sum(jnp.square(m)) for m in jax.tree.leaves(moments))
    return jax.tree.map(lambda w, m: w - 0.1 * m / norm, w, moments), moments, norm


def test_what_an_optimizer_keeps_is_divided_as_its_weights_are():
    w, x = whole()
    found = planner(jax.jit(with_moments, donate_argnums=(0, 1)), (w, w, x)).model
    assert found.argument_nbytes == 2 * WEIGHTS_NBYTES // 2 + X_NBYTES
    twice = planner(jax.jit(with_moments), (w, w, x)).model
    choice = dict(x_in="save")
    more = max(m.alive for m in twice.timeline(placed(choice))) - max(
        m.alive for m in found.timeline(placed(choice))
    )
    assert more >= WEIGHTS_NBYTES // 2  # new weights beside the old ones


def test_what_an_exchange_brings_has_a_place_of_its_own():
    w, x = whole()
    found = planner(jax.jit(with_moments), (w, w, x)).model
    alone = planner(functools.partial(gradients, NOTHING), arguments()).model
    (divided,), (usual,) = found.layers, alone.layers
    working = [
        kind.working_nbytes(kind.find_states(placed(dict(x_in="save"))))[0] for kind in (usual, divided)
    ]
    assert working[1] >= working[0] + W_NBYTES  # gradients of a layer, sent whole


def test_more_of_the_budget_is_left_free_over_a_mesh():
    alone = planner(functools.partial(gradients, NOTHING), arguments())
    divided = planner(jax.jit(data_parallel()), whole())
    assert divided.devices == 2
    for found, margin in ((alone, MARGIN), (divided, WIDE_MARGIN)):
        with pytest.raises(jaxoff.BudgetError) as caught:
            found.plan(1, None, {}, None)
        least = caught.value.smallest_bytes
        assert least is not None
        plan = found.plan(least, None, {}, None)
        known = plan.peak.arguments + plan.peak.results
        assert plan.peak_bytes - known == pytest.approx((1 - margin) * (least - known), rel=1e-5)
        with pytest.raises(
            jaxoff.BudgetError, match=f"{margin:.0%} of what arguments and results leave stays free"
        ):
            found.plan(0.98 * least, None, {}, None)  # the search keeps budgets to 2 kB


def test_devices_of_a_process_share_its_pool(monkeypatch):
    monkeypatch.setenv(POOL_VARIABLE, "6")
    w, x = whole()
    for devices, share in ((1, 6 << 30), (2, 3 << 30)):
        found = planner(jax.jit(data_parallel(devices)), (w, x))
        assert found.find_host_budget(None) == share
        assert found.find_host_budget(5) == 5
    monkeypatch.setenv(POOL_VARIABLE, "0")
    found = planner(jax.jit(data_parallel()), (w, x))
    assert found.plan(1e9, None, {}, None).host_bytes == 0
    with pytest.raises(
        jaxoff.BudgetError, match=f"Without host_bytes it is XLA's pool, which {POOL_VARIABLE} sets"
    ):
        found.plan(1e9, None, {"x_in": "offload", "act": "offload"}, None)


def test_the_policy_of_a_plan_runs_on_the_mesh():
    """The same gradients, with what the plan moves on the host."""
    divided = planner(jax.jit(data_parallel()), whole())
    plan = divided.plan(1e9, None, {"act": "offload", "x_in": "save"}, None)
    args = jax.tree.map(lambda s: jax.random.normal(jax.random.key(0), s.shape) / 8, whole())
    step = jaxoff.jit(data_parallel(policy=plan.policy))
    assert "<host>" in str(jax.make_jaxpr(data_parallel(policy=plan.policy))(*args))
    for a, b in zip(
        jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(data_parallel())(*args)), strict=True
    ):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)
