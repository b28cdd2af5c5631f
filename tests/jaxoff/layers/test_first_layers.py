"""`jaxoff.FirstLayers`: two policies for the layers of a scan, with undivided stacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._layers.scan import scan_by_strategy
from tests.jaxoff.policy import placement
from tests.jaxoff.policy.matrix import assert_close, inputs

STEPS, ROWS, WIDTH = 6, 4, 8
MOVED = jaxoff.policy(offload=["x_in"])
KEPT = jaxoff.policy(save=["x_in", "act"])
X_NBYTES = 4 * ROWS * WIDTH


def body(x, layer):
    x = jaxoff.name(x, "x_in")
    noise = jax.random.normal(layer["key"], x.shape) * layer["scale"]
    out = x + jaxoff.name(jnp.tanh(x @ layer["w"] + noise), "act") @ layer["w"].T
    return out, {"mean": out.mean(), "scale": 2 * layer["scale"]}


def arguments():
    w = jnp.asarray(inputs(STEPS, WIDTH, WIDTH)) / 4
    return w, jnp.asarray(inputs(ROWS, WIDTH))


def loss(scan, w, x):
    """Of weights, keys and integers, with results of each layer."""
    layers = {"w": w, "key": jax.random.split(jax.random.key(0), STEPS), "scale": jnp.arange(STEPS)}
    x, ys = scan(body, x, layers)
    return x.sum() + (ys["mean"] * jnp.arange(STEPS)).sum(), ys


def ours(policy=None, **more):
    policy = policy or jaxoff.FirstLayers(4, MOVED, KEPT)
    return functools.partial(loss, functools.partial(scan_by_strategy, policy=policy, **more))


def differentiated(fun):
    return jax.value_and_grad(fun, (0, 1), has_aux=True)


@pytest.mark.parametrize(
    ("count", "reverse", "jit"),
    [
        (1, False, jaxoff.jit),
        (4, True, jaxoff.jit),
        (4, False, jax.jit),
        (9, False, jaxoff.jit),
        *(
            pytest.param(count, reverse, jit, marks=pytest.mark.long)
            for count in (0, 2, 5, 6)
            for reverse in (False, True)
            for jit in (jax.jit, jaxoff.jit)
        ),
    ],
)
@pytest.mark.some_cases(2)
def test_it_computes_what_lax_scan_does(count, reverse, jit):
    policy = jaxoff.FirstLayers(count, MOVED, KEPT)
    plain = functools.partial(loss, functools.partial(lax.scan, reverse=reverse))
    want = jax.jit(differentiated(plain))(*arguments())
    assert_close(jit(differentiated(ours(policy, reverse=reverse)))(*arguments()), want)


@pytest.mark.parametrize(
    "more",
    [
        {"block": 2},
        pytest.param({"strategy": "ordered"}, marks=pytest.mark.long),
        pytest.param({"strategy": "plain"}, marks=pytest.mark.long),
    ],
)
def test_it_takes_every_strategy(more):
    want = jax.jit(differentiated(functools.partial(loss, lax.scan)))(*arguments())
    assert_close(jaxoff.jit(differentiated(ours(**more)))(*arguments()), want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_only_the_first_layers_move(count, reverse):
    policy = jaxoff.FirstLayers(count, MOVED, KEPT)

    def fun(w, x):
        return ours(policy, reverse=reverse)(w, x)[0]

    assert placement.grad_host_arrays(fun, *arguments()) == placement.arrays({(ROWS, WIDTH): count})
    report = jaxoff.explain(fun, *arguments())
    assert report.host_bytes == count * X_NBYTES
    assert report.by_name["x_in"] == {"offload": count * X_NBYTES, "save": (STEPS - count) * X_NBYTES}
    assert report.by_name["act"]["save"] == (STEPS - count) * X_NBYTES
    assert report.findings == ()
    assert all(WIDTH not in r.shape[1:-1] for r in report.residuals), "weights are read where they are"
    twin = jaxoff.explain(lambda w, x: ours(policy.on_device())(w, x)[0], *arguments())
    assert (twin.host_bytes, twin.device_bytes) == (0, report.host_bytes + report.device_bytes)


@pytest.mark.parametrize("fun", [differentiated(ours()), ours()], ids=["differentiated", "forward"])
def test_stacks_are_read_and_written_where_they_are(fun):
    text = str(jaxoff.jit(fun).trace(*arguments()).jaxpr)
    plain = str(jax.make_jaxpr(fun)(*arguments()))
    for operation in ("= split[", "= concatenate[dimension=0]"):
        assert operation not in text
        assert operation in plain, "the text of a program says so"


def test_weights_and_gradients_take_no_more_memory_in_two_loops():
    shape = 256
    args = jnp.ones((STEPS, shape, shape)), jnp.ones((ROWS, shape))

    def temporary(policy):
        def fun(w, x):
            def layer(x, w):
                return x + jaxoff.name(jnp.tanh(x @ w), "act"), None

            return jaxoff.scan(layer, x, w, policy=policy)[0].sum()

        step = jaxoff.jit(jax.value_and_grad(fun)).lower(*args).compile()
        return step.memory_analysis().temp_size_in_bytes

    one = temporary(KEPT)
    assert temporary(jaxoff.FirstLayers(3, KEPT, KEPT)) < one + 4 * shape * shape


def test_a_stack_that_others_read_too_stays_whole():
    def fun(w, x):
        return ours()(w, x)[0] + (w**2).sum()

    got = jaxoff.jit(jax.value_and_grad(fun))(*arguments())
    assert_close(got, jax.value_and_grad(lambda w, x: loss(lax.scan, w, x)[0] + (w**2).sum())(*arguments()))


def test_what_one_loop_stacks_twice_is_put_together_behind_it():
    def both(scan, w, x):
        def layer(x, w):
            out = x + jaxoff.name(jnp.tanh(x @ w), "act")
            return out, (out, 2 * x)

        ys = scan(layer, x, w)[1]
        return (jnp.concatenate(ys) ** 2).sum()

    fun = functools.partial(both, functools.partial(jaxoff.scan, policy=KEPT))
    got = jaxoff.jit(jax.value_and_grad(fun))(*arguments())
    assert_close(got, jax.value_and_grad(functools.partial(both, lax.scan))(*arguments()))


def test_it_works_in_a_loop_over_microbatches():
    def grads(fun, w, xs):
        def iteration(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(lambda w: fun(w, x)[0])(w)), None

        return lax.scan(iteration, jnp.zeros_like(w), xs)[0]

    w, x = arguments()
    xs = jnp.stack([x, 2 * x, x + 1])
    got = jaxoff.jit(functools.partial(grads, ours()))(w, xs)
    assert_close(got, jax.jit(functools.partial(grads, functools.partial(loss, lax.scan)))(w, xs))


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.some_cases(1)
def test_it_works_over_a_mesh(manual):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = arguments()

    def step(fun):
        def mean(w, x):
            value, grads = jax.value_and_grad(lambda w: fun(w, x)[0])(w)
            return lax.psum((value, grads), "data") if manual else (value, grads)

        if not manual:
            return mean
        specs = (jax.P(), jax.P("data"))
        return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)

    w_spec, x_spec = (jax.P(), jax.P("data")) if manual else (jax.P(None, None, "data"), jax.P())
    args = [jax.device_put(v, jax.NamedSharding(mesh, spec)) for v, spec in ((w, w_spec), (x, x_spec))]
    got = jaxoff.jit(step(ours()))(*args)
    assert_close(got, jax.jit(step(functools.partial(loss, lax.scan)))(*args))


def test_layers_one_after_the_other_have_first_ones_too():
    w, x = arguments()

    def fun(w, x):
        def layer(w, x):
            return x + jaxoff.name(jnp.tanh(jaxoff.name(x, "x_in") @ w), "act") @ w.T

        return jaxoff.layers(layer, x, list(w), policy=jaxoff.FirstLayers(4, MOVED, KEPT)).sum()

    report = jaxoff.explain(fun, w, x)
    assert report.host_bytes == 4 * X_NBYTES
    assert report.by_name["act"] == {"save": 2 * X_NBYTES, "recompute": 4 * X_NBYTES}
    assert_close(jaxoff.jit(jax.grad(fun))(w, x), jax.grad(fun)(w, x))


def test_equal_ones_are_one():
    assert jaxoff.FirstLayers(4, MOVED, KEPT) == jaxoff.FirstLayers(4, MOVED, KEPT)
    assert len({jaxoff.FirstLayers(4, MOVED, KEPT), jaxoff.FirstLayers(4, MOVED, KEPT)}) == 1


def test_what_does_not_know_its_layer_refuses_it():
    policy = jaxoff.FirstLayers(4, MOVED, KEPT)
    with pytest.raises(TypeError, match=r"goes to jaxoff\.scan or jaxoff\.layers, .*Hand it \.policy or"):
        jax.grad(jax.checkpoint(lambda x: jnp.sin(jaxoff.name(x, "x_in")).sum(), policy=policy))(jnp.ones(3))


@pytest.mark.parametrize("count", [-1, 1.5, True, "2"])
def test_the_number_of_layers_is_a_count(count):
    with pytest.raises(ValueError, match=rf"an integer of at least 0, got {count!r}"):
        jaxoff.FirstLayers(count, MOVED, KEPT)


@pytest.mark.parametrize("policy", [None, jaxoff.FirstLayers(1, MOVED, KEPT)])
def test_its_policies_are_of_one_layer(policy):
    for pair in ((policy, KEPT), (KEPT, policy)):
        with pytest.raises(TypeError, match="FirstLayers takes two policies"):
            jaxoff.FirstLayers(1, *pair)


def test_a_block_is_of_one_policy():
    with pytest.raises(ValueError, match="block must divide the number of first layers, 4, got 3"):
        ours(block=3)(*arguments())


def test_bits_are_those_of_the_saved_twin():
    policy = jaxoff.FirstLayers(4, MOVED, KEPT)
    got, want = (jaxoff.jit(differentiated(ours(p)))(*arguments()) for p in (policy, policy.on_device()))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
