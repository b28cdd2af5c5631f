"""The collector is paused while programs are rewritten, and goes on in any case."""

import gc

import jax.numpy as jnp
import pytest

import jaxoff
from jaxoff._runtime.garbage import collector_paused
from jaxoff._schedule import rewrite


@collector_paused()
def _fail():
    raise KeyError(gc.isenabled())


def test_the_collector_goes_on_after_an_error():
    with pytest.raises(KeyError, match="False"):
        _fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_programs_are_rewritten_without_collections(monkeypatch):
    seen, given = [], rewrite._find_transfers
    monkeypatch.setattr(rewrite, "_find_transfers", lambda *a: seen.append(gc.isenabled()) or given(*a))
    jaxoff.jit(jnp.sin)(jnp.ones(3))
    assert seen and not any(seen)
    assert gc.isenabled()
