"""`jaxoff.jit`: all of `jax.jit`, and the options that a program needs."""

import copy
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff import FindingCode
from jaxoff._runtime import flags, versions
from jaxoff._runtime.flags import COMMAND_BUFFER, DISABLED_PASSES, SCHEDULING_MODE
from tests.jaxoff.policy.matrix import SAME_PRODUCTS, assert_close, assert_equal, inputs
from tests.jaxoff.schedule.test_order import BOTH, arguments, layer, loss_of

STEP = jax.value_and_grad(loss_of(BOTH), (0, 1))
FLAT = jax.value_and_grad(loss_of(BOTH, flat=True), (0, 1))


def options_of(jitted):
    return dict(jitted.options)


def assert_same_bits(fun):
    """`jaxoff.jit` and `jax.jit` of a function agree to the bit."""
    ours = jaxoff.jit(fun, compiler_options=SAME_PRODUCTS).lower(*arguments()).compile()
    assert_equal(ours(*arguments()), jax.jit(fun, compiler_options=SAME_PRODUCTS)(*arguments()))


def test_layers_in_a_loop_get_graphs_with_concurrent_edges():
    step = jaxoff.jit(STEP)
    assert_close(step(*arguments()), jax.jit(STEP)(*arguments()))
    assert_same_bits(STEP)
    assert options_of(step)[SCHEDULING_MODE] == "CONCURRENT"
    assert "COLLECTIVES" in options_of(step)[COMMAND_BUFFER].split(",")


def test_nothing_cuts_the_graph_of_a_turn_on_one_device_or_on_several():
    cuts = {"xla_gpu_experimental_use_collective_kernels", "xla_gpu_enable_cub_radix_sort"}
    step = jaxoff.jit(STEP)
    w, x = arguments()
    wanted = step(w, x)
    assert cuts <= options_of(step).keys()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    value, gradients = step(w, jax.device_put(x, rows))
    assert cuts <= options_of(step).keys()
    assert_close(jax.tree.leaves((value, gradients)), jax.tree.leaves(wanted))


@pytest.mark.parametrize(("jaxlib", "kept"), [("0.11.2", False), ("0.12.0.1", True), ("0.13.0rc1", True)])
def test_what_is_left_of_barriers_stays_where_xla_would_take_it_away(jaxlib, kept):
    for scanned in (1, 0):  # in order, with copies or without
        passes = dict(flags.choose_options(loops=2, scanned=scanned, jaxlib=jaxlib))[DISABLED_PASSES].split(
            ","
        )
        assert ("tuple-simplifier" in passes) == kept


def test_xla_recomputes_nothing_by_itself_in_a_program_in_order():
    assert flags.choose_options(jaxlib="0.11.2") == ()
    rows = "dynamic-slice-copy-fusion-async-wrapper"
    for program, passes in [
        (dict(loops=2, scanned=1), f"rematerialization,{rows}"),
        (dict(loops=2, scanned=1, concurrent=False, early=True), f"rematerialization,{rows}"),
        (dict(loops=2, scanned=1, concurrent=False), "rematerialization"),
        (dict(loops=2), "rematerialization"),
        (dict(flat=True), "rematerialization"),
        (dict(flat=True, budgeted=True), f"rematerialization,{rows}"),
        (dict(budgeted=True), rows),
        (dict(budgeted=True, disabled="cse"), f"cse,{rows}"),
    ]:
        assert dict(flags.choose_options(**program, jaxlib="0.11.2"))[DISABLED_PASSES] == passes


def test_passes_that_the_process_leaves_out_stay_left_out(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --{DISABLED_PASSES}=cse,dce")
    step = jaxoff.jit(STEP)
    step.lower(*arguments())
    assert options_of(step)[DISABLED_PASSES].split(",")[:3] == ["cse", "dce", "rematerialization"]


@pytest.mark.parametrize(
    "fun", [FLAT, jax.grad(loss_of(BOTH.on_device())), loss_of(BOTH)], ids=["layers", "saved", "forward"]
)
def test_programs_without_such_a_loop_keep_the_default_options(fun):
    step = jaxoff.jit(fun)
    assert_close(step(*arguments()), jax.jit(fun)(*arguments()))
    assert_same_bits(fun)
    assert options_of(step).keys() <= {DISABLED_PASSES}


def test_the_callers_options_win():
    given = {SCHEDULING_MODE: "SERIALIZE"}
    step = jaxoff.jit(STEP, compiler_options=given)
    with pytest.warns(UserWarning, match="SERIALIZE puts the copies of scanned layers in line"):
        step(*arguments())
    assert options_of(step)[SCHEDULING_MODE] == "SERIALIZE"
    assert "COLLECTIVES" in options_of(step)[COMMAND_BUFFER]


def test_options_known_to_harm_are_warned_of():
    assert not list(flags.find_harmful_options({}, scanned=True))
    assert not list(flags.find_harmful_options({SCHEDULING_MODE: "CONCURRENT"}, scanned=True))
    (text,) = flags.find_harmful_options({SCHEDULING_MODE: "CONCURRENT"}, scanned=False)
    assert "gives up the reuse of memory" in text
    for value in (True, "true"):
        (text,) = flags.find_harmful_options(
            {"xla_gpu_enable_pipelined_host_offloading": value}, scanned=True
        )
        assert "wrong results" in text


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_level_that_pipelines_host_copies_is_warned_of(level):
    previous = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        match = f"jax_optimization_level={level} switches on pipelining"
        with pytest.warns(UserWarning, match=match) as caught:
            jaxoff.jit(STEP).lower(*arguments())
        assert caught[0].filename == __file__
    finally:
        jax.config.update("jax_optimization_level", previous)


def test_a_jaxlib_that_computes_wrong_gradients_is_refused_on_a_gpu():
    with pytest.raises(RuntimeError, match=r"needs jaxlib 0\.11\.1 or newer, got 0\.11\.0.*xla#46231"):
        versions.refuse_wrong_jaxlib("0.11.0", "gpu")
    for version, platform in (("0.11.0", "cpu"), ("0.11.1", "gpu"), ("0.12.0.1", "gpu")):
        versions.refuse_wrong_jaxlib(version, platform)


def test_static_and_named_arguments_and_donation():
    @functools.partial(jaxoff.jit, static_argnums=2, static_argnames="policy", donate_argnums=1)
    def step(w, x, sign, *, policy):
        return jax.grad(lambda w: sign * loss_of(policy)(w, x))(w), x + 1

    w, x = arguments()
    for sign in (1, -1):
        given = jnp.asarray(x)
        got, more = step(w, given, sign, policy=BOTH)
        assert given.is_deleted()
        assert_close(got, jax.grad(lambda w, s=sign: s * loss_of(BOTH)(w, x))(w))
        assert_equal(more, x + 1)


def test_one_function_for_programs_that_need_other_options():
    """A second signature that moves nothing is compiled without the options, and the first still runs."""

    @jaxoff.jit
    def step(w, x):
        policy = BOTH if x.shape[0] > 8 else BOTH.on_device()
        return jax.grad(loss_of(policy))(w, x)

    w, x = arguments()
    for rows in (16, 4, 16, 4):
        assert_close(step(w, x[:rows]), jax.grad(loss_of(BOTH))(w, x[:rows]))
        assert (SCHEDULING_MODE in options_of(step)) == (rows > 8)


def test_a_program_with_nothing_to_order_is_that_of_jax_jit():
    """JAX knows it by its text: both take the same executable of the compilation cache."""

    def drop(key, h):
        return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)

    @jax.value_and_grad
    def step(w, x, key):
        layer = jax.checkpoint(lambda h, key: drop(key, jax.nn.gelu(h @ w)) + drop(key, jax.nn.relu(h)))
        for part in jax.random.split(key, 3):
            x = layer(x, part)
        return jax.nn.logsumexp(x, axis=-1).sum()

    args = inputs(8, 8), inputs(4, 8), jax.random.key(0)
    assert jaxoff.jit(step).lower(*args).as_text() == jax.jit(step).lower(*args).as_text()


def test_effects_outside_of_the_loops_run_once():
    """What stands before and between the loops is put in order, effects among it."""
    seen = []

    def noisy(x, where):
        jax.debug.callback(lambda _: seen.append(where), x)
        return x

    def loss(w, x):
        noisy(x[0, 0], "before")
        out = jaxoff.scan(layer, x, w, policy=BOTH)[0]
        return noisy(jnp.sum(out), "between")

    got = jaxoff.jit(jax.grad(loss))(*arguments())
    jax.effects_barrier()
    assert sorted(seen) == ["before", "between"]
    assert_close(jax.tree.leaves(got), jax.tree.leaves(jax.grad(loss)(*arguments())))


def test_it_traces_once_a_signature():
    traces = []

    @jaxoff.jit
    def step(w, x):
        traces.append(x.shape)
        return jax.grad(loss_of(BOTH))(w, x)

    w, x = arguments()
    step(w, x)
    first = len(traces)
    for _ in range(3):
        step(w, x + 1)
    assert len(traces) == first
    step.clear_cache()
    step(w, x)
    assert len(traces) > first


def test_a_step_within_a_budget_is_found_once_for_described_arrays_and_arrays_at_hand():
    traces = []

    @functools.partial(jaxoff.jit, device_bytes="1GB")
    def step(w, x):
        traces.append(x.shape)
        return jax.grad(loss_of(BOTH))(w, x)

    w, x = arguments()
    step.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (w, x))).compile()
    step(w, x)
    step(w, np.asarray(x))
    assert len(traces) == 1
    elsewhere = jax.device_put((w, x), jax.devices()[1])
    assert jax.tree.leaves(step(*elsewhere))[0].devices() == {jax.devices()[1]}
    assert len(traces) == 2


def test_lower_compile_trace_and_eval_shape():
    step = jaxoff.jit(STEP)
    want = jax.jit(STEP)(*arguments())
    got = step.lower(*arguments()).compile()(*arguments())
    assert_equal(got, step(*arguments()))
    assert_close(got, want)
    assert_same_bits(STEP)
    assert jax.tree.structure(step.eval_shape(*arguments())) == jax.tree.structure(want)
    assert "while" in str(step.trace(*arguments()).jaxpr)  # a scan, written out
    assert step.__name__ == STEP.__name__
    assert step.__wrapped__ is STEP


def test_inside_other_transformations_it_is_an_inner_jit():
    loss, w, x = loss_of(BOTH), *arguments()
    inner = jaxoff.jit(loss)
    with pytest.warns(UserWarning, match=FindingCode.CALLED_INSIDE_TRANSFORM):
        assert_close(jax.grad(inner)(w, x), jax.grad(loss)(w, x))
    assert_close(jaxoff.jit(jax.grad(inner))(w, x), jax.grad(loss)(w, x))
    assert_close(jax.jit(inner)(w, x), loss(w, x))
    xs = np.stack([x, x + 1])
    assert_close(jax.vmap(inner, (None, 0))(w, xs), jnp.stack([loss(w, x) for x in xs]))
    step = jaxoff.jit(jax.grad(inner))
    step(w, x)
    assert options_of(step)[SCHEDULING_MODE] == "CONCURRENT"


@pytest.mark.parametrize("options", [{}, {"device_bytes": 1e9}, {"tune": True}], ids=str)
def test_with_jit_disabled_the_function_sees_values(options):
    seen = []

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        seen.append(float(value))
        return gradient

    with jax.disable_jit():
        got = jaxoff.jit(step, **options)(jnp.ones((2, 2)), jnp.ones((3, 2)))
    assert seen == [24.0]
    assert_close(got, jnp.full((2, 2), 12.0))


def test_closed_over_arrays_and_python_scalars():
    w, x = arguments()
    scale = jnp.asarray(2.0)
    step = jaxoff.jit(lambda w, factor: jax.grad(lambda w: factor * scale * loss_of(BOTH)(w, x))(w))
    assert_close(step(w, 3.0), jax.grad(lambda w: 6.0 * loss_of(BOTH)(w, x))(w))


def test_errors_of_the_function_come_through_unchanged():
    @jaxoff.jit
    def step(w, x):
        raise ValueError("the function's own")

    with pytest.raises(ValueError, match="the function's own") as caught:
        step(*arguments())
    assert caught.value.__context__ is None


def test_a_flax_nnx_model_under_its_own_scan():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            weights = self.up.kernel[...], self.down.kernel[...]
            return layer(x, weights)[0]

    make = nnx.vmap(Layer, in_axes=0, out_axes=0)
    model = make(nnx.Rngs(0).split(4))
    graph, state = nnx.split(model)

    def loss(state, x, policy):
        def body(x, state):
            return nnx.merge(graph, state)(x), None

        block = jax.checkpoint(body, policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(block, x, state)[0])

    step = jaxoff.jit(jax.grad(loss), static_argnums=2)
    x = inputs(16, 8)
    assert_close(step(state, x, BOTH), jax.jit(jax.grad(loss), static_argnums=2)(state, x, BOTH))
    assert options_of(step)[SCHEDULING_MODE] == "CONCURRENT"


def test_sharded_over_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = arguments()
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    step = jaxoff.jit(STEP, in_shardings=(None, sharding))
    assert_close(step(w, x), STEP(w, x))

    def part(w, x):
        return jax.lax.psum(loss_of(BOTH)(w, x), "data")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    step = jaxoff.jit(jax.grad(mapped))
    assert_close(step(w, x), jax.grad(loss_of(BOTH))(w, x))
    assert options_of(step)[SCHEDULING_MODE] == "CONCURRENT"


def test_a_deep_copy_of_an_object_keeps_its_step():
    class Trainer:
        def __init__(self):
            self.step = jaxoff.jit(lambda x: 2 * x)

    trainer = Trainer()
    assert copy.deepcopy(trainer).step(jnp.float32(3)) == 6
