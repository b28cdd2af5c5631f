"""Training on a mesh within a budget: each device keeps its part of the state in host memory."""

import jax
import numpy as np
import pytest

from models.options import Options
from models.parallel import ParallelProgram
from tests.models.test_program import LLAMA, tokens


def program(device_bytes=None):
    overrides = LLAMA | {"num_layers": 2, "mlp_chunk": 0, "logits_chunk": 0}
    options = Options.of("llama3_1b", overrides=overrides, batch=4, seq=16, mesh="context=2,fsdp=4")
    return ParallelProgram(options, None, device_bytes)


def list_kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def assert_same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, theirs)


@pytest.mark.long
def test_state_on_the_host_is_made_trained_saved_and_restored_where_it_rests():
    plain = program()
    expected = plain.init()
    nbytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(expected))
    p = program(1.2 * nbytes)
    state = p.init()
    kinds = list_kinds(state)
    assert "pinned_host" in kinds
    assert_same(state, expected)
    drawn = tokens(p)
    (state, metrics), (expected, others) = p.compiled_step(state, drawn), plain.compiled_step(expected, drawn)
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-3)
    assert list_kinds(state) == kinds
    saved = p.saved_form(state)
    assert list_kinds(saved) == list_kinds(p.saved_shapes)
    again = p.from_saved(saved)
    assert list_kinds(again) == kinds
    assert_same(again, state)
    (state, metrics), (again, resumed) = p.compiled_step(state, drawn), p.compiled_step(again, drawn)
    assert metrics["loss"] == resumed["loss"]
    assert_same(again, state)
