"""Runs the Hopper kernels on the CPU, in Pallas's interpreter, which orders every access to shared memory.

It starts buffers as NaN, refuses reads outside of an array, wants every barrier's phase to be seen, and tells
of two accesses that nothing orders.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

# Few, so that one program takes several tiles and its ring of buffers wraps.
PROGRAMS = 3


def _call_back(*args, callback, **_):
    """JAX's own puts each argument on a device first, which is most of the interpreter's time."""

    def plain(arg):
        return arg.item() if arg.shape == () and np.issubdtype(arg.dtype, np.integer) else np.array(arg)

    return jax.tree.map(np.asarray, callback(*map(plain, args)))


@contextlib.contextmanager
def interpreting(programs: int = PROGRAMS) -> Iterator[None]:
    """Interprets the kernels that are traced or run inside, as on a GPU of so many multiprocessors.

    Raises:
      AssertionError: two accesses race. The interpreter prints that and goes on.
    """
    device = AbstractDevice(device_kind="interpreter", num_cores=programs, platform="cpu")
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(jax_callback, "io_callback_impl", _call_back),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
    ):
        yield
    if "RACE DETECTED" in (text := printed.getvalue()):
        raise AssertionError(text[:2000])


def interpreted(function: Callable[..., Any], *args: Any, programs: int = PROGRAMS) -> Callable[..., Any]:
    """Compiles a function of kernels once; what it returns takes other values of the same shapes."""
    with interpreting(programs):
        program = jax.jit(function).lower(*args).compile()

    def run(*args):
        with interpreting(programs):
            return jax.block_until_ready(program(*args))

    return run
