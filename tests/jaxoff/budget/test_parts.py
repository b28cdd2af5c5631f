"""Heads in parts and narrow stacks: the same step, without the whole logits or wide stacks of gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from bench.client_steps import PROGRAMS
from jaxoff._budget.narrow import narrow_stacks
from jaxoff._budget.parts import write_in_parts
from jaxoff._budget.row_axes import find_operand_axes, find_result_axis, resize
from jaxoff._jaxpr import compat

WITHOUT_TOKENS = {"autoencoder", "dit", "equimo", "ssm", "ssm-chunks", "unet", "vit"}
LARGE = {
    "autoencoder",
    "decoder-python",
    "dit",
    "encoder-decoder",
    "inner-jit",
    "nnx-list",
    "retention",
    "unet",
}  # programs of thousands of equations
TOKENS, WIDTH, VOCABULARY = 64, 16, 1024


def plain(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot(logits, labels):
    hot = jax.nn.one_hot(labels, VOCABULARY)
    return -(hot * jax.nn.log_softmax(logits)).sum(-1).mean()


def z_loss(logits, labels):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    weights = (labels != 3).astype("float32")
    return ((log_z - chosen + 1e-4 * log_z**2) * weights).sum() / weights.sum()


def next_token(logits, labels):
    return plain(logits[:, :-1], labels[:, 1:])


def flat_logits(logits, labels):
    return plain(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def flat_next_token(logits, labels):
    return flat_logits(logits[:, :-1], labels[:, 1:])


def soft_cap(logits, labels):
    return plain(30 * jnp.tanh(logits / 30), labels)


def make_loss(cross_entropy, *, tied=False, flat=False, bias=False, dtype="bfloat16"):
    def loss(params, x, labels):
        if flat:
            x, labels = x.reshape(-1, WIDTH), labels.reshape(-1)
        head = params["embed"].T if tied else params["head"]
        logits = x.astype(dtype) @ head.astype(dtype)
        if bias:
            logits = logits + params["bias"].astype(dtype)
        return cross_entropy(logits.astype("float32"), labels)

    return loss


@pytest.mark.parametrize("cross_entropy", [next_token, flat_logits, flat_next_token])
def test_a_head_whose_loss_drops_or_merges_tokens_is_in_parts_of_the_batch(cross_entropy):
    """Without its last token a sequence has an odd number of tokens; merged, the tokens have no axis."""
    args = arguments((4, TOKENS))
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(cross_entropy), argnums=(0, 1)))(*args)
    written, (region,) = write_in_parts(closed, 1e4)
    assert (region.rows, region.parts) == (4, 2)
    assert region.nbytes == 4 * TOKENS * VOCABULARY * 4
    assert_same(written, closed, args)


def arguments(shape=(2, TOKENS)):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, VOCABULARY)),
        "bias": jnp.linspace(-1.0, 1.0, VOCABULARY),
    }
    x = jax.random.normal(keys[2], (*shape, WIDTH))
    return params, x, jax.random.randint(keys[3], shape, 0, VOCABULARY)


def list_shapes(jaxpr):
    """The shapes of all values, those in loops included."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in compat.sub_jaxprs(eqn):
            yield from list_shapes(inner)


def assert_same(written, closed, args):
    """Equal but for the rounding of bfloat16 sums in another order."""
    run, expected = jax.jit(compat.jaxpr_as_fun(written)), jax.jit(compat.jaxpr_as_fun(closed))
    leaves = jax.tree.leaves(args)
    for got, want in zip(run(*leaves), expected(*leaves), strict=True):
        got, want = (np.asarray(v, "float32") for v in (got, want))
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=4e-3 * np.abs(want).max())


@pytest.mark.parametrize("cross_entropy", [plain, one_hot, z_loss, soft_cap])
@pytest.mark.parametrize("form", [{}, {"tied": True}, {"flat": True}, {"bias": True}, {"dtype": "float32"}])
@pytest.mark.some_cases(4)
def test_a_head_in_parts_is_the_same_head_without_whole_logits(cross_entropy, form):
    args = arguments()
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(cross_entropy, **form), argnums=(0, 1)))(*args)
    written, (region,) = write_in_parts(closed, 1e4)
    rows = (2 * TOKENS,) if form.get("flat") else (2, TOKENS)
    of_logits = {"float32": (*rows, VOCABULARY)}
    assert [s for s in list_shapes(closed.jaxpr) if s == of_logits["float32"]]
    wide = [
        v.aval
        for eqn in written.jaxpr.eqns
        for v in eqn.outvars
        if v.aval.shape == of_logits["float32"] and eqn.primitive.name != "scan"
    ]
    # The gradient with respect to the logits is whole, in the type of the products: allocated, and written.
    assert {a.dtype for a in wide} <= {jnp.dtype(form.get("dtype", "bfloat16"))}
    assert region.parts == 2
    assert region.nbytes == 4 * 2 * TOKENS * VOCABULARY
    assert "in 2 parts" in str(region)
    assert_same(written, closed, args)


def test_the_logits_gradient_of_a_frozen_head_is_not_kept_either():
    args = arguments()
    closed = jax.make_jaxpr(jax.grad(make_loss(plain), argnums=1))(*args)
    written, (_,) = write_in_parts(closed, 1e4)
    assert (2, TOKENS, VOCABULARY) not in list_shapes(written.jaxpr)
    assert_same(written, closed, args)


def test_the_weights_gradient_comes_before_what_reads_the_rows_gradient():
    args = arguments()
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(plain), argnums=(0, 1)))(*args)
    written, _ = write_in_parts(closed, 1e4)
    names = [eqn.primitive.name for eqn in written.jaxpr.eqns]
    loop = names.index("scan")
    assert names[loop + 1 : loop + 3] == ["dot_general", "optimization_barrier"]


def test_a_loss_of_the_sum_of_all_rows_squared_stays_whole():
    """Its gradient waits for all rows: no part can make it."""

    def squared(logits, labels):
        return jnp.square(plain(logits, labels))

    args = arguments()
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(squared)))(*args)
    assert write_in_parts(closed, 1e4) == (closed, [])


def test_small_values_and_batches_of_one_row_are_left():
    args = arguments()
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(plain)))(*args)
    assert write_in_parts(closed, 1e9) == (closed, [])
    one = jax.make_jaxpr(jax.value_and_grad(make_loss(plain)))(*arguments((1, 1)))
    assert write_in_parts(one, 1e3) == (one, [])


def test_the_first_axis_of_a_divided_program_stays_whole():
    closed = jax.make_jaxpr(jax.value_and_grad(make_loss(plain)))(*arguments((TOKENS, 2)))
    rows = [write_in_parts(closed, 1e4, devices=devices)[1][0].rows for devices in (1, 2)]
    assert rows == [TOKENS, 2]
    flat = jax.make_jaxpr(jax.value_and_grad(make_loss(plain, flat=True)))(*arguments())
    assert write_in_parts(flat, 1e4, devices=2)[1] == []
    assert len(write_in_parts(flat, 1e4)[1]) == 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LARGE)) for name in PROGRAMS]
)
def test_client_programs_in_parts_with_narrow_stacks_compute_the_same(name):
    pytest.importorskip(PROGRAMS[name].package)
    program = dataclasses.replace(PROGRAMS[name].shrink(), offloads=None)
    step = program.build(dataclasses.replace(program.sizes, vocabulary=4096), attention="xla")
    args = step.state, step.batch
    closed = jax.make_jaxpr(step.fun)(*args)
    written, regions = write_in_parts(narrow_stacks(closed), 1e3)
    assert len(regions) >= (name not in WITHOUT_TOKENS)
    got, want = (
        jax.eval_shape(compat.jaxpr_as_fun(program), *jax.tree.leaves(args)) for program in (written, closed)
    )
    assert got == want


def layers_loss(weights, x):
    def layer(x, w):
        return jnp.tanh(x @ w.astype("bfloat16")), None

    return lax.scan(layer, x, weights)[0].astype("float32").sum()


def test_a_stack_of_widened_gradients_is_narrow_where_kernels_read_it():
    weights, x = jnp.full((4, 8, 8), 0.1), jnp.ones((2, 8), "bfloat16")

    def step(weights, x):
        return weights - 0.1 * jax.grad(layers_loss)(weights, x)

    closed = jax.make_jaxpr(step)(weights, x)
    written = narrow_stacks(closed)

    def dtypes(program):
        scans = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
        return {str(v.aval.dtype) for v in scans[-1].outvars if v.aval.shape == (4, 8, 8)}

    assert dtypes(closed) == {"float32"}
    assert dtypes(written) == {"bfloat16"}
    for got, want in zip(
        jax.jit(compat.jaxpr_as_fun(written))(weights, x),
        jax.jit(compat.jaxpr_as_fun(closed))(weights, x),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_a_stack_that_the_program_returns_stays_wide():
    closed = jax.make_jaxpr(jax.grad(layers_loss))(jnp.ones((4, 8, 8)), jnp.ones((2, 8), "bfloat16"))
    assert str(narrow_stacks(closed)) == str(closed)


UNARY = [jnp.exp, jnp.tanh, jax.nn.softmax, lambda x: x.T.T, lambda x: x.sum(-1, keepdims=True) + x,
         lambda x: x.reshape(*x.shape, 1)[..., 0], lambda x: jnp.cumsum(x, axis=-1), lambda x: x[..., ::1],
         lambda x: jnp.where(x > 0, x, 0.0), lambda x: jnp.argmax(x, -1)[..., None] + x,
         lambda x: jnp.concatenate([x, x], -1), lambda x: jnp.sort(x, -1),
         lambda x: jnp.split(x, [1], -1)[1] + jnp.split(x, [1], -1)[0],
         lambda x: x @ jnp.ones((x.shape[-1], 3), x.dtype),
         lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])]  # fmt: skip


def bind(eqn, operands):
    """The results of an equation of other operands."""
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(range(len(UNARY))), min_size=1, max_size=4), st.integers(0, 1))
def test_row_wise_equations_on_a_part_give_the_part_of_the_whole(functions, axis):
    """Each equation alone: with the rows of `find_operand_axes` it makes the rows of the whole result."""

    def fun(x):
        for k in functions:
            x = UNARY[k](x)
        return x

    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")
    closed = jax.make_jaxpr(fun)(x)
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | {closed.jaxpr.invars[0]: x}
    for eqn in closed.jaxpr.eqns:
        operands = [v.val if isinstance(v, compat.Literal) else values[v] for v in eqn.invars]
        whole = bind(eqn, operands)
        values.update(zip(eqn.outvars, whole, strict=True))
        if eqn.primitive.name in ("jit", "pjit") or np.ndim(whole[0]) <= axis or whole[0].shape[axis] < 3:
            continue
        axes = find_operand_axes(eqn, axis)
        if axes is None:
            continue
        for k, a in enumerate(axes):
            assert a is None or find_result_axis(eqn, k, a) is not None
        part = [
            v if a is None else lax.slice_in_dim(v, 1, 3, axis=a) for v, a in zip(operands, axes, strict=True)
        ]
        made = eqn.primitive.bind(*part, **resize(eqn, axis, 2))
        made = made if eqn.primitive.multiple_results else [made]
        np.testing.assert_allclose(made[0], lax.slice_in_dim(whole[0], 1, 3, axis=axis), rtol=1e-5)


def test_products_that_nothing_reads_are_not_done_in_parts():
    """In the body of a loop they stay until XLA removes them: a metric that the caller dropped."""

    def body(carry):
        count, x = carry
        logits = x @ jnp.ones((WIDTH, VOCABULARY))
        jnp.where(logits > 0, logits, 0.0)
        return count + 1, x * 0.5

    def fun(x):
        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

    closed = jax.make_jaxpr(fun)(jnp.ones((TOKENS, WIDTH)))
    written, regions = write_in_parts(closed, 4 * TOKENS)
    assert not regions and written is closed
