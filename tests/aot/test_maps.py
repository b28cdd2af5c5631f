"""Budgets for layers whose `jax.shard_map` holds a loop, compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes

pytestmark = pytest.mark.aot
LAYERS, ROWS, WIDTH, PARTS = 6, 65536, 1024, 16


def make_step(mesh, wrap):
    """Six layers over two devices: parts of the rows, each by one of two branches, as its device tells."""

    def inside(x, up, down):
        number = lax.axis_index("rows")

        def mlp(y):
            return jax.nn.gelu(y @ up) @ down

        def half(y):
            return jnp.concatenate([y[:1024], mlp(y[1024:])])

        def part(args):
            rows, j = args
            return lax.cond(j == 0, mlp, lambda y: lax.cond((j - number) % 3 > 1, mlp, half, y), rows)

        parts = x.reshape(PARTS, -1, WIDTH), jnp.arange(PARTS)
        return lax.map(wrap(part), parts).reshape(x.shape)

    own = jax.shard_map(inside, mesh=mesh, in_specs=(P("rows"), P(), P()), out_specs=P("rows"))

    def loss(params, x):
        x = lax.scan(wrap(lambda x, w: (x + own(x, *w), None)), x, params)[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), params, gradients), value

    return jax.jit(step, donate_argnums=0)


def test_branches_of_a_loop_in_a_map_take_what_checkpoints_take():
    target = jaxoff.target("h200", devices=2)
    mesh = target.mesh((2,), ("rows",), (AxisType.Auto,))

    def struct(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = struct(P(), LAYERS, WIDTH, 4 * WIDTH), struct(P(), LAYERS, 4 * WIDTH, WIDTH)
    args = params, struct(P("rows"), ROWS, WIDTH)
    by_hand = program_nbytes(target.compile(make_step(mesh, jax.checkpoint), *args))
    written = make_step(mesh, lambda f: f)
    assert by_hand < 0.1 * program_nbytes(target.compile(written, *args))
    plan = jaxoff.plan(written, *args, device_bytes=1.03 * by_hand, host_bytes=1, device="h200")
    assert program_nbytes(target.compile(plan.step, *args)) <= 1.03 * by_hand
