"""A block, the kinds of policy, and the checks for every program around the block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoff
from tests.jaxoff.policy import placement

WIDTHS = {"in": 8, "pre": 32, "act": 16, "out": 12}
OFFLOAD_ALL = jaxoff.policy(offload=["*"])
POLICIES = {  # policy -> names of its offloads
    "te_v1": (jaxoff.policy("te_v1"), {"act"}),
    "te_v2": (jaxoff.policy("te_v2", min_bytes=1), {"in", "pre", "act"}),
    "lists": (jaxoff.policy(offload=["pre"], save=["in"], recompute=["act"]), {"pre"}),
    "glob": (OFFLOAD_ALL, {"in", "pre", "act"}),
}
NO_CHECKPOINT = object()
MOVE_NOTHING = (None, jaxoff.policy(save=["*"]), OFFLOAD_ALL.on_device())


def block(w, x):
    """(rows, 8) -> (rows, 8), with four names of different widths: a name marked for offload, a name exempt.

    Every named value is read by the backward pass, and nothing un-named has to be.
    """
    x = jaxoff.name(x, "in")
    z = jaxoff.name(x @ w["up"], "pre")
    a = jaxoff.mark_offload(jaxoff.name(jnp.cos(z[..., :16]) * z[..., 16:], "act"))
    y = jaxoff.name(jaxoff.mark_not_offload(a @ w["down"]), "out")
    return x + jnp.square(y) @ w["proj"]


def weights(*lead: int) -> dict[str, np.ndarray]:
    """Weights of the block, or of a stack of blocks."""
    random = np.random.default_rng(0)
    shapes = {"up": (8, 32), "down": (16, 12), "proj": (12, 8)}
    return {k: (random.standard_normal((*lead, *s)) * 0.2).astype("float32") for k, s in shapes.items()}


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype("float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program around the block.

    Attributes:
      body: (remat, w, x) -> y, where `remat` is `jax.checkpoint` with the policy under test.
      x: shape of the input.
      w: leading shape of the weights.
      rows: leading shape of each value that is named.
      count: how many there are of each name.
      place: what puts the arguments where the program wants them.
      checkpoint: `jax.checkpoint`, or what a library makes of it.
    """

    body: Callable[..., Any]
    x: tuple[int, ...] = (4, 8)
    w: tuple[int, ...] = ()
    rows: tuple[int, ...] = (4,)
    count: int = 1
    place: Callable[..., Any] = lambda *args: args
    checkpoint: Callable[..., Any] = jax.checkpoint

    @property
    def args(self) -> tuple[Any, Any]:
        return self.place(weights(*self.w), inputs(*self.x))

    def loss(self, policy) -> Callable[..., jax.Array]:
        """A loss with every checkpoint under the policy, or without checkpoints under `NO_CHECKPOINT`."""
        remat = no_remat if policy is NO_CHECKPOINT else functools.partial(self.checkpoint, policy=policy)
        return lambda w, x: 0.5 * jnp.sum(jnp.square(self.body(remat, w, x)))

    def value_and_grad(self, policy) -> Callable[..., Any]:
        return jax.value_and_grad(self.loss(policy), (0, 1))

    def arrays(self, names: Iterable[str]) -> placement.Arrays:
        return placement.arrays({(*self.rows, WIDTHS[n]): self.count for n in names})


class Cases(dict[str, Case]):
    """A table of cases, entered by decorating functions."""

    def add(self, **fields):
        def enter(body):
            self[body.__name__] = Case(body, **fields)
            return body

        return enter


def no_remat(fun, **_):
    return fun


def check_placement(case: Case, policy, names: Iterable[str]) -> None:
    """The gradient moves exactly the values of these names to the host, and `explain` counts their bytes."""
    loss = case.loss(policy)
    found = placement.grad_host_arrays(loss, *case.args)
    assert found == case.arrays(names), f"moved {dict(found)}, expected {dict(case.arrays(names))}"
    reported = jaxoff.explain(loss, *case.args).host_bytes
    assert reported == placement.nbytes(found), (
        f"explain says {reported} bytes, there are {placement.nbytes(found)}"
    )


def check_control(case: Case) -> None:
    """Policies without an offload fail `check_placement`, for this reason."""
    for policy in MOVE_NOTHING:
        with pytest.raises(AssertionError, match=r"^moved \{\}, expected"):
            check_placement(case, policy, {"act"})


def check_values(case: Case, policies: Iterable[str] = ("te_v2", "lists"), twins: bool = False) -> None:
    """Under each policy, the first call gives the plain function's loss and gradients.

    With `twins`, the call also gives the bits of the saved twin.

    All policies share one program, and their twins another: compilation takes most of the time.
    """
    chosen = {name: POLICIES[name][0] for name in policies}
    got = _run_together(case, {"plain": NO_CHECKPOINT, **chosen})
    for name in chosen:
        assert_close(got[name], got["plain"], name)
    if twins:
        kept = _run_together(case, {"plain": NO_CHECKPOINT, **{k: p.on_device() for k, p in chosen.items()}})
        for name in chosen:
            assert_equal(got[name], kept[name], name)


def _run_together(case: Case, policies: dict[str, Any]) -> dict[str, Any]:
    return jax.jit(lambda *args: {k: case.value_and_grad(p)(*args) for k, p in policies.items()})(*case.args)


# XLA's algebraic simplifier folds a transpose into a product unless a barrier stands between the two, and on
# some CPUs a product rounds by the layout of its operands. Without that pass, and with the layouts as given,
# programs that differ in barriers alone give the same bits on every CPU.
SAME_PRODUCTS = {"xla_disable_hlo_passes": "algsimp"}


def assert_equal(got, wanted, message: str = "") -> None:
    jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=message), got, wanted)


def assert_close(got, wanted, message: str = "", *, least_scale: float = 0.0) -> None:
    """Equal to a few float32 roundings of an array's largest entry, or of `least_scale` if that is larger."""

    def check(got, wanted):
        scale = np.max(np.abs(wanted), initial=least_scale)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6 * scale, err_msg=message)

    jax.tree.map(check, got, wanted)
