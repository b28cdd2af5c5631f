"""Plans whose first layers are placed otherwise than the others."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._device.profile import Device
from jaxoff._plan.calibrations import MARGIN, SECOND_LOOP_PART, WIDE_MARGIN
from jaxoff._plan.layer import Label
from jaxoff._plan.plan import Planner
from jaxoff._plan.search import find_fastest, find_smallest
from tests.jaxoff.plan.planned import (
    DEVICE,
    X_NBYTES,
    arguments,
    chain,
    in_layers,
    model_of,
    placed,
    scanned,
    unrolled,
)
from tests.jaxoff.plan.test_search import FIXED, MODELS, check_against_brute_force

GB = 10**9
LAYERS = 8
# Room for x_in of all layers: with all products on the host, the fastest plan is hardly above the smallest.
HOST = (LAYERS + 1) * X_NBYTES


SCANNED = scanned()


@functools.cache
def traced(fun):
    return Planner.of(fun, arguments(LAYERS), {}, device=DEVICE)


def planned(device_bytes, fun=SCANNED, first_layers=True, host_bytes=HOST, fixed=None, margin=None):
    """As `jaxoff.plan`, which would trace the function each time."""
    planner = dataclasses.replace(traced(fun), tries_first_layers=first_layers)
    return planner.plan(device_bytes, host_bytes, fixed or {}, margin)


def budgets(number=6, fun=SCANNED):
    with pytest.raises(jaxoff.BudgetError) as caught:
        planned(1, fun)
    least, most = caught.value.smallest_bytes, planned(1e9, fun).peak_bytes
    assert least is not None
    return [least + (most - least) * i // (number - 1) for i in range(number)]


def differentiated(fun):
    """A train step."""

    def step(w, x):
        return jax.tree.map(jnp.subtract, w, jax.grad(fun)(w, x))

    return step


FUNCTIONS = {
    "scanned": SCANNED,
    "one after the other": in_layers(LAYERS),
    "train step, scanned": differentiated(SCANNED),
    "train step, one after the other": differentiated(in_layers(LAYERS)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_more_stays_free_where_xla_packs_a_whole_step_at_once(name):
    wide = name == "train step, one after the other"
    found = planned(1e9, FUNCTIONS[name])
    needed = found.peak.find_budget(WIDE_MARGIN if wide else MARGIN)
    assert planned(needed, FUNCTIONS[name]).step_ms == pytest.approx(found.step_ms)
    assert planned(needed - 1000, FUNCTIONS[name]).peak_bytes < found.peak_bytes


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_first_layers_are_between_two_plans(fun):
    mixed = []
    for budget in budgets(6, fun):
        one, two = planned(budget, fun, first_layers=False), planned(budget, fun)
        assert two.step_ms <= one.step_ms
        assert two.peak_bytes <= budget
        assert bool(two.first_layers) == (two.step_ms < one.step_ms)
        mixed += [two] if two.first_layers else []
    assert mixed, "between two plans there is a budget for a part of the layers"
    for plan in mixed:
        assert plan.policy == jaxoff.FirstLayers(plan.first_layers, plan.policy.policy, plan.policy.rest)
        assert plan.policy.policy != plan.policy.rest
        assert {row.layers for row in plan.rows} == {"first", "others"}
        first = sum(row.count for row in plan.rows if (row.name, row.layers) == ("act", "first"))
        others = sum(row.count for row in plan.rows if (row.name, row.layers) == ("act", "others"))
        assert (first, others) == (plan.first_layers, LAYERS - plan.first_layers)
        assert jaxoff.Plan.from_json(plan.to_json()) == plan
        table = str(plan)
        assert table.startswith("layers ")
        assert {line.split("  ")[0] for line in table.splitlines()} >= {
            f"first {plan.first_layers}",
            "others",
        }


def test_more_memory_is_never_slower():
    times = [planned(budget).step_ms for budget in budgets(8)]
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("under", [scanned, functools.partial(in_layers, LAYERS)], ids=["scan", "layers"])
def test_the_policy_does_what_the_plan_says(under):
    fun = under()
    budget, found = next(
        (budget, plan) for budget in budgets(fun=fun) if (plan := planned(budget, fun)).first_layers
    )
    options = dict(device_bytes=budget, host_bytes=HOST, device=DEVICE, first_layers=True)
    assert jaxoff.plan(fun, *arguments(LAYERS), **options) == found

    def loss(w, x):
        return under(policy=found.policy)(w, x)

    report = jaxoff.explain(loss, *arguments(LAYERS))
    for row in found.rows:
        if row.name in report.by_name and row.choice != "recompute":
            assert report.by_name[row.name].get(row.choice, 0) >= row.nbytes
    for name in ("x_in", "act"):
        both = {found.choice(name), found.choice(name, others=True)}
        assert report.by_name.get(name, {}).keys() <= both


def test_what_is_fixed_is_so_in_all_layers():
    for budget in budgets()[2:]:
        found = planned(budget, fixed={"x_in": "save"})
        assert found.choice("x_in") == found.choice("x_in", others=True) == "save"


def test_layers_of_the_callers_own_are_planned_as_one():
    """Only `jaxoff.scan` and `jaxoff.layers` take a policy by layer."""
    fun = unrolled
    args = arguments()
    one, two = (
        jaxoff.plan(fun, *args, device_bytes=1e9, device=DEVICE, first_layers=first)
        for first in (False, True)
    )
    assert two == one and two.first_layers == 0


def test_the_frontier_is_not_above_that_of_one_placement():
    options = dict(device=DEVICE, points=8, host_bytes=HOST)
    one, two = (
        jaxoff.frontier(scanned(), *arguments(LAYERS), first_layers=first, **options).plans
        for first in (False, True)
    )
    assert len(two) > len(one)
    for plan in one:
        assert min(p.step_ms for p in two if p.peak_bytes <= 1.001 * plan.peak_bytes) <= 1.001 * plan.step_ms


def in_both(choice):
    return {of: verb for label, verb in choice.items() for of in (label, Label(label.name, True))}


@pytest.mark.parametrize("step", [False, True], ids=["loss", "train step"])
@pytest.mark.parametrize("first", [1, 3, LAYERS])
def test_layers_that_no_loop_holds_cost_the_same_in_two(step, first):
    """There is no second loop, and at each moment the same layers hold what they keep."""
    fun = in_layers(LAYERS)
    fun = differentiated(fun) if step else fun
    model = Planner.of(fun, arguments(LAYERS), {}, device=DEVICE).model
    assert sorted(n for kind in model.layers for n in kind.numbers) == list(range(LAYERS))
    two = model.split(first)
    for kind in two.layers:
        others = {label.of_others for label in kind.layer.labels}
        assert others == {n >= first for n in kind.numbers}
    for places in itertools.product(("save", "offload", "recompute"), repeat=2):
        choice = dict(zip(("x_in", "act"), places, strict=True))
        one, both = model.cost(placed(choice)), two.cost(in_both(placed(choice)))
        assert both.times.total == pytest.approx(one.times.total)
        assert (both.peak.nbytes, both.host_nbytes) == (one.peak.nbytes, one.host_nbytes)


def test_first_layers_hold_what_they_keep_the_longest():
    """What the first one keeps is there while any other runs; what the last one keeps, for a moment."""
    model = Planner.of(in_layers(LAYERS), arguments(LAYERS), {}, device=DEVICE).model
    nbytes = next(v.nbytes for kind in model.layers for v in kind.layer.values if v.label == Label("act"))

    def moments(first, label):
        """At how many moments there is an act more if it is kept."""
        two = model.split(first)
        without, kept = ([m.residuals for m in two.timeline(verbs)] for verbs in ({}, {label: "save"}))
        more = [b - a for a, b in zip(without, kept, strict=True)]
        assert set(more) <= {0, nbytes}
        return more.count(nbytes)

    assert moments(1, Label("act")) > LAYERS
    assert 0 < moments(LAYERS - 1, Label("act", True)) < 6


def test_two_loops_alike_cost_what_one_does_and_the_second_loop():
    planner = Planner.of(scanned(), arguments(LAYERS), {}, device=DEVICE)
    model = planner.model
    two = model.split(3)
    assert [kind.layer.iterations for kind in two.layers] == [3, LAYERS - 3]
    assert {Label(label.name) for label in two.labels if label.of_others} == set(model.labels)
    for places in itertools.product(("save", "offload", "recompute"), repeat=2):
        choice = dict(zip(("x_in", "act"), places, strict=True))
        one, both = model.cost(placed(choice)), two.cost(in_both(placed(choice)))
        assert both.times.total == pytest.approx(one.times.total + SECOND_LOOP_PART * model.kernels_ms)
        moved = places.count("offload")
        assert both.host_nbytes - one.host_nbytes == sum(
            value.nbytes
            for value in model.layers[0].layer.values
            if placed(choice).get(value.label) == "offload"
        )  # a spare row more for each
        if not moved:
            assert both.peak.nbytes == one.peak.nbytes
        assert both.peak.nbytes >= one.peak.nbytes


def test_what_a_loop_leaves_for_its_first_turn_back_waits_on_the_device():
    """A value whose reload takes longer than an iteration is there from its forward pass on."""
    layer = chain(2, 4, [GB // 10], [1.0])
    slow, fast = (model_of([layer, layer], Device(1, 1, gbps, gbps)) for gbps in (1e-3, 1e6))
    moved = placed(v0="offload", v1="offload")
    peaks = [{m.what: m.residuals for m in model.timeline(moved)} for model in (slow, fast)]
    assert max(peaks[0].values()) == 2 * GB // 10
    assert max(peaks[1].values()) == GB // 10, (
        "the one that is made last, which the next iteration would send"
    )
    (kind, _) = slow.layers
    assert kind.lingering_nbytes(kind.find_states(moved)) == 2 * GB // 10
    assert kind.lingering_nbytes(kind.find_states(placed(v0="offload", v1="save"))) == GB // 10


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(MODELS, FIXED, st.floats(0, 1), st.integers(1, 2))
def test_the_search_of_two_loops_equals_brute_force(model, fixed, part, first):
    two = model.split(first)
    hypothesis.assume(len(two.labels) <= 6)
    check_against_brute_force(two, {k: v for k, v in in_both(fixed).items() if k in two.labels}, part, None)


def test_only_what_is_faster_is_looked_for():
    model = model_of([chain(4, 12, [GB // 10, GB // 4], [1.0, 3.0])], Device(1, 1, 300, 300))
    least = model.cost(find_smallest(model, None, {})).peak.nbytes
    best = find_fastest(model, 2 * least, None, {})
    assert best is not None
    ms = model.cost(best).times.total
    assert find_fastest(model, 2 * least, None, {}, ms - 0.01) is None
    again = find_fastest(model, 2 * least, None, {}, ms + 0.01)
    assert again is not None and model.cost(again).times.total == pytest.approx(ms)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("first", [None, 2])
def test_the_search_of_loops_and_layers_in_none_equals_brute_force(part, first):
    def both(w, x):
        return in_layers(LAYERS)(w, x) + scanned()(w, jnp.sin(x))

    model = Planner.of(both, arguments(LAYERS), {}, device=DEVICE).model
    assert {kind.is_loop for kind in model.layers} == {True, False}
    fixed = placed({"out": "recompute", "(dots)": "recompute"})
    if first is not None:
        model, fixed = model.split(first), in_both(fixed)
    check_against_brute_force(model, fixed, part, None)
