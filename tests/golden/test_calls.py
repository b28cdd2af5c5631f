"""How often the function of a user runs while a program is traced, planned and reported: once."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxoff
from tests.golden.small import SOME, mesh_of, small_loss, small_shapes


def arguments():
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, leaf.dtype), small_shapes())


def counted(fun):
    """A function that counts the runs, and the list that the count is the length of."""
    runs = []

    def run(*args, **kwargs):
        runs.append(1)
        return fun(*args, **kwargs)

    return run, runs


def gradients(policy=SOME, how="scan"):
    return jax.value_and_grad(small_loss(policy, how), (0, 1))


def first_layers(w, x):
    return gradients(jaxoff.FirstLayers(2, SOME, rest=SOME.on_device()))(w, x)


def mapped(w, x):
    local = jax.shard_map(
        lambda w, x: jax.lax.psum(small_loss(SOME)(w, x), "data"),
        mesh=mesh_of(2),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    return jax.value_and_grad(local, (0, 1))(w, x)


def checkpointed_scan(w, x):
    def compute(w, x):
        def body(x, w):
            name = jaxoff.name(x, "x_in")
            return name + jnp.tanh(name @ w["up"]) @ w["down"], None

        policy = jaxoff.policy(offload=["x_in"])
        block = jax.checkpoint(body, policy=policy, prevent_cse=False)
        return jax.lax.scan(block, x, w)[0].sum()

    return jax.value_and_grad(compute, (0, 1))(w, x)


# Loops of `jaxoff.scan` that are differentiated, and moves of any form, choose compiler options.
WITH_OPTIONS = {
    "scan": gradients(),
    "layers": gradients(how="layers"),
    "first layers": first_layers,
    "shard_map": mapped,
    "lax.scan": checkpointed_scan,
    "saved": gradients(SOME.on_device()),
    "recomputed": gradients(jaxoff.policy()),
}
WITHOUT_OPTIONS = {
    "saved layers": gradients(SOME.on_device(), "layers"),
    "forward": small_loss(),
    "plain": lambda w, x: jnp.tanh(x @ w["up"][0]).sum(),
}
STEPS = [
    *(pytest.param(fun, id=name) for name, fun in WITH_OPTIONS.items()),
    *(pytest.param(fun, id=name) for name, fun in WITHOUT_OPTIONS.items()),
]


@pytest.mark.parametrize("fun", STEPS)
def test_lower_runs_a_step_once(fun):
    run, runs = counted(fun)
    jaxoff.jit(run).lower(*small_shapes())
    assert len(runs) == 1


@pytest.mark.parametrize("fun", STEPS)
def test_trace_runs_a_step_once(fun):
    run, runs = counted(fun)
    jaxoff.jit(run).trace(*small_shapes())
    assert len(runs) == 1


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(WITH_OPTIONS["scan"], id="scan"),
        pytest.param(WITH_OPTIONS["layers"], id="layers"),
        pytest.param(WITHOUT_OPTIONS["saved layers"], id="saved layers"),
        pytest.param(WITHOUT_OPTIONS["plain"], id="plain"),
    ],
)
def test_the_first_call_runs_a_step_once_and_the_second_never(fun):
    run, runs = counted(fun)
    step = jaxoff.jit(run)
    step(*arguments())
    first = len(runs)
    step(*arguments())
    assert len(runs) == first  # a second run here is another fault than the one that is known
    assert first == 1


@pytest.mark.parametrize("how", [pytest.param("scan", id="moves"), pytest.param("layers", id="stays")])
def test_static_arguments_run_a_step_once_for_each_value(how):
    policy = SOME if how == "scan" else SOME.on_device()

    def fun(w, x, power, *, scale):
        return jax.grad(lambda w: small_loss(policy, how)(w, x**power) * scale)(w)

    run, runs = counted(fun)
    jitted = jaxoff.jit(run, static_argnums=2, static_argnames="scale")
    jitted.lower(*small_shapes(), 2, scale=0.5)
    assert len(runs) == 1
    jitted.lower(*small_shapes(), 3, scale=0.5)
    assert len(runs) == 2


def test_eval_shape_runs_a_step_once():
    run, runs = counted(gradients())
    jaxoff.jit(run).eval_shape(*small_shapes())
    assert len(runs) == 1


def test_an_inner_jit_runs_a_step_once():
    run, runs = counted(gradients())
    inner = jaxoff.jit(run)
    with pytest.warns(UserWarning, match=jaxoff.FindingCode.CALLED_INSIDE_TRANSFORM):
        jax.jit(lambda w, x: inner(w, x)[0]).lower(*small_shapes())
    assert len(runs) == 1


@pytest.mark.parametrize("form", ["scan", "layers"])
@pytest.mark.parametrize("jit", [lambda fun, **_: fun, jax.jit, jaxoff.jit])
def test_a_plan_runs_a_step_once(jit, form):
    run, runs = counted(gradients(jaxoff.policy(), form))
    jaxoff.plan(jit(run, donate_argnums=0), *small_shapes(), device_bytes=1e9, compiled=False)
    assert len(runs) == 1


def test_a_plan_of_a_mapped_step_runs_the_step_once():
    mesh = mesh_of(2)
    run, runs = counted(jax.grad(small_loss(jaxoff.policy())))
    local = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    jaxoff.plan(jax.jit(local), *small_shapes(), device_bytes=1e9, compiled=False)
    assert len(runs) == 1


@pytest.mark.parametrize("jit", [lambda fun, **_: fun, jax.jit, jaxoff.jit])
def test_a_frontier_runs_a_step_once(jit):
    run, runs = counted(gradients(jaxoff.policy()))
    jaxoff.frontier(jit(run, donate_argnums=0), *small_shapes(), points=3)
    assert len(runs) == 1


def test_a_report_runs_a_loss_once():
    run, runs = counted(small_loss())
    jaxoff.explain(run, *small_shapes())
    assert len(runs) == 1
