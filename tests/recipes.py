"""`jaxoff.jit` for tests of its order: the first recipe, whatever the memory of the others."""

import functools

import jaxoff

jit_in_order = functools.partial(jaxoff.jit, recipe="concurrent")
