"""Layers with names for the planner, traced and made by hand."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

import jaxoff
from jaxoff._device.profile import Device
from jaxoff._plan.divide_loss import divide_loss
from jaxoff._plan.layer import KernelUse, Label, Layer, LayerValue
from jaxoff._plan.layer_cost import LayerModel
from jaxoff._plan.step_cost import StepModel
from jaxoff._plan.timeline import Point
from jaxoff._residuals.traced_function import TracedFunction

ROWS, WIDTH, HIDDEN, LAYERS = 64, 32, 128, 4
X_NBYTES, ACT_NBYTES, W_NBYTES = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN, 4 * WIDTH * HIDDEN
# A product of these layers takes 1 ms, a pass over x a tenth of that, a copy of x half of it.
DEVICE = Device(
    flops=2e3 * ROWS * WIDTH * HIDDEN,
    memory_gbps=2 * X_NBYTES / 1e5,
    d2h_gbps=2 * X_NBYTES / 1e6,
    h2d_gbps=2 * X_NBYTES / 1e6,
)


def layer(x, w):
    x = jaxoff.name(x, "x_in")
    act = jaxoff.name(jnp.tanh(x @ w["up"]), "act")
    return x + jaxoff.name(act @ w["down"], "out"), None


def scanned(body=layer, policy=None):
    def loss(w, x):
        return jaxoff.scan(body, x, w, policy=policy or jaxoff.policy(), keep_first=False)[0].sum()

    return loss


def in_layers(layers=LAYERS, policy=None):
    def loss(w, x):
        weights = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(layers)]
        return jaxoff.layers(lambda w, x: layer(x, w)[0], x, weights, policy=policy or jaxoff.policy()).sum()

    return loss


def unrolled(w, x):
    block = jax.checkpoint(lambda w, x: layer(x, w)[0], policy=jaxoff.policy())
    for i in range(LAYERS):
        x = block(jax.tree.map(lambda leaf, i=i: leaf[i], w), x)
    return x.sum()


def arguments(layers=LAYERS):
    up = jax.ShapeDtypeStruct((layers, WIDTH, HIDDEN), jnp.float32)
    down = jax.ShapeDtypeStruct((layers, HIDDEN, WIDTH), jnp.float32)
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def divided(fun, *args, device=DEVICE):
    return divide_loss(TracedFunction.trace(fun, args, {}, None, False), device)


def iteration(fun, *args, device=DEVICE):
    """The one kind of layer of a function."""
    (found,) = divided(fun, *args, device=device).layers
    return found


def chain(num_names: int, iterations: int, nbytes: Sequence[int], ms: Sequence[float]) -> Layer:
    """A layer of values, each made from the one before and read by its own step of the backward pass."""
    values = [LayerValue(nbytes[0], False, 0.0, (), None, None, is_carried=True)]
    for n in range(num_names):
        step = num_names - 1 - n
        size = nbytes[n % len(nbytes)]
        values.append(
            LayerValue(
                size,
                size > max(nbytes) / 2,
                ms[n % len(ms)],
                (n,),
                step,
                step,
                Label(f"v{n}"),
                produced_ms=n + 1.0,
            )
        )
    forward = [KernelUse("f", min(nbytes), max(nbytes), 0, n + 1.0) for n in range(num_names)]
    backward = [KernelUse("b", min(nbytes), max(nbytes), 0, 2.0 * (n + 1)) for n in range(num_names)]
    return Layer(iterations, tuple(values), tuple(forward), tuple(backward), "layer")


def model_of(layers: Sequence[Layer], device: Device = DEVICE, resident=0, margin=0.0) -> StepModel:
    """A step of one part of each layer, forward and then backward, which makes a third of a gigabyte."""
    kinds = range(len(layers))
    points = [Point("f", 10**7, tuple(int(k <= kind) for k in kinds), kind) for kind in kinds]
    for kind in reversed(kinds):
        holds, made = tuple(int(k <= kind) for k in kinds), 10**9 // (3 * (kind + 1))
        points += [
            Point("b", made + 2 * 10**7, holds, kind, True, made, pending_nbytes=(10**8, 10**8, 10**7))
        ]
        points += [Point("b", made + 10**7, holds, kind, True, made // 2)]
    models = tuple(LayerModel(layer, 1, device) for layer in layers)
    return StepModel(models, tuple(points), 10**9, resident, 1.0, margin)


def placed(by_name=None, /, **more):
    """The placements of labels, given those of names: of layers that are all placed alike."""
    return {Label(name): verb for name, verb in {**(by_name or {}), **more}.items()}


def flat_scan(w, x):
    """No checkpoint anywhere."""
    return lax.scan(layer, x, w)[0].sum()
