"""A mark for tests of what `jax_remat3` does otherwise than `jax.checkpoint` without it."""

import pytest

from jaxoff._jaxpr import remat3

differs = pytest.mark.skipif(remat3.is_enabled(), reason="jax_remat3 asks policies about names and products")
