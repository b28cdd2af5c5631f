"""The order of samples."""

import collections
import itertools

import pytest

from bench.rounds import order_of


@pytest.mark.parametrize("count", range(2, 9))
def test_each_variant_follows_each_other_one_equally_often(count):
    variants = [f"v{k}" for k in range(count)]
    rounds = count * (1 + count % 2)
    orders = [order_of(variants, number) for number in range(rounds)]
    assert all(sorted(order) == variants for order in orders)
    followed = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(followed) == set(itertools.permutations(variants, 2))
    assert len(set(followed.values())) == 1


@pytest.mark.parametrize("variants", [[], ["a"]])
def test_one_variant_is_alone_in_each_round(variants):
    assert order_of(variants, 3) == variants
