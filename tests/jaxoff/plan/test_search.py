"""The search finds the fastest placement that fits, and more memory never makes it slower."""

import itertools
import os
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxoff._budget.integer_program import _silence_output
from jaxoff._device.profile import Device
from jaxoff._plan.layer import UNNAMED_DOTS, KernelUse, Label, Layer, LayerValue, RecomputeFusion
from jaxoff._plan.search import find_fastest, find_smallest
from tests.jaxoff.plan.planned import chain, model_of, placed

VERBS = ("save", "offload", "recompute")
GB = 10**9


def all_choices(model, fixed):
    verbs = {label: (fixed[label],) if label in fixed else VERBS for label in model.labels}
    for choice in itertools.product(*verbs.values()):
        yield dict(zip(verbs, choice, strict=True))


def brute_force(model, device_bytes, host_bytes=None, fixed=None):
    """The time of the fastest of all choices that fit."""
    choices = all_choices(model, fixed or {})
    costs = (model.cost(choice) for choice in choices if model.find_budget(choice) <= device_bytes)
    fitting = (cost for cost in costs if cost.host_nbytes <= (host_bytes or 1e99))
    return min((cost.times.total for cost in fitting), default=None)


def time_of(model, choice):
    return None if choice is None else model.cost(choice).times.total


@st.composite
def values(draw, number, steps, labels):
    nbytes = draw(st.integers(0, 5)) * GB // 5
    reads = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else ()
    used = sorted(draw(st.lists(st.integers(0, steps - 1), max_size=2)))
    alias_of = min(reads) if len(reads) == 1 and draw(st.booleans()) else None
    return LayerValue(
        nbytes,
        nbytes > GB // 2,
        draw(st.integers(0, 20)) / 4,
        tuple(sorted(reads)),
        used[0] if used else None,
        used[-1] if used else None,
        draw(st.sampled_from(labels)),
        draw(st.sampled_from([None, None, None, "save", "offload"])),
        is_carried=not number,
        produced_ms=float(number),
        row_copy=(used[0], used[-1]) if used and draw(st.booleans()) else None,
        alias_of=alias_of,
    )


@st.composite
def layers(draw, labels):
    steps = draw(st.integers(1, 5))
    made = tuple(draw(values(number, steps, labels)) for number in range(draw(st.integers(1, 8))))
    sizes = st.integers(0, 3).map(lambda n: n * GB // 4)

    def shared():
        value, again = (draw(st.integers(0, len(made) - 1)) for _ in range(2))
        return RecomputeFusion(value, (again,), draw(sizes), draw(sizes)) if value < again else None

    def passed(number):
        for i in range(number):
            small = draw(sizes)
            of = tuple(filter(None, [shared()]))
            yield KernelUse(
                "", small, draw(sizes), small // 2, 3.0 * (i + 1), small // 4, of, draw(st.booleans())
            )

    iterations, in_order = draw(st.sampled_from([1, 3])), draw(st.booleans())
    return Layer(iterations, made, tuple(passed(len(made))), tuple(passed(steps)), "", in_order)


MODELS = st.lists(
    layers([None, *map(Label, ["a", "b", "c", "d", UNNAMED_DOTS])]), min_size=1, max_size=2
).flatmap(
    lambda kinds: st.tuples(st.sampled_from([0.1, 0.5, 4.0]), st.sampled_from([0.0, 0.05, 0.4])).map(
        lambda drawn: model_of(kinds, Device(1, 1, drawn[0] * 1e3, drawn[0] * 1e3), margin=drawn[1])
    )
)  # fmt: skip
FIXED = st.dictionaries(st.sampled_from([Label("a"), Label("b")]), st.sampled_from(VERBS), max_size=1)


def check_against_brute_force(model, fixed, part, host_bytes):
    needed = sorted(model.find_budget(choice) for choice in all_choices(model, fixed))
    least = find_smallest(model, None, fixed)
    assert model.find_budget(least) == pytest.approx(needed[0], abs=3000)
    budget = needed[int(part * (len(needed) - 1))]
    found = find_fastest(model, budget, host_bytes, fixed)
    best = brute_force(model, budget, host_bytes, fixed)
    assert time_of(model, found) == pytest.approx(best, abs=1e-3)
    if found is not None:
        cost = model.cost(found)
        assert model.find_budget(found) <= budget + 3000
        assert cost.host_nbytes <= (host_bytes or cost.host_nbytes)
        assert {label: found[label] for label in fixed if label in found}.items() <= fixed.items()


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(MODELS, FIXED, st.floats(0, 1), st.sampled_from([None, None, 2 * GB]))
def test_the_search_equals_brute_force(model, fixed, part, host_bytes):
    check_against_brute_force(model, fixed, part, host_bytes)


@pytest.mark.long
@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(MODELS, FIXED, st.floats(0, 1), st.sampled_from([None, None, 2 * GB]))
def test_the_search_equals_brute_force_at_length(model, fixed, part, host_bytes):
    check_against_brute_force(model, fixed, part, host_bytes)


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(MODELS, st.lists(st.floats(1, 30), min_size=3, max_size=3))
def test_more_memory_is_never_slower(model, sizes):
    times = [time_of(model, find_fastest(model, int(size * GB), None, {})) for size in sorted(sizes)]
    known = [ms for ms in times if ms is not None]
    assert times == [None] * (len(times) - len(known)) + known, "a plan that fits fits in more"
    assert all(later <= earlier + 1e-3 for earlier, later in itertools.pairwise(known))


def test_eight_names_equal_brute_force():
    model = model_of(
        [chain(8, 12, [GB // 10, GB // 4, GB // 3], [1.0, 3.0, 0.5, 2.0])], Device(1, 1, 300, 300)
    )
    costs = [model.cost(choice) for choice in all_choices(model, {})]
    for part in (0.05, 0.3, 0.6):
        peaks = sorted(cost.peak.nbytes for cost in costs)
        budget = peaks[int(part * len(peaks))]
        best = min(cost.times.total for cost in costs if cost.peak.nbytes <= budget)
        assert time_of(model, find_fastest(model, budget, None, {})) == pytest.approx(best, abs=1e-3)


def test_a_deep_model_with_many_names_takes_seconds():
    sizes = [GB // 100 * n for n in (3, 11, 4, 7, 1, 13, 5)]
    model = model_of([chain(24, 64, sizes, [0.7, 2.1, 1.3, 0.2, 3.1])], Device(1, 1, 40, 40))
    low = model.cost(find_smallest(model, None, {})).peak.nbytes
    high = model.cost(dict.fromkeys(model.labels, "save")).peak.nbytes
    start = time.process_time()
    found = [find_fastest(model, int(low + part * (high - low)), None, {}) for part in (0.1, 0.5)]
    assert time.process_time() - start < 20  # both, and on two cores
    assert None not in found
    assert time_of(model, found[0]) > time_of(model, found[1])


def test_what_the_solver_prints_stays_off_the_standard_output(capfd):
    with _silence_output():
        os.write(1, b"noise\n")
    print("a plan")
    assert capfd.readouterr().out == "a plan\n"


def test_what_does_not_fit_is_not_found():
    model = model_of([chain(3, 4, [GB], [1.0])])
    least = model.cost(find_smallest(model, None, {})).peak.nbytes
    assert find_fastest(model, least, None, {}) is not None
    assert find_fastest(model, least - GB // 100, None, {}) is None
    pinned = dict.fromkeys(model.labels, "offload")
    assert find_smallest(model, 100, pinned) is None


def test_what_is_made_early_for_the_sake_of_another_value_counts():
    """In jaxoff's order, making b again at the first step makes a large value that is read at the last.

    Only one of b and d can be saved: d costs more to make again, but with b made again the peak is higher.
    """
    small, fast = GB // 10, Device(1, 1, 1e6, 1e6)
    values = (
        LayerValue(0, False, 0.0, (), is_carried=True),
        LayerValue(GB, True, 1.0, (0,), 3, 3),
        LayerValue(small, False, 1.0, (1,), 0, 0, Label("b")),
        LayerValue(small, False, 5.0, (0,), 0, 0, Label("d")),
        LayerValue(small, False, 1.0, (0,), 2, 2, Label("moved"), "offload"),
    )
    backward = tuple(KernelUse("", 0, GB if s == 1 else 0, 0, 3.0 * (s + 1)) for s in range(4))
    model = model_of([Layer(10, values, (KernelUse("", 0, 0, 0, 9.0),), backward, "")], fast)
    both = model.cost(placed(b="save", d="save")).peak.nbytes
    budget = both - 10 * small
    found = [
        find_fastest(model, budget, None, placed(b=b, d=d))
        for b, d in (("recompute", "save"), ("save", "recompute"))
    ]
    assert found[0] is None
    assert found[1] is not None
    assert time_of(model, find_fastest(model, budget, None, {})) == pytest.approx(
        brute_force(model, budget), abs=1e-3
    )
