"""Kernels of one element, and copies, that stand for dependencies which XLA would otherwise drop.

Each is a function to be traced into a program that is put in order; see `jaxoff._schedule.order`.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax


def copy_aside(value, iteration):
    """A value in other memory: a kernel, since XLA leaves out a copy and waits for the memory instead."""
    value = lax.optimization_barrier(value)
    return lax.select(iteration >= 0, value, lax.full_like(value, 0))


def delay_iteration(iteration, value):
    """The iteration of a loop, which is never negative, so that it depends on a value as well.

    No barrier: XLA evaluates the places of slices itself, and cannot evaluate a barrier.
    """
    return jnp.maximum(iteration, -read_bit(value).astype(iteration.dtype))


def delay_values(values, bits):
    """Values, of each the first element written back once some bits are known; and those elements.

    Where the edges of a graph are by use of data, a barrier makes nothing wait.
    """
    bit = functools.reduce(operator.or_, bits)
    values = lax.optimization_barrier(values)  # or what makes them waits, in one kernel with the write
    elements = [lax.slice(value, [0] * value.ndim, [1] * value.ndim) for value in values]

    def written(value, element):
        # For XLA, which cannot see through a barrier, these are two values to choose from.
        chosen = lax.select(jnp.full(element.shape, bit), element, lax.optimization_barrier(element))
        return lax.dynamic_update_slice(value, lax.optimization_barrier(chosen), [0] * value.ndim)

    return [*map(written, values, elements)], elements


def read_bit(value):
    """Something about a value that nothing knows before it is there."""
    element = _first_element(value)
    return element != element if jnp.issubdtype(value.dtype, jnp.floating) else element.astype(bool)


def _first_element(value):
    return lax.slice(value, [0] * value.ndim, [1] * value.ndim).reshape(())


def write_element(first: int, step: int, stack, value, iteration):
    """Writes the first element of a value into a row of a stack on the host."""
    element = _first_element(value).reshape([1] * stack.ndim).astype(stack.dtype)
    on_host = jax.device_put(element, jax.memory.Space.Host)
    start = [first + step * iteration] + [0] * (stack.ndim - 1)
    return lax.dynamic_update_slice(stack, on_host, start, allow_negative_indices=False)
