"""A map that recomputes rows for the backward loop of a checkpoint around a scan, inside of that loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.joined_maps import join_maps

WIDTH = 8
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def arguments():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (3, WIDTH, WIDTH)) * 0.3, jax.random.normal(keys[1], (4, WIDTH))


def stack(policy, **options):
    """The loss of layers in a scan, the checkpoint around the scan."""

    def layer(x, w):
        x = jaxoff.name(x, "in")
        return x + jnp.sin(jaxoff.name(x @ w, "up")) @ w, None

    def layers(x, w):
        return lax.scan(layer, x, w, **options)[0]

    return lambda w, x: jax.checkpoint(layers, policy=policy)(x, w).sum()


def list_scans(program):
    for eqn in program.eqns:
        if compat.scan_in(eqn) is not None:
            yield eqn
        for inner in compat.sub_jaxprs(eqn):
            yield from list_scans(inner)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_backward_loop_of_a_checkpoint_around_a_scan_recomputes_its_rows(reverse):
    args = arguments()
    loss = stack(jaxoff.policy(offload=["in", "up"]), reverse=reverse)
    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args)
    joined = join_maps(closed)
    assert len(list(list_scans(closed.jaxpr))) == 3
    forward, backward = list_scans(joined.jaxpr)
    assert (forward.params["reverse"], backward.params["reverse"]) == (reverse, not reverse)
    for got, want in zip(*(compat.jaxpr_as_fun(p)(*args) for p in (joined, closed)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("offload", [["up"], []])
def test_layers_computed_one_from_the_other_stay_a_loop(offload):
    """Without the layers' inputs the first loop has a carry; without offloads nothing changes."""
    names = ["in", "up"] if not offload else []
    closed = jax.make_jaxpr(jax.grad(stack(jaxoff.policy(save=names, offload=offload))))(*arguments())
    assert join_maps(closed) is closed


def reload_rows(read):
    """The program of a map over rows in host memory, and what reads its results."""

    def fun(x):
        rows = lax.map(lambda row: jax.device_put(row * 2, HOST), x)
        return read(lax.map(lambda row: jnp.sin(jax.device_put(row, DEVICE)), rows), x)

    return jax.make_jaxpr(fun)(arguments()[0])


def add_up(rows, x):
    return lax.scan(lambda total, row: (total + row[0] @ row[1], None), x[0], (rows, x))[0]


STAYS = {
    "two readers": lambda rows, x: add_up(rows, x) + add_up(rows, 2 * x),
    "a result": lambda rows, x: (add_up(rows, x), rows),
    "read whole": lambda rows, x: lax.scan(lambda total, row: (total @ rows[0] + row, None), x[0], x)[0],
    "another length": lambda rows, x: add_up(rows[:2], x[:2]),
}


@pytest.mark.parametrize("name", STAYS)
def test_rows_that_are_read_otherwise_are_stored(name):
    closed = reload_rows(STAYS[name])
    assert join_maps(closed) is closed


def test_a_map_that_sends_values_to_the_host_stays_before_their_reader():
    closed = reload_rows(add_up)
    joined = join_maps(closed)
    sending, adding = list_scans(joined.jaxpr)
    assert compat.is_host(sending.outvars[0].aval)
    assert any(compat.is_host(v.aval) for v in adding.invars)
    x = arguments()[0]
    (got,), (want,) = (compat.jaxpr_as_fun(p)(x) for p in (joined, closed))
    np.testing.assert_array_equal(got, want)


def test_a_map_that_reads_a_map_takes_it_in_and_joins_its_own_reader():
    def fun(x):
        host = lax.map(lambda row: jax.device_put(row * 2, HOST), x)
        first = lax.map(lambda row: jnp.sin(jax.device_put(row, DEVICE)), host)
        second = lax.map(lambda rows: jnp.cos(jax.device_put(rows[0], DEVICE)) + rows[1], (host, first))
        return add_up(second, x)

    closed = jax.make_jaxpr(fun)(arguments()[0])
    joined = join_maps(closed)
    assert len(list(list_scans(closed.jaxpr))) == 4
    assert len(list(list_scans(joined.jaxpr))) == 2
    x = arguments()[0]
    (got,), (want,) = (compat.jaxpr_as_fun(p)(x) for p in (joined, closed))
    np.testing.assert_array_equal(got, want)
