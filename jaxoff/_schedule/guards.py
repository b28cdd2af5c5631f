"""Errors and warnings of a program bound to fail, or to compute wrong numbers, on its devices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._report.warn import OWN_FILES
from jaxoff._runtime import flags
from jaxoff._runtime.host import find_host_bytes
from jaxoff._runtime.pinned_pool import refuse_small_pool
from jaxoff._runtime.versions import refuse_wrong_jaxlib
from jaxoff._schedule.host_memory import peak_host_nbytes
from jaxoff._schedule.rewrite import Rewritten
from jaxoff._schedule.settings import JAXLIB


def refuse_what_fails(given: ClosedJaxpr, program: Rewritten, options: Mapping[str, Any]) -> None:
    """Raises for too little host memory and for a wrong jaxlib; warns of harmful options.

    Args:
      given: the user's program.
      program: the rewritten program.
      options: the caller's compiler options.

    Raises:
      RuntimeError: on a GPU, for any of them.
    """
    platform = jax.default_backend()
    # A process has one pool for its devices; whole arrays are spread over those of all processes.
    nbytes = (peak_host_nbytes(given) + program.spare_nbytes) * jax.local_device_count() // jax.device_count()
    refuse_small_pool(nbytes, os.environ, platform, find_host_bytes())
    if not (program.scanned or program.flat):
        return
    refuse_wrong_jaxlib(JAXLIB, platform)
    level = jax.config.jax_optimization_level
    for text in flags.find_harmful_options(options, scanned=bool(program.scanned), level=level):
        warnings.warn(text, skip_file_prefixes=OWN_FILES)
