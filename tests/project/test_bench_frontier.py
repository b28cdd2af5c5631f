"""The benchmark of plans: its points, its whole program at a tiny size, its table and picture."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxoff
from bench import frontier, frontier_table
from bench.frontier_points import (
    AHEAD_PART,
    EVERY,
    MAXTEXT,
    ROLES,
    Point,
    _each_once,
    budgets_of,
    compiled_for,
    planner_of,
    points_of,
    predicted_anew,
    predicted_ms,
)
from bench.step_models import Workload
from jaxoff._plan.calibrations import MARGIN
from jaxoff._plan.search import find_smallest

DENSE = Workload("dense", batch=2, layers=4, tiny=True)


@pytest.fixture(scope="module")
def planner():
    return planner_of(DENSE)


@pytest.fixture(scope="module")
def points(planner):
    return points_of(DENSE, planner, ROLES, budgets_of(planner, 3))


def of_role(points, role):
    return [point for point in points if point.role == role]


def test_every_product_of_the_dense_layer_has_a_name(planner):
    assert {"x_in", "qkv", "attn", "out_proj", "mlp_in", "pre", "down"} <= {
        label.name for label in planner.model.labels
    }


def test_budgets_go_from_making_all_again_to_the_fastest(planner):
    budgets = budgets_of(planner, 4)
    assert budgets == sorted(budgets)
    again = planner.model.cost({}).peak.nbytes
    model = dataclasses.replace(planner.model, margin=MARGIN)
    least = model.find_budget(find_smallest(model, None, {}))
    assert budgets[0] == pytest.approx(max(again, least), rel=0.002)
    assert budgets[-1] > budgets[0]


def test_there_are_points_of_every_role(points):
    assert {point.role for point in points} | {"layers"} == set(ROLES)
    assert [point.budget is None for point in of_role(points, "plan")] == [False] * 3
    names = [name for point in points for name in (point.name, *point.also)]
    assert {f"maxtext {name}" for name in MAXTEXT} <= set(names)
    assert len(set(names)) == len(names)


def test_what_keeps_the_same_residuals_is_one_point(planner):
    saved = Point("a", "maxtext", {"save": ("qkv",)})
    # Nothing of the backward pass reads what the last product makes.
    others = [Point("b", "single", {"save": ("qkv", "down")}), Point("c", "plan", {"save": ("qkv",)})]
    moved = Point("d", "maxtext", {"offload": ("qkv",)})
    found = _each_once([saved, *others, moved], planner)
    assert [(point.name, point.also) for point in found] == [("a", ("b",)), ("c", ()), ("d", ())]


def test_points_survive_json(points):
    for point in points:
        assert Point(**json.loads(json.dumps(dataclasses.asdict(point)))).step(DENSE).form == "scanned"


def test_plans_fit_their_budgets_and_get_faster(points):
    plans = of_role(points, "plan")
    assert all(point.predicted["peak_bytes"] <= point.budget for point in plans)
    times = [point.predicted["ms"] for point in plans]
    assert times == sorted(times, reverse=True)


def test_times_are_predicted_for_another_card(planner, points):
    def times(planner):
        found = {point.name: predicted_ms(planner, point) for point in points}
        assert found["no_remat"] is None
        return {name: ms for name, ms in found.items() if ms is not None}

    known = {point.name: point.predicted["ms"] for point in points if point.predicted}
    assert times(planner) == pytest.approx(known)
    h200 = jaxoff.Device.of("h200")
    slow = dataclasses.replace(h200, flops=h200.flops / 2, memory_gbps=h200.memory_gbps / 2)
    slower = times(planner_of(DENSE, slow))
    assert known.keys() == slower.keys() and all(slower[name] > ms for name, ms in known.items())


def test_a_plan_by_layer_is_predicted_as_it_was_planned(planner):
    names = [label.name for label in planner.model.labels if label.name[0] != "("]
    first, rest = {"offload": names[:1], "save": names[1:2]}, {"save": names[:1]}
    both = Point("first 2", "layers", {"count": 2, "policy": first, "rest": rest})
    alone = [predicted_ms(planner, Point("", "plan", policy)) for policy in (first, rest)]
    assert min(alone) < predicted_ms(planner, both) < 1.01 * max(alone)


def test_unnamed_products_that_a_plan_saves_are_predicted(planner):
    saved = Point("", "plan", {"save": ("pre",), "unmarked": "dots"})
    assert predicted_ms(planner, saved) < predicted_ms(planner, Point("", "plan", {"save": ("pre",)}))


def test_unnamed_products_on_the_host_are_those_that_jax_offloads(planner, points):
    stock = next(point.predicted for point in points if point.name == "offload_dots")
    moved = predicted_anew(planner, Point("", "plan", {"unmarked": "offload_dots"})).predicted
    saved = predicted_anew(planner, Point("", "plan", {"unmarked": "dots"})).predicted
    assert moved == stock
    assert moved["host_bytes"] > saved["host_bytes"] == 0
    assert moved["peak_bytes"] < saved["peak_bytes"]


def test_plans_are_checked_by_compilation(planner):
    """Ahead of time they leave memory for what differs on the card; there they may take it."""

    def taken(budget, *, ahead):
        (point,) = points_of(DENSE, planner, ["plan"], [budget], compiled_for(DENSE), ahead=ahead)
        return point.predicted["compiled_bytes"]

    most = taken(10**9, ahead=True)
    assert 0 < most <= (1 - AHEAD_PART) * 10**9
    assert taken(most, ahead=False) == most
    assert taken(most, ahead=True) <= (1 - AHEAD_PART) * most


def test_points_place_residuals_as_their_names_say(points):
    def bytes_of(point):
        fun = point.step(DENSE).jitted.__wrapped__
        text = str(jax.make_jaxpr(fun)(*DENSE.shapes("scanned")))
        return text.count("<host>") > 0

    offloading = {"maxtext qkv_proj_offloaded", "maxtext minimal_offloaded", "offload_dots"}
    by_name = {point.name: point for point in points}
    assert all(bytes_of(by_name[name]) for name in offloading)
    assert not any(bytes_of(by_name[name]) for name in ("no_remat", "nothing_saveable", "maxtext minimal"))


def test_every_placement_of_a_small_layer_is_a_point_once():
    mlp = Workload("mlp", batch=2, layers=4, tiny=True)
    points = points_of(mlp, planner_of(mlp), [EVERY], [])
    # Of x_in, up_in, pre and act; nothing reads what `down` names.
    assert len(points) == 3**4
    assert [len(point.also) for point in points] == [2] * 3**4
    by_name = {point.name: point.policy for point in points}
    assert by_name["save pre; offload x_in"] == {"save": ("pre",), "offload": ("x_in",)}
    assert by_name["recompute all"] == {"save": (), "offload": ()}


@pytest.mark.long
def test_losses_and_gradients_do_not_depend_on_the_point(points):
    arguments = DENSE.arguments("scanned")
    chosen = [of_role(points, "plan")[0], of_role(points, "bound")[0]]
    first, second = (point.step(DENSE).jitted(*arguments)[0] for point in chosen)
    np.testing.assert_allclose(first, second, rtol=1e-2)


def test_a_process_counts_its_steps(monkeypatch, points):
    monkeypatch.setattr(frontier, "wait_for_turn", lambda: None)
    found = frontier.measure(DENSE, of_role(points, "plan")[0], steps=3)
    assert found["steps"] == 3
    assert found["device_peak_bytes"] > 0


def test_a_step_that_does_not_fit_is_an_error_of_its_point(monkeypatch, points):
    class Full:
        call = None

    monkeypatch.setattr(frontier, "wait_for_turn", lambda: None)
    monkeypatch.setattr(frontier, "compiled_facts", lambda call: {"temp_bytes": 5})
    monkeypatch.setattr(frontier, "compile_all", lambda workload, steps, *_: dict.fromkeys(steps, Full()))
    monkeypatch.setattr(Workload, "arguments", lambda *_: 1 / 0)
    found = frontier.measure(DENSE, points[0], steps=1)
    assert found["error"] == "ZeroDivisionError: division by zero"
    assert found["temp_bytes"] == 5
    assert "peak_bytes" not in found


def test_processes_with_budgets_take_their_turns_in_groups_that_fit():
    rows = [{"point": {"budget": budget}} for budget in (30, None, 40, 50, None, 60)]
    budgets = [[row["point"]["budget"] for row in group] for group in frontier._groups(rows, 100)]
    assert budgets == [[None, None], [30, 40], [50], [60]]
    assert [len(group) for group in frontier._groups(rows, None)] == [2, 4]


WORDS = ["--tiny", "--workloads", "dense-b2-l3", "--budgets", "1", "--repeats", "1", "--jobs", "1"]
WORDS += ["--sample-ms", "1"]


def test_a_whole_run_and_its_table(monkeypatch, tmp_path):
    """Memory of processes that are not started here, then times, from the file of the first."""
    asked = []

    def child(command, running, environment):
        asked.append((command, environment))
        return {"bytes_limit": 1000} if "-c" in command else {"peak_bytes": 5_000_000, "steps": 100}

    monkeypatch.setattr(frontier, "run_child", child)
    out, final = tmp_path / "a.json", tmp_path / "b.json"
    frontier.main([*WORDS, "--out", str(out), "--roles", "plan", "--no-times"])
    frontier.main([*WORDS, "--out", str(final), "--resume", str(out), "--roles", "plan,bound", "--no-peaks"])
    fractions = [environment.get(frontier._FRACTION) for _, environment in asked]
    rows = json.loads(final.read_text())["rows"]
    budgets = [row["point"]["budget"] for row in rows if row["point"]["role"] == "plan"]
    assert fractions == ["0.5", *(f"{budget / 2000:.6f}" for budget in budgets)]
    assert all("100" in command for command, _ in asked[1:])
    assert {environment[frontier._PREALLOCATE] for _, environment in asked[1:]} == {"true"}
    assert [row["time"]["repeats"] for row in rows] == [1, 1]
    assert len(json.loads(final.read_text())["sources"]) == 2

    text = frontier_table.markdown(frontier_table.combine([json.loads(final.read_text())]))
    assert text.count("| plan 1") == 2  # its figures, and against what fits
    assert "| 100 |" in text
    frontier_table.draw(frontier_table.combine([json.loads(final.read_text())]), tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_points_of_a_file_are_predicted_anew(tmp_path):
    """What was measured stays, and so do plans."""
    old, new = tmp_path / "a.json", tmp_path / "b.json"
    roles = ["--roles", "plan,stock,bound"]
    frontier.main([*WORDS, *roles, "--out", str(old), "--no-times", "--no-peaks"])
    rows = json.loads(old.read_text())["rows"]
    changed = json.loads(old.read_text())
    for row in changed["rows"]:
        row["point"]["predicted"] |= {"ms": 1.0, "compiled_bytes": 5}
        row["time"] = {"ms": 2.0, "predicted_ms": 3.0}
    old.write_text(json.dumps(changed))
    frontier.main([*WORDS, *roles, "--predict", "--resume", str(old), "--out", str(new)])
    found = json.loads(new.read_text())
    assert [row["time"] for row in found["rows"]] == [{"ms": 2.0}] * len(rows)
    for row, expected in zip(found["rows"], rows, strict=True):
        known = {"ms": 1.0} | expected["point"]["predicted"] | {"compiled_bytes": 5}
        assert row["point"] == expected["point"] | {"predicted": known}
    assert found["sources"][-1]["options"]["predict"] == "True"


def test_the_table_sets_predictions_against_measurements():
    point = Point(
        "plan 1: 2.0 GB", "plan", {}, budget=2 * 10**9, predicted={"ms": 99.0, "peak_bytes": 1.03e9}
    )
    row = {
        "workload": "w",
        "point": dataclasses.asdict(point),
        "memory": {"peak_bytes": 10**9, "steps": 100},
        "time": {"ms": 100.0, "predicted_ms": 102.0},
    }
    failed = row | {
        "point": row["point"] | {"name": "other"},
        "memory": {"error": "out of memory"},
        "time": {},
    }
    text = frontier_table.markdown({"w": [row, failed]})
    assert (
        "| plan 1: 2.0 GB | 100.0 ms | 99.0 ms (-1.0%) | 102.0 ms (+2.0%) | "
        "1.00 GB | 1.03 GB (+3.0%) | 2.00 GB | 100 |"
    ) in text
    assert "- other, memory: out of memory" in text


def test_the_table_sets_plans_against_what_fits_their_budgets():
    def row(name, role, ms, gigabytes, predicted=None, **fields):
        known = {} if predicted is None else {"ms": predicted[0], "peak_bytes": predicted[1] * 1e9}
        point = dataclasses.asdict(Point(name, role, predicted=known, **fields))
        time = {} if ms is None else {"ms": ms, "device_peak_bytes": gigabytes * 1e9}
        return {"workload": "w", "point": point, "time": time}

    plan = row("plan 1: 2.0 GB", "plan", 100.0, 1.9, (99.0, 2.0), policy={}, budget=2 * 10**9)
    others = [
        row("offload a", "single", 104.0, 1.9, (105.0, 1.9), policy={"offload": ("a",)}),
        row("save a", "single", 107.0, 2.0, policy={"save": ("a",)}),
        row("too large", "single", 90.0, 2.1, policy={"save": ("a", "b")}),
        row("failed", "stock", None, None, stock="dots_saveable"),
        row("offload_dots", "stock", 105.0, 1.0, stock="offload_dots"),
        row("offload dots", "every", 104.5, 1.0, policy={"unmarked": "offload_dots"}),
    ]
    text = frontier_table.markdown({"w": [plan, *others]})
    assert "| plan 1: 2.0 GB | offload a | +4.0% | save a | +7.0% |" in text
    assert "Times of 2: predicted -1.0% to +1.0%, half within 1.0%." in text
    assert "Peaks of 2: predicted +0.0% to +5.3%, half within 2.6%." in text
    alone = frontier_table.markdown({"w": [plan]})
    assert "| plan 1: 2.0 GB |  |  |  |  |" in alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x", "--ahead", "--tiny"], "leave one of them out"),
        (["--workloads", "dense"], "a workload is KIND"),
        ([], "--out is needed"),
        (["--out", "x", "--roles", "plans"], "unknown: plans"),
        (["--out", "x", "--roles", "plan,every"], "few names, which is mlp; got dense-b4-l12"),
        (["--out", "x", "--predict"], "name it by --resume"),
        (["--out", "x", "--steps", "0"], "must be at least 1"),
    ],
)
def test_bad_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        frontier.parse(words)
    assert message in capsys.readouterr().err
