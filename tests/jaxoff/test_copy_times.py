"""When copies of a program in order are in time, alone and together."""

import jax
import jax.numpy as jnp
import pytest

from jaxoff._copy_times import CopyTimes
from jaxoff._cost import Device
from jaxoff._units import Units

DEVICE = Device(flops=1, memory_gbps=1, d2h_gbps=1e-3, h2d_gbps=1e-3)  # a kilobyte takes a millisecond


def turn(large, small, q, k, x):
    """Reads q and k of this turn, fetches them for the next one, and goes on."""
    on_device = jax.memory.Space.Device
    return jax.device_put(large, on_device), jax.device_put(small, on_device), q @ x, k @ x, x @ x


def late(read_at, end):
    """Which of two copies, of 4 ms and of 1, is late where what they replace is read until some time."""
    on_host = [
        jax.typeof(jax.device_put(jnp.ones(n, jnp.uint8), jax.memory.Space.Host)) for n in (4000, 1000)
    ]
    sizes = ((4, 8), (2, 8), (8, 8))
    jaxpr = jax.make_jaxpr(turn)(*on_host, *(jnp.ones(size) for size in sizes)).jaxpr
    large, small, *products, last = range(len(jaxpr.eqns))
    times = CopyTimes(jaxpr.eqns, Units(jaxpr.eqns, frozenset(jaxpr.outvars)), DEVICE)
    for i, time in zip((*products, last), (*read_at, end), strict=True):
        times.add(i, time)
    copies = [jaxpr.eqns[i].outvars[0] for i in (large, small)]
    found = times.late(dict(zip(copies, jaxpr.invars[2:4], strict=True)))
    return [name for name, copy in zip(("large", "small"), copies, strict=True) if copy in found]


@pytest.mark.parametrize(
    ("read_at", "end", "found"),
    [
        ((10.0, 10.0), 15.1, []),
        ((10.0, 10.0), 14.5, ["small"]),  # each alone is in time
        ((10.0, 8.9), 14.5, []),  # the small one goes first
        ((10.0, 10.0), 13.9, ["large"]),
        ((10.0, 10.0), 10.9, ["large", "small"]),
    ],
)
def test_copies_that_are_not_in_time_together_leave_the_small_one(read_at, end, found):
    assert late(read_at, end) == found
