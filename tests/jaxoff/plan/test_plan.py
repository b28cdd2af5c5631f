"""`jaxoff.plan` and `jaxoff.frontier`: the plan of `jaxoff.jit(device_bytes=)`, before the step runs."""

import dataclasses
import functools
import json
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.memory import estimate_nbytes, list_peak_values

LAYERS, ROWS, WIDTH = 6, 2048, 512
LEAST = 1.95e8  # a budget nearly as small as possible


def layer(x, w):
    x = jaxoff.name(x, "x_in")
    h = jaxoff.name(x @ w["up"], "up")
    return x + jax.nn.relu(h) @ w["down"], None


def loss(w, x):
    return lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0].var()


def step(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda v, g: v - 0.01 * g, w, grads), value


def structs():
    up = jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), "float32")
    down = jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), "float32")
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


@functools.cache  # several tests look at one plan
def plan_within(nbytes, fun=step, **options):
    fun = jaxoff.jit(fun, donate_argnums=0)
    return jaxoff.plan(fun, *structs(), device_bytes=nbytes, compiled=False, **options)


def test_less_memory_takes_more_time_and_is_never_over():
    found = [plan_within(nbytes) for nbytes in ("1GB", 2.8e8, LEAST)]
    for plan in found:
        assert plan.peak_bytes <= 0.8 * plan.device_bytes
        assert not plan.is_compiled
        assert plan.values
    times = [plan.step_ms for plan in found]
    assert times == sorted(times)
    assert times[0] < times[-1]
    placements = [{v.value: v.placement for v in plan.values} for plan in found]
    assert placements[0]["up"] == "save"
    assert placements[-1]["x_in"] == "offload"
    assert found[0].host_bytes == 0
    assert found[-1].host_bytes == LAYERS * ROWS * WIDTH * 4


def test_what_nothing_fits_is_an_error_with_the_least_budget():
    with pytest.raises(jaxoff.BudgetError, match="less a fifth is used") as caught:
        plan_within(1e6)
    assert caught.value.__suppress_context__  # a single traceback
    (line,) = [s for s in traceback.format_exception_only(caught.value) if "no program fits" in s]
    assert line.startswith("jaxoff.BudgetError: no program fits")
    least = caught.value.smallest_bytes
    assert least is not None
    assert plan_within(1.001 * least).peak_bytes <= 0.8 * 1.001 * least
    assert 0.9 * LEAST < least < 0.95 * LEAST
    there = pickle.loads(pickle.dumps(caught.value))  # in another process
    assert (type(there), there.smallest_bytes, str(there)) == (jaxoff.BudgetError, least, str(caught.value))
    assert caught.value.largest and there.largest == caught.value.largest


def test_a_slower_link_moves_less():
    slow = dataclasses.replace(jaxoff.Device.of("h200"), name="slow link", d2h_gbps=1e-3, h2d_gbps=1e-3)
    plan = plan_within(3.2e8, device=slow)
    assert "offload" not in {v.placement for v in plan.values}
    assert plan.device == "slow link"
    assert str(plan).endswith("ms on slow link")
    assert plan_within(1e9, device="h100").device == jaxoff.Device.of("h100").name


def test_host_memory_has_a_budget():
    with pytest.raises(jaxoff.BudgetError):
        plan_within(LEAST, host_bytes=1e6)


def test_a_plan_runs_within_its_budget():
    w, x = jax.tree.map(lambda s: jnp.full([max(n // 4, 6) for n in s.shape], 0.01, s.dtype), structs())
    plan = jaxoff.plan(jaxoff.jit(step, donate_argnums=0), w, x, device_bytes="1GB", compiled=False)
    expected = jax.jit(step)(w, x)
    got = plan.step(w, x)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert plan.step.plan.is_compiled
    assert plan.step.plan.peak_bytes <= 1e9


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("statics", [{"static_argnames": "name"}, {"static_argnums": 2}])
def test_static_arguments_of_a_jitted_step_stay_static(statics):
    def step(w, x, name):
        assert name == "rows"
        return jax.tree.map(lambda v, g: v - 0.1 * g, w, jax.grad(loss)(w, x))

    w, x = structs()
    named = "static_argnames" in statics
    args, kwargs = (w, x) if named else (w, x, "rows"), {"name": "rows"} if named else {}
    for jit in (jax.jit, jaxoff.jit):
        fun = jit(step, donate_argnums=0, **statics)
        assert jaxoff.plan(fun, *args, **kwargs, device_bytes=1e9, compiled=False).values
    for fun in (step, jax.jit(step), jaxoff.jit(step, donate_argnums=0)):
        assert jaxoff.plan(fun, *args, **kwargs, **statics, device_bytes=1e9, compiled=False).values
    assert jaxoff.frontier(step, *args, **kwargs, **statics, points=2).plans


def test_what_a_jitted_step_donates_is_not_held_twice():
    def with_momentum(state, x):
        w, m = state
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(w, x))
        return jax.tree.map(lambda v, m: v - 0.1 * m, w, m), m

    w, _ = structs()
    x = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    plans = [
        jaxoff.plan(fun, (w, w), x, device_bytes=1e9, compiled=False)
        for fun in (with_momentum, *(j(with_momentum, donate_argnums=0) for j in (jax.jit, jaxoff.jit)))
    ]
    nbytes = 2 * LAYERS * WIDTH * 4 * WIDTH * 4
    assert plans[0].peak_bytes >= plans[1].peak_bytes + nbytes / 2
    assert plans[1].peak_bytes == plans[2].peak_bytes
    assert plans[1].values == plans[2].values


@pytest.mark.parametrize("transform", [jax.jit, jaxoff.jit])
def test_a_jitted_step_that_closes_over_an_array_is_planned_as_the_step_itself(transform):
    table = jnp.arange(float(WIDTH))  # of rotary positions, or weights of classes

    def closing(w, x):
        return step(w, x * table)

    options = {"device_bytes": 2.8e8, "compiled": False}
    expected = jaxoff.plan(jax.jit(closing, donate_argnums=0), *structs(), **options)
    found = jaxoff.plan(transform(jax.jit(closing), donate_argnums=0), *structs(), **options)
    assert (found.peak_bytes, found.values) == (expected.peak_bytes, expected.values)
    assert any(value.placement == "recompute" for value in found.values)


def test_names_say_a_plan_where_they_can():
    assert plan_within("1GB").policy == jaxoff.policy(save=["up", "x_in"])
    assert plan_within(LEAST).policy == jaxoff.policy(offload=["x_in"])

    def unnamed(w, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        grads = jax.grad(lambda w: lax.scan(layer, x, w)[0].var())(w)
        return jax.tree.map(lambda v, g: v - 0.01 * g, w, grads)

    plan = plan_within(LEAST, unnamed)
    assert ("carry", "offload") in {(v.value, v.placement) for v in plan.values}
    assert plan.policy is None


def test_a_plan_is_text_and_json():
    plan = plan_within("1GB")
    fields = json.loads(plan.to_json())
    assert fields["device_bytes"] == 1e9
    assert fields["values"][0]["placement"] == "save"
    assert "step" not in fields
    assert "estimated peak" in str(plan)
    assert "up" in str(plan)


def test_the_compiler_is_asked_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr("jaxoff._plan.plan.PLUGINS", ("no_such_plugin",))
    assert not jaxoff.plan(step, *structs(), device_bytes=1e9).is_compiled
    with pytest.raises(ValueError, match="compiled=True needs a GPU, or jax's CUDA plugin"):
        jaxoff.plan(step, *structs(), device_bytes=1e9, compiled=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_bytes": -1}, "device_bytes is a number of bytes above 0"),
        ({"device_bytes": True}, "device_bytes is a number of bytes above 0"),
        ({"device_bytes": [1]}, "device_bytes is a number of bytes above 0"),
        ({"device_bytes": "fit"}, "takes the limit of a GPU's allocator"),
        ({"device_bytes": 1e9, "device": "h20"}, "Did you mean 'h200'?"),
    ],
)
def test_what_is_wrong_is_said(options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        jaxoff.plan(step, *structs(), compiled=False, **options)


def test_a_frontier_is_faster_with_more_memory(tmp_path):
    pytest.importorskip("matplotlib")
    curve = jaxoff.frontier(jax.jit(step, donate_argnums=0), *structs(), points=3)
    peaks, times = ([getattr(p, name) for p in curve.plans] for name in ("peak_bytes", "step_ms"))
    assert len(curve.plans) > 1
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    heading, first, *rest = str(curve).splitlines()
    least = curve.plans[0]
    assert heading.split()[:2] == ["budget", "peak"] and len(rest) == len(curve.plans) - 1
    assert first.startswith(f"{least.device_bytes / 1e6:.2f} MB  {least.peak_bytes / 1e6:.2f} MB")
    assert plan_within(least.device_bytes) == least
    curve.draw(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="at least 2; got 1"):
        jaxoff.frontier(step, *structs(), points=1)


def test_many_layers_are_planned_without_a_compiler_in_seconds():
    def layers_in_a_row(ws, x):
        for w in ws:
            x = jax.checkpoint(layer)(x, w)[0]
        return x.var()

    def whole(ws, x):
        grads = jax.grad(layers_in_a_row)(ws, x)
        return jax.tree.map(lambda v, g: v - 0.01 * g, ws, grads)

    w, x = structs()
    ws = [jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), w)] * 64
    plan = jaxoff.plan(jaxoff.jit(whole, donate_argnums=0), ws, x, device_bytes=4e9, compiled=False)
    assert {v.count for v in plan.values if v.value == "x_in"} <= {63, 64}
    assert plan.peak_bytes <= 0.8 * 4e9


def test_memory_is_estimated_by_what_is_alive():
    def chain(x):
        for _ in range(4):
            x = jnp.sin(x) @ jnp.ones((8, 8))
        return x

    x = jax.ShapeDtypeStruct((1024, 8), "float32")
    nbytes = 1024 * 8 * 4
    closed = jax.make_jaxpr(chain)(x)
    kept, donated = estimate_nbytes(closed, [False]), estimate_nbytes(closed, [True])
    # Two values of a chain at a time, the argument beside them, and small matrices.
    assert 3 * nbytes <= kept <= 3.2 * nbytes
    assert donated <= kept


def test_the_results_of_a_condition_are_those_of_a_branch():
    """A loop in a branch makes the stack that the condition returns: one buffer, counted and listed once."""

    def fun(x):
        def branch(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=8)[1]

        return jax.lax.cond(x[0, 0] > 0, branch, lambda x: jnp.zeros((8, *x.shape)), x).sum()

    closed, size = jax.make_jaxpr(fun)(jnp.ones((64, 64))), 64 * 64 * 4
    assert 9 * size < estimate_nbytes(closed, [False]) < 12 * size
    stacks = [count for (shape, _), (count, _) in list_peak_values(closed).items() if "[8, 64, 64]" in shape]
    assert stacks == [1]
