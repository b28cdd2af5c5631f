"""On a GPU.

Residuals really lie in host memory, as many bytes as `explain` says, and gradients keep their bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoff
from tests.recipes import jit_in_order

pytestmark = pytest.mark.gpu

LAYERS, ROWS, D, FF = 6, 2048, 1024, 4096
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
CONCURRENT = {**DETERMINISTIC, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def layer(x, w):
    up, down = w
    x = jaxoff.name(x, "x_in")
    h = jaxoff.name(jnp.square(jax.nn.relu(rms_norm(x) @ up)), "act")
    return x + h @ down, None


def rms_norm(x):
    wide = x.astype(jnp.float32)
    # Without the barrier XLA adds in another order where the norm is computed again: other bits.
    mean_square = lax.optimization_barrier(jnp.mean(wide * wide, -1, keepdims=True))
    return (wide * lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)


def stack(policy):
    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return lambda w, x: lax.scan(block, x, w)[0].astype(jnp.float32).mean()


def arguments(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, D, FF), dtype) * D**-0.5
    down = jax.random.normal(keys[1], (LAYERS, FF, D), dtype) * FF**-0.5
    return (up, down), jax.random.normal(keys[2], (ROWS, D), dtype)


def compiled(policy, args, options=None):
    return jax.jit(jax.value_and_grad(stack(policy), (0, 1)), compiler_options=options).lower(*args).compile()


MOVING = {
    "lists": jaxoff.policy(offload=["x_in", "act"]),
    "one name": jaxoff.policy(offload=["act"], save=["x_in"]),
    "te_v2": jaxoff.policy("te_v2"),
    "combined": jaxoff.policy(offload=["x_in"]) | jax.checkpoint_policies.dots_saveable,
}


@pytest.mark.parametrize("policy", MOVING.values(), ids=MOVING)
def test_the_compiled_program_holds_the_bytes_that_explain_reports(policy):
    args = arguments()
    report = jaxoff.explain(stack(policy), *args)
    offloaded, twin = compiled(policy, args), compiled(policy.on_device(), args)
    assert report.host_bytes > 0
    assert offloaded.memory_analysis().host_temp_size_in_bytes == report.host_bytes
    assert twin.memory_analysis().host_temp_size_in_bytes == 0
    assert "S(5)" in offloaded.as_text() and "S(5)" not in twin.as_text()
    saved = twin.memory_analysis().temp_size_in_bytes - offloaded.memory_analysis().temp_size_in_bytes
    assert saved > 0.5 * report.host_bytes  # the device lets go of what the host holds


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", [DETERMINISTIC, CONCURRENT], ids=["default order", "concurrent"])
def test_saving_offloading_and_recomputing_give_the_same_bits(dtype, options):
    args = arguments(dtype)
    names = ["x_in", "act"]
    programs = [
        compiled(jaxoff.policy(**{field: names}), args, options) for field in ("save", "offload", "recompute")
    ]
    for seed in range(3):
        w, x = args
        x = x + jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
        saved, offloaded, recomputed = (jax.tree.map(np.asarray, p(w, x)) for p in programs)
        jax.tree.map(np.testing.assert_array_equal, saved, offloaded)
        jax.tree.map(np.testing.assert_array_equal, saved, recomputed)
        assert np.isfinite(saved[0]) and all(
            np.abs(g.astype(np.float32)).max() > 0 for g in jax.tree.leaves(saved[1])
        )


def test_a_pinned_pool_that_is_too_small_is_refused_before_anything_runs(monkeypatch):
    args, policy = arguments(), MOVING["lists"]
    step = jit_in_order(jax.grad(stack(policy)))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")  # XLA has read it before
    for use in (step, step.lower):
        with pytest.raises(RuntimeError, match=r"HOST_MEMORY_LIMIT_GB is 0.*set it to 2 or more"):
            use(*args)
    monkeypatch.undo()
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(step(*args)))


def test_the_first_call_is_right():
    args = arguments()
    step = compiled(MOVING["lists"], args, DETERMINISTIC)
    jax.tree.map(np.testing.assert_array_equal, step(*args), step(*args))


def test_marked_pytrees_go_leaf_by_leaf():
    def quantized(x, w):
        h = x @ w[0]
        scale = jnp.abs(h).max(-1, keepdims=True) / 127
        kept = jaxoff.mark_offload({"data": (h / scale).astype(jnp.int8), "scale": scale, "zero": None})
        return x + (kept["data"].astype(x.dtype) * kept["scale"]) @ w[1], None

    block = jax.checkpoint(quantized, policy=jaxoff.policy(), prevent_cse=False)

    def loss(w, x):
        return lax.scan(block, x, w)[0].astype(jnp.float32).mean()

    args = arguments()
    report = jaxoff.explain(loss, *args)
    assert sorted(r.dtype for r in report.residuals if r.placement == "offload") == ["bfloat16", "int8"]
    program = jax.jit(jax.grad(loss)).lower(*args).compile()
    assert program.memory_analysis().host_temp_size_in_bytes == report.host_bytes
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(program(*args)))


def test_doctor_finds_this_machine_fit():
    from jaxoff._runtime.doctor import diagnose
    from jaxoff._runtime.environment import collect

    diagnosis = diagnose(collect(link=True))
    assert diagnosis.exit_status == 0, diagnosis.problems
    link = diagnosis.environment.link
    assert link is not None and min(link.d2h_gbps, link.h2d_gbps) > 5, link
