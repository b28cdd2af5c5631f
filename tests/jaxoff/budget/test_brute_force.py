"""The choice of placements against all placements of small layers, in a loop and in a list.

Every useful value of a layer is saved, offloaded or recomputed. Two bounds are checked:

- `choose_placements` is as fast as the fastest of all placements that fit by its own count of memory, but
  for its solver's gap of a thousandth;
- the whole search, whose judge of memory is the estimate here, is within 1% of the fastest placements whose
  estimate is within the budget less the part that a search may leave. Where the search misses this bound,
  `MISSED` has what the search loses.
"""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxoff._budget.budget_error import BudgetError
from jaxoff._budget.choose import choose_placements
from jaxoff._budget.fit import find_fitting
from jaxoff._budget.forms import NO_COPIES, Form
from jaxoff._budget.limits import Budget
from jaxoff._budget.memory import estimate_nbytes
from jaxoff._budget.placements import LayeredProgram
from jaxoff._budget.search import CLOSE_ENOUGH
from jaxoff._device.profile import H200
from tests.jaxoff.budget.rated import list_best, list_rated, list_useful, rate

SLOW_LINK = dataclasses.replace(H200, d2h_gbps=H200.d2h_gbps / 8, h2d_gbps=H200.h2d_gbps / 8)
FAST_LINK = dataclasses.replace(H200, d2h_gbps=H200.d2h_gbps * 8, h2d_gbps=H200.h2d_gbps * 8)
DEVICES = {"h200": H200, "slow link": SLOW_LINK, "fast link": FAST_LINK}
STYLES = ("scan", "list")
LAYERS = {"scan": 8, "list": 4}
# Rows and width of a layer's input. No stack of values has as many bytes as a stack of weights: the estimate
# believes that a loop writes the ones over the others.
SHAPES = {"wide": (24576, 2048), "long": (65536, 1024)}
EVERYTHING = 1e15
GAP = 1e-3  # of the solver, as a part of the time that placements add
SHARES = (0.2, 0.5, 0.8, 0.95)  # of the way from the least budget to that of everything kept
SLOWER = 0.01  # part of a step
# Layer, style and shape -> share -> the part of a step that the search loses there.
MISSED = {
    ("waves", "list", "long"): {0.5: 0.021},
    ("deep", "list", "wide"): {0.2: 0.021, 0.8: 0.016, 0.95: 0.027},
    ("deep", "list", "long"): {0.2: 0.024, 0.8: 0.02},
}


def gated(x, w):
    """Five useful values: the input, two products, a function of one, and what the two are multiplied to."""
    return x + (jnp.sin(x @ w[0]) * (x @ w[1])) @ w[2]


def twice(x, w):
    """Five useful values: the input, two products in a row, and a function of each."""
    return x + jnp.sin(jnp.sin(x @ w[0]) @ w[1]) @ w[2]


def waves(x, w):
    """Six useful values: the input, two products, a function of each, and what these are multiplied to."""
    return x + (jnp.sin(x @ w[0]) * jnp.cos(x @ w[1])) @ w[2]


def deep(x, w):
    """Seven useful values: the input, three products in a row, and a function of each."""
    return x + jnp.tanh(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2]) @ w[3]


# Of each layer, the widths of its weights in and out as multiples of its input's, and its useful values.
SMALL_LAYERS = {
    gated: (((1, 4), (1, 4), (4, 1)), 5),
    twice: (((1, 4), (4, 4), (4, 1)), 5),
    waves: (((1, 2), (1, 2), (2, 1)), 6),
    deep: (((1, 4), (4, 2), (2, 1), (1, 1)), 7),
}


def make_random_layer(seed):
    """A layer of up to seven useful values, by chance, and the widths of its weights."""
    draw = random.Random(seed)
    weights, steps, widths = [], [], [1]
    for _ in range(draw.randint(4, 6)):
        kind = draw.choice(["product", "product", "sin", "times"])
        same = [i for i, width in enumerate(widths[:-1]) if width == widths[-1]]
        if kind == "product" or (kind == "times" and not same):
            widths.append(draw.choice([1, 2, 4]))
            steps.append(("product", len(weights)))
            weights.append((widths[-2], widths[-1]))
        else:
            steps.append((kind, draw.choice(same) if kind == "times" else None))
            widths.append(widths[-1])
    weights.append((widths[-1], 1))

    def layer(x, w):
        values = [x]
        for kind, i in steps:
            v = values[-1]
            values.append(
                v @ w[i] if kind == "product" else jnp.sin(v) if kind == "sin" else jnp.sin(v) * values[i]
            )
        return x + values[-1] @ w[-1]

    return layer, tuple(weights)


def trace(layer, weights, style, shape, layers=None):
    """The loss and the gradients of equal layers, each under a checkpoint."""
    (rows, width), layers = shape, layers or LAYERS[style]
    lead = (layers,) if style == "scan" else ()
    w = [jax.ShapeDtypeStruct((*lead, a * width, b * width), "bfloat16") for a, b in weights]
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    block = jax.checkpoint(layer, prevent_cse=style != "scan")

    def loss(w, x):
        if style == "scan":
            x = lax.scan(lambda x, w: (block(x, w), None), x, w)[0]
        else:
            x = functools.reduce(block, w, x)
        return x.astype(jnp.float32).var()

    return jax.make_jaxpr(jax.value_and_grad(loss))(w if style == "scan" else [w] * layers, x)


def list_all(costs, device, *, copies=True):
    """All placements of the layers, rated. Of several groups of layers, those with the best of each group.

    The times of groups add up, and more bytes of one group are never less of all: others are beaten by these.
    """
    groups = [list_rated(cost, device) for cost in costs]
    if not copies:
        groups = [[r for r in group if not r.host_nbytes] for group in groups]
    if len(groups) == 1:
        return groups[0]
    best = [list_best(group, cost) for group, cost in zip(groups, costs, strict=True)]
    each = itertools.product(*best)
    return [rate(costs, [r.placements[0] for r in chosen], device) for chosen in each]


def check_choices(costs, device, points=5):
    """Checks the choices for memories between the least and that of all values, with and without copies."""
    for copies in (True, False):
        rated, host_nbytes = list_all(costs, device, copies=copies), None if copies else NO_COPIES
        least, most = (pick(r.nbytes for r in rated) for pick in (min, max))
        assert choose_placements(costs, device, 0.99 * least, host_nbytes) is None
        smallest = rate(costs, choose_placements(costs, device, None, host_nbytes)[0], device)
        assert least <= smallest.nbytes <= 1.002 * least
        for i in range(points):
            room = 1.0001 * (least + (most - least) * i / (points - 1))
            found = choose_placements(costs, device, room, host_nbytes)
            assert found is not None
            placements, added_ms = found
            chosen = rate(costs, placements, device)
            best = min((r for r in rated if r.nbytes <= room), key=lambda r: r.milliseconds)
            said = (
                f"in {room / 1e6:.1f} MB\n{chosen.describe(costs)} is chosen\n{best.describe(costs)} is best"
            )
            assert chosen.nbytes <= room * (1 + 1e-6), said
            assert added_ms == pytest.approx(chosen.milliseconds, rel=GAP, abs=1e-6), said
            assert added_ms <= (1 + GAP) * best.milliseconds + 1e-6, said


def list_costs(closed, device):
    return Form.of(LayeredProgram.of(closed), (), device, Budget(EVERYTHING)).costs


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", SMALL_LAYERS, ids=lambda layer: layer.__name__)
def test_the_choice_is_the_fastest_of_all_placements(layer, style):
    weights, useful = SMALL_LAYERS[layer]
    cases = (("wide", H200), ("long", SLOW_LINK), ("wide", FAST_LINK))
    for shape, device in cases if style == "scan" else cases[:1]:
        costs = list_costs(trace(layer, weights, style, SHAPES[shape]), device)
        assert {len(list_useful(cost)) for cost in costs} == {useful}
        check_choices(costs, device)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_fastest_of_all_placements_of_random_layers(seed):
    layer, weights = make_random_layer(seed)
    draw = random.Random(seed)
    shape = draw.choice([4096, 16384, 65536]), draw.choice([512, 1024, 2048])
    style, device = STYLES[seed % 2], draw.choice(list(DEVICES.values()))
    closed = trace(layer, weights, style, shape, draw.choice([2, 3, 6]))
    check_choices(list_costs(closed, device), device, points=9)


def find_slower(closed, shares):
    """What the search loses to the fastest placements that fit, for budgets from the least to the most.

    Returns:
      By share of the way from the least budget to the most: the part of a step that the search takes longer
      than the fastest placements whose estimate is within the budget less what a search may leave, and text.
    """
    donated = [False] * len(closed.jaxpr.invars)

    def estimate(program):
        return estimate_nbytes(program, donated), None

    def find(nbytes):
        return find_fitting(closed, H200, Budget(nbytes), donated, estimate)

    form = Form.of(LayeredProgram.of(closed), (), H200, Budget(EVERYTHING))
    rated = sorted(list_all(form.costs, H200), key=lambda r: r.milliseconds)
    size = functools.cache(lambda placements: estimate(form.write(placements, fills=False))[0])  # as searches
    fastest = find(EVERYTHING)
    with pytest.raises(BudgetError) as error:
        find(1.0)
    least = error.value.smallest_bytes
    assert least is not None
    slower = {}
    for share in shares:
        limit = least + share * (fastest.nbytes - least)
        found = find(limit)
        assert found.nbytes <= limit
        if not (found.regions or found.tiles):
            assert found.nbytes == size(found.placements)
            own = rate(form.costs, found.placements, H200)
            assert found.added_ms == pytest.approx(own.milliseconds, rel=GAP)
        faster = (r for r in rated if fastest.base_ms + r.milliseconds < found.milliseconds())
        best = next((r for r in faster if size(r.placements) <= (1 - CLOSE_ENOUGH) * limit), None)
        if best is None:
            slower[share] = 0.0, ""
            continue
        best_ms = fastest.base_ms + best.milliseconds
        chosen = [(placed.saved, placed.offloaded) for placed in found.placements]
        text = (
            f"in {limit / 1e6:.1f} MB the search finds {found.milliseconds():.3f} ms in "
            f"{found.nbytes / 1e6:.1f} MB with (saved, offloaded) {chosen}; there is {best_ms:.3f} ms in "
            f"{size(best.placements) / 1e6:.1f} MB with {best.describe(form.costs)}"
        )
        slower[share] = found.milliseconds() / best_ms - 1, text
    return slower


CASES = [
    pytest.param(
        layer,
        style,
        shape,
        id=f"{layer.__name__}-{style}-{shape}",
        marks=[pytest.mark.long] * (shape == "long" or (style == "list" and layer is not waves)),
    )
    for layer, style, shape in itertools.product(SMALL_LAYERS, STYLES, SHAPES)
]


@pytest.mark.parametrize(("layer", "style", "shape"), CASES)
def test_the_search_is_nearly_as_fast_as_all_placements_but_for_known_cases(layer, style, shape):
    slower = find_slower(trace(layer, SMALL_LAYERS[layer][0], style, SHAPES[shape]), SHARES)
    found = {share: part for share, (part, _) in slower.items() if part > SLOWER}
    known = MISSED.get((layer.__name__, style, shape), {})
    said = "\n".join(f"{share}: {part:.3f} slower, {text}" for share, (part, text) in slower.items() if text)
    assert found == pytest.approx(known, abs=2e-3), said
