"""`jaxoff.plan`: what it chooses, what it says, and what its policy does to a program."""

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from jaxoff import Device, SharedLink
from jaxoff._plan.calibrations import MARGIN
from jaxoff._plan.plan import Planner
from tests.jaxoff.plan.planned import (
    ACT_NBYTES,
    DEVICE,
    LAYERS,
    X_NBYTES,
    arguments,
    layer,
    scanned,
    unrolled,
)

PLENTY = 1e9
# Room for x_in of all layers: with all products on the host, the fastest plan is hardly above the smallest.
HOST = (LAYERS + 1) * X_NBYTES
FAST_LINK = dataclasses.replace(DEVICE, d2h_gbps=1e6, h2d_gbps=1e6)


def planned(fun=None, device_bytes=PLENTY, device=DEVICE, **options):
    return jaxoff.plan(fun or scanned(), *arguments(), device_bytes=device_bytes, device=device, **options)


def smallest(**options):
    with pytest.raises(jaxoff.BudgetError) as caught:
        planned(device_bytes=1, **options)
    least = caught.value.smallest_bytes
    assert least is not None
    return least


def test_with_plenty_of_memory_nothing_that_costs_time_is_left():
    found = planned()
    assert "offload" not in {row.choice for row in found.rows}
    named, dots = ("save", "offload", "recompute"), ("save", "recompute")
    planner = Planner.of(scanned(), arguments(), {}, device=DEVICE)
    every = [
        planner.plan(PLENTY, None, {"x_in": x_in, "act": act, "(dots)": unnamed}, None).step_ms
        for x_in, act, unnamed in itertools.product(named, named, dots)
    ]
    assert found.step_ms == pytest.approx(min(every))
    assert found.times.exposed_forward == found.times.slowed == 0


def test_a_fast_link_takes_what_does_not_fit():
    budget = smallest(device=FAST_LINK)
    found = planned(device_bytes=budget, device=FAST_LINK)
    assert found.choice("x_in") == "offload"
    known = found.peak.arguments + found.peak.results
    assert found.peak_bytes - known <= (1 - MARGIN) * (budget - known)
    assert found.host_bytes == (LAYERS + 1) * X_NBYTES * (1 + 4 * (found.choice("act") == "offload"))
    # Over a link that takes nothing, the same budget would be missed or cost time.
    slow = planned(device_bytes=2 * budget, device=dataclasses.replace(DEVICE, d2h_gbps=1e-9, h2d_gbps=1e-9))
    assert "offload" not in {row.choice for row in slow.rows}


@pytest.mark.parametrize("fun", [scanned(), unrolled], ids=["scanned", "one after the other"])
def test_the_policy_does_what_the_plan_says(fun):
    found = planned(fun, fixed={"x_in": "offload", "act": "save"})
    # Nothing needs "out".
    assert (found.policy.offload, found.policy.save, found.policy.recompute) == (("x_in",), ("act",), ())

    def loss(w, x):
        return scanned(policy=found.policy)(w, x)

    report = jaxoff.explain(loss, *arguments())
    assert report.by_name["x_in"] == {"offload": LAYERS * X_NBYTES}
    assert report.by_name["act"] == {"save": LAYERS * ACT_NBYTES}


def test_the_policy_of_a_plan_leaves_loss_and_gradients_as_they_are():
    w = {
        k: jnp.asarray(np.random.default_rng(1).normal(size=v.shape), v.dtype)
        for k, v in arguments()[0].items()
    }
    x = jnp.ones(arguments()[1].shape)
    results = []
    for choice in ("save", "offload", "recompute"):
        policy = planned(fixed=dict.fromkeys(("x_in", "act", "out"), choice)).policy
        # At level 0, as the tests compile, some values without a name round differently in other company.
        options = {"xla_backend_optimization_level": 1}
        results.append(jaxoff.jit(jax.value_and_grad(scanned(policy=policy)), compiler_options=options)(w, x))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


@pytest.mark.parametrize(
    ("choice", "unmarked", "placement"),
    [("save", "dots", "save"), ("offload", "offload_dots", "offload"), ("recompute", "recompute", None)],
)
def test_unnamed_dots_are_placed_too(choice: Any, unmarked, placement):
    found = planned(fixed={"(dots)": choice, "act": "recompute"})
    assert found.policy.unmarked == unmarked
    report = jaxoff.explain(scanned(policy=found.policy), *arguments())
    kept = {r.placement for r in report.residuals if r.made_by == "dot_general"}
    assert kept - {"recompute"} == ({placement} if placement else set())
    (row,) = (row for row in found.rows if row.name == "(dots)")
    on_host = sum(
        r.nbytes for r in report.residuals if r.placement == "offload" and r.made_by == "dot_general"
    )
    assert on_host == (row.nbytes if choice == "offload" else 0)


def within(form, policy=None):
    """Products in a loop or in branches of a layer, and one outside of them."""

    def body(x, w):
        x = jaxoff.name(x, "x_in")

        def chunk(x):
            return jaxoff.name(jnp.tanh(jaxoff.name(x @ w["up"], "inner")), "act") @ w["down"]

        if form == "scan":
            ys = lax.scan(lambda c, x: (c, chunk(x)), 0, x.reshape(4, -1, x.shape[-1]))[1]
        else:
            ys = lax.cond(x.sum() > 0, chunk, jnp.sin, x)
        y = jaxoff.name(ys.reshape(x.shape) @ w["up"], "act")
        return x + jnp.tanh(jaxoff.name(y @ w["down"], "out")), None

    return scanned(body, policy)


@pytest.mark.parametrize("form", ["scan", "cond"])
def test_what_a_loop_within_a_layer_makes_is_made_again(form):
    """A policy would keep it for each iteration: what a plan keeps is all that there is."""
    fun = within(form)
    for budget in (PLENTY, 1.3 * smallest(fun=fun)):
        found = planned(fun, device_bytes=budget)
        for name in ("(dots)", "act"):
            (row,) = (row for row in found.rows if row.name == name)
            assert (row.choice, row.why) == ("recompute", "made in a loop or a branch of a layer, too")
        report = jaxoff.explain(within(form, found.policy), *arguments())
        assert report.device_bytes == sum(row.nbytes for row in found.rows if row.choice == "save") + (
            0 if found.choice("x_in") == "offload" else LAYERS * X_NBYTES
        )
        assert report.host_bytes == sum(row.nbytes for row in found.rows if row.choice == "offload")
    assert planned(fun, fixed={"inner": "recompute"}).rows == planned(fun).rows
    for name in ("(dots)", "act", "inner"):
        for choice in ("save", "offload"):
            with pytest.raises(ValueError, match=rf"takes 'recompute' for '.*', got '{choice}': a loop or a"):
                planned(fun, fixed={name: choice})


def test_of_equals_what_has_a_name_is_kept():
    """Keeping a product's result costs the same under its name and without it."""

    def body(x, w):
        both = [jaxoff.name(x @ w["up"], f"up{n}") for n in range(2)]
        return x + jnp.tanh(both[0] * both[1]) @ w["down"], None

    named = {"(dots)": "recompute", "up0": "save", "up1": "save"}
    unnamed = {"(dots)": "save", "up0": "recompute", "up1": "recompute"}
    times = [planned(scanned(body), fixed=choice).step_ms for choice in (named, unnamed)]
    assert times[0] == pytest.approx(times[1])
    least, most = smallest(fun=scanned(body)), planned(scanned(body)).peak.find_budget(MARGIN)
    planner = Planner.of(scanned(body), arguments(), {}, device=DEVICE)
    for budget in np.linspace(least, most, 6):
        for host in (0, None):
            found = planner.plan(1.0001 * budget, host, {}, None)
            assert found.choice("(dots)") == "recompute"


def test_a_layer_without_names_moves_its_products_if_the_link_is_fast():
    """Nothing but dots: what the policy moves is what the plan says, to the byte."""

    def body(x, w):
        return x + jnp.tanh(x @ w) @ w.T, None

    def loss(w, x, policy=None):
        return jaxoff.scan(body, x, w, policy=policy or jaxoff.policy())[0].sum()

    w, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    with pytest.raises(jaxoff.BudgetError) as caught:
        jaxoff.plan(loss, w, x, device_bytes=1, device=FAST_LINK, margin=0.0)
    assert caught.value.smallest_bytes is not None
    budget = 1.2 * caught.value.smallest_bytes
    found = jaxoff.plan(loss, w, x, device_bytes=budget, device=FAST_LINK, margin=0.0)
    assert found.choice("(dots)") == "offload"
    report = jaxoff.explain(functools.partial(loss, policy=found.policy), w, x)
    assert report.host_bytes == 8 * 4096 * 64 * 4
    assert found.host_bytes == 9 * 4096 * 64 * 4  # a loop's stack has a spare row


def test_keep_first_leaves_a_plan_alone():
    slow = dataclasses.replace(DEVICE, h2d_gbps=DEVICE.h2d_gbps / 13)
    policy = planned(fixed={"x_in": "offload", "act": "offload"}).policy

    def moved(policy):
        def loss(w, x):
            return jaxoff.scan(layer, x, w, policy=policy, device=slow)[0].sum()

        return jaxoff.explain(loss, *arguments()).host_bytes

    kept = dataclasses.replace(policy, preset=None)
    assert moved(policy) == LAYERS * (X_NBYTES + ACT_NBYTES)
    assert moved(kept) < moved(policy), "else the test shows nothing"


def test_marks_are_honoured():
    def body(x, w):
        x = jaxoff.mark_not_offload(jaxoff.name(x, "x_in"))
        act = jaxoff.mark_offload(jaxoff.name(jnp.tanh(x @ w["up"]), "act"))
        return x + act @ w["down"], None

    found = planned(scanned(body))
    assert (found.choice("x_in"), found.choice("act")) == ("save", "offload")
    assert {row.name: row.why for row in found.rows if row.why == "marked"} == {
        "x_in": "marked",
        "act": "marked",
    }
    with pytest.raises(ValueError, match="fixed takes names"):
        planned(scanned(body), fixed={"act": "save"})


def test_a_budget_that_is_too_small_names_the_smallest():
    least = smallest()
    assert planned(device_bytes=least).peak_bytes <= least
    with pytest.raises(jaxoff.BudgetError) as caught:
        planned(device_bytes=0.99 * least)
    message = str(caught.value)
    assert f"the smallest budget is {least} bytes" in message
    for part in (
        "arguments",
        "gradients and others",
        "working set",
        "backward pass of",
        "Take a smaller batch",
    ):
        assert part in message
    assert smallest(resident_bytes=10**6) == pytest.approx(least + 10**6, abs=2)
    peak = planned(device_bytes=least).peak
    assert 0 < peak.results <= peak.alive  # gradients
    known = peak.arguments + peak.results
    assert smallest(margin=0.0) - known == pytest.approx((1 - MARGIN) * (least - known), abs=2)


def test_a_host_budget_is_kept():
    free = planned(device_bytes=smallest(device=FAST_LINK), device=FAST_LINK)
    less = free.host_bytes - X_NBYTES
    budget = smallest(device=FAST_LINK, host_bytes=less)
    bound = planned(device_bytes=budget, device=FAST_LINK, host_bytes=less)
    assert bound.host_bytes < free.host_bytes
    with pytest.raises(jaxoff.BudgetError, match=r"host_bytes=1 B is too little for what is fixed") as caught:
        planned(host_bytes=1, fixed={"x_in": "offload"})
    assert caught.value.smallest_bytes is None


def test_a_shared_link_exposes_copies():
    device = dataclasses.replace(DEVICE, shared_links=(SharedLink(4, 1e-4, 1e-4, 1e-4),))
    fixed = {"x_in": "offload"}
    alone, shared = (planned(device=device, fixed=fixed, link=link) for link in (None, 3))
    assert shared.times.exposed_backward > alone.times.exposed_backward
    assert planned(device=device, fixed=fixed, link=device.shared_links[0]).times == shared.times


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(fixed={"x_inn": "save"}),
            r"names that the function's layers have, got 'x_inn'.*Did you mean 'x_in'",
        ),
        (dict(fixed={"x_in": "keep"}), r"fixed takes save, offload, recompute, got 'keep' for 'x_in'"),
        (dict(device_bytes=-1), "device_bytes is a count of bytes, at least 0, got -1"),
        (dict(host_bytes=float("nan")), "host_bytes is a count of bytes"),
        (dict(resident_bytes=-1), "resident_bytes is a count of bytes, at least 0, got -1"),
        (dict(margin=1), "margin is a part of what is free, at least 0 and below 1, got 1"),
        (dict(link=0), "at least 1, got 0"),
        (dict(argnums=7), "argnums index the 2 positional arguments, got 7"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        planned(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(device="h200"), r"such as jaxoff.Device.of\('h200'\).*, got 'h200'"),
        (dict(device_bytes="20GB"), "device_bytes is a count of bytes, a number such as 20e9 .*, got '20GB'"),
        (dict(device_bytes=None), "device_bytes is a count of bytes, a number .*, got None"),
        (dict(resident_bytes=True), "resident_bytes is a count of bytes, a number .*, got True"),
        (dict(link=55.0), "whole number, and their rates are a jaxoff.SharedLink; got 55.0"),
        (dict(fixed=["x_in"]), r"as in \{'x_in': 'save'\}, got list"),
    ],
)
def test_input_of_another_kind_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        planned(**options)


def test_what_takes_a_device_refuses_its_name():
    x = jnp.ones((2, 4))
    name: Any = "h200"
    takers = (
        lambda: jaxoff.jit(jnp.sin, device=name),
        lambda: jaxoff.explain(jnp.sum, x, device=name),
        lambda: jaxoff.frontier(scanned(), *arguments(), device=name),
        lambda: jaxoff.scan(lambda c, y: (c, y), x, x, policy=jaxoff.policy(), device=name),
        lambda: jaxoff.layers([jnp.sin], x, policy=jaxoff.policy(), device=name),
    )
    for take in takers:
        with pytest.raises(TypeError, match=r"device is a jaxoff.Device, .* got 'h200'"):
            take()


def test_rows_say_what_the_other_choices_would_do():
    found = planned(fixed={"act": "offload"})
    slower = [
        planned(fixed={"act": choice, "x_in": found.choice("x_in")}).step_ms - found.step_ms
        for choice in ("save", "recompute")
    ]
    why = next(row.why for row in found.rows if row.name == "act")
    assert why == f"save: {slower[0]:+.2f} ms; recompute: {slower[1]:+.2f} ms"
    row = next(row for row in found.rows if row.name == "act")
    assert (row.count, row.nbytes, row.shape) == (LAYERS, LAYERS * ACT_NBYTES, "float32[64, 128]")
    assert row.copied_ms == pytest.approx(LAYERS * 2 * DEVICE.h2d_ms(ACT_NBYTES))


def test_json_gives_the_plan_back():
    found = planned(fixed={"act": "offload"})
    again = jaxoff.Plan.from_json(found.to_json())
    assert again == found
    assert again.policy == found.policy
    for text in ("{}", "nothing", json.dumps(found.to_dict() | {"times": {"days": 1}})):
        with pytest.raises(ValueError, match=r"read from the JSON of Plan.to_json"):
            jaxoff.Plan.from_json(text)


def test_the_table_has_every_part():
    found = planned(fixed={"act": "offload"})
    text = found.table()
    for word in ("x_in", "act", "offload", "ms", "device peak", "arguments", "host", "recomputed", "exposed"):
        assert word in text
    assert all(line == line.rstrip() or line for line in text.splitlines())
    with pytest.raises(KeyError, match="A plan has"):
        found.choice("nothing")


def test_a_frontier_goes_down_and_draws_itself(tmp_path):
    curve = jaxoff.frontier(scanned(), *arguments(), device=DEVICE, points=6)
    peaks, times = [p.peak_bytes for p in curve.plans], [p.step_ms for p in curve.plans]
    assert len(curve.plans) > 1
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(planned().step_ms)
    assert str(curve).count("ms") == len(curve.plans)
    curve.draw(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.dumps(curve.to_dict())) > 100
    with pytest.raises(ValueError, match="at least 2, got 1"):
        jaxoff.frontier(scanned(), *arguments(), points=1)


def test_a_named_device_plans_with_no_gpu():
    found = jaxoff.plan(scanned(), *arguments(), device_bytes=PLENTY)
    assert found.device == Device.of("h200")
    assert "on NVIDIA H200: kernels" in found.table()
    assert jaxoff.plan(scanned(), *arguments(), device_bytes=PLENTY, device=None) == found
