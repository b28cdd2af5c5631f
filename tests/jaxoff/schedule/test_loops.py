"""Scans written out as while loops: stacks with a spare row, reloads with a time, residuals handed over."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxoff
from jaxoff._device.profile import Device
from jaxoff._jaxpr import allocation, compat
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._schedule.rewrite import rewrite
from tests.jaxoff.policy.matrix import assert_close, assert_equal
from tests.jaxoff.schedule.test_order import BOTH, HIDDEN, LAYERS, ROWS, WIDTH, arguments, deep, layer

# Copies that are never in time, copies that take none, and copies of about a product's length.
SLOW = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=1e-6, h2d_gbps=1e-6)
INSTANT = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=math.inf, h2d_gbps=math.inf)
EVEN = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=0.2, h2d_gbps=0.2)


def loss(w, x, reverse=False):
    return jnp.sum(jaxoff.scan(layer, x, w, policy=BOTH, reverse=reverse)[0])


def program_of(fun, *args, device=SLOW, one_device=True):
    return rewrite(jax.make_jaxpr(fun)(*args), device, large_nbytes=1, one_device=one_device).jaxpr


def loops(closed):
    """The bodies of the while loops, the forward one first."""
    return [eqn.params["body_jaxpr"].jaxpr for eqn in closed.jaxpr.eqns if eqn.primitive.name == "while"]


def rows_of_host_stacks(closed):
    avals = [v.aval for eqn in closed.jaxpr.eqns for v in eqn.outvars if eqn.primitive.name == "while"]
    return sorted({aval.shape for aval in avals if compat.is_host(aval)})


def reloads(jaxpr):
    return [eqn for eqn in jaxpr.eqns if compat.transfer_in(eqn) == "H2D"]


def variable_in(atom):
    return atom if isinstance(atom, compat.Var) else None


def behind(jaxpr, variables):
    """All equations that some variables depend on."""
    maker, found, todo = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}, {}, list(variables)
    while todo:
        eqn = maker.get(todo.pop())
        if eqn is not None and id(eqn) not in found:
            found[id(eqn)] = eqn
            todo += [v for v in eqn.invars if isinstance(v, compat.Var)]
    return list(found.values())


@pytest.mark.parametrize("device", [SLOW, INSTANT, EVEN], ids=["slow", "instant", "even"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.some_cases(2)
def test_results_keep_their_bits(device, reverse):
    args = arguments()
    step = jax.value_and_grad(lambda w, x: loss(w, x, reverse), (0, 1))
    got = jax.jit(compat.jaxpr_as_fun(program_of(step, *args, device=device)))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)))


def test_loops_beside_one_without_iterations_are_written_out():
    checkpointed = jax.checkpoint(layer, policy=BOTH, prevent_cse=False)

    def stages(w, x):
        for stage in (w, jax.tree.map(lambda leaf: leaf[:0], w)):
            x = lax.scan(checkpointed, x, stage)[0]
        return jnp.sum(x)

    args, step = arguments(), jax.value_and_grad(stages, (0, 1))
    program = program_of(step, *args)
    assert len(loops(program)) == 2
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)))


@pytest.mark.parametrize("device", [SLOW, INSTANT, EVEN], ids=["slow", "instant", "even"])
@pytest.mark.some_cases(2)
def test_no_result_depends_on_what_a_stack_held_before(device, monkeypatch):
    """On a GPU device memory of a stack is not written before the rows are."""
    made = []

    def nonsense(behind, shape, sharding):
        made.append(shape)
        value = jnp.nan if jnp.issubdtype(behind.dtype, jnp.inexact) else 77
        return lax.full(shape, value, behind.dtype)

    args, step = arguments(), jax.value_and_grad(loss, (0, 1))
    wanted = jax.jit(step)(*args)
    monkeypatch.setattr(allocation, "allocate", nonsense)
    program = program_of(step, *args, device=device)
    assert {w.shape for w in args[0]} <= set(made)  # gradients of weights
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(wanted))


def test_stacks_that_the_compiler_divides_are_not_left_to_an_allocation():
    """It knows no way to divide one: each device would get it whole."""
    args = arguments()
    for one_device in (True, False):
        text = str(program_of(jax.grad(loss), *args, one_device=one_device))
        assert (" = unwritten[" in text) == one_device


def test_what_a_turn_takes_in_and_keeps_goes_into_its_stack_first():
    """At the end of the iteration the next one's takes its memory, and it would be copied before."""

    def loss(w, x):
        policy = jaxoff.policy(offload=["act"], save=["x_in"])
        return jnp.sum(jaxoff.scan(layer, x, w, policy=policy)[0])

    forward, _ = loops(program_of(jax.grad(loss), *arguments()))
    carried = next(v for v in forward.invars if v.aval.shape == (ROWS, WIDTH) and not compat.is_host(v.aval))
    made = {v: eqn for eqn in forward.eqns for v in eqn.outvars}
    first = next(i for i, eqn in enumerate(forward.eqns) if is_compute(eqn))
    writes = [eqn for eqn in forward.eqns[:first] if eqn.primitive.name == "dynamic_update_slice"]
    kept = [eqn for eqn in writes if eqn.outvars[0].aval.shape == (LAYERS, ROWS, WIDTH)]
    assert len(kept) == 1
    names, value = [], kept[0].invars[1]
    while value is not carried:
        names.append(made[value].primitive.name)
        value = made[value].invars[0]
    assert "optimization_barrier" not in names


def test_what_would_be_late_is_fetched_a_turn_ahead():
    """The forward loop hands over what the backward loop needs first: nothing is fetched twice."""
    program = program_of(jax.grad(loss), *arguments())
    forward, back = loops(program)
    assert [v.aval.shape for v in forward.outvars[-2:]] == [(ROWS, WIDTH), (ROWS, HIDDEN)]
    assert not any(map(compat.is_host, (v.aval for v in forward.outvars[-2:])))
    assert len(reloads(back)) == 2
    assert {eqn.outvars[0] for eqn in reloads(back)} == set(back.outvars[-2:])
    assert len([eqn for eqn in deep(program.jaxpr) if compat.transfer_in(eqn) == "H2D"]) == 2


def test_what_is_in_time_is_fetched_in_its_own_turn():
    _, back = loops(program_of(jax.grad(loss), *arguments(), device=INSTANT))
    fetched = {eqn.outvars[0] for eqn in reloads(back)}
    assert len(fetched) == 2
    assert fetched.isdisjoint(back.outvars)


def readers(jaxpr, variable):
    """What reads a variable, as it is or held back by barriers."""
    held, found = {variable}, []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            held.update(out for v, out in zip(eqn.invars, eqn.outvars, strict=True) if v in held)
        elif not held.isdisjoint(map(variable_in, eqn.invars)):
            found.append(eqn)
    return found


@pytest.mark.parametrize(("device", "aside"), [(EVEN, False), (SLOW, True)], ids=["even", "slow"])
def test_a_reload_ahead_waits_for_the_last_reader_of_what_it_replaces(device, aside):
    """That is a copy on the device, which the iteration reads, if the iteration would read it too long."""
    _, back = loops(program_of(jax.grad(loss), *arguments(), device=device))
    ahead = [eqn for eqn in reloads(back) if eqn.outvars[0] in back.outvars]
    assert ahead
    for eqn in ahead:
        arrived = back.invars[back.outvars.index(eqn.outvars[0]) - len(back.outvars)]
        before, read_by = {id(e) for e in behind(back, eqn.invars)}, readers(back, arrived)
        assert read_by
        assert all(id(e) in before for e in read_by)
        assert any(map(is_compute, read_by)) == (not aside)
        if aside:
            (copy,) = read_by
            late = [e for e in readers(back, copy.outvars[0]) if is_compute(e) and id(e) not in before]
            assert late


def made_last(w, x):
    """A loss whose layers end in what is offloaded."""

    def body(x, w):
        up, down = w
        for _ in range(6):
            x = jnp.tanh(x @ up @ down)
        return jaxoff.name(jnp.sin(x), "last"), None

    policy = jaxoff.policy(offload=["last"])
    return jnp.sum(jaxoff.scan(lambda x, w: (body(x, w)[0] ** 2, None), x, w, policy=policy)[0])


@pytest.mark.parametrize(("gbps", "in_place"), [(0.02, True), (1e-6, False)], ids=["in time", "late"])
def test_what_is_made_late_is_sent_a_turn_later(gbps, in_place):
    """And if that is done before the next value is made, that value takes its memory."""
    device = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=gbps, h2d_gbps=gbps)
    args = arguments()
    program = program_of(jax.value_and_grad(made_last, (0, 1)), *args, device=device)
    forward, _ = loops(program)
    (sent,) = [eqn for eqn in forward.eqns if compat.transfer_in(eqn) == "D2H"]
    arrived, made = forward.invars[-1], forward.outvars[-1]
    assert sent.invars[0] is arrived
    assert any(arrived in map(variable_in, eqn.invars) for eqn in behind(forward, [made])) == in_place
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    want = jax.jit(jax.value_and_grad(made_last, (0, 1)))(*args)
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(want))


def rows_at(body, count):
    """The rows that an iteration reads and writes, by the count of iterations, and the next count."""
    at = {body.invars[-len(body.outvars)]: count}
    operations = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
    rows = []
    for eqn in body.eqns:
        values = [at.get(v) if isinstance(v, compat.Var) else v.val for v in eqn.invars]
        if eqn.primitive.name in operations and None not in values:
            at[eqn.outvars[0]] = int(operations[eqn.primitive.name](*values))
        elif eqn.primitive.name in ("dynamic_slice", "dynamic_update_slice"):
            rows += [value for value in values if value is not None]
    return rows, at[body.outvars[0]]


@pytest.mark.parametrize("device", [SLOW, INSTANT, EVEN], ids=["slow", "instant", "even"])
@pytest.mark.parametrize("reverse", [False, True])
def test_no_row_is_the_next_count(device, reverse):
    """XLA would compute both as one value, in the memory of the count, behind all that still reads that."""
    step = jax.grad(lambda w, x: loss(w, x, reverse))
    for body in loops(program_of(step, *arguments(), device=device)):
        found = [rows_at(body, count) for count in (3, 4, 100)]
        assert all(following == count + 1 for (_, following), count in zip(found, (3, 4, 100), strict=True))
        offsets = [{row - following for row in rows} for rows, following in found]
        assert all(map(len, offsets))
        assert 0 not in set.intersection(*offsets)


def test_a_turn_may_leave_constants():
    def constants(w, x):
        def body(x, w):
            return layer(x, w)[0], (jnp.float32(2), 3)

        x, (twos, threes) = jaxoff.scan(body, x, w, policy=BOTH)
        return jnp.sum(x) * jnp.sum(twos) + jnp.sum(threes)

    args, step = arguments(), jax.value_and_grad(constants)
    got = jax.jit(compat.jaxpr_as_fun(program_of(step, *args)))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)))


@pytest.mark.parametrize("device", [SLOW, INSTANT, EVEN], ids=["slow", "instant", "even"])
def test_nothing_in_a_turn_waits_for_a_write_into_a_stack_on_the_host(device):
    """That is when its copy ends: whatever has a place behind it would show the copy."""
    bodies = loops(program_of(jax.grad(loss), *arguments(), device=device))
    barriers = [eqn for body in bodies for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    assert barriers
    assert not any(compat.is_host(v.aval) for eqn in barriers for v in eqn.invars)


def test_what_is_made_early_is_sent_in_its_turn():
    forward, _ = loops(program_of(jax.grad(loss), *arguments(), device=INSTANT))
    sent = [eqn for eqn in forward.eqns if compat.transfer_in(eqn) == "D2H"]
    assert len(sent) == 2
    assert {eqn.invars[0] for eqn in sent}.isdisjoint(forward.invars)


def test_a_reload_that_would_come_early_waits_for_its_time():
    """Which only a dependency can make it do that goes through the stack that it copies from."""

    def body(x, w):
        up, down = w
        first = jaxoff.name(jnp.sin(x), "first")
        y = first * first
        for _ in range(6):
            y = jaxoff.name(jnp.tanh(y @ up @ down), "y")
        return y, None

    def early(w, x):
        policy = jaxoff.policy(offload=["first"], save=["y"])
        return jnp.sum(jaxoff.scan(body, x, w, policy=policy)[0])

    _, back = loops(program_of(jax.grad(early), *arguments(), device=INSTANT))
    (reload,) = reloads(back)
    before = behind(back, reload.invars)
    writes = [eqn for eqn in before if eqn.primitive.name == "dynamic_update_slice"]
    assert any(eqn.primitive.name == "dot_general" for eqn in before)
    assert any(eqn.invars[1].aval.size == 1 for eqn in writes)


@pytest.mark.parametrize("device", [SLOW, INSTANT], ids=["ahead", "in its iteration"])
def test_each_stack_has_one_spare_row(device):
    program = program_of(jax.grad(loss), *arguments(), device=device)
    assert rows_of_host_stacks(program) == [(LAYERS + 1, ROWS, WIDTH), (LAYERS + 1, ROWS, HIDDEN)]


def test_over_several_devices_nothing_is_handed_over():
    """One element of a value that the compiler divides would have to be fetched from where it is."""
    program = program_of(jax.grad(loss), *arguments(), one_device=False)
    assert rows_of_host_stacks(program) == [(LAYERS, ROWS, WIDTH), (LAYERS, ROWS, HIDDEN)]


def test_a_stack_that_someone_else_reads_has_no_spare_row():
    def steps(x, w):
        x, _ = layer(x, w)
        return x, jax.device_put(x, jax.memory.Space.Host)

    def both(w, x):
        _, stack = lax.scan(steps, x, w)

        def back(g, x):
            return g + jnp.tanh(jax.device_put(x, jax.memory.Space.Device)), None

        return lax.scan(back, jnp.zeros_like(x), stack, reverse=True)[0], stack

    args = arguments()
    program = program_of(both, *args)
    assert rows_of_host_stacks(program) == [(LAYERS, ROWS, WIDTH)]
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(both)(*args)))


def test_loops_in_different_jits_are_put_together():
    def step(w, x):
        value, back = jax.vjp(jax.jit(loss), w, x)
        return value, jax.jit(back)(jnp.ones_like(value))

    args = arguments()
    program = program_of(step, *args)
    assert rows_of_host_stacks(program) == [(LAYERS + 1, ROWS, WIDTH), (LAYERS + 1, ROWS, HIDDEN)]
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)))


def test_gradients_leave_for_their_stack_in_the_order():
    """What comes after the gradient of a weight waits until it is written, so that its memory is free."""
    _, back = loops(program_of(jax.grad(loss), *arguments(), device=INSTANT))
    writes = [
        eqn
        for eqn in back.eqns
        if eqn.primitive.name == "dynamic_update_slice" and not compat.is_host(eqn.outvars[0].aval)
    ]
    assert len(writes) == 2
    held = {v for eqn in back.eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars}
    assert any(eqn.outvars[0] in held for eqn in writes)


def residual_of(make, length=3):
    """A loss whose layers move one value, made from a product."""

    def body(x, w):
        h = jaxoff.name(make(x @ w), "h")
        return jnp.tanh(x + jnp.real(h).astype(x.dtype)), None

    def step(w, x):
        return jnp.sum(jaxoff.scan(body, x, w, policy=jaxoff.policy(offload=["h"]), keep_first=False)[0])

    w = jax.random.normal(jax.random.key(0), (length, 8, 8)) / 3
    return jax.value_and_grad(step, (0, 1)), (w, jax.random.normal(jax.random.key(1), (16, 8)))


@pytest.mark.parametrize("device", [SLOW, INSTANT], ids=["slow", "instant"])
@pytest.mark.parametrize(
    "make",
    [
        lambda z: jnp.sin(z).astype(jnp.bfloat16),
        lambda z: jnp.sin(z).astype(jnp.float8_e4m3fn),
        lambda z: jnp.exp(1j * z),
        lambda z: z > 0,
        lambda z: jnp.sum(jnp.sin(z)) / 9,
    ],
    ids=["bfloat16", "float8", "complex", "bool", "scalar"],
)
@pytest.mark.some_cases(5)
def test_residuals_of_any_type(make, device):
    step, args = residual_of(make)
    program = program_of(step, *args, device=device)
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_close(list(got), jax.tree.leaves(jax.jit(step)(*args)))


@pytest.mark.parametrize("length", [2, 7])
def test_loops_of_any_length(length):
    step, args = residual_of(jnp.sin, length)
    program = program_of(step, *args)
    assert {shape[0] for shape in rows_of_host_stacks(program)} == {length + 1}
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_close(list(got), jax.tree.leaves(jax.jit(step)(*args)))
