"""What surrounds a call of `jaxoff.jit`: traces, configurations, threads and searches for a nan."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes

LAYERS, ROWS, WIDTH = 6, 512, 64
BUDGET = 9e6  # bytes; all saved, the step takes more than twice as much
ADAMW = optax.adamw(1e-3)


def layer(x, w):
    return x + jax.nn.gelu(jaxoff.name(x @ w["up"], "up")) @ w["down"], None


def step(w, x):
    gradients = jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients)


def arguments(rows=ROWS, width=WIDTH):
    up = jax.random.normal(jax.random.key(0), (LAYERS, width, 4 * width)) / 8
    down = jax.random.normal(jax.random.key(1), (LAYERS, 4 * width, width)) / 16
    return {"up": up, "down": down}, jax.random.normal(jax.random.key(2), (rows, width))


def count_nbytes(jitted):
    return program_nbytes(jitted.lower(*arguments()).compile())


@contextlib.contextmanager
def caches_cleared():
    jax.clear_caches()
    yield


CONTEXTS = {
    "cleared": caches_cleared,
    "precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "device": lambda: jax.default_device(jax.devices()[0]),
}


LONG = {"promotion", "device"}  # as "precision"


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "context", [pytest.param(c, marks=[pytest.mark.long] * (c in LONG)) for c in CONTEXTS]
)
def test_a_budget_holds_where_jax_traces_anew(context):
    fitted = jaxoff.jit(step, donate_argnums=0, device_bytes=BUDGET)
    assert count_nbytes(jax.jit(step, donate_argnums=0)) > 2 * BUDGET
    assert count_nbytes(fitted) <= BUDGET
    with CONTEXTS[context]():
        assert count_nbytes(fitted) <= BUDGET
        assert fitted.plan.peak_bytes <= BUDGET


def test_a_configuration_is_that_of_the_call_with_state_on_the_host():
    def train(state, x):
        w, moments = state
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)
        updates, moments = ADAMW.update(gradients, moments, w)
        return (optax.apply_updates(w, updates), moments), loss.astype(float)

    w, x = arguments(16, 256)
    plain = jax.jit(train, donate_argnums=0)
    fitted = jaxoff.jit(train, donate_argnums=0, device_bytes=34e6)

    def fresh():
        return jax.tree.map(jnp.copy, (w, ADAMW.init(w)))

    fitted(fresh(), x)
    assert fitted.plan.host_bytes
    with jax.default_matmul_precision("highest"):
        texts = [jitted.lower(fresh(), x).as_text() for jitted in (plain, fitted)]
        assert all(text.count("HIGHEST") > LAYERS for text in texts)
    with jax.enable_x64(True):
        wanted, got = (jitted(fresh(), x)[1] for jitted in (plain, fitted))
        assert got.dtype == wanted.dtype == np.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


TABLE = np.arange(3.0, dtype=np.float32)
TRACES = {
    "jit": lambda fun: jax.jit(lambda z: fun(TABLE) + z)(1.0),
    "jaxoff.jit": lambda fun: jaxoff.jit(lambda z: fun(TABLE) + z)(1.0),
    "grad": lambda fun: jax.grad(lambda z: (fun(TABLE) * z).sum())(1.0),
    "vmap": lambda fun: jax.vmap(lambda z: fun(TABLE) + z)(jnp.ones(2)),
    "scan": lambda fun: lax.scan(lambda c, _: (c + fun(TABLE), None), jnp.ones(3), None, length=2)[0],
    "checkpoint": lambda fun: jax.checkpoint(lambda z: fun(TABLE) + z)(1.0),
    "eval_shape": lambda fun: jax.eval_shape(lambda z: fun(TABLE) + z, 1.0),
    "lower": lambda fun: jax.jit(lambda z: fun.lower(TABLE).compile() is not None and z)(1.0),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_call_with_arrays_within_a_trace_is_an_inner_jit(trace):
    got, wanted = (TRACES[trace](jit(lambda x: x * 2)) for jit in (jaxoff.jit, jax.jit))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if trace != "eval_shape":
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("trace", sorted(TRACES.keys() - {"lower"}))
def test_within_a_trace_a_budget_is_not_kept_and_a_warning_says_so(trace):
    with pytest.warns(UserWarning, match="its budget is not kept"):
        got = TRACES[trace](jaxoff.jit(lambda x: x * 2, device_bytes="1GB"))
    assert got.shape == TRACES[trace](jax.jit(lambda x: x * 2)).shape


def test_threads_with_the_same_first_call_search_once():
    searches = []

    def traced(w, x):
        searches.append(threading.get_ident())
        return step(w, x)

    fitted, results = jaxoff.jit(traced, device_bytes=BUDGET), []
    args = arguments()
    threads = [threading.Thread(target=lambda: results.append(fitted(*args))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert fitted.plan.programs <= 2
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])


@pytest.mark.parametrize("budget", [{}, {"device_bytes": "1GB"}], ids=["plain", "budget"])
def test_a_nan_is_found_in_the_users_function(budget):
    def divide(x):
        return x / 0 * 0 + 1

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in mul") as raised:
        jaxoff.jit(divide, **budget)(jnp.ones(3))
    assert any(entry.name == "divide" for entry in raised.traceback)


def test_without_jit_the_users_function_runs():
    seen = []

    def scale(x):
        seen.append(type(x).__name__)
        return 2 * x

    with jax.disable_jit():
        got = jaxoff.jit(scale, device_bytes="1GB")(jnp.ones(3))
    np.testing.assert_array_equal(got, 2 * np.ones(3))
    assert seen[-1] == "ArrayImpl"


def test_a_step_is_exported_for_a_symbolic_batch():
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments()[0])
    x = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, {WIDTH}"), jnp.float32)
    with pytest.warns(UserWarning, match=r"the shape \(b, 64\)"):
        exported = export.export(jaxoff.jit(step))(structs, x)
    for rows in (8, 16):
        args = arguments(rows)
        jax.tree.map(np.testing.assert_array_equal, exported.call(*args), jax.jit(step)(*args))
    with pytest.raises(ValueError, match=r"device_bytes= .* got an argument of the shape \(b, 64\)"):
        export.export(jaxoff.jit(step, device_bytes="1GB"))(structs, x)
