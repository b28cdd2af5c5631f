"""The bytes that the collectives of a compiled program exchange between devices."""

from __future__ import annotations

import functools
import math
import re

# Bits of an element by type of HLO; in other types they are the first number of the name: bf16, f8e4m3.
_BITS = {"pred": 8, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"\n(?=%|ENTRY)")
_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?\("
)
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def exchanged_nbytes(text: str) -> int:
    """The bytes that the collectives of a program make on a device, those in a loop once for each iteration.

    Args:
      text: the program, as `jax.stages.Compiled.as_text` gives it.
    """
    computations = [part.splitlines() for part in _COMPUTATION.split(text)]
    by_name = {lines[0].removeprefix("ENTRY ").split(" ", 1)[0]: lines for lines in computations if lines}
    entry = next((name for name, lines in by_name.items() if lines[0].startswith("ENTRY ")), None)

    @functools.cache
    def count(name: str) -> int:
        return sum(map(count_line, by_name.get(name, ())))

    def count_line(line: str) -> int:
        made = _COLLECTIVE.search(line)
        if made:
            return _count_nbytes(made[1], is_start=bool(made[2]))
        called = _CALLED.search(line) if "=%" in line else None
        trips = _TRIPS.search(line)
        names = re.findall(r"%[\w.\-]+", called[1]) if called else ()
        return (int(trips[1]) if trips else 1) * sum(map(count, names))

    return 0 if entry is None else count(entry)


def _count_nbytes(types: str, *, is_start: bool) -> int:
    """The bytes of a collective's results; the type of a start has the operands before the results."""
    arrays = [_array_nbytes(*found) for found in _ARRAY.findall(_LAYOUT.sub("", types))]
    return sum(arrays[len(arrays) // 2 :]) if is_start and len(arrays) > 1 else sum(arrays)


def _array_nbytes(dtype: str, shape: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (int(digits[0]) if digits else 8)
    return math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
