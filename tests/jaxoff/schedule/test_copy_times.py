"""When the copies of an ordered program are in time, alone and together."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxoff._device.profile import Device
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._schedule.copy_times import CopyTimes

DEVICE = Device(flops=1, memory_gbps=1, d2h_gbps=1e-3, h2d_gbps=1e-3)  # a kilobyte takes a millisecond

REST = 8  # products after the two that read q and k


def iteration(large, small, q, k, x):
    """Reads q and k of this iteration, reloads both for the next iteration, and goes on."""
    on_device = jax.memory.Space.Device
    rest = functools.reduce(lambda y, _: y @ x, range(REST), x)
    return jax.device_put(large, on_device), jax.device_put(small, on_device), q @ x, k @ x, rest


def estimate_times(read_at, end, rest_at=None):
    """Returns an iteration's times, its reloads of 4 and 1 ms, and reload -> argument in its buffer."""
    host = jax.memory.Space.Host
    on_host = [jax.typeof(jax.device_put(jnp.ones(n, jnp.uint8), host)) for n in (4000, 1000)]
    sizes = ((4, 8), (2, 8), (8, 8))
    jaxpr = jax.make_jaxpr(iteration)(*on_host, *(jnp.ones(size) for size in sizes)).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    large, small = (i for i, name in enumerate(names) if name == "device_put")
    reads = [i for v in jaxpr.invars[2:4] for i, eqn in enumerate(jaxpr.eqns) if v in eqn.invars]
    rest = [i for i, name in enumerate(names) if name == "dot_general" and i not in reads]
    times = CopyTimes(jaxpr.eqns, KernelGraph(jaxpr.eqns, frozenset(jaxpr.outvars)), DEVICE)
    last = max(read_at)
    even = [last + (end - last) * (n + 1) / REST for n in range(REST)]
    ends = [*read_at, *(rest_at or even)]
    for i, time in sorted(zip((*reads, *rest), ends, strict=True), key=lambda item: item[1]):
        times.add(i, time)
    copies = [jaxpr.eqns[i].outvars[0] for i in (large, small)]
    return times, (large, small), dict(zip(copies, jaxpr.invars[2:4], strict=True))


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
def test_of_reloads_in_time_alone_but_not_together_the_small_one_is_late(read_at, end, found):
    times, _, reuses_buffer_of = estimate_times(read_at, end)
    late = times.find_late_reloads(reuses_buffer_of)
    assert [
        name for name, copy in zip(("large", "small"), reuses_buffer_of, strict=True) if copy in late
    ] == found


@pytest.mark.parametrize("read_at", [(9.0, 5.0), (5.0, 9.0)])
def test_of_reloads_for_the_next_iteration_the_one_whose_buffer_is_free_last_goes_last(read_at):
    times, (large, small), reuses_buffer_of = estimate_times(read_at, 20.0)
    starts = times.plan_reloads(reuses_buffer_of).starts
    assert (starts[large] < starts[small]) == (read_at[0] < read_at[1])


def leave(x, *values):
    """Sends values to the host, and goes on for ten products."""
    on_host = jax.memory.Space.Host
    return [jax.device_put(v, on_host) for v in values], functools.reduce(lambda y, _: y @ x, range(10), x)


@pytest.mark.parametrize(
    ("made_at", "found"),
    [
        ({"first": 1.0, "second": 4.0}, {}),
        ({"first": 1.0, "second": 7.0}, {"second": True}),
        ({"carried": 0.0, "second": 7.0}, {"second": True}),
        ({"first": 8.5, "second": 9.5}, {"first": True, "second": True}),
        # Both others may go first.
        ({"carried": 0.0, "first": 3.0, "second": 7.0}, {"second": False}),
        ({"carried": 0.0, "first": 1.0, "second": 2.0, "third": 3.0}, {"third": False}),
        ({"first": 4.5, "second": 5.0, "third": 5.5}, {"second": False, "third": False}),
    ],
)
def test_a_late_send_gives_up_its_buffer_if_the_send_is_in_time_even_as_the_last(made_at, found):
    """Sends of 3.3 ms, as name -> time when the value is made, in an iteration of 10 ms.

    The sends found end after the iteration. True: the previous iteration's send ends before the value is
    made, even if the send goes last of all waiting sends.
    """
    jaxpr = jax.make_jaxpr(leave)(jnp.ones((8, 8)), *(jnp.ones(3000, jnp.uint8) for _ in made_at)).jaxpr
    times = CopyTimes(jaxpr.eqns, KernelGraph(jaxpr.eqns, frozenset(jaxpr.outvars)), DEVICE)
    sends = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "device_put"]
    products = [i for i in range(len(jaxpr.eqns)) if i not in sends]
    times.add(products[-1], 10.0)
    for i, time in zip(sends, made_at.values(), strict=True):
        times.send_starts[i] = time
    names = dict(zip((jaxpr.eqns[i].outvars[0] for i in sends), made_at, strict=True))
    assert {names[v]: in_place for v, in_place in times.find_late_sends().items()} == found


@pytest.mark.parametrize("small_ms", [0.01, 0.05])
def test_small_kernels_before_a_large_one_do_not_start_a_copy(small_ms):
    """The small kernels which start the copy would find no room beside the large kernel, and run at 30 ms."""
    small_ones = [5.0 + small_ms * n for n in range(1, REST)]
    times, (large, _), reuses_buffer_of = estimate_times((3.0, 5.0), 30.0, rest_at=[*small_ones, 30.0])
    assert times.plan_reloads(reuses_buffer_of).starts[large] == 1  # after the kernel which ends at 3 ms


def test_a_copy_starts_before_a_large_kernel_whose_end_is_early_enough():
    times, (large, _), reuses_buffer_of = estimate_times(
        (3.0, 5.0), 30.0, rest_at=[10.0, 15.0, 20.0, 22.2, 22.3, 24.0, 27.0, 30.0]
    )
    # At 22.5 ms it is planned; at 24.0 it is still in time.
    assert times.plan_reloads(reuses_buffer_of).starts[large] == 5
