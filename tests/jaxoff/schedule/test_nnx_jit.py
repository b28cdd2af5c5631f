"""`jaxoff.nnx_jit`: what `nnx.jit` computes and updates, by the program of `jaxoff.jit`."""

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from tests.jaxoff.policy.matrix import assert_close

WIDTH, HIDDEN, LAYERS = 8, 32, 3
POLICY = jaxoff.policy(offload=["act"])
JITS = {"nnx.jit": nnx.jit, "jaxoff.nnx_jit": jaxoff.nnx_jit}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        act = jaxoff.name(jnp.tanh(self.up(x)), "act")
        return x + self.drop(self.norm(self.down(act)))


class Model(nnx.Module):
    """Blocks under the policy, the first shared; batch statistics, dropout and a count are updated."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed, dropout=1)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.shared, self.calls = self.blocks[0], nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.calls[...] += 1
        for block in self.blocks:
            x = nnx.remat(Block.__call__, policy=POLICY)(block, x)
        return self.shared(x)


def train(jit, steps=4, **kwargs):
    """The losses of a few steps, the model afterwards, the step, and how often it was traced."""
    model, traces = Model(0), []
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @jit(**kwargs)
    def step(model, optimizer, x):
        traces.append(x)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x = jax.random.normal(jax.random.key(0), (16, WIDTH))
    losses = [step(model, optimizer, x) for _ in range(steps)]
    return losses, nnx.state((model, optimizer)), step, len(traces)


def numbers_in(state):
    leaves = jax.tree.leaves(state)
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(donate_argnums=(0, 1)), marks=pytest.mark.long),
        pytest.param(dict(donate_argnames="model"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_losses_and_updates_of_several_steps_are_those_of_nnx_jit(options):
    losses, state, step, traces = train(jaxoff.nnx_jit, **options)
    want, want_state, _, _ = train(nnx.jit, **options)
    assert losses[0] != losses[1]
    assert_close(losses, want)
    # A bias ahead of a batch norm has a gradient of rounding errors.
    assert_close(numbers_in(state), numbers_in(want_state), least_scale=1.0)
    assert int(state[0]["calls"][...]) == 4
    assert traces == 1
    assert step.findings == () and step.recipe == "ordered"
    assert "xla_disable_hlo_passes" in step.options


@pytest.mark.filterwarnings("ignore:recipe-replaced")  # by the times, "saved" may be the fastest
def test_programs_are_compared_by_the_times_of_steps_that_train(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path))
    losses, _, step, _ = train(jaxoff.nnx_jit, steps=24, tune=True)
    assert len(step.tuned) > 1 and all(ms > 0 for ms in step.tuned.values())
    assert_close(losses, train(nnx.jit, steps=24)[0])


def test_residuals_of_the_step_are_offloaded():
    step = jaxoff.nnx_jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model))
    text = str(step.trace(Model(0), jnp.ones((16, WIDTH))).traced.jaxpr)
    assert text.count("MemorySpace.Host") == LAYERS


def test_the_options_of_jaxoff_jit_are_taken():
    _, _, step, _ = train(jaxoff.nnx_jit, steps=1, recipe="stock")
    assert step.recipe == "stock"
    with pytest.raises(ValueError, match="recipe is one of"):
        jaxoff.nnx_jit(lambda model: model, recipe="fast")
    with pytest.raises(TypeError, match=r"jaxoff\.Device"):
        jaxoff.nnx_jit(lambda model: model, device=200)


@pytest.mark.long  # README has such a step
def test_a_step_within_a_budget_is_planned_and_trains():
    losses, state, step, _ = train(jaxoff.nnx_jit, device_bytes="1MB", host_bytes=0.5e6)
    want, want_state, _, _ = train(nnx.jit)
    assert_close(losses, want)
    assert_close(numbers_in(state), numbers_in(want_state))
    assert step.plan.device_bytes == 1e6 and 0 < step.plan.peak_bytes <= 1e6
    with pytest.raises(jaxoff.BudgetError, match="no program fits"):
        train(jaxoff.nnx_jit, device_bytes="1kB")
    with pytest.raises(ValueError, match="host_bytes goes with device_bytes"):
        jaxoff.nnx_jit(lambda model: model, host_bytes=1e6)


def test_a_misspelt_name_is_said():
    @jaxoff.nnx_jit
    def step(model, x):
        block = nnx.remat(Block.__call__, policy=jaxoff.policy(offload=["acts", "act"]))
        return nnx.grad(lambda model: block(model, x).sum())(model)

    with pytest.warns(UserWarning, match="rule-matched-nothing: offload='acts'"):
        step(Block(nnx.Rngs(0)), jnp.ones((2, WIDTH)))
    assert [f.code for f in step.findings] == [jaxoff.FindingCode.RULE_MATCHED_NOTHING]


@pytest.mark.parametrize("graph", [dict(graph=False), dict(graph_updates=False)], ids=str)
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_tree_mode_of_flax(graph, donate):
    def run(jit):
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @jit(**graph, donate_argnums=donate)
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).sum(), **graph)(model)
            optimizer.update(model, grads)
            return loss

        return [step(model, optimizer, jnp.ones((4, WIDTH))) for _ in range(3)]

    losses = run(jaxoff.nnx_jit)
    assert losses[0] != losses[1]
    assert_close(losses, run(nnx.jit))


@pytest.mark.parametrize("graph", [{}, dict(graph_updates=False)], ids=str)
def test_shardings_and_static_arguments(graph):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    by_path = nnx.StateSharding({nnx.PathContains("kernel"): rows, ...: whole})

    def run(jit):
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        of_model = whole if graph else by_path

        @jit(in_shardings=(of_model, rows), out_shardings=whole, static_argnums=1, **graph)
        def step(model, rate, x):
            loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).sum(), **graph)(model)
            nnx.update(model, jax.tree.map(lambda p, g: p - rate * g, nnx.state(model), nnx.state(grads)))
            return loss

        losses = [step(model, rate, jnp.ones((4, WIDTH))) for rate in (1e-2, 1e-2, 1e-3)]
        return losses, model.kernel[...].sharding

    (losses, sharding), (want, want_sharding) = run(jaxoff.nnx_jit), run(nnx.jit)
    assert_close(losses, want)
    assert sharding == want_sharding == (whole if graph else rows)


def test_lower_eval_shape_and_methods():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        @jaxoff.nnx_jit
        def add(self, x):
            """Adds."""
            self.count[...] += x
            return self.count[...]

    counter = Counter()
    assert float(counter.add(2.0)) == float(Counter.add(counter, 0.0)) == float(counter.count[...]) == 2.0
    assert Counter.add.__name__ == "add" and Counter.add.__doc__ == "Adds."
    assert float(Counter.add.lower(counter, 1.0).compile()(counter, 1.0)) == 3.0
    assert Counter.add.eval_shape(counter, 1.0).shape == ()
    assert float(counter.count[...]) == 3.0
    Counter.add.clear_cache()
    assert float(counter.add(1.0)) == 4.0


def test_new_and_removed_parts_of_a_module_are_taken_over():
    def run(jit):
        @jit
        def change(model):
            model.extra = nnx.Param(model.kernel[...] * 2)
            del model.bias
            return model.extra

        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        assert change(model) is model.extra
        return nnx.to_pure_dict(nnx.state(model))

    assert_close(run(jaxoff.nnx_jit), run(nnx.jit))


def test_every_keyword_of_nnx_jit_is_taken():
    handed_on = set(inspect.signature(nnx.jit).parameters) - {"fun", "device"}
    defaults = {key: inspect.signature(nnx.jit).parameters[key].default for key in handed_on}
    assert np.isclose(float(jaxoff.nnx_jit(lambda x: x + 1, **defaults)(1.0)), 2.0)


def test_without_flax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r"jaxoff\.nnx_jit needs flax, which is not installed: pip"):
        jaxoff.nnx_jit(lambda model: model)
