"""Values in float8 by `jaxoff.policy(store=...)`, compiled for a GPU: bytes moved, bytes kept."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from tests.aot.programs import QUICK

pytestmark = pytest.mark.aot

LAYERS, WIDTH, HIDDEN, ROWS = 6, 8192, 8192, 16384
STACK = LAYERS * ROWS * HIDDEN
ON_DEVICE = jax.ShapeDtypeStruct


def compile_step(memory, store, style):
    policy = jaxoff.policy(**{memory: ["h"]}, store=store)

    def layer(x, w):
        h = jaxoff.name(x @ w[0], "h")
        return x + jax.nn.gelu(h) @ w[1], None

    body = jax.checkpoint(layer, policy=policy, prevent_cse=style == "list")

    def loss(w, x):
        if style == "scan":
            x, _ = jax.lax.scan(body, x, w)
        else:
            for i in range(LAYERS):
                x, _ = body(x, jax.tree.map(lambda a, i=i: a[i], w))
        return x.astype(jnp.float32).sum()

    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (ROWS, WIDTH)
    up, down, x = (ON_DEVICE(shape, jnp.bfloat16) for shape in shapes)
    jitted = jaxoff.jit(jax.value_and_grad(loss), compiler_options=QUICK, recipe="ordered")
    compiled = jaxoff.target("h200").compile(jitted, (up, down), x)
    return compiled, jaxoff.verify(compiled, compiler_options=jitted.options)


@pytest.mark.filterwarnings("ignore:offload-vanished:UserWarning")  # of the last layer of a list
@pytest.mark.parametrize("style", ["scan", "list"])
def test_an_offload_moves_half_of_the_bytes(style):
    compiled, facts = compile_step("offload", {"h": "float8_e4m3fn"}, style)
    _, wide = compile_step("offload", {}, style)
    layer = STACK // LAYERS
    assert facts.d2h_bytes == facts.h2d_bytes
    # The residuals of the last layer may stay on the device.
    assert facts.d2h_bytes in [layers * layer * (1 + 4 / 128) for layers in (LAYERS - 1, LAYERS)]
    assert wide.d2h_bytes in [layers * layer * 2 for layers in (LAYERS - 1, LAYERS)]
    assert all(copy.via == "dma" for copy in facts.copies)
    assert compiled.memory_analysis().host_temp_size_in_bytes < 0.62 * 2 * STACK


def test_a_saved_value_takes_half_of_the_memory():
    kept, _ = compile_step("save", {"h": "float8_e4m3fn"}, "scan")
    wide, facts = compile_step("save", {}, "scan")
    assert not facts.copies
    spared = wide.memory_analysis().temp_size_in_bytes - kept.memory_analysis().temp_size_in_bytes
    assert spared > 0.9 * STACK * (1 - 4 / 128)
