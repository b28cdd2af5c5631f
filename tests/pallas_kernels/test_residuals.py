"""What the grouped MLP keeps: two named values, placed by a policy, of the same bits wherever they live.

The kernels are traced for a GPU that need not be there; their bits are compared on
one, in `tests/gpu`: the interpreter does not run under `jax.checkpoint`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from pallas_kernels import grouped_mlp
from tests.pallas_kernels.hopper import launches, on_h200

ROWS, WIDTH, HIDDEN, EXPERTS = 24, 64, 128, 3
BOTH = ("moe.dispatched", "moe.act")
SHAPES = {"moe.dispatched": (ROWS, WIDTH), "moe.act": (ROWS, HIDDEN)}
policies = jax.checkpoint_policies
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "mosaic"])


def device_of(implementation):
    """Where to trace an implementation."""
    return on_h200() if implementation == "mosaic" else contextlib.nullcontext()


@functools.cache  # one function object, which JAX traces once for several policies
def layer_of(implementation):
    def layer(x, w1, w2, probs):
        # The input of the op is made here: it is an intermediate of the checkpointed function, as in a model.
        sizes = jnp.array([7, 0, 15], jnp.int32)
        return grouped_mlp(jnp.sin(x), w1, w2, sizes, probs=probs, implementation=implementation)

    return layer


@functools.cache
def inputs(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((ROWS, WIDTH), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, w1, w2 = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=False))
    return x, w1, w2, jax.random.uniform(keys[3], (ROWS,))


def kept(function, implementation):
    """Shape and place of each value of R rows that the gradient's program carries over, the inputs aside."""
    with device_of(implementation):
        closed = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[1])(*inputs())
    given = set(map(id, closed.jaxpr.invars))
    found = {
        id(v): (v.aval.shape, str(v.aval.memory_space).lower())
        for v in closed.jaxpr.outvars
        if id(v) not in given and v.aval.shape[:1] == (ROWS,) and v.aval.ndim == 2
    }
    return sorted(found.values())


def table(implementation, policy):
    layer = layer_of(implementation)
    with device_of(implementation):
        return jaxoff.residuals(layer if policy is None else jax.checkpoint(layer, policy=policy), *inputs())


PLACED = {
    "saved": jaxoff.policy(save=BOTH),
    "offloaded": jaxoff.policy(offload=BOTH),
    "the activation offloaded": jaxoff.policy(offload=["moe.act"], save=["moe.dispatched"]),
    "the rows offloaded": jaxoff.policy(offload=["moe.dispatched"], save=["moe.act"]),
    "the activation recomputed": jaxoff.policy(save=["moe.dispatched"]),
    "the rows recomputed": jaxoff.policy(save=["moe.act"]),
    "both recomputed": jaxoff.policy(),
}


@pytest.mark.parametrize("policy", PLACED)
@pytest.mark.some_cases(3)
def test_both_implementations_have_the_same_table_and_it_is_the_policys(policy):
    """And it is what the gradient's program carries."""
    chosen = PLACED[policy]
    reference, kernels = (table(name, chosen) for name in ("reference", "mosaic"))
    assert reference == kernels
    places = {row.name: row.placement for row in kernels if row.shape in SHAPES.values()}
    wanted = dict.fromkeys(BOTH, "recompute")
    wanted |= dict.fromkeys(chosen.save, "save") | dict.fromkeys(chosen.offload, "offload")
    assert places == wanted
    for row in kernels:
        if row.name in SHAPES:
            assert (row.shape, row.nbytes) == (SHAPES[row.name], 2 * np.prod(SHAPES[row.name]))
    carried = sorted(
        (SHAPES[name], "host" if place == "offload" else "device")
        for name, place in wanted.items()
        if place != "recompute"
    )
    for implementation in ("reference", "mosaic"):
        found = kept(jax.checkpoint(layer_of(implementation), policy=chosen), implementation)
        assert [(shape, "host" if "host" in place else "device") for shape, place in found] == carried


@IMPLEMENTATIONS
def test_without_a_checkpoint_one_value_of_the_experts_width_is_kept(implementation):
    found = kept(layer_of(implementation), implementation)
    assert [shape for shape, _ in found].count((ROWS, HIDDEN)) == 1
    rows = [row for row in table(implementation, None) if row.shape == (ROWS, HIDDEN)]
    assert [row.name for row in rows] == ["moe.act"]


FORWARD = {"fc1": 1, "fc2": 1}
BACKWARD = {"grad_act": 1, "grad_x": 1, "grad_weight": 2}


@pytest.mark.parametrize(
    ("policy", "again"),
    [("offloaded", 0), ("the rows recomputed", 0), ("the activation recomputed", 1)],
)
def test_fc1_runs_again_only_where_its_output_is_recomputed(policy, again):
    block = jax.checkpoint(layer_of("mosaic"), policy=PLACED[policy])

    def step(*arguments):
        y, pullback = jax.vjp(block, *arguments)
        return y, pullback(y)

    assert launches(step, *inputs()) == FORWARD | BACKWARD | {"fc1": 1 + again}


def test_without_gradients_the_forward_kernels_run():
    assert launches(layer_of("mosaic"), *inputs()) == FORWARD


@IMPLEMENTATIONS
def test_names_are_there_without_gradients(implementation):
    with device_of(implementation):
        jaxpr = str(jax.make_jaxpr(layer_of(implementation))(*inputs()))
    for name in BOTH:
        assert f"name={name}" in jaxpr


@pytest.mark.parametrize(
    ("implementation", "dtype", "bits"),
    [
        ("reference", jnp.bfloat16, (8, 7)),
        ("reference", jnp.float32, (8, 23)),
        ("reference", jnp.float16, (5, 10)),
        ("mosaic", jnp.bfloat16, (8, 7)),
    ],
)
def test_rounding_is_pinned_right_before_each_name(implementation, dtype, bits):
    """In the program without gradients and in that of the gradient's forward pass."""

    def formats(jaxpr, found):
        made = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name":
                before = made[id(eqn.invars[0])]
                assert before.primitive.name == "reduce_precision"
                found[eqn.params["name"]] = (before.params["exponent_bits"], before.params["mantissa_bits"])
            for value in eqn.params.values():
                if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                    formats(inner, found)
        return found

    layer = layer_of(implementation)
    for function in (layer, lambda *a: jax.vjp(layer, *a)[0]):
        with device_of(implementation):
            jaxpr = jax.make_jaxpr(function)(*inputs(dtype)).jaxpr
        assert formats(jaxpr, {}) == dict.fromkeys(BOTH, bits)


def offload(*names):
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def gradients(implementation, policy):
    function = jax.checkpoint(layer_of(implementation), policy=policy)
    return jax.value_and_grad(
        lambda *a: jnp.sum(jnp.sin(function(*a)).astype(jnp.float32)), tuple(range(len(inputs())))
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.long)])
def test_saved_offloaded_and_recomputed_give_the_same_bits(dtype):
    """By JAX's own policies: the names are plain ones."""

    def run(policy):
        return jax.tree.leaves(jax.jit(gradients("reference", policy))(*inputs(dtype)))

    saved = run(policies.save_only_these_names(*BOTH))
    assert all(np.asarray(g, np.float32).any() for g in saved)
    for policy in (
        offload(*BOTH),
        policies.save_only_these_names(BOTH[0]),
        policies.nothing_saveable,
    ):
        for a, b in zip(saved, run(policy), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
