"""A run's training step: what compiles it, and that its copies change neither the loss nor what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoff._runtime.flags import DISABLED_PASSES, SCHEDULING_MODE
from models import policy_text
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
    assert p.step.options[SCHEDULING_MODE] == "CONCURRENT"


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
