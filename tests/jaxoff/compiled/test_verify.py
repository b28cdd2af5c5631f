"""What `verify` refuses. What it finds is tested where programs are compiled for a GPU."""

import jax
import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._compiled.verify import verify


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((8, 8)))


def test_a_program_for_the_cpu_is_refused_with_the_way_out(lowered):
    with pytest.raises(ValueError, match=r'compiled for a GPU.*jaxoff\.target\("h200"\)\.compile'):
        verify(lowered.compile())


def test_what_is_not_compiled_is_refused(lowered):
    with pytest.raises(TypeError, match=r"takes a compiled program.*got Lowered"):
        verify(lowered)
    with pytest.raises(TypeError, match=r"takes a compiled program.*got function"):
        verify(lambda x: x)
    with pytest.raises(TypeError, match=r"takes a compiled program.*got NoneType"):
        verify(None)


def test_what_is_expected_is_said_once_and_is_a_number_of_bytes(lowered):
    report = jaxoff.explain(jnp.sin, jnp.ones(3))
    with pytest.raises(ValueError, match="say the same thing"):
        verify(lowered.compile(), expected_host_bytes=1, report=report)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        verify(lowered.compile(), expected_host_bytes=-1)
