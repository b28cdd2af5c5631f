"""The largest decoder that one GPU trains, by compiled memory, with and without its state on the host.

    JAX_PLATFORMS=cpu python -m bench.largest --target h100 --device-gb 78 --host-gb 128 --layers 16 32 48

Nothing runs: the steps are compiled ahead of time, and no GPU is needed. All layers have the shapes of
Qwen2.5-14B (without biases), and one sequence of 8,192 tokens is a step. A variant ends at the first model
that does not fit. On a GPU, `--steps` times the steps:

    python -m bench.largest --steps 2 --layers 48 --batch 4 --moments bfloat16 --masters none --host-gb 100

AdamW with clipping, weights in bfloat16. Variants:

- "device": `jax.jit`, each layer recomputed, a plain head, everything on the device;
- "budget": `jaxoff.jit(device_bytes=, host_bytes=)` of the same step, without another change.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.client_steps.decoder import decoder_loss, initialize_decoder, make_scan_block, stack
from bench.client_steps.step import Sizes
from bench.long import add_arguments, jit_within, measure_in_turn, measure_step

QWEN = Sizes(
    layers=48, width=5120, hidden=13824, heads=40, kv_heads=8, head_size=128, vocabulary=152064, batch=1
)
VARIANTS = ("device", "budget")


def scale_by_adam_in(dtype: Any) -> optax.GradientTransformation:
    """Adam's scaling with both moments stored in a dtype, computed in float32."""
    adam = optax.scale_by_adam(b2=0.95)

    def narrow(state: Any) -> Any:
        return state._replace(**{n: optax.tree.cast(getattr(state, n), dtype) for n in ("mu", "nu")})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = state._replace(**{n: optax.tree.cast(getattr(state, n), jnp.float32) for n in ("mu", "nu")})
        updates, state = adam.update(updates, wide, params)
        return updates, narrow(state)

    return optax.GradientTransformation(lambda params: narrow(adam.init(params)), update)


def make_step(sizes: Sizes, moments: str, masters: bool) -> tuple[Callable[..., Any], Any]:
    """The step, and structs of its arguments: the state and a batch of tokens.

    Args:
      sizes: the decoder's.
      moments: the dtype of AdamW's moments.
      masters: whether float32 masters of the weights are in the state. Otherwise the weights themselves are
        updated, in float32, and rounded to the nearest.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        scale_by_adam_in(moments),
        optax.add_decayed_weights(0.1),
        optax.scale(-1e-4),
    )
    block = make_scan_block(sizes, None, "cudnn")

    def loss_of(weights, tokens):
        return decoder_loss(lambda x, layers: jax.lax.scan(block, x, layers)[0], weights, tokens)

    def step(state, tokens):
        weights, *rest, optimizer_state = state
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        grads = optax.tree.cast(grads, jnp.float32)
        wide = rest[0] if masters else optax.tree.cast(weights, jnp.float32)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, wide)
        wide = optax.apply_updates(wide, updates)
        weights = optax.tree.cast(wide, jnp.bfloat16)
        return (weights, *([wide] if masters else []), optimizer_state), loss

    def initialize(key):
        wide = initialize_decoder(sizes, stack, key)
        return optax.tree.cast(wide, jnp.bfloat16), *([wide] if masters else []), optimizer.init(wide)

    return step, (jax.eval_shape(initialize, jax.random.key(0)), sizes.tokens)


def measure_variant(variant: str, sizes: Sizes, o: argparse.Namespace) -> dict[str, Any]:
    """The row of a variant: parameters, peaks, and with `--steps` its times, or the error."""
    step, args = make_step(sizes, o.moments, o.masters == "float32")
    jitted = jit_within(step, o) if variant == "budget" else jax.jit(step, donate_argnums=0)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(args[0][0]))
    row = {"variant": variant, "layers": sizes.layers, "parameters": parameters}
    return row | measure_step(jitted, args, sizes, o)


def main(arguments: list[str] | None = None) -> None:
    """Compiles each variant of each model, times it with `--steps`, and writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--host-gb", type=float, default=128.0)
    parser.add_argument("--layers", type=int, nargs="+", default=[QWEN.layers])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--moments", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--masters", choices=["float32", "none"], default="float32")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    options = parser.parse_args(arguments)
    sizes = dataclasses.replace(QWEN, batch=options.batch, length=options.tokens)
    cases = [dataclasses.replace(sizes, layers=layers) for layers in sorted(options.layers)]
    measure_in_turn(measure_variant, cases, options)


if __name__ == "__main__":
    main()
