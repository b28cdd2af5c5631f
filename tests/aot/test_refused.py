"""Offloads that XLA refuses, compiled for a GPU: saved, unless the program can be written otherwise."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff import FindingCode
from tests.aot.programs import QUICK

pytestmark = pytest.mark.aot

LAYERS, ROWS, WIDTH = 4, 4096, 512
X_NBYTES = 2 * ROWS * WIDTH


def layer_with_a_loop(x, w):
    x = jaxoff.name(x, "x_in")

    def inner(total, rows):
        act = jaxoff.name(jnp.tanh(rows @ w), "inner")
        return total + act.mean(0), jnp.sin(act)

    total, y = jax.lax.scan(inner, jnp.zeros(WIDTH, x.dtype), x.reshape(8, -1, WIDTH))
    return x + y.reshape(x.shape) * total, None


def layer_with_a_condition(x, w):
    x = jaxoff.name(x, "x_in")

    def active(x):
        return x + jaxoff.name(jnp.tanh(x @ w), "inner") @ w.T

    return jax.lax.cond(x[0, 0] > 0, active, lambda x: x, x), None


def plain_layer(x, w):
    return x + jaxoff.name(jnp.tanh(jaxoff.name(x, "x_in") @ w), "inner") @ w.T, None


def layer_with_a_kernel_for_gpus(x, w):
    x = jaxoff.name(x, "x_in")

    def act(x, w):
        return jaxoff.name(jnp.tanh(x @ w), "inner")

    return x + jax.lax.platform_dependent(x, w, cuda=act, default=lambda x, w: jnp.sin(act(x, w))) @ w.T, None


def scan_layers(body, w, x, **options):
    return jax.lax.scan(body, x, w, **options)[0]


def scan_groups(body, w, x, groups):
    w = w.reshape(groups, -1, WIDTH, WIDTH)
    return jax.lax.scan(lambda x, w: (jnp.sin(scan_layers(body, w, x)), None), x, w)[0]


def make_step(layer, run):
    policy = jaxoff.policy(offload=["x_in", "inner"])
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return jax.grad(lambda w, x: run(body, w, x).astype(jnp.float32).var())


ARGUMENTS = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)]]


@pytest.mark.parametrize(
    ("layer", "run"),
    [
        (plain_layer, functools.partial(scan_layers, unroll=2)),
        (plain_layer, functools.partial(scan_groups, groups=1)),
        (plain_layer, functools.partial(scan_groups, groups=LAYERS)),
        (layer_with_a_kernel_for_gpus, scan_layers),
    ],
    ids=["unrolled", "one group", "groups of one", "a branch of the platform"],
)
def test_copies_in_control_flow_that_is_settled_compile(layer, run):
    ours = jaxoff.jit(make_step(layer, run), compiler_options=QUICK, recipe="ordered")
    facts = jaxoff.verify(jaxoff.target("h200").compile(ours, *ARGUMENTS), compiler_options=ours.options)
    assert ours.findings == ()
    assert all(copy.via == "dma" for copy in facts.copies)
    assert facts.d2h_bytes in [2 * layers * X_NBYTES for layers in (LAYERS - 1, LAYERS)]


def layer_with_either(x, w):
    def active(x):
        return x + jaxoff.name(jnp.tanh(x @ w), "inner") @ w.T

    def other(x):
        return x * jnp.sin(jaxoff.name(x @ w, "inner"))

    return jax.lax.cond(x[0, 0] > 0, active, other, jaxoff.name(x, "x_in")), None


def run_list(body, w, x):
    for row in w:
        x, _ = body(x, row)
    return x


def run_list_within_a_branch(body, w, x):
    return jax.lax.cond(x[0, 0] > 1, lambda w: run_list(body, w, x), lambda w: run_list(body, w * 2, x), w)


def run_scans_within_branches(body, w, x):
    either = (lambda w: scan_layers(body, w, x)), (lambda w: scan_layers(body, w * 2, x))
    return jax.lax.cond(x[0, 0] > 1, *either, w)


@pytest.mark.parametrize(
    ("layer", "run"),
    [
        (layer_with_either, run_list),
        (layer_with_either, run_list_within_a_branch),
        (plain_layer, run_scans_within_branches),
    ],
    ids=["layers", "nested", "scans"],
)
def test_copies_in_every_branch_of_a_condition_compile(layer, run):
    ours = jaxoff.jit(make_step(layer, run), compiler_options=QUICK, recipe="ordered")
    compiled = jaxoff.target("h200").compile(ours, *ARGUMENTS)
    assert FindingCode.OFFLOAD_IN_NESTED_SCAN not in {finding.code for finding in ours.findings}
    assert compiled.memory_analysis().host_temp_size_in_bytes >= (LAYERS - 1) * X_NBYTES


@pytest.mark.parametrize("layer", [layer_with_a_loop, layer_with_a_condition])
def test_what_xla_refuses_is_saved_and_the_rest_is_offloaded(layer):
    args, target, step = ARGUMENTS, jaxoff.target("h200"), make_step(layer, scan_layers)
    with pytest.raises(jax.errors.JaxRuntimeError):
        target.compile(jax.jit(step, compiler_options=QUICK), *args)
    ours = jaxoff.jit(step, compiler_options=QUICK, recipe="ordered")
    with pytest.warns(UserWarning, match=FindingCode.OFFLOAD_IN_NESTED_SCAN):
        facts = jaxoff.verify(target.compile(ours, *args), compiler_options=ours.options)
    assert all(copy.via == "dma" for copy in facts.copies)
    assert facts.d2h_bytes in [layers * X_NBYTES for layers in (LAYERS - 1, LAYERS)]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_checkpoint_around_layers_keeps_no_layer_on_the_device(groups):
    """The backward pass of each group is a loop for what it computes again, and the loop that reads it."""
    policy = jaxoff.policy(offload=["x_in", "inner"])

    def loss(weights, x):
        group = jax.checkpoint(lambda x, w: jax.lax.scan(plain_layer, x, w), policy=policy)
        return jax.lax.scan(group, x, weights)[0].astype(jnp.float32).mean()

    shapes = (groups, 32, WIDTH, WIDTH), (ROWS, WIDTH)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    function = jaxoff.jit(jax.grad(loss), recipe="ordered", compiler_options=QUICK)
    facts = jaxoff.verify(jaxoff.target("h200").compile(function, *args))
    assert facts.d2h_bytes == facts.h2d_bytes == 2 * 32 * groups * X_NBYTES
    assert {copy.via for copy in facts.copies} == {"dma"}
    assert facts.device_temp_bytes < 32 * X_NBYTES  # what a stack of one kind of value takes


def test_rows_in_host_memory_that_another_loop_divides_are_saved():
    """XLA would copy each row within host memory first, by a kernel."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def fun(x):
        rows = jax.lax.map(lambda g: jax.lax.map(lambda r: jax.device_put(jnp.sin(r), host), g), x)

        def add_up(total, group):
            again = jax.lax.map(lambda r: 2 * jax.device_put(r, device), group)
            added = jax.lax.scan(lambda c, r: (c + r @ r.T, None), total, again)[0]
            return jax.lax.scan(lambda c, r: (c * r, None), added, again)[0], None

        return jax.lax.scan(add_up, x[0, 0], rows)[0]

    x = jax.ShapeDtypeStruct((2, 4, WIDTH, WIDTH), jnp.float32)
    function = jaxoff.jit(fun, recipe="ordered", compiler_options=QUICK)
    with pytest.warns(UserWarning, match=FindingCode.OFFLOAD_IN_NESTED_SCAN):
        facts = jaxoff.verify(jaxoff.target("h200").compile(function, x))
    assert not facts.copies
