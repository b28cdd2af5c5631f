"""Arithmetic of time intervals: union, difference, length."""

from __future__ import annotations

from collections.abc import Iterable

# Start and end, in ms.
type Interval = tuple[float, float]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals into the fewest disjoint intervals with the same points, in order.

    An interval without a length is left out.
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Iterable[Interval], cover: Iterable[Interval]) -> list[Interval]:
    """Subtracts a cover from intervals; returns disjoint intervals in order."""
    covers, bare, first = unite(cover), [], 0
    for start, end in unite(intervals):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        for left, right in covers[first:]:
            if left >= end:
                break
            if start < left:
                bare.append((start, left))
            start = right
        if start < end:
            bare.append((start, end))
    return bare


def sum_lengths(intervals: Iterable[Interval]) -> float:
    """Sums the lengths of disjoint intervals."""
    return sum((end - start for start, end in intervals), 0.0)
