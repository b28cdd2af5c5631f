"""The room for kept values, corrected by what programs took."""

import jax
import jax.numpy as jnp
import pytest

from jaxoff._budget.choose import saved_nbytes
from jaxoff._budget.costs import Costs
from jaxoff._budget.joint_graph import Placements
from jaxoff._budget.tried import Tried, correct_room
from jaxoff._device.profile import H200
from tests.jaxoff.budget.layered import list_joint_graphs

LIMIT = 1e9


@pytest.fixture(scope="module")
def costs():
    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

    args = jax.ShapeDtypeStruct((4, 256, 256), "float32"), jax.ShapeDtypeStruct((1024, 256), "float32")
    return [Costs.of(graph, H200) for graph in list_joint_graphs(jax.make_jaxpr(jax.grad(loss))(*args))]


def make_tried(costs, count, nbytes):
    """A program that keeps the first values of a layer, as many as `count`, and takes `nbytes`."""
    placements = (Placements(tuple(range(count))),)
    return Tried((costs[0].pair,), placements, (), 0.0, False, 0.0, nbytes, 1, None)


def test_less_kept_in_more_memory_says_nothing_of_the_next_step(costs):
    """The room shrinks by the excess of the program nearest to the budget, and not to nothing."""
    first, second = make_tried(costs, 2, LIMIT + 1e5), make_tried(costs, 1, 1.2 * LIMIT)
    assert saved_nbytes(costs, second.placements) < saved_nbytes(costs, first.placements)
    alone = correct_room(costs, [first], LIMIT)
    assert correct_room(costs, [first, second], LIMIT) == alone > 0


def test_a_slow_descent_takes_longer_steps(costs):
    """Where a byte less kept saves a tenth of a byte, the step is ten times the excess."""
    kept = [saved_nbytes(costs, make_tried(costs, count, 0.0).placements) for count in (2, 1)]
    over = 1e4
    nbytes = LIMIT + over + (kept[0] - kept[1]) / 10, LIMIT + over
    tried = [make_tried(costs, count, n) for count, n in zip((2, 1), nbytes, strict=True)]
    assert correct_room(costs, tried, LIMIT) == pytest.approx(kept[1] - 10 * over - 0.05 * over)
