"""Bytes of collectives, counted in the text of a program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoff._compiled import hlo
from jaxoff._compiled.exchange import exchanged_nbytes

ASYNC = """HloModule jit_step

%gather (p: bf16[4,8]) -> bf16[8,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), dimensions={0}
}

%body (s: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %start.1 = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}) async-start(%x), calls=%gather
  %reduce-start = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%y), to_apply=%add
  %sum = (f32[2]{0}, f32[3]{0}) all-reduce(%a, %b), to_apply=%add
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %while.1 = (s32[], bf16[4,8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %last = pred[10]{0} all-gather(%flags)
}
"""


def test_a_collective_in_a_loop_counts_once_an_iteration():
    gather, scatter, reduce = 8 * 8 * 2, 4 * 4, (2 + 3) * 4
    assert exchanged_nbytes(hlo.parse(ASYNC)) == 6 * (gather + scatter + reduce) + 10


def test_a_program_of_one_device_exchanges_nothing():
    text = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()
    assert exchanged_nbytes(hlo.parse(text)) == 0


@pytest.mark.parametrize("iterations", [1, 5])
def test_a_compiled_loop(iterations):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    def step(x, w):
        def body(x, _):
            y = jax.lax.with_sharding_constraint(jnp.sin(x), whole)
            return jax.lax.with_sharding_constraint(y @ w, rows), None

        return jax.lax.scan(body, x, length=iterations)[0]

    arguments = [jax.device_put(jnp.ones((16, 16)), sharding) for sharding in (rows, whole)]
    compiled = jax.jit(step).lower(*arguments).compile()
    assert exchanged_nbytes(hlo.parse(compiled.as_text())) == iterations * 16 * 16 * 4
