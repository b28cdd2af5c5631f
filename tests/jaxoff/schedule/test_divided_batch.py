"""The batch of a step: found, followed through its program, and divided throughout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._budget.parts import write_in_parts
from jaxoff._compiled import hlo
from jaxoff._compiled.exchange import exchanged_nbytes
from jaxoff._jaxpr import compat
from jaxoff._schedule import divided_batch
from jaxoff._schedule.batch_axes import BatchAxes, find_axes
from jaxoff._schedule.divided_batch import Batch, divide_batch, pin_batch

WIDTH, HIDDEN, WORDS = 128, 512, 1024
LAYERS = 3


@functools.cache
def mesh(*sizes, names=("data", "model")):
    sizes = sizes or (4,)
    count = int(np.prod(sizes))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names[: len(sizes)], types, devices=jax.devices()[:count])


def layer(x, w):
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    return x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]


def loss(in_loop, w, tokens):
    x = w["embed"][tokens]
    if in_loop:
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w["layers"])
    else:
        for parameters in w["layers"]:
            x = jax.checkpoint(layer)(x, parameters)
    return jnp.mean(jax.nn.logsumexp(x @ w["head"], -1))


def step(in_loop, w, tokens):
    """A step of gradient descent; layers in a loop, or in a list."""
    value, gradients = jax.value_and_grad(functools.partial(loss, in_loop))(w, tokens)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients), value


def make_arguments(in_loop, *, on=None, axis=0):
    """Weights divided along their first or last axis, and tokens divided by the batch."""
    on = on or mesh()
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def draw(*shape, stacked=False):
        spec = [None] * len(shape)
        spec[axis if axis < 0 else axis + stacked] = on.axis_names[-1]
        return jax.device_put(jax.random.normal(next(keys), shape) / 16, NamedSharding(on, P(*spec)))

    def draw_layer(*stack):
        sizes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        return {name: draw(*stack, *shape, stacked=bool(stack)) for name, shape in sizes.items()}

    layers = draw_layer(LAYERS) if in_loop else [draw_layer() for _ in range(LAYERS)]
    w = {"embed": draw(WORDS, WIDTH), "layers": layers, "head": draw(WIDTH, WORDS)}
    tokens = jax.random.randint(next(keys), (4, 256), 0, WORDS)
    return w, jax.device_put(tokens, NamedSharding(on, P(on.axis_names[0])))


def compile_both(in_loop, args):
    """The step by `jax.jit` and within a budget: the compiled programs."""
    fun = functools.partial(step, in_loop)
    options = {"out_shardings": (jax.tree.map(lambda leaf: leaf.sharding, args[0]), None)}
    plain = jax.jit(fun, **options).lower(*args).compile()
    return plain, jaxoff.jit(fun, device_bytes="1GB", **options).lower(*args).compile()


def exchanged(compiled):
    return exchanged_nbytes(hlo.parse(compiled.as_text()))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_step_within_a_budget_exchanges_weights_and_no_activations(axis):
    """By itself the compiler divides activations, or their gradients, as the weights."""
    args = make_arguments(True, axis=axis)
    plain, planned = compile_both(True, args)
    assert 2.5 * exchanged(planned) < exchanged(plain)
    for got, want in zip(*(jax.tree.leaves(fun(*args)) for fun in (planned, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_pins_are_not_judged_where_the_compiler_divides_the_batch(monkeypatch):
    """Only the marks are compiled; the pins hold in the program that a budget writes."""
    args = make_arguments(False)
    closed, donated, shardings = trace(functools.partial(step, False), args)
    monkeypatch.setattr(divided_batch, "_count_exchanged", lambda _: pytest.fail("a program was compiled"))
    pinned = divide_batch(closed, donated, shardings, make_lower(args, []))
    assert "sharding_constraint" in str(pinned) and "sharding_constraint" not in str(closed)
    assert pin_batch(closed, donated, shardings, make_lower(args, [])) == (closed, closed)
    monkeypatch.undo()
    plain, planned = compile_both(False, args)
    assert exchanged(planned) <= exchanged(plain)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_pins_stay_unless_more_is_exchanged(more, monkeypatch):
    args, lowered = make_arguments(True), []
    closed, donated, shardings = trace(functools.partial(step, True), args)
    counts = iter([100 + more, 100])  # with pins, and without
    monkeypatch.setattr(divided_batch, "_count_exchanged", lambda _: next(counts))
    divided = divide_batch(closed, donated, shardings, make_lower(args, lowered))
    assert len(lowered) == 3  # the first has the marks
    assert divided is (lowered[1] if more <= 0 else closed)


def make_lower(args, lowered):
    def lower_program(program):
        lowered.append(program)
        return jax.jit(compat.jaxpr_as_fun(program)).lower(*jax.tree.leaves(args)).compile

    return lower_program


def trace(fun, args):
    closed = jax.make_jaxpr(fun)(*args)
    leaves = jax.tree.leaves(args)
    return closed, [False] * len(leaves), [leaf.sharding for leaf in leaves]


def test_other_axes_of_products_are_left_to_the_compiler():
    """Over data and tensor parallel devices, the pins divide the batch and leave the columns free."""
    args = make_arguments(True, on=mesh(2, 2), axis=-1)
    closed, donated, shardings = trace(functools.partial(step, True), args)
    batch = Batch.find(closed, donated, shardings)
    assert batch is not None and batch.names == ("data",)
    program = batch.wrap_products(closed, batch.pin)
    options = {"out_shardings": [*shardings[:-1], None]}
    compiled = jax.jit(compat.jaxpr_as_fun(program), **options).lower(*jax.tree.leaves(args)).compile()
    divided = f"f32[2,256,{HIDDEN // 2}]"  # by rows of the batch and by columns
    assert divided in compiled.as_text()


def struct(spec, *shape):
    """An array's description, in float32 unless the last argument is a dtype."""
    *shape, dtype = shape if not isinstance(shape[-1], int) else (*shape, jnp.float32)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), spec))


# Arguments of `struct`: the devices are those of the run, not those where the tests are collected.
FEATURES = (P("data"), 64, 64)
WHOLE_NUMBERS = (*FEATURES, jnp.int8)
ROWS = (P("data"), 8, 64)
LABELS = (P("data"), 8, jnp.int32)


@pytest.mark.parametrize(
    ("others", "axes"),
    [
        ((ROWS,), (0,)),
        ((ROWS, LABELS), (0, 0)),
        (((P("data"), 64, 32), ROWS, LABELS), (None, 0, 0)),  # frozen weights
        (((P(None, "data"), 2, 8, 64), (P(None, "data"), 2, 8, jnp.int32)), (1, 1)),
        (((P(), 8, 64), LABELS), (None, 0)),
        (((P(), 8, 64),), None),
        ((WHOLE_NUMBERS, ROWS), None),  # which of both is the batch?
        ((WHOLE_NUMBERS, ROWS, LABELS), (None, 0, 0)),
        ((FEATURES,), None),  # of the type of a result: a state that is not donated
    ],
)
def test_what_counts_as_the_batch(others, axes):
    def fun(state, *others):
        return jax.tree.map(lambda w: w - sum(jnp.sum(other) for other in others), state)

    state = {"w": struct(*FEATURES)}
    batch = Batch.find(*trace(fun, (state, *(struct(*other) for other in others))))
    assert (None if batch is None else batch.axes[1:]) == axes


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True))


def branches(x, w):
    return jax.lax.cond(jnp.sum(w) > 0, lambda x: x @ w, lambda x: x * 2, x)


def attention(x, w):
    q = (x @ w).reshape(*x.shape[:2], 2, -1)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)


FOLLOWED = {
    "product": lambda x, w: x @ w,
    "product from the left": lambda x, w: jnp.einsum("de,bse->dbs", w, x),
    "norm": lambda x, w: normalized(x) @ w,
    "attention": attention,
    "scan over layers": lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w[None])[0],
    "stack of a scan": lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w[None])[1],
    "scan over time": lambda x, w: jax.lax.scan(
        lambda h, row: (jnp.tanh(h @ w + row), h), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
    )[1],
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
    "jit": lambda x, w: jax.jit(lambda x: x @ w)(x),
    "cond": branches,
    "gather": lambda x, w: w[jnp.argmax(x, -1)],
    "sort of rows": lambda x, w: jnp.sort(x, -1) @ w,
    "cumsum": lambda x, w: jnp.cumsum(x, 1),
    "vmap": lambda x, w: jax.vmap(lambda row: row @ w)(x),
    "convolution": lambda x, w: jax.lax.conv_general_dilated(
        x.swapaxes(1, 2), w[:, :, None], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    ),
    "heads": lambda x, w: (x @ w).reshape(*x.shape[:2], 4, -1).transpose(2, 0, 1, 3),
    "tokens in one axis": lambda x, w: x.reshape(-1, 8) @ w,
    "tokens in one axis, and back": lambda x, w: (x.reshape(-1, 8) @ w).reshape(x.shape),
    "gradient": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_axis_of_the_batch_is_followed(name):
    """With the rows of the batch in another order, the result has them in that order along the axis."""
    fun = FOLLOWED[name]
    x = jax.random.normal(jax.random.key(0), (6, 5, 8))
    w = jax.random.normal(jax.random.key(1), (8, 8))
    program = jax.make_jaxpr(fun)(x, w).jaxpr
    (axis,) = find_axes(BatchAxes().follow(program, (0, None)), program.outvars)
    assert axis is not None
    order = jnp.array([3, 1, 5, 0, 4, 2])
    got, want = (jnp.moveaxis(fun(rows, w), axis, 0).reshape(6, -1) for rows in (x[order], x))
    np.testing.assert_allclose(got, want[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: x.sum(0),
        lambda x, w: jnp.einsum("bse,bsd->ed", x, x),  # the gradient of a weight
        lambda x, w: jnp.einsum("bse,cse->bc", x, x),  # of each row with each
        lambda x, w: x.swapaxes(0, 1).reshape(-1, 8) @ w,
        lambda x, w: jnp.sort(x, 0),
        lambda x, w: jax.lax.scan(lambda c, row: (c + row, row @ w), jnp.zeros((5, 8)), x)[0],
        lambda x, w: jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ w, x),
        lambda x, w: w @ w,
    ],
)
def test_no_axis_is_the_batch_where_rows_meet(fun):
    program = jax.make_jaxpr(fun)(jnp.ones((6, 5, 8)), jnp.ones((8, 8))).jaxpr
    assert find_axes(BatchAxes().follow(program, (0, None)), program.outvars) == (None,)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x[:3],
        lambda x: jnp.concatenate([x, x * 2]),  # chosen and rejected, real and made
        lambda x: jax.grad(lambda x: jnp.sum(x[:3] ** 2))(x),
    ],
)
def test_some_rows_of_the_batch_and_two_batches_keep_its_axis(fun):
    program = jax.make_jaxpr(fun)(jnp.ones((6, 8))).jaxpr
    assert find_axes(BatchAxes().follow(program, (0,)), program.outvars) == (0,)


def test_the_batch_is_followed_through_maps():
    """To what is divided over the same devices, but for a result of a weight's type: its gradient."""

    def inside(x, w):
        rows = jnp.tanh(x @ w)
        return (
            rows,
            rows.sum((1, 2)),
            rows.swapaxes(0, 1),
            (w * rows.sum())[None],
            w * jnp.ones(()),
            rows.sum(),
        )

    specs = P("data"), P("data"), P(None, "data"), P("data"), P("data"), P()
    own = jax.shard_map(
        inside, mesh=mesh(), in_specs=(P("data"), P("data")), out_specs=specs, check_vma=False
    )
    program = jax.make_jaxpr(own)(jnp.ones((8, 5, 8)), jnp.ones((32, 8))).jaxpr
    assert find_axes(BatchAxes().follow(program, (0, None)), program.outvars) == (0, 0, 1, 0, None, None)
    assert find_axes(BatchAxes().follow(program, (None, None)), program.outvars) == (None,) * 6


def test_a_step_whose_tokens_are_divided_is_not_cut_along_them():
    """Parts of the tokens of a sequence would each be on a device."""
    w, tokens = make_arguments(True)
    args = w, jax.device_put(tokens, NamedSharding(mesh(), P(None, "data")))
    closed, donated, shardings = trace(functools.partial(step, True), args)
    divided = divide_batch(closed, donated, shardings, make_lower(args, []))
    assert divided is not closed
    assert {region.rows for region in write_in_parts(closed, 1e6, devices=4)[1]} == {256}
    assert write_in_parts(divided, 1e6, devices=4)[1] == []


def test_arguments_over_two_meshes_are_no_batch():
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh(2, 2), P("data")))
    assert Batch.find(*trace(lambda w, x: w * jnp.sum(x), (struct(*FEATURES), struct(*ROWS)))) is not None
    assert Batch.find(*trace(lambda w, x: w * jnp.sum(x), (struct(*FEATURES), rows))) is None


@pytest.mark.parametrize(("count", "axis"), [(2, 1), (4, 0), (3, 1)])
def test_microbatches_of_a_batch_are_divided_within(count, axis):
    """Over four devices: of two microbatches the 12 rows are divided, of three the 8; four are divided."""
    program = jax.make_jaxpr(lambda x: x.reshape(count, 24 // count, 8))(jnp.ones((24, 8))).jaxpr
    assert find_axes(BatchAxes(4).follow(program, (0,)), program.outvars) == (axis,)


@pytest.mark.parametrize("spec", ["NCH", "NHC"])
def test_the_gradient_of_a_kernel_has_no_batch(spec):
    """As many output channels as rows."""

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=(spec, "OIH", spec))

    x, w = jnp.ones((6, 5, 5)), jnp.ones((6, 5, 3))
    program = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(convolve(x, w) ** 2), (0, 1)))(x, w).jaxpr
    assert find_axes(BatchAxes().follow(program, (0, None)), program.outvars) == (0, None)


def test_what_follows_a_carry_that_changes_its_axis_has_none():
    def swap(carry, _):
        k, j = carry
        return (k.T, k @ j), None

    program = jax.make_jaxpr(lambda k, j: jax.lax.scan(swap, (k, j), length=3)[0])(*[jnp.ones((6, 6))] * 2)
    assert find_axes(BatchAxes().follow(program.jaxpr, (0, None)), program.jaxpr.outvars) == (None, None)


def test_tokens_that_are_donated_or_returned_are_the_batch():
    closed, _, shardings = trace(lambda w, labels: (w, labels + 1), (struct(*FEATURES), struct(*LABELS)))
    batch = Batch.find(closed, [True, True], shardings)
    assert batch is not None and batch.axes == (None, 0)


def test_mesh_axes_of_one_device_divide_nothing():
    on, w = mesh(1, 4), struct(P(), 4)
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(on, P(("data", "model"))))
    batch = Batch.find(*trace(lambda x: jnp.sum(x), (rows,)))
    assert batch is not None and batch.names == ("model",)
    alone = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(on, P("data")))
    assert Batch.find(*trace(lambda x: jnp.sum(x), (alone,))) is None
    assert Batch.find(*trace(lambda w: jnp.sum(w), (w,))) is None


def test_arguments_without_a_sharding_have_that_of_jit():
    args = make_arguments(True)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, args)
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    options = {"in_shardings": shardings, "out_shardings": (shardings[0], None)}
    fun = functools.partial(step, True)
    planned = jaxoff.jit(fun, device_bytes="1GB", **options).lower(*structs).compile()
    assert 2.5 * exchanged(planned) < exchanged(jax.jit(fun, **options).lower(*structs).compile())


def test_a_carry_whose_batch_changes_its_axis_has_none():
    def swap(x, _):
        return x.swapaxes(0, 1), x

    program = jax.make_jaxpr(lambda x: jax.lax.scan(swap, x, length=3))(jnp.ones((6, 6, 8))).jaxpr
    assert find_axes(BatchAxes().follow(program, (0,)), program.outvars) == (None, None)
