"""JAX's protocol for checkpoint policies: `policy(primitive, *avals, **params)`, and the answers to JAX.

`ask_policy` turns the answer of any policy into a `Decision`. A policy of jaxoff is a `DecidingPolicy`: its
decision carries the rule; for other policies the rule is the policy's name.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax

from jaxoff._jaxpr import compat, remat3
from jaxoff._policy.decision import Decision, Placement, Rule, RuleKind
from jaxoff._report.near_miss import near_miss


class DecidingPolicy(abc.ABC):
    """A policy able to give the rule behind its answer."""

    @abc.abstractmethod
    def __call__(self, prim, *in_avals, **params) -> Any:
        """Answers JAX: `Saveable`, `Recompute` or `Offloadable`."""

    @abc.abstractmethod
    def decide(self, prim, *in_avals, **params) -> Decision:
        """Decides on the output of an equation.

        Args:
          prim: the primitive of the equation.
          *in_avals: the abstract inputs.
          **params: the parameters; for a name, `name` is the tag.
        """

    @abc.abstractmethod
    def on_device(self) -> Callable[..., Any]:
        """Returns the saved twin: a policy with saves in place of the offloads of this policy."""


def ask_policy(policy: Callable[..., Any] | None, prim, *in_avals, **params) -> Decision:
    """Asks a policy of JAX's protocol about the output of an equation."""
    if policy is None:
        return Decision("recompute", Rule(RuleKind.NO_POLICY, "jax.checkpoint without a policy"))
    if isinstance(policy, DecidingPolicy):
        return policy.decide(prim, *in_avals, **params)
    answer = policy(prim, *in_avals, **params)
    name = getattr(policy, "__name__", None) or repr(policy)
    if isinstance(answer, compat.Offloadable) and answer.dst != "pinned_host":
        text = f"{name}: JAX keeps on the device what goes to the memory kind {answer.dst!r}"
        return Decision("save", Rule(RuleKind.WRONG_MEMORY_KIND, text))
    return Decision(read_answer(answer), Rule(RuleKind.OTHER_POLICY, name))


def ask_about(policy: Callable[..., Any] | None, eqn: compat.JaxprEqn) -> Decision:
    """Asks a policy about the output of an equation of a program."""
    eqn = remat3.write_name(eqn)  # policies know names by `checkpoint_name`'s primitive
    return ask_policy(policy, eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def read_answer(answer: Any) -> Placement:
    """Translates a policy's answer to JAX into a placement.

    Raises:
      TypeError: for an answer outside of JAX's protocol.
      ValueError: for an offload to a memory kind other than "pinned_host".
    """
    if isinstance(answer, bool):
        return "save" if answer else "recompute"
    if isinstance(answer, compat.Offloadable):
        check_choice("the host memory kind of Offloadable(dst=)", answer.dst, ("pinned_host",))
        return "offload"
    if isinstance(answer, type(compat.Saveable)):
        return "save"
    if isinstance(answer, type(compat.Recompute)):
        return "recompute"
    raise TypeError(
        f"A checkpoint policy answers a bool, Saveable, Recompute or Offloadable(src, dst), got {answer!r} "
        f"of type {type(answer).__name__}."
    )


def infer_out_avals(prim, in_avals, params) -> tuple[Any, ...]:
    """Infers the abstract outputs of an equation. JAX shows policies the inputs only."""
    for key in ("out_avals", "result_avals"):
        if key in params:
            return tuple(params[key])
    out = jax.eval_shape(lambda *xs: prim.bind(*xs, **params), *in_avals)
    return tuple(jax.tree.leaves(out))


def check_choice(subject: str, got: Any, choices: tuple[str, ...]) -> None:
    """Raises for a value outside of a setting's choices.

    Raises:
      ValueError: with the choices and the closest of the choices.
    """
    if got not in choices:
        raise ValueError(
            f"{subject} is one of {', '.join(map(repr, choices))}, got {got!r}.{near_miss(got, choices)}"
        )


def check_policy(policy: Any) -> None:
    """Checks the type of a policy of `jaxoff.scan` or `jaxoff.layers`.

    Raises:
      TypeError: for anything but None, a policy by layer, or a callable such as `jaxoff.policy` returns.
    """
    is_uncalled = isinstance(policy, FunctionType) and policy.__module__ == "jaxoff._policy.presets"
    if is_uncalled or not (policy is None or callable(policy) or hasattr(policy, "rest")):
        raise TypeError(
            "policy is what jaxoff.policy(...) returns, or another callable (prim, *avals, **params), got "
            f"{policy!r}. A preset or a list of names is an argument of it: jaxoff.policy('te_v2'), "
            "jaxoff.policy(offload=['mlp.*'])."
        )
