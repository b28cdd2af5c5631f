"""The search for a program within a budget, with a stand-in for the compiler and in a real step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.choose import choose_placements, saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.estimated import find_estimated
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.forms import step_ms
from jaxoff._budget.integer_program import IntegerProgram
from jaxoff._budget.joint_graph import Placements, list_recomputed
from jaxoff._budget.limits import Budget, parse_nbytes
from jaxoff._budget.memory import estimate_nbytes
from jaxoff._budget.report import Plan, list_values
from jaxoff._budget.search import TRIES, Search
from jaxoff._device.profile import H200
from jaxoff._jaxpr.tag import Tag
from jaxoff._report.tables import format_ms
from tests.jaxoff.budget.layered import list_joint_graphs, write_placed

LAYERS, ROWS, WIDTH = 6, 2048, 512


def layer(x, w):
    h = jnp.tanh(x @ w["up"])
    return x + (h * jax.nn.sigmoid(h)) @ w["down"], None


def loss(w, x):
    return lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0].sum()


def structs(layers=LAYERS, rows=ROWS, width=WIDTH):
    up = jax.ShapeDtypeStruct((layers, width, 4 * width), "float32")
    down = jax.ShapeDtypeStruct((layers, 4 * width, width), "float32")
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((rows, width), "float32")


DONATED = [False] * 3  # the arguments of `loss`


@pytest.fixture(scope="module")
def closed():
    return jax.make_jaxpr(jax.value_and_grad(loss))(*structs())


@pytest.fixture(scope="module")
def costs(closed):
    return [Costs.of(pair, H200) for pair in list_joint_graphs(closed)]


class Compiler:
    """Compiles nothing: a program takes `fixed` bytes and `factor` times what its stacks of values take."""

    def __init__(self, fixed, factor):
        self.fixed, self.factor, self.sizes = fixed, factor, []

    def __call__(self, program):
        stacks = 0
        for eqn in program.jaxpr.eqns:
            if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
                outs = [v.aval for v in eqn.outvars if v.aval.shape[:2] == (LAYERS, ROWS)]
                on_device = [a for a in outs if a.memory_space == jax.memory.Space.Device]
                stacks += sum(a.size * a.dtype.itemsize for a in on_device)
        self.sizes.append(self.fixed + self.factor * stacks)
        return self.sizes[-1], len(self.sizes)


@pytest.mark.parametrize(("budget", "share"), [(1e12, 1e-9), (240e6, 0.1)])
def test_a_predicted_step_counts_each_kernel_once(closed, budget, share):
    """The fastest program takes the time of its kernels; others what their own placements add."""
    found = find_estimated(closed, H200, Budget.of(budget, 0), DONATED)
    assert found.is_fastest == (budget > 1e9)
    written = write_placed(closed, lambda _: found.placements[0])
    kernels_ms = step_ms(written, found.pairs, H200)
    assert found.base_ms + found.added_ms == pytest.approx(kernels_ms, rel=share)


@pytest.mark.parametrize(
    ("fixed", "factor", "budget"),
    list(itertools.product([10e6, 80e6], [0.8, 1.0, 1.25], [120e6, 180e6, 240e6])),
)
def test_the_program_fits_after_few_compilations_and_is_nearly_the_fastest(
    closed, costs, fixed, factor, budget
):
    compiler = Compiler(fixed, factor)
    found = find_fitting(closed, H200, Budget(budget), DONATED, compiler)
    assert found.nbytes <= budget
    assert found.nbytes == compiler.sizes[found.program - 1]
    assert len(compiler.sizes) <= TRIES
    best = choose_placements(costs, H200, (budget - fixed) / factor)
    assert best is not None
    assert found.added_ms <= best[1] + 0.02 * LAYERS * (costs[0].forward_ms + costs[0].backward_ms)


def test_a_plan_that_leaves_memory_says_that_no_placements_are_faster(closed):
    left = "The rest of the budget is left: no placements are faster, by the model of time."

    def plan_within(nbytes):
        budget = Budget(nbytes, host_nbytes=0)
        return find_fitting(closed, H200, budget, DONATED, LargeCompiler(0, 1.0)).make_plan(
            budget, H200, None
        )

    plan = plan_within(1e12)
    assert plan.is_fastest and str(plan).endswith(left)
    assert left not in str(plan_within(1.05 * plan.peak_bytes))
    assert not plan_within(0.7 * plan.peak_bytes).is_fastest


def test_a_program_traced_again_has_the_same_integer_program(monkeypatch):
    """Not in the order of a set of variables, which is that of their addresses."""
    solve, solved = IntegerProgram.minimise, []

    def minimise(self, cost):
        solved.append(([list(terms.items()) for terms, _ in self._rows], list(self.cost.items())))
        return solve(self, cost)

    monkeypatch.setattr(IntegerProgram, "minimise", minimise)
    for _ in range(4):
        traced = jax.make_jaxpr(jax.value_and_grad(lambda *args: loss(*args)))(*structs())
        choose_placements([Costs.of(pair, H200) for pair in list_joint_graphs(traced)], H200, 120e6)
    assert len(solved) == 4
    assert all(program == solved[0] for program in solved)


def test_what_nothing_fits_is_an_error_with_the_least(closed):
    with pytest.raises(
        BudgetError, match=r"no program fits 9\.00 MB of device memory. The least that"
    ) as error:
        find_fitting(closed, H200, Budget(9e6), DONATED, Compiler(10e6, 1.0))
    assert error.value.smallest_bytes is not None
    assert error.value.smallest_bytes >= 10e6


def test_an_error_names_the_largest_values_at_the_peak():
    def step(w, x, head):
        value, grads = jax.value_and_grad(lambda *args: loss(*args[:2]) + args[0]["up"].sum())(w, x)
        return value, grads, jnp.exp(x @ head).sum()

    head = jnp.ones((WIDTH, 8 * WIDTH))
    args = jax.tree.map(lambda s: jnp.ones(s.shape), structs(layers=2))
    with pytest.raises(BudgetError) as error:
        jaxoff.jit(step, device_bytes="1MB")(*args, head)
    first, *lines = str(error.value).splitlines()
    assert first.endswith("The largest values at its peak:")
    assert [line.strip() for line in lines] == list(error.value.largest)
    assert len(lines) <= 10
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((args, head)))
    assert f"{arguments / 1e6:.2f} MB  arguments" in error.value.largest
    carry = next(line for line in error.value.largest if "carry" in line)
    assert carry.startswith(f"{2 * ROWS * WIDTH * 4 / 1e6:.2f} MB  2 x float32[{ROWS}, {WIDTH}]  carry")
    assert all("test_fit.py" in line for line in error.value.largest if "arguments" not in line)


def test_a_long_search_says_how_far_it_is(closed, caplog, monkeypatch):
    caplog.set_level("INFO", logger="jaxoff")
    compiler = Compiler(10e6, 1.0)
    found = find_fitting(closed, H200, Budget(180e6), DONATED, compiler)
    over = [", too much, with " in record.message for record in caplog.records]
    assert over == [nbytes > 180e6 for nbytes in compiler.sizes]
    assert [record.levelname for record in caplog.records] == ["INFO"] * found.programs
    assert caplog.records[0].message.startswith("program 1 for 180.00 MB of device memory takes ")
    monkeypatch.setattr("jaxoff._report.progress._PATIENCE", 0.0)
    find_fitting(closed, H200, Budget(180e6), DONATED, Compiler(10e6, 1.0))
    assert caplog.records[-1].levelname == "WARNING"


def test_a_later_search_knows_what_programs_take(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("jaxoff._runtime.program_memory._WORTH_A_FILE", 0.0)
    w, x = jax.tree.map(lambda s: jnp.ones(s.shape), structs(layers=2, rows=8, width=4))
    compiled = []
    compile_lowered = jax.stages.Lowered.compile

    def compile_and_count(self, *args, **kwargs):
        compiled.append(self)
        return compile_lowered(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_count)
    first, second, third = (
        jaxoff.jit(jax.value_and_grad(loss), device_bytes=b) for b in ("1GB", "1GB", "2GB")
    )
    value, _ = first(w, x)
    programs = len(compiled)
    assert programs == first.plan.programs == len(list(tmp_path.glob("memory-*.json"))) > 0
    assert second(w, x)[0] == value
    assert len(compiled) == programs
    assert second.plan == first.plan
    next(tmp_path.glob("memory-*.json")).write_text("torn")
    third(w, x)
    assert len(compiled) == programs + 1


class LargeCompiler(Compiler):
    """A program takes what the estimate of its liveness says, and a part more."""

    def __call__(self, program):
        self.sizes.append(self.factor * estimate_nbytes(program, DONATED))
        return self.sizes[-1], len(self.sizes)


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.04])
def test_where_memory_is_about_as_estimated_the_first_program_fits(closed, factor):
    most = find_fitting(closed, H200, Budget(1e12), DONATED, LargeCompiler(0, factor)).nbytes
    with pytest.raises(BudgetError) as error:
        find_fitting(closed, H200, Budget(1.0, host_nbytes=0), DONATED, LargeCompiler(0, factor))
    least = error.value.smallest_bytes
    assert least is not None
    assert least < 0.7 * most
    for part in (0.3, 0.6, 0.9):
        budget = Budget(least + part * (most - least), host_nbytes=0)
        compiler = LargeCompiler(0, factor)
        found = find_fitting(closed, H200, budget, DONATED, compiler)
        assert found.nbytes <= budget.device_nbytes
        assert compiler.sizes[0] <= factor * budget.device_nbytes
        assert len(compiler.sizes) <= 2


def test_a_fault_of_a_later_search_leaves_the_program_found(closed, monkeypatch):
    def fail(self, *, copies):
        raise TypeError("a slice of a divided axis")

    monkeypatch.setattr(Search, "is_slowed", lambda self, found: True)
    monkeypatch.setattr(Search, "tile", fail)
    compiler = LargeCompiler(0, 1.0)
    assert find_fitting(closed, H200, Budget(1e12), DONATED, compiler).program == 1


def test_a_budget_out_of_reach_costs_two_programs(closed):
    """The least without copies and the least with copies; other options win less than is missing."""
    compiler = LargeCompiler(0, 1.0)
    with pytest.raises(BudgetError):
        find_fitting(closed, H200, Budget(1e6), DONATED, compiler, compile_otherwise=compiler)
    assert len(compiler.sizes) <= 2


def test_where_nothing_fits_the_smallest_programs_are_compiled_otherwise(closed):
    sizes = []

    def compile_otherwise(program):
        sizes.append(Compiler(5e6, 1.0)(program)[0])
        return sizes[-1], "otherwise"

    first = Compiler(10e6, 1.0)
    with pytest.raises(BudgetError) as error:
        find_fitting(closed, H200, Budget(9e6), DONATED, first)
    least = error.value.smallest_bytes
    assert least is not None
    budget, compiler = Budget(least - 1e6), Compiler(10e6, 1.0)
    found = find_fitting(closed, H200, budget, DONATED, compiler, compile_otherwise=compile_otherwise)
    assert found.program == "otherwise"
    assert found.nbytes <= budget.device_nbytes
    assert 1 <= len(sizes) <= 2
    assert found.programs == len(compiler.sizes) + len(sizes)


def test_a_step_without_a_loop_over_layers_is_told_so():
    with pytest.raises(BudgetError, match=r"no layers were found, .* loop over layers") as caught:
        jaxoff.jit(jax.grad(lambda x: jnp.sin(x).sum()), device_bytes=8)(jnp.ones(3))
    assert "shard_map" not in str(caught.value)


def test_less_memory_never_costs_less_time(costs):
    times = []
    for nbytes in (1e9, 2e8, 1e8, 5e7, 3e7):
        found = choose_placements(costs, H200, nbytes)
        assert found is not None
        placements, ms = found
        times.append(ms)
        assert saved_nbytes(costs, placements) <= nbytes * (1 + 1e-6)
        list_recomputed(costs[0].pair, placements[0])  # raises where it needs what is not kept
    assert times == sorted(times)


def test_a_search_that_reaches_its_bounds_returns_the_best_found(costs, monkeypatch):
    monkeypatch.setattr("jaxoff._budget.integer_program._NODES", 1)
    found = choose_placements(costs, H200, 1e8)
    assert found is not None
    assert saved_nbytes(costs, found[0]) <= 1e8 * (1 + 1e-6)


def test_host_memory_is_a_budget_of_its_own(costs):
    def host(placements):
        return LAYERS * sum(costs[0].nbytes[costs[0].pair.values[i]] for i in placements[0].offloaded)

    # The input of a layer takes 4.2 MB, and has to be somewhere.
    without = choose_placements(costs, H200, 1e7)
    assert without is not None
    assert host(without[0]) >= LAYERS * ROWS * WIDTH * 4
    assert choose_placements(costs, H200, 1e7, host_nbytes=1e6) is None
    limited = choose_placements(costs, H200, 6e7, host_nbytes=1e6)
    assert limited is not None
    assert host(limited[0]) == 0


def test_the_choice_is_that_of_all_placements(costs):
    """Brute force over the four largest values of the layer: none is faster within the memory."""
    (cost,) = costs
    pair = cost.pair
    order = sorted(cost.nbytes, key=lambda v: -cost.nbytes[v])
    positions = [pair.values.index(v) for v in order[:6]]
    for room in (1e9, 1.2e8, 6e7):
        found = choose_placements(costs, H200, room)
        assert found is not None
        for saved in itertools.chain.from_iterable(itertools.combinations(positions, n) for n in range(7)):
            placements = Placements((0, *(i for i in saved if i)))
            if saved_nbytes(costs, [placements]) > room:
                continue
            repeated = {id(eqn) for eqn in list_recomputed(pair, placements)}
            again = sum(
                ms for eqn, ms in zip(pair.pure, cost.equation_ms, strict=True) if id(eqn) in repeated
            )
            kept = [pair.values[i] for i in placements.saved]
            saving = sum(cost.saving_ms[v] + 0.02 * H200.pass_ms(cost.nbytes[v]) for v in kept)
            assert found[1] <= LAYERS * (again + saving) + LAYERS * 1e-6 * len(pair.pure)


@pytest.mark.parametrize(
    ("given", "expected"), [(60e9, 60e9), ("60GB", 60e9), ("56 GiB", 56 * 2**30), ("512MB", 512e6), (7, 7.0)]
)
def test_bytes_are_numbers_or_text(given, expected):
    assert parse_nbytes(given, "device_bytes") == expected


@pytest.mark.parametrize("given", [0, -1, "60", "60 gigs", "GB", "1.2.3GB", float("inf"), float("nan")])
def test_other_budgets_are_errors(given):
    with pytest.raises(ValueError, match="device_bytes is a number of bytes above 0, or text such as"):
        jaxoff.jit(lambda x: x, device_bytes=given)


def test_no_host_memory_at_all_is_a_budget_of_it(closed):
    found = find_fitting(closed, H200, Budget.of("120MB", 0), DONATED, Compiler(10e6, 1.0))
    assert not any(value.placement == "offload" for value in found.list_values())
    with pytest.raises(ValueError, match="host_bytes is a number of bytes, or text such as"):
        Budget.of("120MB", -1)


def test_the_limit_of_the_allocator_is_that_of_a_gpu(monkeypatch):
    with pytest.raises(
        ValueError, match="takes the limit of a GPU's allocator, in a single process; got 'cpu'"
    ):
        jaxoff.jit(loss, device_bytes="fit")(*jax.tree.map(lambda s: jnp.ones(s.shape), structs(2, 8, 8)))
    assert Budget(5.0).resolve(None) == Budget(5.0)

    class Gpu:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    assert Budget.of("fit", None).resolve(jnp.ones(8)) == Budget(700)  # an array of another device


def test_a_budget_excludes_a_recipe_and_host_bytes_alone():
    with pytest.raises(ValueError, match="chooses the recipe by compiled memory"):
        jaxoff.jit(lambda x: x, device_bytes=1e9, recipe="stock")
    with pytest.raises(ValueError, match="host_bytes goes with device_bytes"):
        jaxoff.jit(lambda x: x, host_bytes=1e9)


def test_a_step_under_a_budget_runs_once_through_the_users_function():
    calls = []

    def step(w, x):
        calls.append(1)
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda v, g: v - 0.01 * g, w, grads), value

    w, x = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), structs(4, 64, 128))
    expected = jax.jit(step)(w, x)
    calls.clear()
    planned = jaxoff.jit(step, device_bytes="1GB")
    got = planned(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
    planned(w, x)
    assert len(calls) == 1
    assert planned.plan.device_bytes == 1e9
    assert 0 < planned.plan.peak_bytes <= 1e9
    assert "offload" not in {v.placement for v in planned.plan.values}
    with pytest.raises(jaxoff.BudgetError, match="no program fits"):
        jaxoff.jit(step, device_bytes="100kB")(w, x)


def named_layer(x, w):
    with jax.named_scope("mlp/gate"):
        gate = x @ -w["up"]
    up = jaxoff.name(x @ w["up"], "up")
    with jax.named_scope("down"):
        return x + jaxoff.mark_not_offload(jnp.sin(gate) * jnp.cos(up)) @ w["down"], None


def named_loss(w, x):
    return lax.scan(jax.checkpoint(named_layer, prevent_cse=False), x, w)[0].sum()


def place_named(room, loss=named_loss):
    pairs = list_joint_graphs(jax.make_jaxpr(jax.value_and_grad(loss))(*structs()))
    found = choose_placements([Costs.of(pair, H200) for pair in pairs], H200, room)
    assert found is not None
    return list(list_values(pairs[0], found[0][0]))


def test_a_report_has_a_row_for_each_kept_value_by_name_or_by_path_and_source():
    rows = {row.value: row for row in place_named(1e9)}
    assert rows["up"].placement == "save"
    assert rows["up"].shape == f"float32[{ROWS}, {4 * WIDTH}]"
    assert rows["up"].nbytes == LAYERS * ROWS * 4 * WIDTH * 4
    assert "test_fit.py:" in rows["up"].source
    rows = {row.value: row for row in place_named(1e7)}
    assert rows["carry"].placement == "offload"
    assert rows["mlp/gate:dot_general"].placement == "recompute"
    report = Plan(2e9, 1.5e9, 0, 12.0, "a GPU", is_compiled=True, programs=3, values=tuple(rows.values()))
    assert "compiled peak 1.50 GB of 2.00 GB; 3 programs tried; host 0 B\nstep about 12.0 ms on a GPU" in str(
        report
    )
    assert "mlp/gate:dot_general" in str(report)
    assert report.to_dict()["values"][0]["placement"] in ("save", "offload", "recompute")


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(0.0, "0.00 ms"), (2.306, "2.31 ms"), (9.996, "10.0 ms"), (434.94, "435 ms"), (999.6, "1.00 s"),
     (4320.9, "4.32 s"), (123456.0, "123 s")],
)  # fmt: skip
def test_an_estimated_duration_has_three_digits(duration_ms, text):
    assert format_ms(duration_ms) == text


def test_a_value_marked_not_offload_stays_off_the_host():
    free_link = dataclasses.replace(H200, d2h_gbps=1e9, h2d_gbps=1e9, memory_gbps=1e9)
    (pair,) = list_joint_graphs(jax.make_jaxpr(jax.value_and_grad(named_loss))(*structs()))
    marked = [v for v, name in pair.names.items() if Tag.of(name).mark == "not_offload"]
    assert marked
    found = choose_placements([Costs.of(pair, free_link)], free_link, 1e7)
    assert found is not None
    offloaded = {pair.values[i] for i in found[0][0].offloaded}
    assert offloaded
    assert offloaded.isdisjoint(marked)
