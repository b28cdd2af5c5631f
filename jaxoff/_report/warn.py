"""Warnings of findings, on the line of the user's call."""

from __future__ import annotations

import contextlib
import os
import warnings

import jax

from jaxoff._report.finding import Finding

# Beginnings of paths of jaxoff, of JAX and of context managers: a warning names the caller of these.
OWN_FILES = (
    *(os.path.dirname(package) for package in (os.path.dirname(__file__), jax.__file__)),
    contextlib.__file__.removesuffix(".py"),
)


def warn_of(finding: Finding) -> None:
    """Warns of a finding."""
    warnings.warn(str(finding), skip_file_prefixes=OWN_FILES)
