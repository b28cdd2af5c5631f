"""Steps within budgets that only state on the host meets."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.limits import Budget
from jaxoff._budget.state import State
from jaxoff._budget.tried import Tried
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._report.progress import Progress
from jaxoff._report.tables import format_nbytes
from jaxoff._runtime import program_memory
from jaxoff._schedule.rewrite import rewrite
from jaxoff._state import stream

WIDTH = 512
LAYOUT = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch, folder):
    monkeypatch.setattr(stream, "_BLOCK_NBYTES", 1 << 18)
    # The same programs are searched again and again: what each takes is known from the first test on.
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(folder))
    monkeypatch.setattr(program_memory, "_WORTH_A_FILE", 0.0)


OPTIMIZER = optax.adamw(1e-3)


def initialize(key):
    params = {"w": jax.random.normal(key, (4, WIDTH, WIDTH)) / WIDTH, "b": jnp.zeros(WIDTH)}
    return params, OPTIMIZER.init(params)


def step(state, x):
    def loss(params):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        return (lax.scan(layer, x, params["w"])[0] + params["b"]).var()

    params, optimizer_state = state
    value, grads = jax.value_and_grad(loss)(params)
    changes, optimizer_state = OPTIMIZER.update(grads, optimizer_state, params)
    return (optax.apply_updates(params, changes), optimizer_state), value


def make_arguments():
    return jax.jit(initialize)(jax.random.key(0)), jnp.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)


def jit_within(device_bytes, **options):
    return jaxoff.jit(step, donate_argnums=0, device_bytes=device_bytes, **options)


MOMENTS_NBYTES = 2 * 4 * WIDTH * WIDTH * 4


@pytest.fixture(scope="module")
def budget():
    """Two thirds of the moments less than the state takes: no program meets it with all of them."""
    state, _ = make_arguments()
    return sum(x.nbytes for x in jax.tree.leaves(state)) + MOMENTS_NBYTES / 6


@pytest.fixture(scope="module")
def shared(budget):
    """The step within the budget: tests that share it share its search."""
    return jit_within(budget)


def list_kinds(state):
    return [(x.nbytes > 1 << 20, x.sharding.memory_kind) for x in jax.tree.leaves(state[1])]


def test_state_rests_on_the_host_where_the_budget_asks_for_it(budget):
    calls = []

    def counted(state, x):
        calls.append(1)
        return step(state, x)

    within = jaxoff.jit(counted, donate_argnums=0, device_bytes=budget)
    plain, (state, x), (other, _) = jax.jit(step), make_arguments(), make_arguments()
    given = jax.tree.leaves(state)
    for _ in range(3):
        (state, value), (other, expected) = within(state, x), plain(other, x)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert len(calls) == 1
    assert all(x.is_deleted() for x in given)  # donated, whichever memory they were in
    assert set(list_kinds(state)) == {(True, "pinned_host"), (False, "device")}
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-7)
    plan = within.plan
    assert plan.host_bytes == MOMENTS_NBYTES
    assert plan.peak_bytes <= budget
    rows = {v.value: v for v in plan.values}
    assert rows["state/1/0/mu/w"].placement == "offload"
    assert rows["state/1/0/mu/w"].nbytes == MOMENTS_NBYTES / 2
    assert "state/1/0/nu/w" in str(plan)


def test_a_budget_for_all_of_the_state_leaves_it_on_the_device():
    within, (state, x) = jit_within(1e9), make_arguments()
    state, _ = within(state, x)
    assert {kind for _, kind in list_kinds(state)} == {"device"}
    assert within.plan.host_bytes == 0


def test_a_step_takes_its_state_from_either_memory(budget, shared):
    within, (state, x) = shared, make_arguments()
    state, _ = within(state, x)
    host = jax.tree.map(np.asarray, state)
    plan, kinds = within.plan, list_kinds(state)
    state, value = within(jax.tree.map(jnp.asarray, host), x)  # restored to the device
    assert list_kinds(state) == kinds
    restored = jax.device_put(host, plan.in_shardings[0])
    assert list_kinds(restored) == kinds
    _, again = within(restored, x)
    assert value == again
    assert within.plan is plan  # one plan for both
    fresh = jit_within(budget)
    _, first = fresh(jax.device_put(host, plan.in_shardings[0]), x)  # resumed in a process without a plan
    assert first == value


def test_a_larger_budget_takes_the_state_of_a_smaller_one_to_the_device(shared):
    (state, x), (other, _) = make_arguments(), make_arguments()
    within, wide = shared, jit_within("1GB")
    (state, _), (other, _) = within(state, x), jax.jit(step)(other, x)
    x = jax.device_put(x, jax.memory.Space.Host)
    state, value = wide(state, x)
    _, expected = jax.jit(step)(other, jax.device_put(x, jax.memory.Space.Device))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert all(kind == "device" for _, kind in list_kinds(state))
    state, again = wide(state, x)  # an argument that is not donated is still there
    assert again < value
    host = jax.device_put(state, within.plan.in_shardings[0])
    wide.lower(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding), host), x)


def test_a_state_is_made_where_the_plan_wants_it(shared):
    state, x = make_arguments()
    within = shared
    compiled = within.lower(jax.eval_shape(lambda: state), x).compile()
    made = jax.jit(initialize, out_shardings=within.plan.in_shardings[0])(jax.random.key(0))
    assert set(list_kinds(made)) == {(True, "pinned_host"), (False, "device")}
    made, value = within(made, x)
    assert set(list_kinds(made)) == {(True, "pinned_host"), (False, "device")}
    made, ahead = compiled(state, x)  # of structs without shardings; from the device
    assert ahead == value
    compiled(made, x)


def test_the_least_of_a_budget_below_the_arguments_is_that_of_a_program(budget):
    args = make_arguments()
    with pytest.raises(jaxoff.BudgetError) as error:
        jit_within(1e6).lower(*args)
    least = error.value.smallest_bytes
    assert least is not None
    assert least < budget
    within = jit_within(least)
    within.lower(*args)
    assert within.plan.peak_bytes <= least


def test_an_error_with_state_on_the_host_names_the_gradients_that_are_left():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER)

    def step(state, x):
        def loss(w):
            return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0].var()

        w, optimizer_state = state
        value, grads = jax.value_and_grad(loss)(w)
        changes, optimizer_state = clipped.update(grads, optimizer_state, w)
        return (optax.apply_updates(w, changes), optimizer_state), value

    (params, _), x = make_arguments()
    with pytest.raises(jaxoff.BudgetError, match="of state rest on the host") as error:
        jaxoff.jit(step, donate_argnums=0, device_bytes=1e6).lower(
            (params["w"], clipped.init(params["w"])), x
        )
    gradients = f"  float32[4, {WIDTH}, {WIDTH}]  "
    assert any(gradients in line and "test_state_budget.py" in line for line in error.value.largest)


def test_arrays_anywhere_and_described_arrays_make_one_program(budget, shared):
    state, x = make_arguments()
    text = shared.lower(state, x).as_text()
    assert "pinned_host" in text
    on_host = jax.device_put(state, shared.plan.in_shardings[0])
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, x))
    assert shared.lower(on_host, x).as_text() == text
    assert jit_within(budget).lower(*described).as_text() == text  # a search of its own


def test_a_budget_of_host_memory_bounds_the_state(budget):
    args = make_arguments()
    with pytest.raises(jaxoff.BudgetError, match="MB of state would rest on the host"):
        jit_within(budget, host_bytes=MOMENTS_NBYTES / 4).lower(*args)
    jit_within(budget, host_bytes=2 * MOMENTS_NBYTES).lower(*args)


def test_without_host_memory_the_least_is_that_of_a_program(budget):
    """Not the bytes of the arguments, which no program takes."""
    state, x = make_arguments()
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((state, x)))
    with pytest.raises(jaxoff.BudgetError, match="beyond host_bytes") as error:
        jit_within(arguments / 2, host_bytes=0)(state, x)
    assert (error.value.smallest_bytes or 0) > arguments


def test_state_that_is_not_donated_stays_and_the_error_says_what_it_takes(budget):
    with pytest.raises(jaxoff.BudgetError, match=r"No argument is donated \(donate_argnums\)"):
        jaxoff.jit(step, device_bytes=budget).lower(*make_arguments())
    unused = pytest.warns(UserWarning, match="donated buffers were not usable")
    with unused, pytest.raises(jaxoff.BudgetError, match="No donated argument is state"):
        jaxoff.jit(step, donate_argnums=1, device_bytes=budget).lower(*make_arguments())


def test_the_program_takes_and_returns_host_memory(shared):
    traced = shared.trace(*make_arguments())
    assert sum(compat.is_host(v.aval) for v in traced.jaxpr.jaxpr.outvars) == 2
    assert shared.lower(*make_arguments()).as_text().count('mhlo.memory_kind = "pinned_host"') >= 4


@pytest.mark.parametrize("taken", [4e6, 12e6])
def test_the_least_is_that_of_all_searches(taken):
    """A program with its state on the host may take more than one without."""
    closed = jax.make_jaxpr(step)(*make_arguments())
    state = State.find(closed, [True] * len(closed.jaxpr.invars))

    def find(program, budget):
        raise jaxoff.BudgetError("nothing", taken)

    names = [str(v) for v in closed.jaxpr.invars]
    limits = H200, Budget.of(1e6, None, None), jaxoff.BudgetError("at first", 8e6)
    with pytest.raises(jaxoff.BudgetError, match="of state rest on the host") as caught:
        state.search(names, *limits, find, 7e6, Progress())
    assert caught.value.smallest_bytes == min(taken, 8e6)


def test_state_far_below_what_is_missing_is_not_tried():
    closed = jax.make_jaxpr(step)(*make_arguments())
    state = State.find(closed, [True] * len(closed.jaxpr.invars))

    def find(program, budget):
        raise AssertionError("a program with its state on the host was searched for")

    names = [str(v) for v in closed.jaxpr.invars]
    limits = H200, Budget.of(1e6, None, None), jaxoff.BudgetError("at first", 800e6)
    with pytest.raises(
        jaxoff.BudgetError, match=r"rest on the host takes 8\.\d+ MB, and 799\.00 MB are missing"
    ):
        state.search(names, *limits, find, 799e6, Progress())


@pytest.mark.parametrize(
    ("missing", "more", "tried"),
    [
        (1.5e6, 0, ["2.10 MB"]),  # the smallest state that is enough
        (1.5e6, 3e6, ["2.10 MB", "8.39 MB"]),  # and what was missing with it
        (1.5e6, 99e6, ["2.10 MB", "14.68 MB"]),
        (6e6, -4e6, ["8.39 MB", "4.19 MB"]),  # less, since much was left
    ],
)
def test_a_search_keeps_as_little_state_on_the_host_as_programs_need(missing, more, tried):
    """Of 8.4, 4.2 and 2.1 MB; the programs take more memory, or less, than was missing at first."""
    structs = [jax.ShapeDtypeStruct((n << 8, 1024), "float32") for n in (8, 4, 2)]

    def step(momenta, grads):
        return jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)

    closed = jax.make_jaxpr(step)(structs, structs)
    state = State.find(closed, [True] * 3 + [False] * 3)
    kept = []

    def find(program, budget):
        kept.append(sum(compat.nbytes(v.aval) for v in program.jaxpr.invars if compat.is_host(v.aval)))
        nbytes = budget.device_nbytes + missing + more - kept[-1]
        if nbytes > budget.device_nbytes:
            raise jaxoff.BudgetError("nothing", int(nbytes))
        return Tried((), (), (), 0.0, True, 0.0, nbytes, 1, None)

    limits = H200, Budget.of(20e6, None, None), jaxoff.BudgetError("at first", int(20e6 + missing))
    search = functools.partial(state.search, list("abcdef"), *limits, find, missing, Progress())
    if more > sum(compat.nbytes(v.aval) for v in closed.jaxpr.invars[:3]):
        with pytest.raises(jaxoff.BudgetError):
            search()
    else:
        _, hosted = search()
        assert sum(value.nbytes for value in hosted.values) == kept[-1]
    assert [format_nbytes(nbytes) for nbytes in kept] == tried


def train(state, x):
    """A step with momentum through layers in a scan, or in a list."""

    def loss(params):
        h = x
        if not isinstance(params, list):
            h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params)[0]
        else:
            for w in params:
                h = h + jnp.tanh(h @ w)
        return h.var()

    params, moments = state
    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), value


def test_layers_in_a_row_train_alike_with_their_state_on_the_host():
    def make():
        draws = jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)) / WIDTH
        return ([*draws], [jnp.zeros_like(w) for w in draws]), jnp.linspace(-1, 1, 64 * WIDTH).reshape(64, -1)

    (state, x), (other, _), plain = make(), make(), jax.jit(train)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    within = jaxoff.jit(train, donate_argnums=0, device_bytes=1.2 * nbytes)
    for _ in range(3):
        (state, value), (other, expected) = within(state, x), plain(other, x)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert "pinned_host" in {leaf.sharding.memory_kind for leaf in state[1]}
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loop", [False, True])
def test_layers_in_a_row_are_ordered_with_their_state_on_the_host(loop):
    """Without an order XLA keeps the operands of all weights' gradients up to the updates."""
    struct = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    params = jax.ShapeDtypeStruct((4, *struct.shape), "float32") if loop else [struct] * 4
    closed = jax.make_jaxpr(train)((params, params), jax.ShapeDtypeStruct((64, WIDTH), "float32"))
    count = len(closed.jaxpr.invars) // 2
    state = State.find(closed, [True] * (2 * count) + [False])
    program = stream.stream_updates(state.closed, state.updates)
    written = rewrite(program, H200, large_nbytes=1 << 10)
    assert written.streamed
    assert written.flat != loop
    assert any(eqn.primitive.name == "optimization_barrier" for eqn in written.jaxpr.jaxpr.eqns) or loop


def test_state_is_updated_in_blocks_where_updates_in_the_backward_pass_take_too_much():
    params = jax.ShapeDtypeStruct((16, WIDTH, WIDTH), "float32")
    closed = jax.make_jaxpr(train)((params, params), jax.ShapeDtypeStruct((64, WIDTH), "float32"))
    state = State.find(closed, [True, True, False])
    searched = []

    def find(program, budget):
        searched.append(program)
        if len(searched) == 1:
            raise jaxoff.BudgetError("nothing", 21e6)
        return Tried((), (), (), 0.0, True, 0.0, 20e6, 1, None)

    limits = H200, Budget.of(20e6, None, None), jaxoff.BudgetError("at first", 30e6)
    _, hosted = state.search(["w", "momentum", "x"], *limits, find, 10e6, Progress())
    assert len(searched) == 2
    assert [value.source for value in hosted.values] == ["state, updated in blocks"]


def convolve(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)


@pytest.mark.parametrize(
    ("product", "shape", "large_nbytes"),
    [
        (convolve, (3, 3, 256, 256), 1 << 20),
        (convolve, (3, 3, 256, 256), 1 << 24),
        (jnp.matmul, (1024, 1024), 1 << 24),
    ],
    ids=["large convolution", "small convolution", "small product"],
)
def test_the_gradient_of_weights_is_read_behind_the_barrier_that_waits_for_it(product, shape, large_nbytes):
    """XLA drops a barrier's operand that nobody reads: the product would run when the weights change."""

    def step(state, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(product(h, w))
            return h.var()

        params, momenta = state
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(params))
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, momenta), momenta

    params = [jax.ShapeDtypeStruct(shape, "float32")] * 4
    closed = jax.make_jaxpr(step)((params, params), jax.ShapeDtypeStruct((8, 64, 64, shape[-1]), "float32"))
    state = State.find(closed, [True] * 8 + [False])
    assert len(state.updates) == 4
    program = rewrite(stream.stream_updates(state.closed, state.updates), H200, large_nbytes=large_nbytes)
    eqns = program.jaxpr.jaxpr.eqns
    gradients = [
        eqn.outvars[0] for eqn in eqns if is_compute(eqn) and eqn.outvars[0].aval.size == math.prod(shape)
    ]
    assert len(gradients) == 4
    readers = [[eqn.primitive.name for eqn in eqns if v in eqn.invars] for v in gradients]
    assert sum(names == ["optimization_barrier"] for names in readers) >= 3  # nothing waits for the last one
