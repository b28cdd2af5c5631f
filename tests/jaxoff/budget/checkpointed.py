"""What a `jax.checkpoint` of each layer takes, as the budget of the step without."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxoff
from jaxoff._runtime.program_memory import program_nbytes


def check_fit(make_step: Callable[..., Any], args: tuple[Any, ...], part: float, **options: Any) -> None:
    """Checks that a step fits in what its layers under `jax.checkpoint` take, and computes the same.

    Args:
      make_step: a wrapper of layers -> the step.
      args: of the step.
      part: the budget, as a part of what the checkpointed step takes.
      options: of `jax.jit`.
    """
    recomputed = jax.jit(make_step(jax.checkpoint), **options).lower(*args).compile()
    limit = part * program_nbytes(recomputed)
    written = make_step(lambda layer: layer)
    step = jaxoff.jit(written, device_bytes=limit, host_bytes=1, **options)
    compiled = step.lower(*args).compile()
    assert program_nbytes(compiled) <= limit
    want = jax.jit(written)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), compiled(*args), want)
