"""Products that are only added up run one after the other, and nothing but the additions reads them."""

import jax
import jax.numpy as jnp
import pytest

from jaxoff import Device
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._schedule.decide import decide
from jaxoff._schedule.problem import OrderProblem
from jaxoff._schedule.schedule import Barrier
from jaxoff._schedule.summed_products import find_summed_products

WIDTH = 1024


def gradients(x, y, z, a, b, c):
    """The gradients of one input by three weights, with those of the weights between, as JAX orders them."""
    by_a, of_a = x @ a.T, x.T @ y
    by_b, of_b = y @ b.T, y.T @ z
    by_c = z @ c.T
    return jnp.tanh(by_a + by_b + by_c), of_a, of_b


def two_read_elsewhere(x, y, z, a, b, c):
    by_a, by_b = x @ a.T, y @ b.T
    return jnp.tanh(by_a + by_b), jnp.sin(by_a), z @ c.T


def of_two_dtypes(x, y, z, a, b, c):
    return (x @ a.T).astype(jnp.float32) + jnp.dot(y, b.T, preferred_element_type=jnp.float32), z @ c.T


def make_problem(fun, is_divided=True):
    struct = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(fun)(*[struct] * 6).jaxpr
    eqns, outs = tuple(jaxpr.eqns), frozenset(jaxpr.outvars)
    problem = OrderProblem(eqns, outs, (True,) * len(eqns), waits_for_sends=False, is_divided=is_divided)
    return problem, KernelGraph(eqns, outs)


def find_products(eqns):
    return [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"]


def test_the_products_of_a_sum_are_found():
    problem, graph = make_problem(gradients)
    by_a, _, by_b, _, by_c = find_products(problem.eqns)
    summed = find_summed_products(problem, graph)
    assert summed.last == {by_a: by_c, by_b: by_c, by_c: by_c}
    assert summed.others == {by_c: (by_a, by_b)}
    (reader,) = summed.readers
    assert {problem.eqns[i].outvars[0] for i in (by_a, by_b, by_c)} <= set(graph.reads[reader])


@pytest.mark.parametrize("fun", [two_read_elsewhere, of_two_dtypes])
def test_products_with_other_readers_are_no_sum(fun):
    problem, graph = make_problem(fun)
    assert not find_summed_products(problem, graph).last


@pytest.mark.parametrize("is_divided", [True, False])
def test_no_barrier_reads_a_product_of_a_sum(is_divided):
    problem, _ = make_problem(gradients, is_divided)
    by_a, of_a, by_b, of_b, by_c = products = find_products(problem.eqns)
    schedule = decide(problem, Device.of("h200"))
    barriers = [action for action in schedule.actions if isinstance(action, Barrier)]
    read = {v for barrier in barriers for v in barrier.operands}
    parted = [i for i in (by_a, by_b, by_c) if problem.eqns[i].outvars[0] in read]
    order = [i for i in schedule.kernels if i in products]
    if is_divided:
        assert order == [of_a, of_b, by_a, by_b, by_c] and not parted
    else:
        assert order == products and parted
    assert barriers
