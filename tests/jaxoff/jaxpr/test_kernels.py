"""Which values are stored, and where light kernels and copies stand in the order."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxoff._device.profile import Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.kernels import KernelGraph, find_stored
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._schedule.decide import decide
from jaxoff._schedule.emit import emit
from jaxoff._schedule.problem import OrderProblem
from tests.jaxoff.policy.matrix import assert_equal, inputs

ROWS, WIDTH = 16, 8
# A product of ROWS x WIDTH x WIDTH takes 2 us, one of WIDTH x ROWS x 64 takes 16, a copy of ROWS x WIDTH 8.
EVEN = Device(flops=1e9, memory_gbps=1e9, d2h_gbps=6.4e-2, h2d_gbps=6.4e-2)


def trace_problem(fun, *args, waits_for_sends=False):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    outs = frozenset(jaxpr.outvars)
    return jaxpr, OrderProblem(
        tuple(jaxpr.eqns), outs, (True,) * len(jaxpr.eqns), waits_for_sends=waits_for_sends
    )


def in_order(fun, *args, **kwargs):
    """The ordered program, after a look at its results."""
    jaxpr, problem = trace_problem(fun, *args, **kwargs)
    eqns, _ = emit(decide(problem, EVEN, large_nbytes=4 * ROWS * WIDTH), problem)
    closed = jax.make_jaxpr(fun)(*args).replace(jaxpr=jaxpr.replace(eqns=eqns))
    got = jax.jit(compat.jaxpr_as_fun(closed))(*args)
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fun)(*args)))
    return eqns


def place(eqns, name, number=0):
    return [i for i, eqn in enumerate(eqns) if eqn.primitive.name == name][number]


def depends(eqns, later, earlier):
    """Whether an equation depends on another one, by their places."""
    behind = set(eqns[earlier].outvars)
    for eqn in eqns[earlier + 1 : later + 1]:
        if not behind.isdisjoint(v for v in eqn.invars if isinstance(v, compat.Var)):
            behind.update(eqn.outvars)
    return not behind.isdisjoint(eqns[later].outvars)


@pytest.mark.parametrize("terms", [1, 3])
def test_a_sum_that_several_units_read_is_stored_if_that_frees_memory(terms):
    """Of one term it is computed again, in each of them."""

    def fun(x, w):
        total = -sum(x @ (w * i) for i in range(1, 1 + terms))
        return (total * 2) @ w, total * 3

    jaxpr, problem = trace_problem(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    graph = KernelGraph(problem.eqns, problem.outs)
    (total,) = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "neg"]
    assert (total in graph.kernels) == (terms > 1)
    readers = [i for i in graph.kernels if total in graph.fused[i]]
    assert len(readers) == (0 if terms > 1 else 2)


def stored(fun, *args):
    """The equations whose results are stored."""
    _, problem = trace_problem(fun, *args)
    return [problem.eqns[i] for i in KernelGraph(problem.eqns, problem.outs).kernels]


def test_a_sum_that_is_rounded_for_its_readers_is_stored_narrow():
    def fun(x, w):
        total = -sum(x @ (w * i) for i in range(1, 4))
        rounded = total.astype(jnp.bfloat16).astype(jnp.float32)
        return (rounded * 2) @ w, rounded * 3

    graph = stored(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    converted = [eqn for eqn in graph if eqn.primitive.name == "convert_element_type"]
    assert [eqn.outvars[0].aval.dtype for eqn in converted] == ["bfloat16"]
    assert "neg" not in [eqn.primitive.name for eqn in graph]


def test_what_is_computed_from_a_stored_sum_is_not_stored_as_well():
    """The activation of a sum of two products, as of adapters: the sum is all that its readers need."""

    def fun(x, w, v):
        gate = x @ w + x @ v
        active = jax.nn.sigmoid(gate)
        return lax.cumsum(active * 2), lax.cumsum(active * 3), lax.cumsum(gate * 5)

    names = [eqn.primitive.name for eqn in stored(fun, inputs(ROWS, WIDTH), *[inputs(WIDTH, WIDTH)] * 2)]
    assert "add" in names and "logistic" not in names


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_product_scales_its_operand_itself_where_the_unscaled_one_is_stored(is_stored):
    def fun(x, w):
        h = jnp.tanh(x @ w)
        return (2.0 * h) @ w, (h if is_stored else x) @ w

    graph = stored(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    assert ("mul" in [eqn.primitive.name for eqn in graph]) != is_stored
    assert ("tanh" in [eqn.primitive.name for eqn in graph]) == is_stored


@pytest.mark.parametrize("beside", [True, False])
def test_a_sum_of_two_that_several_units_read_is_stored_if_it_takes_no_more(beside):
    """Each of them reads one value then. Of one term and a scalar it is computed again."""

    def fun(x, y, w):
        product = x @ w
        total = jnp.cos(product + y if beside else product + 1)
        return lax.cumsum(total * 2), lax.cumsum(total * 3)

    graph = stored(fun, inputs(ROWS, WIDTH), inputs(ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH))
    assert ("cos" in [eqn.primitive.name for eqn in graph]) == beside


def test_what_a_barrier_waits_for_is_no_part_of_the_value():
    """A bias that waits for a large value: with it, the activation would count as a sum of two."""

    def fun(x, y, w):
        bias, _ = lax.optimization_barrier((w[0], y @ w))
        h = jnp.tanh(x @ w + bias)
        return lax.cumsum(h * 2), lax.cumsum(h * 3), y

    graph = stored(fun, inputs(ROWS, WIDTH), inputs(2 * ROWS, WIDTH), inputs(WIDTH, WIDTH))
    assert "tanh" not in [eqn.primitive.name for eqn in graph]
    jaxpr, problem = trace_problem(fun, inputs(ROWS, WIDTH), inputs(2 * ROWS, WIDTH), inputs(WIDTH, WIDTH))
    (tanh,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "tanh"]
    assert max(v.aval.size for v in find_stored(tanh.outvars, problem.eqns)) == ROWS * WIDTH


def test_what_a_product_reads_widened_is_stored_narrow():
    def fun(x, w):
        narrow = lax.cumsum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        wide = narrow.astype(jnp.float32).reshape(2 * ROWS, WIDTH // 2)
        return wide @ w[: WIDTH // 2], wide @ w[WIDTH // 2 :]

    graph = stored(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    assert {"convert_element_type", "reshape"}.isdisjoint(eqn.primitive.name for eqn in graph)
    assert sum(eqn.primitive.name == "dot_general" for eqn in graph) == 3


@pytest.mark.parametrize("again", [False, True])
def test_a_product_that_is_rounded_for_its_one_reader_stores_that(again):
    """No barrier stands between them, and none holds the wide value."""

    def fun(x, y, w):
        before = lax.cumsum(y @ w)
        wide = lax.reduce_precision(x @ w, 8, 7)
        narrow = wide.astype(jnp.bfloat16)
        return lax.cumsum(narrow.astype(jnp.float32) + before) @ w, (wide @ w if again else None)

    eqns = in_order(fun, inputs(2 * ROWS, WIDTH), inputs(2 * ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH))
    (wide,) = eqns[place(eqns, "dot_general", 1)].outvars
    readers = [eqn.primitive.name for eqn in eqns if wide in eqn.invars]
    assert ("optimization_barrier" in readers) == again


@pytest.mark.parametrize("alone", [True, False])
def test_a_kernel_of_which_only_a_narrow_form_is_read_stores_that(alone):
    def fun(x, w, order):
        rows = (x @ w)[order].reshape(ROWS // 2, 2, WIDTH)
        wide = jnp.sum(rows, axis=1)
        return wide.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (None if alone else wide)

    order = jnp.arange(ROWS)[::-1]
    names = [e.primitive.name for e in stored(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH), order)]
    assert ("reduce_sum" in names) == (not alone)


@pytest.mark.parametrize("again", [False, True])
def test_light_kernels_one_after_the_other_can_be_one(again):
    """A barrier on what one hands to the next would have it stored; so would another reader."""

    def fun(x, y, w, order):
        beside = y @ w
        rows = (x @ w)[order]
        total = jnp.sum(rows.reshape(ROWS, 2, WIDTH), axis=1) + beside
        return total @ w, (rows @ w if again else None)

    order = jnp.arange(2 * ROWS)[::-1]
    args = inputs(2 * ROWS, WIDTH), inputs(ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH), order
    eqns = in_order(fun, *args)
    light = [v for eqn in eqns if eqn.primitive.name in ("gather", "reduce_sum") for v in eqn.outvars]
    held = [
        v for eqn in eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars if v in light
    ]
    assert bool(held) == again


def test_what_makes_little_of_much_comes_at_once():
    """Late, it would keep that memory. What comes next waits for it."""

    def fun(x, w):
        a = x @ w
        b = a @ w
        return b @ w, jnp.sum(a, axis=0)

    eqns = in_order(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    little, second = place(eqns, "reduce_sum"), place(eqns, "dot_general", 1)
    assert little < second
    assert depends(eqns, second, little)


def test_a_light_kernel_does_not_wait_for_what_makes_little_of_much():
    """Reading the same, both can be one."""

    def fun(x, w, order):
        a = x @ w
        rows = (a + jnp.max(a, axis=1, keepdims=True))[order]
        return rows @ w, jnp.sum(a, axis=0)

    eqns = in_order(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH), jnp.arange(ROWS)[::-1])
    little, light, second = place(eqns, "reduce_sum"), place(eqns, "gather"), place(eqns, "dot_general", 1)
    assert little < light < second
    assert not depends(eqns, light, little)
    assert depends(eqns, second, little)


def test_outside_of_loops_a_copy_to_the_host_is_waited_for_behind_what_hides_it():
    """XLA starts it just before that: behind a short product it would be seen."""

    def fun(x, w, wide):
        moved = x @ w
        host = jax.device_put(moved, jax.memory.Space.Host)
        short = moved @ w
        long = short @ wide
        back = jax.device_put(host, jax.memory.Space.Device)
        return (long @ wide.T) @ w + back

    given = inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH), inputs(WIDTH, 64)
    eqns = in_order(fun, *given, waits_for_sends=True)
    sent = next(eqn.outvars[0] for eqn in eqns if compat.transfer_in(eqn) == "D2H")
    (wait,) = [i for i, eqn in enumerate(eqns) if sent in eqn.invars]
    heavy = [i for i, eqn in enumerate(eqns) if is_compute(eqn)]
    assert eqns[wait].primitive.name == "optimization_barrier"
    assert heavy[2] < wait < heavy[3]  # the long one, and the one after that
    assert depends(eqns, wait, heavy[2])
    assert depends(eqns, heavy[3], wait)


def test_what_nothing_hides_is_waited_for_all_the_same():
    """Or the last of many copies would be as far behind as all of them together."""
    number, between = 12, 5  # copies of 8 us, each with products of 10 us behind it

    def fun(x, w):
        sent = []
        for _ in range(number):
            x = x @ w
            sent.append(jax.device_put(x, jax.memory.Space.Host))
            for _ in range(between - 1):
                x = x @ w
        return [x, *(jax.device_put(host, jax.memory.Space.Device) for host in sent)]

    eqns = in_order(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH), waits_for_sends=True)
    heavy = [i for i, eqn in enumerate(eqns) if is_compute(eqn)]
    behind = []
    for place, eqn in enumerate(eqns):
        if compat.transfer_in(eqn) == "D2H":
            wait = next(i for i, other in enumerate(eqns) if eqn.outvars[0] in other.invars)
            behind.append(sum(place < i < wait for i in heavy))
    assert len(behind) == number
    assert max(behind[: number - 4]) <= 3 * between  # the last ones find the end before that
    assert min(behind) >= between - 1


def test_a_barrier_holds_two_values():
    """XLA takes what nothing reads behind it out of a larger one, and with it the dependency."""

    def fun(x, y, w):
        a, b = x @ w, y @ w
        c = (x + y) @ w
        return (a + b + c) @ w

    eqns = in_order(fun, inputs(ROWS, WIDTH), inputs(ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH))
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert barriers
    assert {len(eqn.invars) for eqn in barriers} == {2}


def list_level_sizes(fun, *args):
    """The sizes of the sums and products that are stored, but for the results."""
    jaxpr, problem = trace_problem(fun, *args)
    found = [v for eqn in stored(fun, *args) for v in eqn.outvars if v not in jaxpr.outvars]
    assert {v.aval.size for v in find_stored(found, problem.eqns)} == {v.aval.size for v in found}
    return sorted({v.aval.size for v in found}, reverse=True)


def test_each_level_of_an_associative_scan_is_stored():
    """XLA compiles two kernels a level: one halves, one interleaves. Of 16 rows, the first level halves."""

    def fun(x):
        return lax.associative_scan(lambda a, b: a * b + b, jnp.cos(x) + x)

    assert list_level_sizes(fun, inputs(ROWS, WIDTH)) == [8 * WIDTH, 4 * WIDTH, 2 * WIDTH, WIDTH]


def test_a_value_rotated_in_pairs_is_not_stored():
    """Rotary embeddings take every second element once: their kernel reads the operand in place."""

    def fun(x):
        x = jnp.cos(x) + x
        a, b = x[:, ::2], x[:, 1::2]
        return lax.cumsum(a - 2 * b), lax.cumsum(b + 2 * a)

    assert not list_level_sizes(fun, inputs(ROWS, WIDTH))
