"""Random steps with loops in the layers of a loop: the same numbers within any budget, never over it."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxoff

ROWS, WIDTH = 32, 16


@dataclasses.dataclass(frozen=True)
class Nest:
    """A step whose loop over groups has a loop over layers, with other parts of models or without.

    Attributes:
      parts: the parts that it has.
      groups, layers: the iterations of the loops.
    """

    parts: frozenset[str]
    groups: int
    layers: int

    @staticmethod
    def draw(seed: int) -> Nest:
        draw = random.Random(seed)
        of_layers = ["results", "names", "constants", "conditions", "inner checkpoint", "reverse"]
        of_groups = ["second loop", "third level", "parts of rows", "keys", "counter", "outer checkpoint"]
        parts = [part for part in (*of_layers, *of_groups, "carry", "microbatches") if draw.random() < 0.35]
        return Nest(frozenset(parts), draw.choice([1, 2, 3]), draw.choice([2, 3]))

    def layer(self, carry, w, scale):
        x, total = carry
        y = jnp.tanh(x @ w["a"]) * scale
        if "names" in self.parts:
            y = checkpoint_name(y, "wave")
        if "conditions" in self.parts:
            y = lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y)
        x = x + jnp.sin(y * y) @ w["b"]
        total = total * 0.9 + y.mean() if "carry" in self.parts else total
        return (x, total), y.mean() if "results" in self.parts else None

    def group(self, carry, rows):
        (w, key), (x, total, *counter) = rows, carry
        scale = jnp.cos(x.mean(0)) @ w["mix"] if "constants" in self.parts else 1.0
        if "keys" in self.parts:
            x = x * jax.random.bernoulli(key, 0.8, x.shape)

        def layer(carry, w):
            return self.layer(carry, w, scale)

        layer = jax.checkpoint(layer, prevent_cse=False) if "inner checkpoint" in self.parts else layer

        def twice(carry, w):
            pair = jax.tree.map(lambda a: jnp.stack([a, a / 2]), w)
            return lax.scan(layer, carry, pair)[0], None

        body = twice if "third level" in self.parts else layer
        carry, results = lax.scan(body, (x, total), w["inner"], reverse="reverse" in self.parts)
        if "second loop" in self.parts:
            carry, _ = lax.scan(layer, carry, w["second"])
        x, total = carry
        if "parts of rows" in self.parts:
            rows = x.reshape(4, -1, WIDTH)
            x = lax.map(jax.checkpoint(lambda r: r + jnp.sin(r @ w["mix"]) @ w["mix"].T), rows)
            x = x.reshape(ROWS, WIDTH)
        (x, total), _ = self.layer((x, total), w["last"], scale)
        return (x, total, *(i + 1 for i in counter)), None if results is None else results.sum()

    def loss(self, weights, x, keys):
        group = jax.checkpoint(self.group) if "outer checkpoint" in self.parts else self.group
        counter = [jnp.int32(0)] if "counter" in self.parts else []
        (x, total, *_), results = lax.scan(group, (x, jnp.zeros(()), *counter), (weights, keys))
        return (x * x).mean() + total / 10 + (0 if results is None else results.sum() / 100)

    def step(self, weights, x, keys):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(self.loss)(weights, x, keys)), None

        if "microbatches" in self.parts:
            grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, weights), jnp.stack([x, x / 2]))
        else:
            grads = jax.grad(self.loss)(weights, x, keys)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    def make_arguments(self):
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def normal(*lead):
            return jax.random.normal(next(keys), (*lead, WIDTH, WIDTH)) / 4

        inner = {name: {k: normal(self.groups, self.layers) for k in "ab"} for name in ("inner", "second")}
        weights = {**inner, "last": {k: normal(self.groups) for k in "ab"}, "mix": normal(self.groups)}
        x = 4 * jax.random.normal(next(keys), (ROWS, WIDTH))
        return weights, x, jax.random.split(jax.random.key(1), self.groups)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 1)) for seed in range(40)]
)
def test_steps_within_budgets_are_those_of_jit(seed):
    nest = Nest.draw(seed)
    args = nest.make_arguments()
    compiled = jax.jit(nest.step).lower(*args).compile()
    memory, want = compiled.memory_analysis(), compiled(*args)
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    for part in (1.5, 0.6, 0.4):
        limit = arrays + part * memory.temp_size_in_bytes
        within = jaxoff.jit(nest.step, device_bytes=limit)
        try:
            got = within(*args)
        except jaxoff.BudgetError as error:
            least = error.smallest_bytes
        else:
            least = within.plan.peak_bytes
        assert least is not None, "a fault of jaxoff"
        if least > limit:
            assert part < 1
            continue
        assert not any(finding.code == "runs-as-written" for finding in within.findings)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))
