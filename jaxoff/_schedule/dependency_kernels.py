"""Kernels of one element, and copies, for dependencies which XLA would otherwise drop.

`jaxoff._schedule.emit` and `jaxoff._schedule.loops` trace each function into the program.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxoff._jaxpr import compat, meshes
from jaxoff._jaxpr.own_primitives import change_in_place
from jaxoff._jaxpr.shares import apply_to_shares


def copy_aside(value, iteration):
    """Copies a value into a buffer of its own, by a select on the loop counter.

    The select is a kernel. XLA would leave out a plain copy, and make the next writer wait for the buffer.
    """
    value = lax.optimization_barrier(value)
    return lax.select(iteration >= 0, value, lax.full_like(value, 0))


def delay_iteration(iteration, value, *, is_divided: bool = False):
    """Makes the loop counter, which is never negative, depend on a value.

    A barrier is not possible: XLA evaluates the starts of slices itself, and cannot evaluate a barrier.
    """

    def delay(iteration, value):
        bit = read_bit_of_shares(value) if is_divided else read_bit(value)
        return jnp.maximum(iteration, -bit.astype(iteration.dtype))

    return _keep_type(delay, iteration, value)


def delay_values(values, bits):
    """Makes values depend on bits: writes the first element of each value back once the bits are known.

    A barrier makes no kernel wait in a CUDA graph whose edges follow the data.

    Returns:
      The values, and their first elements from before the write.
    """
    bit = functools.reduce(operator.or_, bits)
    # Without this barrier XLA fuses the write with the value's maker, and the maker waits for the bits.
    values = lax.optimization_barrier(values)
    elements = [lax.slice(value, [0] * value.ndim, [1] * value.ndim) for value in values]

    def write_back(value, element):
        # XLA cannot see through a barrier, and takes the two operands of the select for different values.
        chosen = lax.select(jnp.full(element.shape, bit), element, lax.optimization_barrier(element))
        return lax.dynamic_update_slice(value, lax.optimization_barrier(chosen), [0] * value.ndim)

    return [*map(write_back, values, elements)], elements


def read_bit(value):
    """Computes a bit from the first element of a value; the bit is unknown until the value is made."""
    element = _read_first_element(value)
    return element != element if jnp.issubdtype(value.dtype, jnp.floating) else element.astype(bool)


def read_bit_of_shares(value):
    """Computes, on each device, a bit from the first element of the device's share of a divided value."""
    return apply_to_shares(
        lambda share, *, shape: read_bit(share),
        [value],
        like=lambda value: jnp.zeros((), bool),
    )


def _read_first_element(value):
    return lax.slice(value, [0] * value.ndim, [1] * value.ndim).reshape(())


def write_element(first: int, step: int, stack, value, iteration, *, is_divided: bool = False):
    """Writes the first element of a value into row `first + step * iteration` of a host stack.

    If the compiler divides the stack and the value, each device writes an element of its own share.
    """
    if is_divided:
        operands = [stack, value, first + step * iteration]
        return apply_to_shares(_write_share, operands, like=lambda stack, *_: stack, follows_first=True)

    def write(stack, value, iteration):
        on_host = _read_element_to_host(value, stack)
        start = [first + step * iteration] + [0] * (stack.ndim - 1)
        return lax.dynamic_update_slice(stack, on_host, start, allow_negative_indices=False)

    if meshes.explicit_mesh(kind := jax.typeof(stack)) is not None:  # of one device, where all is whole
        write = jax.sharding.auto_axes(out_sharding=kind.sharding)(write)
    return _keep_type(write, stack, value, iteration)


def _keep_type(function, value, *others):
    """`function(value, *others)`, which differs between devices only where `value` does."""
    if compat.varies_with(jax.typeof(value), map(jax.typeof, others)):
        return function(value, *others)
    return change_in_place(function, value, *others)


def _write_share(stack, value, row, *, shape):
    del shape
    stack = jax.device_put(stack, jax.memory.Space.Host)  # types in `apply_to_shares` have no memory space
    on_host = _read_element_to_host(value, stack, is_divided=True)
    start = [row] + [0] * (stack.ndim - 1)
    return lax.dynamic_update_slice(stack, on_host, start, allow_negative_indices=False)


def _read_element_to_host(value, stack, *, is_divided=False):
    element = _read_first_element(value)
    if is_divided:
        # XLA gives the stack the layout of what is written into it. Without a barrier that is a slice of the
        # value, in the value's layout, and XLA fails to take a copy between layouts off the host.
        element = lax.optimization_barrier(element)
    element = element.reshape([1] * stack.ndim).astype(stack.dtype)
    return jax.device_put(element, jax.memory.Space.Host)
