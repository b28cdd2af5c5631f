"""Loops with collectives in a `jax.shard_map`: written out and ordered as others, and what is around them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._jaxpr import compat
from jaxoff._jaxpr.primitives import is_collective
from tests.jaxoff.jaxpr.test_kernels import depends
from tests.jaxoff.policy.matrix import assert_close
from tests.jaxoff.schedule.test_collectives import by_data
from tests.jaxoff.schedule.test_loops import INSTANT, SLOW, behind, program_of, variable_in
from tests.jaxoff.schedule.test_order import BOTH, LAYERS, arguments, deep, layer

RING = [(0, 1), (1, 0)]


@functools.cache
def mesh():
    return jax.make_mesh((2,), ("pipe",), (AxisType.Auto,), devices=jax.devices()[:2])


def stage(x, w):
    """A layer on another device each time, whose parameters are whole there only."""
    w = jax.tree.map(lambda part: lax.all_gather(part, "pipe", axis=0, tiled=True), w)
    out, extra = layer(lax.ppermute(x, "pipe", RING), w)
    return out + lax.pmean(jnp.mean(x), "pipe"), extra


def step(policy=BOTH, body=stage, after=lambda gradients: gradients):
    """The gradients of each device's share, taken inside."""

    def local(w, x):
        def share(w, x):
            # A constant of the loop: its gradient is a sum over the iterations.
            bias = jnp.sum(jax.tree.leaves(w)[0][0, :, :1])
            return jnp.sum(jaxoff.scan(lambda x, w: body(x + bias, w), x, w, policy=policy)[0])

        return after(jax.grad(share, (0, 1))(w, x))

    specs = P(None, "pipe"), P("pipe")
    return jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=specs, check_vma=False)


def rewritten(device=SLOW, **kwargs):
    """The program, and the one in its shard_map."""
    program = program_of(step(**kwargs), *arguments(), device=device, one_device=False)
    (mapped,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return program, mapped.params["jaxpr"]


@pytest.mark.parametrize("device", [SLOW, INSTANT], ids=["slow", "instant"])
@pytest.mark.some_cases(1)
def test_gradients_are_the_same(device):
    args = arguments()
    program, _ = rewritten(device)
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_close(got, jax.tree.leaves(jax.jit(step())(*args)))


def test_loops_with_collectives_are_written_out():
    _, body = rewritten()
    names = [eqn.primitive.name for eqn in body.eqns]
    assert names.count("while") == 2
    assert "scan" not in names
    stacks = [v.aval for eqn in body.eqns if eqn.primitive.name == "while" for v in eqn.outvars]
    length = jax.tree.leaves(arguments()[0])[0].shape[0]
    assert {aval.shape[0] for aval in stacks if compat.is_host(aval)} == {length + 1}  # a spare row
    collectives = {"all_gather", "ppermute", "reduce_scatter"}
    inside = [eqn.primitive.name for eqn in deep(body) if eqn.primitive.name in collectives]
    assert inside.count("all_gather") == 2 * inside.count("reduce_scatter") > 0  # once more going back


def narrow_stage(x, w, *, wide_too):
    """A layer that reads its gathered parameters as bfloat16, and perhaps as they are, too."""
    w = jax.tree.map(lambda part: lax.all_gather(part, "pipe", axis=0, tiled=True), w)
    out, extra = layer(x.astype(jnp.bfloat16), jax.tree.map(lambda part: part.astype(jnp.bfloat16), w))
    return out.astype(x.dtype) + (w[0][0, 0] if wide_too else 0), extra


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("wide_too", [False, True])
def test_what_is_read_narrower_only_is_gathered_narrower(wide_too):
    body = functools.partial(narrow_stage, wide_too=wide_too)
    program, mapped = rewritten(body=body)
    gathered = [eqn for eqn in deep(mapped) if eqn.primitive.name == "all_gather"]
    dtypes = {(eqn.outvars[0].aval.shape, str(eqn.outvars[0].aval.dtype)) for eqn in gathered}
    up, down = (leaf.shape[1:] for leaf in arguments()[0])
    # Where the backward pass gathers again, it reads both narrower only.
    assert dtypes == {(up, "bfloat16"), (down, "bfloat16")} | ({(up, "float32")} if wide_too else set())
    scattered = [eqn for eqn in deep(mapped) if eqn.primitive.name == "reduce_scatter"]
    assert {str(eqn.outvars[0].aval.dtype) for eqn in scattered} == {"float32"}  # gradients are added up wide
    args = arguments()
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step(body=body))(*args)), strict=True):
        assert jnp.allclose(a, b, rtol=2e-2, atol=2e-2 * jnp.max(jnp.abs(b)))


def test_a_loop_with_another_effect_stays():
    def noisy(x, w):
        jax.debug.callback(lambda x: None, x[0, 0])
        return stage(x, w)

    _, body = rewritten(body=noisy)
    scans = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    assert any(
        eqn.primitive.name == "debug_callback" for scan in scans for eqn in deep(scan.params["jaxpr"].jaxpr)
    )


def test_sums_of_the_backward_loop_start_from_zeros_made_after_the_forward_loop():
    _, body = rewritten()
    forward, back = [eqn for eqn in body.eqns if eqn.primitive.name == "while"]
    before, zeros = (
        list(behind(body, filter(None, map(variable_in, loop.invars)))) for loop in (forward, back)
    )
    zeros = [eqn for eqn in zeros if eqn.primitive.name == "broadcast_in_dim" and eqn not in before]
    zeros = [eqn for eqn in zeros if eqn.outvars[0].aval.shape and not compat.is_host(eqn.outvars[0].aval)]
    assert zeros
    for eqn in zeros:
        assert any(made is forward for made in behind(body, eqn.invars)), eqn


def test_stacks_of_gradients_are_not_allocated_while_an_exchange_is_under_way():
    """They lead to a collective and wait for nothing, but are no work."""

    def local(w, x):
        def share(w, x):
            return jnp.sum(jaxoff.scan(layer, lax.ppermute(x, "pipe", RING), w, policy=BOTH)[0])

        return jax.tree.map(lambda leaf: lax.psum(leaf, "pipe"), jax.grad(share)(w, x))

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("pipe")), out_specs=P(), check_vma=False)
    program = program_of(mapped, *arguments(), one_device=False)
    (eqn,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    eqns = eqn.params["jaxpr"].eqns
    names = [eqn.primitive.name for eqn in eqns]
    stacks = [
        i
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "unwritten" and eqn.outvars[0].aval.shape[0] == LAYERS
    ]
    assert names.index("ppermute") < names.index("while")
    assert len(stacks) == len(arguments()[0])
    assert min(stacks) > names.index("while")


def test_no_barrier_is_over_a_stack_on_the_host():
    _, body = rewritten()
    barriers = [eqn for eqn in deep(body) if eqn.primitive.name == "optimization_barrier"]
    assert barriers
    assert not any(compat.is_host(v.aval) for eqn in barriers for v in eqn.invars)


def test_sums_after_the_last_loop_follow_each_other_by_data():
    """Nothing else keeps two of them in one order on all devices."""

    def averaged(gradients):
        total = lax.pmean(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(gradients)), "pipe")
        return jax.tree.map(
            lambda leaf: jax.jit(lax.pmean, static_argnums=1)(leaf, "pipe") * total, gradients
        )

    program, body = rewritten(after=averaged)
    eqns = by_data(body.eqns)
    (*_, last) = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "while"]
    sums = [i for i, eqn in enumerate(eqns) if is_collective(eqn) and i > last]
    assert len(sums) == 1 + len(jax.tree.leaves(arguments()))
    assert all(depends(eqns, second, first) for first, second in itertools.pairwise(sums))
    args = arguments()
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves(args))
    assert_close(got, jax.tree.leaves(jax.jit(step(after=averaged))(*args)))


@pytest.mark.parametrize("varies", [True, False], ids=["varying weights", "equal weights"])
def test_waits_keep_the_types_of_a_checked_shard_map(varies):
    """The counter waits for activations, which differ between devices; the weights that it finds may not."""

    def cast_layer(x, w):
        h = jnp.tanh(jaxoff.name(x @ w["up"].astype(x.dtype), "h"))
        return x + h @ w["down"].astype(x.dtype), None

    def local(w, x):
        if varies:
            w = lax.pcast(w, ("pipe",), to="varying")
        block = jax.checkpoint(cast_layer, policy=jaxoff.policy(offload=["h"]), prevent_cse=False)
        grads = jax.grad(lambda w: lax.scan(block, x, w)[0].astype(jnp.float32).sum())(w)
        return lax.psum(grads, "pipe") if varies else grads

    fun = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("pipe")), out_specs=P())
    w = {
        "up": jax.random.normal(jax.random.key(0), (LAYERS, 16, 32)),
        "down": jax.random.normal(jax.random.key(1), (LAYERS, 32, 16)),
    }
    x = jax.random.normal(jax.random.key(2), (8, 16)).astype(jnp.bfloat16)
    program = program_of(fun, w, x, device=SLOW, one_device=False)
    assert "changed_in_place" in str(program)
    got = jax.jit(compat.jaxpr_as_fun(program))(*jax.tree.leaves((w, x)))
    assert_close(got, jax.tree.leaves(jax.jit(fun)(w, x)))


KINDS = list(itertools.product((AxisType.Explicit, AxisType.Auto), repeat=2))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_axes_may_be_explicit_and_auto(kinds):
    """The type has the division over Explicit axes, the compiler that over the others."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])

    def loss(w, x):
        def layer(x, w):
            return x + jnp.tanh(jaxoff.name(x @ w, "h")), None

        block = jax.checkpoint(layer, policy=jaxoff.policy(offload=["h"]), prevent_cse=False)
        return jnp.var(lax.scan(block, x, w)[0])

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        columns = "model" if kinds[1] is AxisType.Auto else None
        w, x = put(jnp.full((6, 64, 64), 0.01), None, None, columns), put(jnp.ones((32, 64)), "data")
        x += put(jnp.arange(64.0))
        step = jaxoff.jit(jax.grad(loss), recipe="concurrent")
        assert_close(step(w, x), jax.jit(jax.grad(loss))(w, x))
    assert step.recipe == "concurrent"
    assert not step.findings
