"""Which move kernels are placed next to each other for a fusion, and the memory held by an order."""

import jax.numpy as jnp
import pytest
from jax import lax

from jaxoff._jaxpr.dataflow import variables
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._schedule.liveness import count_held_nbytes, find_fusion_pairs
from tests.jaxoff.jaxpr.test_kernels import ROWS, WIDTH, depends, in_order, place, trace_problem
from tests.jaxoff.policy.matrix import inputs

ROW_NBYTES = 4 * WIDTH


def trace_kernels(fun, *args):
    _, problem = trace_problem(fun, *args)
    graph = KernelGraph(problem.eqns, problem.outs)
    return problem, graph, graph.kernels


def test_a_value_is_held_from_its_maker_to_its_last_reader():
    def fun(x, w):
        a = x @ w  # held to the end: a result
        b = a @ w
        c = b @ w
        return a, c @ w

    problem, graph, order = trace_kernels(fun, inputs(ROWS, WIDTH), inputs(WIDTH, WIDTH))
    held = count_held_nbytes(order, problem.eqns, graph, problem.outs)
    assert [n // (ROWS * ROW_NBYTES) for n in held] == [1, 2, 3, 3]


def gathered_twice(x, y, w, order, between, after):
    """Rows and, two products later, other rows by the same indices."""
    rows = (x @ w)[order]
    product = rows @ between @ between.T
    again = y[order]
    return (product * again) @ after @ after.T


def arguments(between, after):
    """For products of so many columns."""
    return (
        inputs(ROWS, WIDTH), inputs(ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH), jnp.arange(2 * ROWS) % ROWS,
        inputs(WIDTH, between), inputs(WIDTH, after),
    )  # fmt: skip


def test_rows_by_the_same_indices_are_gathered_side_by_side():
    eqns = in_order(gathered_twice, *arguments(1, 8 * WIDTH))
    first, second = place(eqns, "gather"), place(eqns, "gather", 1)
    assert not any(is_compute(eqn) for eqn in eqns[first:second])
    assert not depends(eqns, second, first)
    for gather in first, second:  # both read the indices themselves, not a value held back for one of them
        made = {v: eqn for eqn in eqns[:gather] for v in eqn.outvars}
        names, todo = set(), [eqns[gather].invars[1]]
        while todo:
            eqn = made.get(todo.pop())
            if eqn is not None:
                names.add(eqn.primitive.name)
                todo += variables(eqn)
        assert names == {"lt", "add", "select_n", "broadcast_in_dim"}


@pytest.mark.parametrize(("between", "after", "pairs"), [(1, 8 * WIDTH, 1), (8 * WIDTH, 1, 0)])
def test_only_where_the_order_holds_as_much_elsewhere(between, after, pairs):
    problem, graph, order = trace_kernels(gathered_twice, *arguments(between, after))
    names = {i: problem.eqns[i].primitive.name for i in order}
    found = find_fusion_pairs(order, problem, graph, large_nbytes=4 * ROWS * WIDTH)
    assert [(names[a], names[b]) for a, b in found.items()] == [("gather", "gather")] * pairs


def test_neither_reads_what_the_other_makes():
    def fun(x, w, order, spread):
        rows = (x @ w)[order]
        again = rows[order]
        return rows @ spread @ spread.T, again @ w

    x, _, w, order, _, spread = arguments(1, 8 * WIDTH)
    problem, graph, all_kernels = trace_kernels(fun, x, w, order % ROWS, spread)
    assert find_fusion_pairs(all_kernels, problem, graph, large_nbytes=4) == {}


def test_no_barrier_parts_a_move_kernel_from_a_reader_that_can_be_fused():
    """An activation and its gradient: the first is read by a product as well."""

    def fun(x, y, w):
        act = lax.cummax(x @ w, axis=0)
        grad = lax.cumsum(act * y, axis=0)
        return grad @ w, act.T @ y

    eqns = in_order(fun, inputs(ROWS, WIDTH), inputs(ROWS, WIDTH) / 3, inputs(WIDTH, WIDTH))
    act = eqns[place(eqns, "cummax")].outvars[0]
    readers = [eqn.primitive.name for eqn in eqns[: place(eqns, "cumsum")] if act in eqn.invars]
    assert "optimization_barrier" not in readers
