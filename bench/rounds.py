"""The order in which variants take samples: each variant follows each other variant equally often."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax


def time_in_rounds[K: Hashable](
    calls: Mapping[K, Callable[[], Any]], repeats: int, prepare: Callable[[K], Any] = lambda _: None
) -> dict[K, list[float]]:
    """Times alternating calls; returns the milliseconds of each, a sample a round.

    Args:
      calls: by variant.
      repeats: the number of rounds.
      prepare: called with a variant ahead of its clock; what it returns is waited for.
    """
    times: dict[K, list[float]] = {variant: [] for variant in calls}
    for repeat in range(repeats):
        for variant in order_of(list(calls), repeat):
            jax.block_until_ready(prepare(variant))
            start = time.perf_counter()
            jax.block_until_ready(calls[variant]())
            times[variant].append((time.perf_counter() - start) * 1e3)
    return times


def order_of[K: Hashable](variants: Sequence[K], number: int) -> list[K]:
    """The order of a round.

    The program that ran before a variant changes the variant's clock: a program at the card's power limit is
    up to 3% faster after a program that waits. So each variant follows each other variant equally often: once
    in N rounds if the number N of variants is even, else twice in 2 N rounds.

    Args:
      variants: the variants to order.
      number: the round's number, from 0.

    References:
      Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.
    """
    count = len(variants)
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(count)]  # 0, 1, -1, 2, -2, ...
    order = [variants[(k + number) % count] for k in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order
