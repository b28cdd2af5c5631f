"""The block over eight devices: with Auto and Explicit axes, shard_map inside and around, vmap of an axis."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import (
    OFFLOAD_ALL,
    POLICIES,
    Case,
    Cases,
    assert_close,
    block,
    check_control,
    check_placement,
    check_values,
    inputs,
    no_remat,
    weights,
)

KINDS = (AxisType.Auto, AxisType.Explicit)
ROWS = 16  # two a device
CASES = Cases()
"""Their bodies take the mesh first."""


@functools.cache
def mesh_of(kind: AxisType):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def over_rows(mesh, fun, **options):
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), **options)


def scan(layer, w, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


@CASES.add(x=(ROWS, 8), rows=(ROWS,))
def jit(mesh, remat, w, x):
    return remat(block)(w, x)


@CASES.add(x=(ROWS, 8), rows=(ROWS,), w=(3,), count=3)
def scan_of_layers(mesh, remat, w, x):
    return scan(remat(block, prevent_cse=False), w, x)


@CASES.add(x=(ROWS, 8), rows=(ROWS,))
def shard_map_inside(mesh, remat, w, x):
    return remat(over_rows(mesh, block))(w, x)


@CASES.add(x=(ROWS, 8), rows=(ROWS,))
def shard_map_around(mesh, remat, w, x):
    return over_rows(mesh, remat(block))(w, x)


@CASES.add(
    x=(ROWS, 8), rows=(8 * 3, ROWS // 8), w=(3,)
)  # each device's stack of three layers, one after the other
def shard_map_around_scan(mesh, remat, w, x):
    return over_rows(mesh, lambda w, x: scan(remat(block, prevent_cse=False), w, x))(w, x)


@CASES.add(x=(ROWS, 8), rows=(ROWS,), w=(3,), count=3)
def scan_around_shard_map(mesh, remat, w, x):
    return scan(remat(over_rows(mesh, block), prevent_cse=False), w, x)


@CASES.add(x=(4, 8), rows=(4,))
def shard_map_of_replicated(mesh, remat, w, x):
    return jax.shard_map(remat(block), mesh=mesh, in_specs=(P(), P()), out_specs=P())(w, x)


@CASES.add(x=(ROWS, 8), rows=(ROWS,))
def gathered_weights(mesh, remat, w, x):
    def gather(w):
        move = (
            jax.sharding.reshard if mesh.axis_types == (AxisType.Explicit,) else lax.with_sharding_constraint
        )
        return move(w, NamedSharding(mesh, P()))

    return remat(lambda w, x: block(jax.tree.map(gather, w), x))(w, x)


@CASES.add(x=(8, 4, 8), rows=(8, 4))
def vmap_of_mesh_axis(mesh, remat, w, x):
    return jax.vmap(remat(block), in_axes=(None, 0), spmd_axis_name="data")(w, x)


def on(mesh, case: Case) -> Case:
    """The case on a mesh, its input's rows and, where the body gathers them, its weights sharded."""

    def place(w, x):
        by_row = NamedSharding(mesh, P("data"))
        columns = {k: P(None, "data") if v.shape[-1] % 8 == 0 else P("data") for k, v in w.items()}
        specs = columns if case.body is gathered_weights else P()
        w = jax.device_put(w, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        return w, jax.device_put(x, by_row if x.shape[0] % 8 == 0 else NamedSharding(mesh, P()))

    return dataclasses.replace(case, body=lambda *args: case.body(mesh, *args), place=place)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.some_cases(18)
def test_moves_exactly_the_chosen_values(case, policy, kind):
    with jax.set_mesh(mesh_of(kind)):
        check_placement(on(mesh_of(kind), CASES[case]), *POLICIES[policy])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some_cases(5)
def test_keeps_loss_and_gradients(case, kind):
    with jax.set_mesh(mesh_of(kind)):
        check_values(on(mesh_of(kind), CASES[case]), twins=case in ("jit", "shard_map_around"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
def test_a_policy_that_moves_nothing_fails_the_check(case, kind):
    with jax.set_mesh(mesh_of(kind)):
        check_control(on(mesh_of(kind), CASES[case]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gradients_inside_shard_map(kind):
    """A data-parallel step that sums its own gradients: what moves never leaves a device's own program."""

    def step(remat):
        def local(w, x):
            return jax.grad(lambda w: jnp.sum(jnp.square(remat(block)(w, x))))(w)

        return jax.shard_map(local, mesh=mesh_of(kind), in_specs=(P(), P("data")), out_specs=P())

    args = on(mesh_of(kind), CASES["jit"]).args
    moved = step(functools.partial(jax.checkpoint, policy=OFFLOAD_ALL))
    found = placement.host_arrays(moved, *args)
    assert found == placement.arrays({(ROWS // 8, n): 8 for n in (8, 32, 16)})
    assert_close(jax.jit(moved)(*args), jax.jit(step(no_remat))(*args))


def test_gradients_keep_the_sharding_of_their_arguments():
    case = on(mesh_of(AxisType.Explicit), CASES["gathered_weights"])
    w, x = case.args
    grads = jax.jit(case.value_and_grad(OFFLOAD_ALL))(w, x)[1]
    same = jax.tree.map(lambda g, a: g.sharding.is_equivalent_to(a.sharding, a.ndim), grads, (w, x))
    assert jax.tree.all(same), same


def test_unchecked_shard_map_keeps_one_copy_a_device():
    """With check_vma=False JAX cannot tell that a value is the same everywhere. Every copy counts."""
    fun = jax.shard_map(
        jax.checkpoint(block, policy=OFFLOAD_ALL),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(), P()),
        out_specs=P(),
        check_vma=False,
    )

    def loss(w, x):
        return jnp.sum(fun(w, x))

    args = weights(), inputs(4, 8)
    found = placement.grad_host_arrays(loss, *args)
    assert found == placement.arrays({(8 * 4, n): 1 for n in (8, 32, 16)})
    assert jaxoff.explain(loss, *args).host_bytes == placement.nbytes(found)


def test_residuals_of_sharded_shapes_need_no_arrays():
    case = on(mesh_of(AxisType.Explicit), CASES["jit"])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), case.args)
    loss = case.loss(OFFLOAD_ALL)
    assert jaxoff.residuals(loss, *shapes) == jaxoff.residuals(loss, *case.args)
    assert {r.name for r in jaxoff.residuals(loss, *shapes) if r.placement == "offload"} == {
        "in",
        "pre",
        "act",
    }


@pytest.mark.parametrize("is_set", [False, True], ids=["arrays", "set_mesh"])
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_in_a_scan_run_on_the_default_mesh_of_make_mesh(devices, is_set):
    """The axes of `jax.make_mesh` are Explicit, and its arrays carry their mesh without `jax.set_mesh`."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    layer = jax.checkpoint(
        lambda x, w: (jnp.tanh(jaxoff.name(x, "x") @ w), None), policy=jaxoff.policy(offload=["x"])
    )
    fun = jax.grad(lambda w, x: (lax.scan(layer, x, w)[0] ** 2).mean())
    w = jax.random.normal(jax.random.key(0), (4, 16, 16))
    x = jax.random.normal(jax.random.key(1), (8, 16))
    args = jax.device_put((w, x), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        jitted = jaxoff.jit(fun)
        np.testing.assert_allclose(jitted(*args), jax.jit(fun)(*args), rtol=1e-5, atol=1e-7)
        program = str(jitted.trace(*args).jaxpr)
    assert not jitted.findings
    assert "scan" not in program and "<host>" in program  # the loops are written out, and still offload


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_budget_places_values_on_the_default_mesh_of_make_mesh(devices):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])

    def layer(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"] + x, None

    fun = jax.value_and_grad(lambda w, x: (lax.scan(layer, x, w)[0] ** 2).mean())
    w = {"up": jnp.ones((8, 64, 256)) / 64, "down": jnp.ones((8, 256, 64)) / 64}
    args = jax.device_put(
        (w, jnp.ones((4096, 64))), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
    )
    everything = jaxoff.jit(fun, device_bytes=1e9)
    everything(*args)
    most = everything.plan.peak_bytes
    jitted = jaxoff.jit(fun, device_bytes=0.92 * most)
    for got, want in zip(jax.tree.leaves(jitted(*args)), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert jitted.plan.peak_bytes <= 0.92 * most
