"""The host memory that a traced program is said to take is what XLA takes."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._host_bytes import peak_host_nbytes
from tests.aot.programs import BOTH, STACK_NBYTES, arguments, layer, scanned, step

pytestmark = pytest.mark.aot

GRAD = jax.grad(scanned(BOTH))


def over_microbatches(w, x):
    def add(total, x):
        return total + GRAD(w, x), None

    return jax.lax.scan(add, w, jnp.stack([x, x + 1, x + 2]))[0]


PROGRAMS = {
    "one step": (step(scanned(BOTH)), 2),
    "a step after another": (lambda w, x: GRAD(w - GRAD(w, x), x), 4),
    "microbatches": (over_microbatches, 2),
}


@pytest.mark.parametrize(("fun", "stacks"), PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("jit", [jax.jit, jaxoff.jit], ids=["jax", "jaxoff"])
def test_the_compiled_program_takes_what_the_traced_one_is_said_to(fun, stacks, jit):
    needed = peak_host_nbytes(jax.make_jaxpr(fun)(*arguments()))
    taken = jaxoff.target("h200").compile(jit(fun), *arguments()).memory_analysis().host_temp_size_in_bytes
    assert needed == taken == stacks * STACK_NBYTES


@pytest.mark.parametrize(("keep_first", "stacks"), [(True, 1), (False, 2)])
def test_what_the_backward_pass_needs_first_is_not_in_host_memory(keep_first, stacks):
    def loss(w, x):
        x, _ = jaxoff.scan(layer, x, w, policy=BOTH, keep_first=keep_first)
        return x.astype(jnp.float32).sum()

    program = jaxoff.target("h200").compile(jaxoff.jit(step(loss)), *arguments())
    assert program.memory_analysis().host_temp_size_in_bytes == stacks * STACK_NBYTES
    assert jaxoff.explain(loss, *arguments()).host_bytes == stacks * STACK_NBYTES
