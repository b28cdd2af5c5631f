"""Values for `name`: pytrees leaf by leaf, arrays of every dtype, and leaves without a name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from tests.jaxoff.policy.test_semantics import W, X, kept, square


def test_a_pytree_is_tagged_leaf_by_leaf():
    def block(w, x):
        quantized = {
            "data": (x @ w).astype(jnp.bfloat16),
            "scale": jnp.abs(x @ w).max(-1, keepdims=True),
            "bias": None,
            "kind": "int8",
        }
        quantized = jaxoff.mark_offload(quantized)
        assert quantized["bias"] is None and quantized["kind"] == "int8"
        return square(quantized["data"].astype(jnp.float32)) * square(quantized["scale"])

    spaces = kept(jax.checkpoint(block, policy=jaxoff.policy()), W, X)
    assert spaces == {"host": [(8, 1), (8, 16)]}


def test_numpy_arrays_and_python_numbers():
    tagged = jaxoff.name({"a": np.ones(3, np.float32), "b": 2.0, "c": 3}, "x")
    assert isinstance(tagged["b"], float) and tagged["c"] == 3
    np.testing.assert_array_equal(tagged["a"], np.ones(3))


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float32",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "int8",
        "int32",
        "bool",
        "uint32",
        "int4",
    ],
)
def test_every_dtype_keeps_its_value(dtype):
    if dtype == "bool" or "int" in dtype:
        x = jnp.array([0, 1, 1, 0]).astype(dtype)
    else:
        x = jnp.array([0.0, -1.5, 448.0, 1e-2]).astype(dtype)
    for tag in (lambda x: jaxoff.name(x, "a"), jaxoff.mark_offload, jaxoff.mark_not_offload):
        for run in (tag, jax.jit(tag)):
            assert run(x).dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(run(x)), np.asarray(x))


def test_keys_can_be_named():
    key = jaxoff.name(jax.random.key(3), "key")
    assert (jax.random.bits(key) == jax.random.bits(jax.random.key(3))).all()
