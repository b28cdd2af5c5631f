"""Programs put in order: the same results, the same copies, and one chain of large values."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoff
from jaxoff._device.profile import H200, Device
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_calls
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._jaxpr.primitives import is_compute
from jaxoff._layers.scan import scan_by_strategy
from jaxoff._schedule.copy_times import ReloadPlan
from jaxoff._schedule.decide import Draft, decide
from jaxoff._schedule.problem import OrderOptions, OrderProblem, SpareRow
from jaxoff._schedule.rewrite import rewrite
from jaxoff._schedule.schedule import DelayReload
from jaxoff._schedule.summed_products import SummedProducts
from tests.jaxoff.policy.matrix import SAME_PRODUCTS, assert_close, assert_equal, inputs
from tests.jaxoff.schedule.test_random_programs import (
    ARGS,
    SIMPLE,
    TRANSFORMS,
    policies,
    programs,
    random_loss,
)
from tests.repeated_steps import REPEATED_STEPS, step_of_list

LAYERS, ROWS, WIDTH, HIDDEN = 5, 16, 8, 32
BOTH = jaxoff.policy(offload=["x_in", "act"])
ROUNDED = {"xla_allow_excess_precision": False}  # a cast rounds in every order
LOOP_BODIES = ("jaxpr", "body_jaxpr")  # of a scan, and of a while loop


def layer(x, w):
    up, down = w
    x = jaxoff.name(x, "x_in")
    act = jaxoff.name(jnp.square(jax.nn.relu(x @ up)), "act")
    return x + jnp.tanh(act @ down), None


def arguments():
    w = inputs(LAYERS, WIDTH, HIDDEN) / 8, inputs(LAYERS, HIDDEN, WIDTH) / 8
    return w, inputs(ROWS, WIDTH)


def loss_of(policy, flat=False):
    def scanned(w, x):
        return jnp.sum(jaxoff.scan(layer, x, w, policy=policy)[0])

    def one_by_one(w, x):
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(LAYERS)]
        return jnp.sum(jaxoff.layers(lambda w, x: layer(x, w)[0], x, each, policy=policy))

    return one_by_one if flat else scanned


def rewritten(fun, *args, device=H200):
    return rewrite(jax.make_jaxpr(fun)(*args), device, large_nbytes=1)


def deep(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.sub_jaxprs(eqn):
            yield from deep(inner)


def copies(jaxpr):
    """All copies but those of single elements, which only hold others back."""
    found = [(kind, eqn.outvars[0].aval.shape) for eqn in deep(jaxpr) if (kind := compat.transfer_in(eqn))]
    return sorted((kind, shape) for kind, shape in found if math.prod(shape) > 1)


def bodies(closed):
    """The straight-line programs in which residuals come back, their calls inlined."""
    loops = [eqn.params[key].jaxpr for eqn in closed.jaxpr.eqns for key in eqn.params if key in LOOP_BODIES]
    for jaxpr in (*loops, closed.jaxpr):
        eqns = list(inline_calls(jaxpr.eqns, {}))
        if any(compat.transfer_in(eqn) == "H2D" for eqn in eqns):
            yield jaxpr.replace(eqns=eqns, outvars=[])


def is_chained(jaxpr):
    """Whether each heavy equation depends on the one before it."""
    behind = {}  # by variable, the heavy equations that it depends on
    last = None
    for i, eqn in enumerate(jaxpr.eqns):
        before = set().union(*(behind.get(v, set()) for v in eqn.invars if isinstance(v, compat.Var)))
        if is_compute(eqn):
            if last is not None and last not in before:
                return False
            before, last = before | {i}, i
        behind |= dict.fromkeys(eqn.outvars, before)
    return last is not None


@pytest.mark.parametrize("repeated", REPEATED_STEPS)
def test_steps_within_loops_and_conditions_are_ordered_and_keep_their_results(repeated):
    block = jax.checkpoint(
        lambda x, w: jnp.tanh(jaxoff.name(jnp.sin(x @ w), "h") @ w), policy=jaxoff.policy(offload=["h"])
    )
    step = functools.partial(REPEATED_STEPS[repeated], functools.partial(step_of_list, block))
    w, x = list(jax.random.normal(jax.random.key(0), (3, 8, 8))), jnp.full((4, 8), 0.5)
    program = rewritten(step, w, x)
    assert (program.scanned, program.flat) == (0, True)
    assert str(program.jaxpr).count("optimization_barrier") > str(jax.make_jaxpr(step)(w, x)).count(
        "optimization_barrier"
    )
    got = jax.jit(compat.jaxpr_as_fun(program.jaxpr), compiler_options=SAME_PRODUCTS)(*w, x)
    assert_equal(got, jax.jit(step, compiler_options=SAME_PRODUCTS)(w, x))


@pytest.mark.parametrize("flat", [False, True], ids=["scan", "layers"])
def test_every_heavy_equation_follows_the_one_before(flat):
    args = arguments()
    step = jax.value_and_grad(loss_of(BOTH, flat), (0, 1))
    plain = jax.make_jaxpr(step)(*args)
    program = rewritten(step, *args)
    assert (program.scanned, program.flat) == ((0, True) if flat else (1, False))
    found = list(bodies(program.jaxpr))
    assert len(found) == 1
    assert all(map(is_chained, found))
    assert not any(map(is_chained, bodies(plain)))
    assert copies(program.jaxpr.jaxpr) == copies(plain.jaxpr)


@pytest.mark.parametrize("flat", [False, True], ids=["scan", "layers"])
def test_results_keep_their_bits(flat):
    args = arguments()
    step = jax.value_and_grad(loss_of(BOTH, flat), (0, 1))
    program = rewritten(step, *args).jaxpr
    got = jax.jit(compat.jaxpr_as_fun(program), compiler_options=SAME_PRODUCTS)(*jax.tree.leaves(args))
    wanted = jax.jit(step, compiler_options=SAME_PRODUCTS)(*args)
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(wanted))


def with_strategy(strategy, policy):
    return lambda w, x: jnp.sum(scan_by_strategy(layer, x, w, policy=policy, strategy=strategy)[0])


def with_stock_scan(w, x):
    return jnp.sum(lax.scan(jax.checkpoint(layer, policy=BOTH.on_device(), prevent_cse=False), x, w)[0])


def test_the_layers_of_a_scan_that_moves_nothing_are_in_order_too():
    args = arguments()
    step = jax.value_and_grad(loss_of(BOTH.on_device()), (0, 1))
    program = rewritten(step, *args)
    assert (program.loops, program.scanned, program.flat, program.spare_nbytes) == (2, 0, False, 0)
    loops = [eqn for eqn in program.jaxpr.jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    assert [eqn.primitive.name for eqn in loops] == ["while", "while"]
    for eqn in loops:
        body = eqn.params["body_jaxpr"].jaxpr
        assert is_chained(body.replace(eqns=list(inline_calls(body.eqns, {})), outvars=[]))
    got = jax.jit(compat.jaxpr_as_fun(program.jaxpr))(*jax.tree.leaves(args))
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)))


@pytest.mark.parametrize(
    "fun",
    [
        loss_of(BOTH.on_device()),
        jax.value_and_grad(with_strategy("plain", BOTH.on_device())),
        jax.value_and_grad(with_stock_scan),
    ],
    ids=["forward", "plain", "lax.scan"],
)
def test_other_programs_that_move_nothing_stay_as_they_are(fun):
    plain = jax.make_jaxpr(fun)(*arguments())
    program = rewrite(plain, H200, large_nbytes=1)
    assert (program.loops, program.scanned, program.flat) == (0, 0, False)
    assert str(program.jaxpr) == str(plain)


def heavy_names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns if is_compute(eqn) or compat.transfer_in(eqn)]


def first_product_reads_a_reload(device):
    """Whether the backward pass begins with what waits for the host."""

    def body(x, w):
        up, down = w
        h = jaxoff.name(x, "h")
        return x + jax.nn.relu(h @ up) @ down, None

    def loss(w, x):
        return jnp.sum(jaxoff.scan(body, x, w, policy=jaxoff.policy(offload=["h"]))[0])

    (back,) = bodies(rewritten(jax.grad(loss), *arguments(), device=device).jaxpr)
    reloaded = set()
    for eqn in back.eqns:
        if compat.transfer_in(eqn) == "H2D" or not reloaded.isdisjoint(
            v for v in eqn.invars if isinstance(v, compat.Var)
        ):
            reloaded.update(eqn.outvars)
        if is_compute(eqn):
            return any(v in reloaded for v in eqn.outvars)
    raise AssertionError("no product")


NO_LINK = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=1e-6, h2d_gbps=1e-6)
INSTANT_LINK = Device(flops=1e9, memory_gbps=1.0, d2h_gbps=math.inf, h2d_gbps=math.inf)


def test_what_does_not_wait_for_a_copy_goes_first():
    assert not first_product_reads_a_reload(NO_LINK)
    assert first_product_reads_a_reload(INSTANT_LINK)


def test_copies_to_the_host_are_waited_for_outside_of_loops():
    """Otherwise XLA puts each off to where its value is read back, and the device keeps it all the way."""
    args = arguments()
    program = rewritten(jax.grad(loss_of(BOTH, flat=True)), *args, device=INSTANT_LINK).jaxpr.jaxpr
    sent = [eqn.outvars[0] for eqn in program.eqns if compat.transfer_in(eqn) == "D2H"]
    held = {v for eqn in program.eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars}
    assert len(sent) == 2 * LAYERS
    assert sum(v in held for v in sent) >= 2 * (LAYERS - 1)


def test_kernels_that_keep_pace_with_the_link_wait_for_each_send_and_hold_few_reloads():
    """Over a link much slower than the kernels; otherwise these wait for no send."""
    link = Device(flops=1e6, memory_gbps=1e-3, d2h_gbps=1e-6, h2d_gbps=1e-6)
    plain = jax.make_jaxpr(jax.grad(loss_of(jaxoff.policy(offload=["act"]), flat=True)))(*arguments())

    def describe(keeps_pace):
        options = OrderOptions(keeps_pace=keeps_pace)
        eqns = rewrite(plain, link, large_nbytes=1, options=options).jaxpr.jaxpr.eqns
        names = [compat.transfer_in(eqn) or ("product" if is_compute(eqn) else "") for eqn in eqns]
        awaited = {v for eqn in eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars}
        sent = [eqn.outvars[0] in awaited for eqn in eqns if compat.transfer_in(eqn) == "D2H"]
        reloads = [i for i, name in enumerate(names) if name == "H2D"]
        between = [names[i:k].count("product") for i, k in itertools.pairwise(reloads)]
        return sum(sent), between

    assert describe(keeps_pace=False)[0] == 0
    awaited, between = describe(keeps_pace=True)
    assert awaited >= LAYERS - 1
    assert len(between) == LAYERS - 1
    assert min(between[2:]) > 1  # the first ones start as soon as their values are sent


@settings(max_examples=4, deadline=None, derandomize=True)
@given(programs(SIMPLE | TRANSFORMS, 8), policies(), st.booleans())
def test_random_programs_in_loops_keep_results_and_copies(program, policy, differs):
    loss = functools.partial(random_loss(program, scanned=True), policy)
    plain = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*ARGS)
    options = OrderOptions(shares_operands=differs, keeps_pace=differs)
    result = rewrite(plain, H200, large_nbytes=1, options=options)
    assert copies(result.jaxpr.jaxpr) == copies(plain.jaxpr)
    leaves = jax.tree.leaves(ARGS)
    functions = map(compat.jaxpr_as_fun, (result.jaxpr, plain))
    got, want = (jax.jit(fun, compiler_options=ROUNDED)(*leaves) for fun in functions)
    assert_close(list(got), list(want))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(programs(SIMPLE | TRANSFORMS, 8), policies(), st.booleans())
def test_random_programs_one_layer_after_the_other_keep_their_results(program, policy, differs):
    def loss(w, x):
        one = random_loss(program, scanned=False)
        return sum(one(policy, w[i : i + 1], x * (i + 1)) for i in range(2))

    plain = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*ARGS)
    options = OrderOptions(shares_operands=differs, keeps_pace=differs)
    result = rewrite(plain, H200, large_nbytes=1, options=options)
    leaves = jax.tree.leaves(ARGS)
    functions = map(compat.jaxpr_as_fun, (result.jaxpr, plain))
    got, want = (jax.jit(fun, compiler_options=ROUNDED)(*leaves) for fun in functions)
    assert_close(list(got), list(want))


def test_a_loop_with_effects_is_left_alone():
    def body(x, w):
        x, _ = layer(x, w)
        jax.debug.callback(lambda value: None, x[0, 0])
        return x, None

    def loss(w, x):
        return jnp.sum(lax.scan(jax.checkpoint(body, policy=BOTH, prevent_cse=False), x, w)[0])

    plain = jax.make_jaxpr(jax.grad(loss))(*arguments())
    assert str(rewrite(plain, H200, large_nbytes=1).jaxpr).count("optimization_barrier") == str(plain).count(
        "optimization_barrier"
    )


@pytest.mark.parametrize("is_result", [True, False], ids=["result", "passing"])
def test_a_reload_starts_before_light_kernels_where_what_it_waits_for_lives_anyway(is_result):
    """Behind them a large kernel could begin first, and keep the small ones waiting that start it."""
    size = (64, 64)

    def iteration(stack, rows, x, number):
        total = lax.dynamic_update_slice(rows, (x @ x)[None], (number, 0, 0))
        last = jnp.tanh(total[0]) @ x  # light, then heavy
        row = lax.dynamic_slice(stack, (number, 0, 0), (1, *size))
        return (total if is_result else total.sum()), jax.device_put(row, jax.memory.Space.Device)[0] + last

    stack = jax.typeof(jax.device_put(jnp.ones((4, *size)), jax.memory.Space.Host))
    jaxpr = jax.make_jaxpr(iteration)(stack, jnp.ones((4, *size)), jnp.ones(size), 1).jaxpr
    (reload,) = (i for i, eqn in enumerate(jaxpr.eqns) if compat.transfer_in(eqn) == "H2D")
    outs = frozenset(v for v in jaxpr.outvars if isinstance(v, compat.Var))
    problem = OrderProblem(
        tuple(jaxpr.eqns),
        outs,
        (True,) * len(jaxpr.eqns),
        waits_for_sends=False,
        iteration=jaxpr.invars[3],
        spare_rows={jaxpr.invars[0]: SpareRow(0, 1)},
    )
    reloads = ReloadPlan((reload,), {reload: 2})
    schedule = Draft(
        problem, KernelGraph(problem.eqns, outs), SummedProducts(), H200, 1 << 10, reloads, {}
    ).run()
    names = [jaxpr.eqns[i].primitive.name for i in schedule.kernels]
    began = schedule.kernels.index(reload)
    assert names.index("dot_general") < names.index("dynamic_update_slice")
    assert (began < names.index("tanh")) == is_result
    (delay,) = (action for action in schedule.actions if isinstance(action, DelayReload))
    (last_large,) = (v for v in jaxpr.eqns[schedule.kernels[began - 1]].outvars)
    assert (delay.kernel, delay.row, delay.after) == (reload, SpareRow(0, 1), last_large)


def test_a_sum_of_a_value_frees_it_once_the_other_readers_have_run():
    """The gradient of a bias that layers share, for example: values of all layers would wait for an add."""

    def backward(g, x, w):
        scores, sums = jnp.tanh(x @ w), []  # all sums are read at the end
        for _ in range(LAYERS):
            scores = jnp.tanh(scores * 2 @ w)
            sums.append(jnp.sum(scores.reshape(2, 2, -1, WIDTH), 0))
        return g + sum(sums)

    arguments = inputs(2, ROWS, WIDTH), inputs(4 * ROWS, WIDTH), inputs(WIDTH, WIDTH)
    jaxpr = jax.make_jaxpr(backward)(*arguments).jaxpr
    problem = OrderProblem(
        tuple(jaxpr.eqns), frozenset(jaxpr.outvars), (True,) * len(jaxpr.eqns), waits_for_sends=True
    )
    names = [jaxpr.eqns[i].primitive.name for i in decide(problem, H200, large_nbytes=1).kernels]
    heavy = [name for name in names if name in ("dot_general", "reduce_sum")]
    assert heavy == ["dot_general", *["dot_general", "reduce_sum"] * LAYERS]


def test_what_a_mutable_array_holds_is_read_and_written_in_the_order_given():
    def step(w, xs):
        total = jax.new_ref(jnp.zeros_like(w[0]))
        for x in xs:
            total[...] += jax.grad(loss_of(BOTH))(w, x)[0]
        return w[0] - 0.1 * total[...]

    w, x = arguments()[:2]
    args = w, [x, 2 * x]
    program = rewritten(step, *args)
    assert program.scanned
    got = jaxoff.jit(step, compiler_options=SAME_PRODUCTS)(*args)
    assert_equal(got, jax.jit(step, compiler_options=SAME_PRODUCTS)(*args))
