"""Collectives between devices in a program in order: what goes first, what stands beside them, and when."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_calls, resolve
from jaxoff._jaxpr.primitives import is_collective
from jaxoff._schedule.decide import decide
from jaxoff._schedule.emit import emit
from jaxoff._schedule.problem import OrderProblem
from tests.jaxoff.jaxpr.test_kernels import EVEN, depends, place
from tests.jaxoff.policy.matrix import assert_equal, inputs

ROWS, WIDTH = 16, 8
LARGE_NBYTES = 4 * ROWS * WIDTH
ALL = P(("expert", "pipe", "one"))


@functools.cache
def mesh():
    sizes, names = (2, 2, 1), ("expert", "pipe", "one")
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * 3, devices=jax.devices()[:4])


def arguments():
    return inputs(4 * ROWS, WIDTH), inputs(WIDTH, WIDTH) / 8


def in_order(local, *, check_vma=False):
    """The ordered program of a device, after a look at the results of all."""
    fun = functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(ALL, P()), out_specs=ALL, check_vma=check_vma
    )
    args = arguments()
    (mapped,) = jax.make_jaxpr(fun(local))(*args).jaxpr.eqns
    jaxpr, renamed = mapped.params["jaxpr"], {}
    eqns = list(inline_calls(jaxpr.eqns, renamed))
    outs = [resolve(renamed, v) for v in jaxpr.outvars]
    problem = OrderProblem(tuple(eqns), frozenset(outs), (True,) * len(eqns), waits_for_sends=False)
    found, _ = emit(decide(problem, EVEN, LARGE_NBYTES), problem)
    program = compat.jaxpr_as_fun(compat.ClosedJaxpr(jaxpr.replace(eqns=found, outvars=outs), ()))
    got = jax.jit(fun(lambda *args: tuple(program(*args))))(*args)
    assert_equal(list(got), jax.tree.leaves(jax.jit(fun(local))(*args)))
    return found


def by_data(eqns):
    """The same without barriers, of which no edge of a graph is left."""
    renamed, kept = {}, []
    for eqn in eqns:
        operands = [resolve(renamed, v) for v in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            renamed.update(zip(eqn.outvars, operands, strict=True))
        else:
            kept.append(eqn.replace(invars=operands))
    return kept


def exchanged(x, axis="expert"):
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


def with_shared_products(x, w):
    """An expert's product, and, before it in the program, others that need no collective."""
    shared = jnp.tanh(x @ w) @ w.T
    rows = exchanged(jnp.sort(x, axis=1))
    return (exchanged(rows @ w) + shared,)


def test_what_leads_to_an_exchange_goes_first_and_other_products_stand_beside_it():
    eqns = in_order(with_shared_products)
    sent, (shared, *_, expert) = place(eqns, "all_to_all"), [place(eqns, "dot_general", n) for n in range(3)]
    assert sent < shared < expert
    assert not depends(eqns, shared, sent)
    assert depends(eqns, expert, sent)
    assert depends(eqns, expert, shared)


def test_what_stands_beside_an_exchange_does_not_wait_for_what_is_in_its_memory():
    """An element of the value that is sent stands for it: a barrier over all of it would be a copy."""
    eqns = in_order(lambda x, w: (exchanged(jnp.cos(x)), *with_shared_products(x, w)))
    same, written = {}, set()  # by result of a barrier, what it is; what was written to
    for eqn in eqns:
        operands = [resolve(same, v) for v in eqn.invars]
        assert written.isdisjoint(v for v in operands if isinstance(v, compat.Var))
        if eqn.primitive.name == "optimization_barrier":
            same.update(zip(eqn.outvars, operands, strict=True))
        elif eqn.primitive.name == "dynamic_update_slice":
            written.add(operands[0])
    assert written


def test_exchanges_follow_each_other_by_data():
    def local(x, w):
        return exchanged(x @ w), exchanged(x @ w.T), lax.psum(jnp.sum(x), "expert")[None]

    eqns = by_data(in_order(local))
    places = [i for i, eqn in enumerate(eqns) if is_collective(eqn)]
    assert len(places) == 3
    for first, second in itertools.pairwise(places):
        assert depends(eqns, second, first)


def test_no_exchange_waits_for_one_over_other_axes():
    def local(x, w):
        return exchanged(x @ w), exchanged(x @ w.T, "pipe")

    eqns = by_data(in_order(local))
    assert not depends(eqns, place(eqns, "all_to_all", 1), place(eqns, "all_to_all"))


def test_an_axis_of_one_device_exchanges_nothing():
    eqns = in_order(lambda x, w: (lax.psum(x @ w, "one"), exchanged(x)))
    assert not is_collective(eqns[place(eqns, "psum")])
    assert is_collective(eqns[place(eqns, "all_to_all")])
    assert not any(eqn.primitive.name == "dynamic_update_slice" for eqn in eqns)


def test_an_empty_exchange_is_none():
    eqns = in_order(lambda x, w: (exchanged(x), exchanged(x[:, :0])))
    assert [is_collective(eqn) for eqn in eqns if eqn.primitive.name == "all_to_all"].count(True) == 1


def test_an_exchange_goes_no_sooner_than_there_is_memory():
    """Beside the widest product it would take more than the program does in its own order."""

    def local(x, w):
        wide = jnp.einsum("ij,kl->ijkl", x, w)
        narrow = jnp.einsum("ijkl,kl->ij", wide, w)
        return (narrow + exchanged(jnp.sort(x, axis=1) @ w),)

    eqns = in_order(local)
    (wide,) = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general" and is_wide(eqn)]
    assert place(eqns, "all_to_all") > wide


def is_wide(eqn):
    return len(eqn.outvars[0].aval.shape) == 4


def test_a_value_keeps_the_axes_over_which_it_varies():
    """So one that is the same on some devices does not wait for what differs there."""

    def local(x, w):
        sent, rows = exchanged(x @ w), jnp.tile(lax.pcast(w, "expert", to="varying"), (2, 1))
        return sent, x + lax.psum(rows, "expert")

    in_order(local, check_vma=True)
