"""Steps in processes limited to their budgets: the command line, and the arrays of a state."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import allocator


def test_a_word_has_a_program_and_its_budgets():
    assert allocator.parse_budgets("vit=40,25.5") == [("vit", 40.0), ("vit", 25.5)]


@pytest.mark.parametrize("word", ["vit", "vit=", "vits=40"])
def test_a_word_without_budgets_or_program_is_refused(word):
    with pytest.raises(argparse.ArgumentTypeError, match="PROGRAM=GB,GB"):
        allocator.parse_budgets(word)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_a_state_is_of_small_numbers_that_are_not_negative(dtype):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made = np.asarray(allocator.make_array(jax.ShapeDtypeStruct((3, 5), dtype), place), np.float32)
    assert made.shape == (3, 5)
    assert (made >= 0).all()
    assert made.max() < 0.03
    assert (made.max() > 0) == (dtype != jnp.int32)
