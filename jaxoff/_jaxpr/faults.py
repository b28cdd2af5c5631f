"""Errors raised by mistakes in a rewriting, as opposed to refusals."""

from __future__ import annotations

from jaxoff._jaxpr import compat

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    compat.ShardingTypeError,
)
