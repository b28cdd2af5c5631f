"""A fault of jaxoff's own costs copies and memory, and never the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes
from jaxoff._schedule import faults, prepare, within_budget


def step(w, x):
    def loss(w):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, w)[0].var()

    return w - jax.grad(loss)(w)


ARGS = jnp.full((3, 32, 32), 0.01), jnp.linspace(-1, 1, 16 * 32).reshape(16, 32)


def fail(*args, **kwargs):
    raise KeyError("a variable")


def test_a_step_that_cannot_be_rewritten_runs_as_written(monkeypatch):
    monkeypatch.setattr(faults, "rewrite", fail)
    ours = jaxoff.jit(step)
    with pytest.warns(UserWarning, match="runs-as-written: .*KeyError: 'a variable' at .*test_faults.py"):
        result = ours(*ARGS)
    assert (result == jax.jit(step)(*ARGS)).all()
    assert [finding.code for finding in ours.findings] == [jaxoff.FindingCode.RUNS_AS_WRITTEN]


def test_a_step_that_cannot_be_read_runs_as_written(monkeypatch):
    monkeypatch.setattr(prepare, "merge_nested_loops", fail)
    ours = jaxoff.jit(step)
    with pytest.warns(UserWarning, match="runs-as-written: reading its program .*KeyError: 'a variable'"):
        result = ours(*ARGS)
    assert (result == jax.jit(step)(*ARGS)).all()


def test_merging_maps_that_fails_takes_the_step_as_written_if_it_fits(monkeypatch):
    monkeypatch.setattr(within_budget, "merge_shard_maps", fail)
    ours = jaxoff.jit(step, device_bytes=1e8)
    with pytest.warns(UserWarning, match="runs-as-written: the search"):
        result = ours(*ARGS)
    assert (result == jax.jit(step)(*ARGS)).all()


def test_a_search_that_fails_takes_the_step_as_written_if_it_fits(monkeypatch):
    monkeypatch.setattr(within_budget, "find_fitting", fail)
    ours = jaxoff.jit(step, device_bytes=1e8)
    with pytest.warns(UserWarning, match="runs-as-written: the search"):
        result = ours(*ARGS)
    assert (result == jax.jit(step)(*ARGS)).all()
    assert ours.plan.peak_bytes < 1e8
    with pytest.raises(jaxoff.BudgetError, match=r"KeyError.* as it is written takes"):
        jaxoff.jit(step, device_bytes=1e3)(*ARGS)


def test_a_budget_error_says_why_xla_compiles_nothing():
    within = jaxoff.jit(step, device_bytes=1e8, compiler_options={"xla_nonsense": True})
    with pytest.raises(jaxoff.BudgetError, match=r"XLA says: .*xla_nonsense"):
        within.lower(*ARGS)


def test_state_on_the_host_is_no_cure_where_xla_compiles_nothing():
    def train(state, x):
        w, moments = state
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, w - step(w, x))
        return (w - 0.1 * moments, moments), x.sum()

    w = jax.ShapeDtypeStruct((3, 512, 512), jnp.float32)
    options = {"xla_nonsense": True}
    within = jaxoff.jit(train, donate_argnums=0, device_bytes=1e8, device="h200", compiler_options=options)
    with pytest.raises(jaxoff.BudgetError, match=r"(?s)does not help.*XLA says: .*xla_nonsense"):
        within.lower((w, w), jax.ShapeDtypeStruct((8192, 512), jnp.float32))


def test_the_least_budget_counts_the_step_as_written(monkeypatch):
    def find_nothing(*args, **kwargs):
        raise jaxoff.BudgetError("no placement fits.", 10**9)

    monkeypatch.setattr(within_budget, "find_fitting", find_nothing)
    taken = program_nbytes(jax.jit(step).lower(*ARGS).compile())
    with pytest.raises(jaxoff.BudgetError, match=r"no placement fits\. The step as it is written takes") as e:
        jaxoff.jit(step, device_bytes=taken - 1).lower(*ARGS)
    assert e.value.smallest_bytes == taken
    within = jaxoff.jit(step, device_bytes=taken)
    within.lower(*ARGS)
    assert within.plan.peak_bytes == taken


@pytest.mark.filterwarnings("ignore:runs-as-written")
def test_a_step_as_written_that_the_compiler_divides_has_the_time_of_its_devices(monkeypatch):
    monkeypatch.setattr(within_budget, "find_fitting", fail)
    w = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.bfloat16)
    times = []
    for devices in (1, 2):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
        rows = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
        within = jaxoff.jit(step, device_bytes=1e12, device="h200")
        within.lower(w, rows)
        times.append(within.plan.step_ms)
    assert times[1] == pytest.approx(times[0] / 2, rel=0.1)
