"""The MoE layer's kernels on a Hopper GPU: right, the same from run to run, and offloaded by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from pallas_kernels import choose_implementation, moe
from tests.pallas_kernels import moe_oracle
from tests.pallas_kernels.oracle import float64, largest_error, norm_error

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
# As in test_grouped_mlp.py.
NORM_SLACK, WORST_SLACK = 2e-5, 1e-4


@pytest.fixture(autouse=True)
def hopper():
    chosen = choose_implementation(jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16))
    if chosen.name != "mosaic":
        pytest.skip(chosen.reason)


def output_and_gradients(implementation, activation):
    return jax.jit(functools.partial(moe_oracle.output_and_gradients, implementation, activation))


CASES = {
    "squared_relu": dict(tokens=900, top_k=3, experts=8, width=320, hidden=448),
    "swiglu": dict(tokens=771, top_k=2, experts=8, width=448, hidden=320, biased=True),
    "geglu": dict(tokens=130, top_k=4, experts=64, width=128, hidden=128, dtype=jnp.float16),
}


@pytest.mark.parametrize("activation", CASES)
def test_error_against_float64_is_that_of_the_reference_and_bits_repeat(activation):
    """Tokens choose their experts unevenly, some twice the same, and some experts have no token."""
    given = moe_oracle.make(activation, **CASES[activation])
    kernels, reference = (output_and_gradients(name, activation) for name in ("mosaic", "reference"))
    wanted = moe_oracle.dense(activation, given)
    got, other = kernels(*given), reference(*given)
    for field, value, rival, want in zip(moe_oracle.Results._fields, got, other, wanted, strict=True):
        if value is None:  # the gradient of a bias that was not given
            continue
        assert norm_error(value, want) <= 2 * norm_error(rival, want) + NORM_SLACK, field
        assert largest_error(value, want) <= 3 * largest_error(rival, want) + WORST_SLACK, field

    @jax.jit
    def differences(first, second):
        return sum(jnp.sum(a != b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))

    assert int(differences(got, got._replace(y=got.y + 1))) > 0
    assert sum(map(int, [differences(got, kernels(*given)) for _ in range(1000)])) == 0


def test_nan_of_one_token_stays_with_its_experts():
    given = moe_oracle.make("squared_relu", tokens=300, top_k=2, experts=6, width=128, hidden=192)
    kernels = output_and_gradients("mosaic", "squared_relu")
    clean, token = kernels(*given), 17
    dirty = kernels(*given._replace(x=given.x.at[token].set(jnp.nan), dy=given.dy.at[token].set(jnp.nan)))
    its = np.isin(np.arange(6), np.asarray(given.experts[token]))
    rows = np.arange(300) == token
    for field, own in {"y": rows, "dx": rows, "dprobs": rows, "dw1": its, "dw2": its}.items():
        value, want = float64(getattr(dirty, field)), float64(getattr(clean, field))
        assert (value[~own] == want[~own]).all(), field
        assert np.isnan(value[own]).any(), field


def test_offloading_both_residuals_moves_their_bytes_and_keeps_their_bits():
    layers, tokens, width, hidden, experts, k = 3, 2048, 512, 768, 16, 4
    keys = jax.random.split(jax.random.key(0), 5)
    w1 = jax.random.normal(keys[0], (layers, experts, width, hidden), jnp.bfloat16) * width**-0.5
    w2 = jax.random.normal(keys[1], (layers, experts, hidden, width), jnp.bfloat16) * hidden**-0.5
    x = jax.random.normal(keys[2], (tokens, width), jnp.bfloat16)
    chosen = lax.top_k(jax.random.normal(keys[3], (tokens, experts)), k)[1]
    probs = jax.random.uniform(keys[4], (tokens, k))

    def loss(policy):
        def layer(x, w):
            return x + moe(jnp.tanh(x), probs, chosen, w[0], w[1], implementation="mosaic"), None

        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    programs = {}
    for name, policy in {
        "offloaded": jaxoff.policy(offload=["moe.in", "moe.act"]),
        "saved": jaxoff.policy(save=["moe.*"]),
        "recomputed": jaxoff.policy(save=["moe.in"]),
    }.items():
        step = jax.jit(jax.value_and_grad(loss(policy), (0, 1)), compiler_options=DETERMINISTIC)
        programs[name] = step.lower((w1, w2), x).compile()
    nbytes = layers * tokens * 2 * (width + k * hidden)
    host = {name: p.memory_analysis().host_temp_size_in_bytes for name, p in programs.items()}
    assert host == {"offloaded": nbytes, "saved": 0, "recomputed": 0}
    results = [[np.asarray(v).tobytes() for v in jax.tree.leaves(p((w1, w2), x))] for p in programs.values()]
    assert results[0] == results[1] == results[2]
