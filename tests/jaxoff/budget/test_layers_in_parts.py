"""Row-wise work of layers in parts: the same gradients, without a wide value of all tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoff
from bench.client_steps import PROGRAMS
from jaxoff._budget import budget_error, choose, fit, regions
from jaxoff._budget.estimated import find_estimated
from jaxoff._budget.forms import NO_COPIES, Form
from jaxoff._budget.limits import Budget
from jaxoff._budget.parts import write_layers_in_parts
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.search import Search
from jaxoff._device.profile import H200
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import holds_copies
from tests.jaxoff.budget.test_parts import list_shapes

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY = 3, 32, 192, 4, 64


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(regions, "_PART_ROWS", 8)
    monkeypatch.setattr(regions, "_TILE_ROWS", 64)


def normalize(x, scale):
    wide = x.astype("float32")
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def layer(x, w):
    h = normalize(x, w["norm1"])
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["o"]
    h = normalize(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def loss(params, tokens):
    block = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    x, _ = lax.scan(block, params["embed"][tokens], params["layers"])
    logits = (x @ params["embed"].T).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def loss_of_list(params, tokens):
    """The same loss, its layers in a Python loop over a list."""
    block = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    x = params["embed"][tokens]
    for w in params["layers"]:
        x, _ = block(x, w)
    logits = (x @ params["embed"].T).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def step(params, tokens):
    in_list = isinstance(params["layers"], list)
    value, grads = jax.value_and_grad(loss_of_list if in_list else loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), value


def as_list(args):
    """Arguments with the layers in a list."""
    params, tokens = args
    layers = [jax.tree.map(lambda w, n=n: w[n], params["layers"]) for n in range(LAYERS)]
    return params | {"layers": layers}, tokens


def arguments(batch, length, dtype="float32"):
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def draw(*shape):
        return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(dtype)

    layers = {name: draw(LAYERS, WIDTH, WIDTH) for name in "qkvo"}
    layers |= {name: draw(LAYERS, WIDTH, HIDDEN) for name in ("gate", "up")}
    layers |= {"down": draw(LAYERS, HIDDEN, WIDTH)}
    layers |= {name: jnp.ones((LAYERS, WIDTH), dtype) for name in ("norm1", "norm2")}
    params = {"embed": draw(VOCABULARY, WIDTH), "layers": layers}
    return params, jax.random.randint(next(keys), (batch, length), 0, VOCABULARY)


def run(program, args):
    return jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))


FORMS = {"scan": lambda args: args, "list": as_list}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_no_wide_value_of_all_tokens_is_left(form):
    args = FORMS[form](arguments(1, 512))
    closed = jax.make_jaxpr(step)(*args)
    written, found = write_layers_in_parts(closed, 1e5)
    wide = (1, 512, HIDDEN)
    assert wide in list_shapes(closed.jaxpr)
    assert wide not in list_shapes(written.jaxpr)
    # The gradients of gate, up and down, once for all layers of a scan.
    assert sum(len(region.sums) for region in found) >= 3 * (1 if form == "scan" else LAYERS)
    for got, want in zip(run(written, args), run(closed, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def accumulate(params, tokens):
    """A step over two microbatches."""

    def run(params, _):
        params, value = step(params, tokens)
        return params, value

    return lax.scan(run, params, None, length=2)


def per_device(params, tokens):
    """A step in a `jax.shard_map` over a device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False)(
        params, tokens
    )


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("around", [accumulate, per_device])
def test_layers_in_a_list_run_in_parts_within_other_programs(around):
    args = as_list(arguments(1, 512))
    closed = jax.make_jaxpr(around)(*args)
    written, found = write_layers_in_parts(closed, 1e5)
    assert (1, 512, HIDDEN) not in list_shapes(written.jaxpr)
    assert sum(len(region.sums) for region in found) >= 3 * LAYERS
    for got, want in zip(run(written, args), run(closed, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


DRAWS = st.sampled_from(["scan", "list"]), st.integers(1, 3), st.sampled_from([16, 48, 60, 96, 128])


def check_steps_in_parts(form, batch, length, least_nbytes):
    args = FORMS[form](arguments(batch, length))
    closed = jax.make_jaxpr(step)(*args)
    written, _ = write_layers_in_parts(closed, least_nbytes)
    for got, want in zip(run(written, args), run(closed, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.long  # the tests above compute the same with both forms
@settings(deadline=None, max_examples=3)
@given(*DRAWS, st.sampled_from([2e3, 2e4]))
def test_steps_with_layers_in_parts_compute_the_same(form, batch, length, least_nbytes):
    check_steps_in_parts(form, batch, length, least_nbytes)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(*DRAWS, st.sampled_from([2e3, 2e4]))
def test_many_steps_with_layers_in_parts_compute_the_same(form, batch, length, least_nbytes):
    check_steps_in_parts(form, batch, length, least_nbytes)


def test_gradients_in_bfloat16_are_added_up_in_float32():
    """Parts rounded to bfloat16 would lose most of what the later ones add."""
    args = arguments(1, 256, "bfloat16")
    exact = jax.tree.leaves(jax.jit(step)(jax.tree.map(lambda x: x.astype("float32"), args[0]), args[1]))
    closed = jax.make_jaxpr(step)(*args)
    written, found = write_layers_in_parts(closed, 1e4)
    assert max(region.parts for region in found if region.sums) >= 16
    for got, plain, want in zip(run(written, args), run(closed, args), exact, strict=True):
        errors = [float(jnp.abs(x.astype("float32") - want).max()) for x in (got, plain)]
        assert errors[0] <= 1.2 * errors[1] + 1e-6


def test_values_that_rows_share_are_left_whole():
    """The mean over all tokens joins the rows: what depends on it is in a region of its own, or in none."""

    def mixed(x, w):
        h = jnp.tanh(x @ w["gate"])
        h = h - h.mean(1, keepdims=True)
        return x + h @ w["down"], None

    def mixed_loss(w, x):
        return (lax.scan(mixed, x, w)[0] ** 2).mean()

    params, tokens = arguments(1, 256)
    args = {k: params["layers"][k] for k in ("gate", "down")}, params["embed"][tokens]
    closed = jax.make_jaxpr(jax.value_and_grad(mixed_loss))(*args)
    written, found = write_layers_in_parts(closed, 1e4)
    assert found
    for got, want in zip(run(written, args), run(closed, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_small_layers_stay_as_they_are():
    closed = jax.make_jaxpr(step)(*arguments(1, 64))
    assert write_layers_in_parts(closed, 1e9) == (closed, [])


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    "name", ["linen-scan", "decoder-scan", "ssm", "moe-linen", "decoder-python", "nnx-list"]
)
def test_client_programs_with_layers_in_parts_have_the_same_types(name):
    program = dataclasses.replace(PROGRAMS[name].shrink(), offloads=None)
    built = program.build(program.sizes, attention="xla")
    args = built.state, built.batch
    closed = jax.make_jaxpr(built.fun)(*args)
    written, found = write_layers_in_parts(closed, 1e3)
    assert found
    got, want = (
        jax.eval_shape(compat.jaxpr_as_fun(program), *jax.tree.leaves(args)) for program in (written, closed)
    )
    assert got == want


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_search_takes_parts_of_layers_where_no_placements_fit(form, monkeypatch):
    args = jax.eval_shape(lambda: FORMS[form](arguments(1, 4096)))
    closed = jax.make_jaxpr(step)(*args)
    donated = [True] * len(closed.jaxpr.invars)
    device = jaxoff.Device.of("h100")
    with monkeypatch.context() as patch:
        patch.setattr("jaxoff._budget.search.Search.tile", lambda search, copies: None)
        with pytest.raises(jaxoff.BudgetError) as error:
            find_estimated(closed, device, Budget(1e6, None), donated)
    least = error.value.smallest_bytes
    found = find_estimated(closed, device, Budget(0.8 * least, 0.0), donated)
    assert found.nbytes <= 0.8 * least
    assert any(region.sums for region in found.tiles)
    plan = found.make_plan(Budget(0.8 * least, 0.0), device, None)
    assert "4096, 4096], 268.44 MB, in " in str(plan)
    # Parts are made again in the backward pass, and have a time.
    whole = find_estimated(closed, device, Budget(1.01 * least, 0.0), donated)
    assert not whole.tiles
    assert found.base_ms > 1.02 * whole.base_ms


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("form", ["scan", pytest.param("list", marks=pytest.mark.long)])
def test_the_least_of_an_error_is_that_of_budgets_near_it(form, monkeypatch):
    """A search far below what fits does not try layers in parts."""
    args = jax.eval_shape(lambda: FORMS[form](arguments(1, 4096)))
    settings = {"host_bytes": 0, "compiled": False, "device": "h100"}
    with monkeypatch.context() as patch:
        patch.setattr(budget_error, "_SEARCHES", 0)
        with pytest.raises(jaxoff.BudgetError) as error:
            jaxoff.plan(step, *args, device_bytes=1e6, **settings)
    first = error.value.smallest_bytes
    with pytest.raises(jaxoff.BudgetError, match=r"A search for less .*: ask for") as error:
        jaxoff.plan(step, *args, device_bytes=1e6, **settings)
    least = error.value.smallest_bytes
    assert first is not None and least is not None
    assert least < 0.4 * first
    assert str(error.value).startswith("no program fits 800.00 kB of device memory.")
    plan = jaxoff.plan(step, *args, device_bytes=1.05 * least, **settings)
    assert plan.in_parts


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_each_process_writes_the_same_program(form):
    """Variables hash by their places in memory: an order taken from a set of them differs."""

    def write():
        args = FORMS[form](arguments(1, 512))
        return str(write_layers_in_parts(jax.make_jaxpr(lambda *args: step(*args))(*args), 1e5)[0])

    assert len({write() for _ in range(4)}) == 1


def test_a_search_takes_parts_of_layers_where_copies_are_slower(monkeypatch):
    """By a compiler that gets within the budget with copies, or with layers in parts."""
    closed = jax.make_jaxpr(step)(*jax.eval_shape(lambda: arguments(1, 4096)))
    donated = [True] * len(closed.jaxpr.invars)
    tile, searches = Search.tile, []

    def note(search, **options):
        searches.append(tile(search, **options))
        return searches[-1]

    monkeypatch.setattr(Search, "tile", note)
    monkeypatch.setattr(choose, "_LEAST_OFFLOADED_NBYTES", 0)  # a layer's input takes half a megabyte

    def compile_program(program):
        fits = bool(searches) or holds_copies(program.jaxpr)
        return (0.99 if fits else 1.3) * budget, None

    budget = 0.8 * 1.0143e9  # of what the least program takes, by the estimate
    device = dataclasses.replace(jaxoff.Device.of("h100"), d2h_gbps=0.05, h2d_gbps=0.05)
    found = fit.find_fitting(closed, device, Budget(budget), donated, compile_program)
    assert not any(placed.offloaded for placed in found.placements) and found.tiles


def test_the_time_of_parts_is_that_of_all_layers():
    def added_ms(layers):
        def loss(ws, x):
            run = lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, ws)[0]
            return jnp.mean(run.astype(jnp.float32) ** 2)

        shapes = {"up": (layers, 512, 2048), "down": (layers, 2048, 512)}
        ws = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        x = jax.ShapeDtypeStruct((1 << 16, 512), jnp.bfloat16)
        layered = LayeredProgram.of(jax.make_jaxpr(jax.grad(loss))(ws, x))
        form = Form.of(layered, (), H200, Budget(1e9, NO_COPIES))
        least = form.choose_least(NO_COPIES)
        assert least is not None
        return form.count_parts_ms(least[0], 1e7, 1)

    assert 0 < added_ms(8) == pytest.approx(2 * added_ms(4), rel=0.1)
