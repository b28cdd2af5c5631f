"""Recipes: the choice by compiled memory, and the saved twin of a program."""

import functools
import types

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoff
from jaxoff import FindingCode
from jaxoff._jaxpr.host_values import split_copies
from jaxoff._jaxpr.saved_twin import build_saved_twin
from jaxoff._runtime.flags import recall_placement
from jaxoff._schedule.other_forms import FormMaker, choose_form, exchanges_too_much
from jaxoff._schedule.recipes import Recipe, choose_beside, choose_recipe, find_fallback, list_recipes
from tests.jaxoff.policy.matrix import SAME_PRODUCTS, assert_equal

EVERY = tuple(Recipe)
WITHOUT_EARLY = tuple(recipe for recipe in Recipe if recipe is not Recipe.EARLY)


def compiled_of(nbytes, text=""):
    """A stand-in for the account and the text of a compiled program: all that the choice reads."""
    memory = types.SimpleNamespace(
        argument_size_in_bytes=0, output_size_in_bytes=0, temp_size_in_bytes=nbytes, alias_size_in_bytes=0
    )
    return types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: text)


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        ({"concurrent": 12.4, "ordered": 12.0, "stock": 13.3, "saved": 18.0}, "concurrent"),
        ({"concurrent": 55.8, "ordered": 47.7, "stock": 48.4, "saved": 50.4}, "ordered"),
        ({"concurrent": 55.8, "ordered": 49.0, "stock": 48.4, "saved": 50.4}, "stock"),
        ({"concurrent": 46.4, "ordered": 46.4, "stock": 43.9, "saved": 43.9}, "saved"),
        ({"concurrent": 43.8, "ordered": 46.4, "stock": 44.0, "saved": 43.9}, "saved"),
        ({"concurrent": 55.8, "ordered": 50.9, "stock": 51.0, "saved": 50.4}, "saved"),
        ({"concurrent": 8.0, "ordered": 7.59, "stock": 7.53, "saved": 7.61}, "ordered"),
        ({"concurrent": None, "ordered": 47.7, "stock": None, "saved": 50.4}, "ordered"),
        ({"concurrent": None, "ordered": None, "stock": None, "saved": 50.4}, "saved"),
        ({"concurrent": None, "ordered": None, "stock": None, "saved": None}, "concurrent"),
        ({"concurrent": 12.4, "early": 12.2, "ordered": 12.0, "stock": 13.3, "saved": 18.0}, "early"),
        ({"concurrent": 12.1, "early": 12.2, "ordered": 12.0, "stock": 13.3, "saved": 18.0}, "concurrent"),
        ({"concurrent": 12.2, "early": 12.2, "ordered": 12.0, "stock": 13.3, "saved": 18.0}, "concurrent"),
        ({"concurrent": 55.8, "early": 47.9, "ordered": 47.7, "stock": 48.4, "saved": 50.4}, "early"),
        ({"concurrent": 55.8, "early": 49.3, "ordered": 47.7, "stock": 48.4, "saved": 50.4}, "ordered"),
        ({"concurrent": 55.8, "early": None, "ordered": None, "stock": 48.4, "saved": 50.4}, "stock"),
    ],
)
def test_the_first_recipe_within_the_smallest_memory_runs(gigabytes, expected):
    compilations = []

    def compile_recipe(recipe):
        compilations.append(recipe)
        if gigabytes[recipe] is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return compiled_of(int(gigabytes[recipe] * 1e9))

    recipes = EVERY if "early" in gigabytes else WITHOUT_EARLY
    chosen, candidates = choose_recipe(recipes, compile_recipe, 1)
    assert chosen == expected
    assert len(compilations) == len(set(compilations)) == len(candidates)
    findings = find_fallback(chosen, candidates)
    assert (not findings) == (expected in ("concurrent", "early"))
    for finding in findings:
        assert finding.code is FindingCode.RECIPE_REPLACED
        first = gigabytes["concurrent"]
        assert ("out of memory" if first is None else f"{first:.2f} GB") in finding.message
        if first is None and expected == "saved":
            assert "nothing is offloaded" in finding.message
            assert "insists" not in finding.message
        else:
            assert repr(expected) in finding.message


@pytest.mark.parametrize(("copied", "expected"), [(0, "stock"), (2e9, "stock"), (3e9, "concurrent")])
def test_a_recipe_that_exchanges_more_than_the_program_as_given_does_not_run(copied, expected):
    """Unless the copies that it hides are worth it: 256 MB are less than a tenth of 3 GB."""
    floats = int(copied // 4)
    gather = (
        "ENTRY %main (x: f32[8]) -> f32[64] {{\n  %h = f32[" + str(floats) + "]{{0:S(5)}} parameter(0)\n"
        "  %d = f32[" + str(floats) + "]{{0}} copy(%h)\n  %g = f32[{rows},8]{{1,0}} all-gather(%x)\n}}\n"
    )
    rows = {"concurrent": 16, "early": 16, "ordered": 16, "stock": 8, "saved": 8}

    def compile_recipe(recipe):
        nbytes = {"saved": 50_000_000}.get(recipe, 40_000_000)
        return compiled_of(nbytes, gather.format(rows=1_000_000 * rows[recipe]))

    chosen, candidates = choose_recipe(EVERY, compile_recipe, 2)
    assert chosen == expected
    findings = find_fallback(chosen, candidates)
    assert len(findings) == (expected == "stock")
    assert all("exchanged 512.00 MB for 256.00 MB" in finding.message for finding in findings)


def test_offloads_given_up_for_what_they_exchange_are_said_by_the_recipe_of_least_memory():
    gather = "ENTRY %main (x: f32[8]) -> f32[64] {{\n  %g = f32[{rows},8]{{1,0}} all-gather(%x)\n}}\n"
    nbytes = {"concurrent": 6.23e9, "early": 4.87e9, "ordered": 4.9e9, "stock": 6.52e9, "saved": 6.25e9}
    rows = {"concurrent": 16, "early": 16, "ordered": 16, "stock": 8, "saved": 8}

    def compile_recipe(recipe):
        return compiled_of(int(nbytes[recipe]), gather.format(rows=1_000_000 * rows[recipe]))

    chosen, candidates = choose_recipe(EVERY, compile_recipe, 2)
    assert chosen == "saved"
    (finding,) = find_fallback(chosen, candidates)
    assert "by 'early' it took 4.87 GB and exchanged 512.00 MB for 256.00 MB. Nothing" in finding.message
    assert "wins no memory" not in finding.message
    assert "recipe='early' in jaxoff.jit insists" in finding.message


def test_over_several_devices_the_first_recipe_within_the_limit_runs():
    gigabytes = {"concurrent": 12.4, "early": 12.2, "ordered": 12.0, "stock": 13.3, "saved": 18.0}
    chosen, _ = choose_recipe(EVERY, lambda recipe: compiled_of(int(gigabytes[recipe] * 1e9)), 2)
    assert chosen == "concurrent"


def test_a_form_that_cannot_be_made_leaves_the_recipe_chosen():
    def divide():
        raise ValueError("the sharding does not fit")

    assert (
        choose_form(None, [FormMaker(divide), FormMaker(lambda: None)], [], None) is None
    )  # nothing is made of the call


@pytest.mark.parametrize(
    ("rows", "gigabytes", "expected"),
    [
        (8, 4.0, "concurrent"),  # as many bytes exchanged as by the program as given
        (16, 4.0, None),
        (8, 4.5, None),  # more memory than the program as given
        (4, 4.5, None),
    ],
)
def test_another_form_of_a_program_runs_within_the_limits_of_the_program(rows, gigabytes, expected):
    gather = "ENTRY %main (x: f32[8]) -> f32[64] {{\n  %g = f32[{rows},8]{{1,0}} all-gather(%x)\n}}\n"
    given = {"concurrent": 16, "early": 16, "ordered": 16, "stock": 8, "saved": 8}

    def compile_given(recipe):
        nbytes = 5_000_000_000 if recipe == "saved" else 4_000_000_000
        return compiled_of(nbytes, gather.format(rows=1_000_000 * given[recipe]))

    chosen, candidates = choose_recipe(EVERY, compile_given, 2)
    assert exchanges_too_much(chosen, candidates)
    assert not exchanges_too_much(Recipe.EARLY, candidates)

    def compile_other(recipe):
        return compiled_of(int(gigabytes * 1e9), gather.format(rows=1_000_000 * rows))

    assert choose_beside(EVERY[:3], compile_other, candidates, 2) == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ({"loops": 2, "scanned": 0, "flat": False}, ["ordered", "stock"]),
        ({"loops": 2, "scanned": 2, "flat": False}, ["concurrent", "early", "ordered", "stock", "saved"]),
        (
            {"loops": 2, "scanned": 2, "flat": False, "breaks_graphs": True},
            ["early", "concurrent", "ordered", "stock", "saved"],
        ),
        ({"loops": 2, "scanned": 2, "flat": False, "graphs": False}, ["early", "ordered", "stock", "saved"]),
        (
            {"loops": 2, "scanned": 2, "flat": False, "profiled": True},
            ["concurrent", "ordered", "stock", "saved"],
        ),
        ({"loops": 0, "scanned": 0, "flat": True}, ["ordered", "stock", "saved"]),
    ],
)
def test_recipes_of_a_program(program, expected):
    assert list(list_recipes(has_twin=True, **program)) == expected
    assert list(list_recipes(has_twin=False, **program)) == [r for r in expected if r != "saved"]


def test_a_program_with_copies_that_are_not_ordered_is_compared_with_its_twin():
    nothing_ordered = {"loops": 0, "scanned": 0, "flat": False}
    assert list(list_recipes(has_twin=True, **nothing_ordered)) == ["ordered", "stock", "saved"]
    assert list(list_recipes(has_twin=False, **nothing_ordered)) == ["ordered"]


def offloading(layers):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["act"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        return jnp.sin(checkpoint_name(x @ w, "act")), None

    def scanned(w, x):
        return lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, w)[0].sum()

    def flat(w, x):
        for row in w:
            x, _ = jax.checkpoint(layer, policy=policy)(x, row)
        return x.sum()

    return jax.value_and_grad({"scan": scanned, "flat": flat}[layers])


def arguments():
    w, x = jax.random.split(jax.random.key(0))
    return jax.random.normal(w, (3, 16, 16)), jax.random.normal(x, (8, 16))


@pytest.mark.parametrize("layers", ["scan", "flat"])
def test_a_saved_twin_has_no_host_memory_and_equal_results(layers):
    fun = offloading(layers)
    closed = jax.make_jaxpr(fun)(*arguments())
    assert "<host>" in str(closed)
    twin = build_saved_twin(closed)
    assert twin is not None
    assert "<host>" not in str(twin)
    assert "device_put" not in str(twin)
    got = jax.jit(jax.extend.core.jaxpr_as_fun(twin), compiler_options=SAME_PRODUCTS)(*arguments())
    assert_equal(got, jax.tree.leaves(jax.jit(fun, compiler_options=SAME_PRODUCTS)(*arguments())))


def parks_and_offloads(fun):
    """A function like `fun` that also copies two values at once to the host and back by hand."""

    def around(w, x):
        hosts = jax.device_put((x * 2, x * 3), jax.memory.Space.Host)
        loss = fun(w, x)
        return loss, jax.device_put(hosts, jax.memory.Space.Device)

    return around


@pytest.mark.parametrize("layers", ["scan", "flat"])
def test_a_saved_twin_keeps_what_the_user_moves(layers):
    fun = parks_and_offloads(offloading(layers))
    closed = split_copies(jax.make_jaxpr(fun)(*arguments()))
    twin = build_saved_twin(closed)
    assert twin is not None
    assert str(twin).count(":f32<host>") == 2
    assert str(closed).count(":f32<host>") > 4
    got = jax.jit(jax.extend.core.jaxpr_as_fun(twin), compiler_options=SAME_PRODUCTS)(*arguments())
    assert_equal(got, jax.tree.leaves(jax.jit(fun, compiler_options=SAME_PRODUCTS)(*arguments())))


def test_a_program_with_arguments_on_the_host_and_a_policys_copies_has_a_twin():
    def fun(w, x, host):
        return offloading("scan")(w, x), jax.device_put(host, jax.memory.Space.Device) * 2

    on_host = jax.device_put(jnp.ones(4), jax.memory.Space.Host)
    twin = build_saved_twin(jax.make_jaxpr(fun)(*arguments(), on_host))
    assert twin is not None
    assert str(twin).count("<host>") == 1


def test_a_program_with_arguments_on_the_host_has_no_twin():
    on_host = jax.device_put(jnp.ones(4), jax.memory.Space.Host)
    closed = jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2)(on_host)
    assert build_saved_twin(closed) is None


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Recipe])
@pytest.mark.some_cases(2)
def test_every_recipe_computes_the_same(recipe):
    step = jaxoff.jit(offloading("scan"), recipe=recipe, compiler_options=SAME_PRODUCTS)
    stock = jax.jit(offloading("scan"), compiler_options=SAME_PRODUCTS)
    assert_equal(jax.tree.leaves(step(*arguments())), jax.tree.leaves(stock(*arguments())))
    assert step.recipe == recipe
    assert ("<host>" in str(step.trace(*arguments()).jaxpr)) == (recipe != "saved")
    assert step.findings == ()


@pytest.mark.parametrize(
    ("options", "placed_by"),
    [({"recipe": "saved"}, "recipe"), ({"recipe": "ordered"}, None), ({"device_bytes": "1GB"}, "budget")],
)
def test_a_compiled_program_remembers_that_jit_placed_its_residuals(options, placed_by):
    compiled = jaxoff.jit(offloading("scan"), **options).lower(*arguments()).compile()
    assert recall_placement(compiled) == placed_by


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match=r"recipe is one of .* got 'orderd'\. Did you mean 'ordered'"):
        jaxoff.jit(lambda x: x, recipe="orderd")


def test_without_graphs_the_order_runs_under_xlas_scheduler():
    step = jaxoff.jit(offloading("scan"), compiler_options={"xla_gpu_enable_command_buffer": ""})
    step.trace(*arguments())
    assert step.recipe == "early"


def test_a_method_binds_its_instance_and_no_device_is_the_default():
    class Trainer:
        scale = 2

        @functools.partial(jaxoff.jit, static_argnums=0, device=None)
        def step(self, x):
            return x * self.scale

    assert float(Trainer().step(jnp.float32(3))) == 6
    assert Trainer.step._cache_size() == 1


def test_jax_jit_can_be_replaced(monkeypatch):
    monkeypatch.setattr(jax, "jit", jaxoff.jit)
    assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2


@pytest.mark.parametrize("static", [{"static_argnums": 2}, {"static_argnames": "moves"}])
def test_each_value_of_a_static_argument_gets_its_own_setting(static):
    fun = offloading("scan")

    def step(w, x, moves):
        return fun(w, x) if moves else (w.sum(), w)

    jitted = jaxoff.jit(step, **static)
    jitted(*arguments(), False)
    assert jitted.options == {}
    jitted(*arguments(), True)
    assert jitted.recipe == "concurrent"
    jitted(*arguments(), moves=False)
    assert jitted.options == {}
