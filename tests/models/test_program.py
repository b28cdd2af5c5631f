"""A run's training step: what compiles it, and that its copies change neither the loss nor what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoff._runtime.flags import DISABLED_PASSES
from models import policy_text
from models.checkpoints import Checkpoints
from models.options import POLICY, Options, parse_overrides
from models.program import Program
from tests.jaxoff.policy import placement

SMALL = [
    "d_model=32",
    "num_heads=2",
    "num_kv_heads=1",
    "head_dim=16",
    "d_expert=24",
    "d_shared=40",
    "d_ff=48",
]


def program(policy, accum=1, overrides=()):
    options = Options.of(
        "tiny", overrides=parse_overrides([*SMALL, *overrides]), policy=POLICY, batch=4, seq=32, accum=accum
    )
    return Program(options, policy)


def tokens(p):
    drawn = jax.random.randint(jax.random.key(0), (p.options.batch, p.options.seq + 1), 0, 256)
    return p.microbatches(np.asarray(drawn))


LOOP = ["num_layers=2", "first_k_dense=0"]


def test_the_step_is_compiled_for_copies_beside_compute():
    p = program(policy_text.parse(POLICY), overrides=LOOP)
    p.step.lower(p.state_shapes, tokens(p))
    # On a CPU the interpreter of the experts' kernels is a loop in the layer, which no CUDA graph would hold.
    assert p.step.recipe == "early"
    assert p.step.options[DISABLED_PASSES].startswith("rematerialization")


@pytest.mark.long
def test_the_twins_step_is_compiled_without_copies():
    p = program(policy_text.parse(POLICY).on_device(), accum=2, overrides=LOOP)
    p.step.lower(p.state_shapes, tokens(p))
    assert p.step.options.keys() == {DISABLED_PASSES}


@pytest.mark.long
def test_the_step_does_what_jax_jit_makes_of_it():
    p = program(policy_text.parse(POLICY), accum=2, overrides=LOOP)
    state, metrics = p.compiled_step(p.init(), tokens(p))
    want_state, want = jax.jit(p._step)(p.init(), tokens(p))
    assert metrics["loss"] == want["loss"]  # to the last bit; gradients may add up in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, want_state)


@pytest.mark.parametrize(
    "layers",
    [pytest.param(["num_layers=3"], marks=pytest.mark.long), ["num_layers=2"]],
    ids=["loop", "one layer a stack"],
)
def test_the_step_moves_what_explain_says(layers):
    p = program(policy_text.parse(POLICY), overrides=layers)
    args = p.state_shapes, jax.ShapeDtypeStruct((1, *p.microbatch_shape.shape), jnp.int32)
    assert placement.nbytes(placement.host_arrays(p._step, *args)) == p.explain().host_bytes > 0
    assert p.explain().findings == ()


LLAMA = dict(vocab_size=256, d_model=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=1024)


def llama(device_bytes=None, **overrides):
    chosen = {**LLAMA, "mlp_chunk": 32, "logits_chunk": 32, **overrides}
    return Program(Options.of("llama3_1b", overrides=chosen, batch=2, seq=64), None, device_bytes)


def test_weights_in_16_bits_follow_masters_in_float32():
    p = llama(num_layers=1, d_model=64, head_dim=16, d_ff=96)
    state = p.init()
    drawn = tokens(p)
    new, metrics = p.compiled_step(state, drawn)
    assert {x.dtype.name for x in jax.tree.leaves(new["params"])} == {"bfloat16"}
    for master, weight in zip(jax.tree.leaves(new["masters"]), jax.tree.leaves(new["params"]), strict=True):
        assert master.dtype == jnp.float32
        np.testing.assert_array_equal(master.astype(jnp.bfloat16), weight)
    pairs = zip(*map(jax.tree.leaves, (new["masters"], p.init()["masters"])), strict=True)
    assert all(bool((a != b).any()) for a, b in pairs)
    assert "masters" not in llama(param_dtype="float32").state_shapes
    assert np.isfinite(metrics["loss"])


@pytest.mark.long
def test_a_budget_keeps_masters_and_moments_on_the_host_from_the_first_step_on():
    """And the norm of the new weights, which the step returns, is no obstacle."""
    plain = llama()
    p = llama(device_bytes=0.75 * plain.state_bytes)
    state, want = p.init(), plain.init()
    assert p.plan is not None
    assert p.plan.host_bytes > 0.3 * plain.state_bytes
    kinds = {jax.tree_util.keystr(k): x.sharding.memory_kind for k, x in jax.tree.leaves_with_path(state)}
    on_host = {k for k, kind in kinds.items() if kind == "pinned_host"}
    assert any("masters" in k for k in on_host) and any("mu" in k for k in on_host)
    assert not any("params" in k for k in on_host)
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert jax.tree.map(lambda s: s.sharding.memory_kind, p.saved_shapes) == jax.tree.map(
        lambda x: x.sharding.memory_kind, state
    )
    drawn = tokens(p)
    (state, metrics), (want, expected) = p.compiled_step(state, drawn), plain.compiled_step(want, drawn)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-3)
    np.testing.assert_allclose(metrics["param_norm"], expected["param_norm"], rtol=1e-4)


@pytest.mark.long
def test_state_on_the_host_is_saved_and_restored_where_it_rests(tmp_path):
    """By orbax, while the step that donates it goes on; the next step has the bits of the unbroken run."""
    p = llama(device_bytes=0.75 * llama().state_bytes)
    state, drawn = p.init(), tokens(p)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        state, _ = p.compiled_step(state, drawn)
        checkpoints.save(1, p.saved_form(state), {})
        state, unbroken = p.compiled_step(state, drawn)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = p.from_saved(checkpoints.restore(1, p.saved_shapes))
    kinds, wanted = (
        jax.tree.map(lambda x: x.sharding.memory_kind, tree) for tree in (restored, p.saved_shapes)
    )
    assert kinds == wanted
    assert "pinned_host" in jax.tree.leaves(kinds)
    again, resumed = p.compiled_step(restored, drawn)
    assert resumed["loss"] == unbroken["loss"]
    jax.tree.map(np.testing.assert_array_equal, again, state)
