"""The host memory that a traced program is said to take is what XLA takes."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._device.profile import H200
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.rewrite import rewrite
from tests.aot.programs import BOTH, LAYERS, ROWS, STACK_NBYTES, TRITON, D, arguments, layer, scanned, step
from tests.recipes import jit_in_order

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


def host_nbytes(fun, rows=ROWS):
    compiled = jaxoff.target("h200").compile(fun, *arguments(rows), compiler_options=TRITON)
    return compiled.memory_analysis().host_temp_size_in_bytes


@pytest.mark.parametrize(("fun", "stacks"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_compiled_program_takes_what_the_traced_one_is_said_to(fun, stacks):
    traced = jax.make_jaxpr(fun)(*arguments())
    assert peak_host_nbytes(traced) == host_nbytes(jax.jit(fun)) == stacks * STACK_NBYTES
    spare = rewrite(traced, H200).spare_nbytes
    assert spare == stacks * STACK_NBYTES // LAYERS
    assert host_nbytes(jit_in_order(fun)) == stacks * STACK_NBYTES + spare


def test_values_of_more_elements_than_32_bits_count_are_offloaded_whole():
    rows = 2**31 // D + 4096
    fun = step(scanned(BOTH))
    row_nbytes = rows * D * 2
    assert host_nbytes(jax.jit(fun), rows) == 2 * LAYERS * row_nbytes
    jitted = jaxoff.jit(fun, recipe="concurrent")
    facts = jaxoff.verify(
        jaxoff.target("h200").compile(jitted, *arguments(rows)), compiler_options=jitted.options
    )
    assert facts.host_bytes == 2 * (LAYERS + 1) * row_nbytes
    assert {copy.nbytes for copy in facts.copies} == {row_nbytes}
    assert all(copy.via != "kernel" and copy.overlaps for copy in facts.copies)


@pytest.mark.parametrize(("keep_first", "stacks"), [(True, 1), (False, 2)])
def test_what_the_backward_pass_needs_first_is_not_in_host_memory(keep_first, stacks):
    def loss(w, x):
        x, _ = jaxoff.scan(layer, x, w, policy=BOTH, keep_first=keep_first)
        return x.astype(jnp.float32).sum()

    assert host_nbytes(jax.jit(step(loss))) == stacks * STACK_NBYTES
    assert jaxoff.explain(loss, *arguments()).host_bytes == stacks * STACK_NBYTES
