"""Random programs of dots, elementwise operations, names, marks and transforms, under random policies."""

import functools

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoff
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import NO_CHECKPOINT, assert_close, inputs

ROWS, WIDTH = 4, 8
ARGS = inputs(2, WIDTH, WIDTH) / 8, inputs(ROWS, WIDTH)
LABELS = ["a.x", "a.y", "b.x", "b.y"]


@jax.custom_vjp
def sine_of_dot(x, w):
    return jnp.sin(x @ w)


def _sine_of_dot_fwd(x, w):
    h = jaxoff.name(x @ w, "a.y")
    return jnp.sin(h), (x, h, w)


def _sine_of_dot_bwd(residuals, ct):
    x, h, w = residuals
    d = ct * jnp.cos(h)
    return d @ w.T, x.T @ d


sine_of_dot.defvjp(_sine_of_dot_fwd, _sine_of_dot_bwd)

# Functions of two earlier values and the weights.
SIMPLE = {
    "dot": lambda a, b, w: a @ w,
    "sin": lambda a, b, w: jnp.sin(a),
    "add": lambda a, b, w: a + b,
    "mul": lambda a, b, w: a * b,
    "jit": lambda a, b, w: jax.jit(lambda a, b: jnp.tanh(a) * b)(a, b),
    "slice": lambda a, b, w: jnp.concatenate([b[..., :3], a[..., 3:]], -1),
    "mark_offload": lambda a, b, w: jaxoff.mark_offload(a),
    "mark_not_offload": lambda a, b, w: jaxoff.mark_not_offload(a),
    **{label: lambda a, b, w, label=label: jaxoff.name(a, label) for label in LABELS},
}
TRANSFORMS = {
    "cond": lambda a, b, w: lax.cond(
        a[0, 0] < 0.3,
        lambda a: jnp.sin(jaxoff.name(a @ w, "a.x")),
        lambda a: jaxoff.name(a * 2, "b.y") * a,
        a,
    ),
    "scan": lambda a, b, w: lax.scan(lambda c, _: (jnp.sin(jaxoff.name(c @ w, "a.y")), None), a, length=3)[0],
    "map": lambda a, b, w: lax.map(lambda row: jnp.square(jaxoff.name(row, "b.x")), a),
    "vmap": lambda a, b, w: jax.vmap(lambda row: jnp.sin(jaxoff.mark_offload(jaxoff.name(row @ w, "b.x"))))(
        a
    ),
    "custom_vjp": lambda a, b, w: sine_of_dot(a, w),
    "cast": lambda a, b, w: jnp.sin(jaxoff.name(a.astype("bfloat16"), "a.x")).astype("float32"),
    "mask": lambda a, b, w: jnp.where(jaxoff.name(a > 0, "b.y"), a, jnp.sin(b)),
}


def programs(operations, max_size):
    """Operations, each with how far back, from the newest value, its two operands lie."""
    back = st.integers(0, 7)
    return st.lists(st.tuples(st.sampled_from(sorted(operations)), back, back), min_size=1, max_size=max_size)


@st.composite
def policies(draw):
    lists, taken = {}, set()
    for field in ("offload", "save", "recompute"):
        drawn = draw(st.lists(st.sampled_from([*LABELS, "a.*", "*.x", "c"]), max_size=2))
        lists[field] = [pattern for pattern in drawn if pattern not in taken]
        taken.update(lists[field])
    unmarked = draw(st.sampled_from(["recompute", "save", "dots", "offload", "offload_dots"]))
    return jaxoff.policy(**lists, unmarked=unmarked, min_bytes=draw(st.sampled_from([0, 128, 129])))


def random_loss(program, scanned):
    """A loss of (policy, w, x) that runs a program in one checkpoint, or in each layer of a scan."""

    def fun(w, x):
        values = [x]
        for operation, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append({**SIMPLE, **TRANSFORMS}[operation](a, b, w))
        return jnp.tanh(values[-1]) + values[-1]

    def loss(policy, w, x):
        layer = (
            fun if policy is NO_CHECKPOINT else jax.checkpoint(fun, policy=policy, prevent_cse=not scanned)
        )
        y = lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] if scanned else layer(w[0], x)
        return jnp.sum(jnp.square(y))

    return loss


@settings(max_examples=12, deadline=None, derandomize=True)
@given(programs(SIMPLE | TRANSFORMS, 8), policies(), st.booleans())
def test_random_programs_are_reported_to_the_byte(program, policy, scanned):
    loss = random_loss(program, scanned)
    found = placement.grad_host_arrays(functools.partial(loss, policy), *ARGS)
    report = jaxoff.explain(functools.partial(loss, policy), *ARGS)
    assert report.host_bytes == placement.nbytes(found)
    saved = jaxoff.explain(functools.partial(loss, policy.on_device()), *ARGS)
    assert saved.host_bytes == 0
    if all(
        operation != "cond" for operation, *_ in program
    ):  # its branches share what they keep in one place
        assert saved.device_bytes == report.host_bytes + report.device_bytes


@settings(max_examples=8, deadline=None, derandomize=True)
@given(programs(SIMPLE, 12), policies(), st.booleans())
def test_random_programs_keep_their_gradients(program, policy, scanned):
    loss = random_loss(program, scanned)
    moved, plain = (jax.grad(functools.partial(loss, p), (0, 1))(*ARGS) for p in (policy, NO_CHECKPOINT))
    assert_close(moved, plain)
