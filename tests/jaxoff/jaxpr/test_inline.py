"""Calls replaced by their equations: scopes and source lines."""

import inspect

import jax
import jax.numpy as jnp

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.inline import inline_program


def mask(key, x):
    drawn = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(drawn, x, 0.0)


def test_an_equation_of_library_code_has_the_line_of_the_users_call():
    program = inline_program(jax.make_jaxpr(mask)(jax.random.key(0), jnp.ones(8)).jaxpr)
    first = inspect.getsourcelines(mask)[1]
    lines = {eqn.primitive.name: compat.source_line(eqn) for eqn in program.eqns}
    assert lines["random_bits"] == lines["lt"] == f"{__file__}:{first + 1} (mask)"
    assert lines["select_n"] == f"{__file__}:{first + 2} (mask)"
