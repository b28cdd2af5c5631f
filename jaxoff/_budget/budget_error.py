"""The error of a budget too small for every program, with the largest values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import argument_nbytes, list_peak_values
from jaxoff._budget.report import PlacedValue, shorten
from jaxoff._jaxpr.compat import ClosedJaxpr
from jaxoff._jaxpr.faults import FAULTS
from jaxoff._report.tables import format_nbytes

# Values that an error names.
_LISTED = 10
# Values of less than this part of the largest are not listed: beside gigabytes, scalars explain nothing.
_LEAST_OF_LARGEST = 0.001
# A search tries all programs whose memory is at most this many times its budget.
_NEAR = 1.2
# Searches for less memory at most, behind one that found nothing.
_SEARCHES = 3


class BudgetError(ValueError):
    """No placement fits the budget.

    Attributes:
      smallest_bytes: the device memory of the smallest program found, for which there is a plan (where layers
        run in parts, for some percent more); None where no placement fits the budget of host memory.
    """

    __module__ = "jaxoff"  # the public name, in tracebacks

    def __init__(
        self, message: str, smallest_bytes: int | None, list_largest: Callable[[], Sequence[str]] = tuple
    ):
        super().__init__(message)
        self.smallest_bytes, self._list_largest = smallest_bytes, list_largest

    @functools.cached_property
    def largest(self) -> tuple[str, ...]:
        """The largest values at the peak of that plan's program, by an estimate: bytes, shape and source.

        Empty where a search for a smaller budget found the program: its plan lists the values.
        """
        return tuple(self._list_largest())

    def least_bytes(self) -> float:
        """`smallest_bytes`, or infinity."""
        return math.inf if self.smallest_bytes is None else self.smallest_bytes

    def __str__(self) -> str:
        if not self.largest:
            return self.args[0]
        return "\n  ".join((f"{self.args[0]} The largest values at its peak:", *self.largest))

    def __reduce__(self):  # for another process, which has no program to list values of
        return BudgetError, (self.args[0], self.smallest_bytes, functools.partial(tuple, self.largest))

    def extend(self, text: str, smallest_bytes: int | None = None) -> BudgetError:
        """The same error with a further sentence, and with another smallest budget if given."""
        least = self.smallest_bytes if smallest_bytes is None else smallest_bytes
        return BudgetError(f"{self.args[0]} {text}", least, lambda: self.largest)


def find_least(error: BudgetError, budget: Budget, find_nbytes: Callable[[Budget], float]) -> BudgetError:
    """The error of a search with the least memory of any budget: not every program is tried far below it.

    Args:
      error: of the search.
      budget: of the search.
      find_nbytes: another search, budget -> bytes on a device of the program found.
    """
    first = least = error.least_bytes()
    largest: tuple[str, ...] = ()
    if least <= _NEAR * budget.device_nbytes or math.isinf(least):
        return error
    for _ in range(_SEARCHES):
        try:
            least = find_nbytes(dataclasses.replace(budget, device_nbytes=least / _NEAR))
        except BudgetError as other:
            if other.least_bytes() < least:
                least, largest = other.least_bytes(), other.largest
            break
        except (ValueError, *FAULTS):  # of a program that nobody asked for
            break
    if least == first:
        return error
    nbytes = math.ceil(least)
    size = format_nbytes(nbytes)
    text = f"{error.args[0]} A search for less found a program of {size}: ask for that much or more."
    return BudgetError(text, nbytes, lambda: largest)


def make_uncompiled(limit: str, host_nbytes: float | None, tried: int) -> BudgetError:
    """The error of a search that compiled none of the programs `tried`, for a limit of device memory."""
    if not tried:
        host = format_nbytes(int(host_nbytes or 0))
        return BudgetError(f"no placement keeps a layer's input within {host} of host memory.", None)
    text = f"no program for {limit} of device memory: XLA refuses to compile the {tried} tried."
    return BudgetError(text, None)


# What an error says of a program without layers to place.
NO_LAYERS = (
    ": no layers were found, neither a loop over layers (jax.lax.scan) that keeps values for a loop of "
    "its backward pass nor layers one after the other with products"
)


def list_largest(program: ClosedJaxpr, placed: Sequence[PlacedValue]) -> list[str]:
    """The largest values at the peak of a program, a line each: arguments, kept values, and others.

    Args:
      program: the program.
      placed: the values of its layers with their placements.
    """
    kept = [v for v in placed if v.placement == "save"]
    known = {(v.shape, v.source) for v in kept}
    lines = [(argument_nbytes(program), "arguments", "", "")]
    lines += [(v.nbytes, _count(v.count, v.shape), v.value, v.source) for v in kept]
    lines += [
        (nbytes, _count(count, shape), "", source)
        for (shape, source), (count, nbytes) in list_peak_values(program).items()
        if (shape, source) not in known
    ]
    least = _LEAST_OF_LARGEST * max(line[0] for line in lines)
    lines = sorted((line for line in lines if line[0] >= least), key=lambda line: -line[0])[:_LISTED]
    return [
        "  ".join(filter(None, (format_nbytes(nbytes), *texts, shorten(source))))
        for nbytes, *texts, source in lines
    ]


def _count(count: int, shape: str) -> str:
    return f"{count} x {shape}" if count > 1 else shape
