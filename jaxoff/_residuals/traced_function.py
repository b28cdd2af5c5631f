"""A user's function as a jaxpr: its equations, its gradients, and the values kept for the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxoff._jaxpr import compat
from jaxoff._jaxpr.jit_functions import statics_of
from jaxoff._jaxpr.provenance import Scope, find_line
from jaxoff._jaxpr.stack_slices import splits_stack
from jaxoff._jaxpr.statics import find_statics
from jaxoff._jaxpr.tag import Tag
from jaxoff._policy.marks import TagKey, key_of_tag, record_labels


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation of the function, with the checkpoints and loops around the equation, outermost first.

    Attributes:
      scope, eqn: the equation, and the jaxpr with the equation.
      checkpoints: the `jax.checkpoint`s around the equation. The policy of the outermost decides.
      loops: the scans around the equation.
      loops_around: for each checkpoint, the number of scans around it.
      primal_only: whether a custom_vjp's forward rule replaces the equation under differentiation.
    """

    scope: Scope
    eqn: compat.JaxprEqn
    checkpoints: tuple[compat.Checkpoint, ...] = ()
    loops: tuple[compat.ScanLayout, ...] = ()
    loops_around: tuple[int, ...] = ()
    primal_only: bool = False

    @functools.cached_property
    def tag(self) -> Tag | None:
        """The tag bound by the equation, or None."""
        text = compat.name_in(self.eqn)
        return None if text is None else Tag.of(text)

    @functools.cached_property
    def line(self) -> str:
        """The source line, `file:line (function)`."""
        return find_line(self.scope, self.eqn)

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy of the outermost checkpoint; None outside of checkpoints, or without a policy."""
        return self.checkpoints[0].policy if self.checkpoints else None


def iterate_sites(scope: Scope, around: Site | None = None) -> Iterator[Site]:
    """Yields every equation of a program, inner jaxprs included, in program order."""
    for eqn in scope.jaxpr.eqns:
        site = Site(scope, eqn) if around is None else dataclasses.replace(around, scope=scope, eqn=eqn)
        yield site
        inner = site
        checkpoint, loop = compat.checkpoint_in(eqn), compat.scan_in(eqn)
        if checkpoint is not None:
            inner = dataclasses.replace(
                site,
                checkpoints=(*site.checkpoints, checkpoint),
                loops_around=(*site.loops_around, len(site.loops)),
            )
        elif loop is not None:
            inner = dataclasses.replace(site, loops=(*site.loops, loop))
        elif eqn.primitive.name.startswith("custom_vjp_call"):
            inner = dataclasses.replace(site, primal_only=True)
        for index in range(len(compat.sub_jaxprs(eqn))):
            yield from iterate_sites(scope.enter(eqn, index), inner)


def collect_labels(sites: Iterable[Site]) -> set[str]:
    """Collects the labels of named sites."""
    return {s.tag.label for s in sites if s.tag and s.tag.label}


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A function of arrays as a jaxpr. Make one with `trace`.

    Attributes:
      primal: the function, without gradients, over the leaves of its arguments.
      differentiated: for each leaf, whether gradients are taken with respect to the leaf.
      num_aux: the number of auxiliary outputs, last among the outputs.
      labels_called: the labels of all calls of `jaxoff.name` during the trace.
    """

    primal: compat.ClosedJaxpr
    differentiated: tuple[bool, ...]
    num_aux: int
    labels_called: frozenset[str]

    @classmethod
    def trace(
        cls,
        fun: Callable[..., Any],
        args,
        kwargs,
        argnums,
        has_aux: bool,
        statics: Mapping[str, Any] | None = None,
    ) -> TracedFunction:
        """Traces a function of pytrees. Arguments as for `jaxoff.residuals`.

        Args:
          statics: `static_argnums` and `static_argnames`; None for those of a given `jax.jit` function.

        Raises:
          ValueError: for argnums out of range, and for a function without a floating-point output.
          TypeError: for an argument that is neither an array nor static, and for a wrong `has_aux`.
        """
        fixed = find_statics(fun, statics or statics_of(fun))
        given = args, kwargs
        args = tuple(None if i in fixed else arg for i, arg in enumerate(args))
        kwargs = {name: None if name in fixed else arg for name, arg in kwargs.items()}
        _check_arrays((args, kwargs))
        chosen = _select_differentiated(args, kwargs, argnums)
        num_aux = 0

        @functools.wraps(fun, updated=())  # so that JAX's errors name the function and its arguments
        def traced(*args, **kwargs):
            nonlocal num_aux
            args = [given[0][i] if i in fixed else arg for i, arg in enumerate(args)]
            out = fun(*args, **{k: given[1][k] if k in fixed else arg for k, arg in kwargs.items()})
            if has_aux:
                if not isinstance(out, tuple) or len(out) != 2:
                    raise TypeError(
                        "has_aux=True is for a function that returns (output, auxiliary), a tuple of two; "
                        f"got {type(out).__name__}."
                    )
                out, aux = out
                num_aux = len(jax.tree.leaves(aux))
                return _check_output(jax.tree.leaves(out)), jax.tree.leaves(aux)
            return _check_output(jax.tree.leaves(out)), []

        with record_labels() as labels:
            primal = jax.make_jaxpr(traced)(*args, **kwargs)
        return cls(primal, chosen, num_aux, frozenset(labels))

    def with_closure(self) -> TracedFunction:
        """Returns the function with the arrays of its closure as further, leading arguments.

        Gradients are taken with respect to the tracers among the closure's inexact arrays.
        """
        traced = (isinstance(x, Tracer) and _is_inexact(x) for x in self.primal.consts)
        primal = compat.move_constants_to_arguments(self.primal)
        return dataclasses.replace(self, primal=primal, differentiated=(*traced, *self.differentiated))

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """All equations of the function, in program order."""
        return tuple(iterate_sites(Scope(compat.as_open(self.primal))))

    @functools.cached_property
    def checkpointed_sites(self) -> tuple[Site, ...]:
        """The sites inside a checkpoint."""
        return tuple(s for s in self.sites if s.checkpoints)

    @functools.cached_property
    def policies(self) -> tuple[Callable[..., Any] | None, ...]:
        """The policies of the outermost checkpoints, without repeats."""
        return tuple(dict.fromkeys(s.policy for s in self.checkpointed_sites))

    @functools.cached_property
    def sites_by_line(self) -> dict[str, list[Site]]:
        """Source line -> the sites inside a checkpoint on the line."""
        return _group_by(self.checkpointed_sites, lambda s: s.line)

    @functools.cached_property
    def sites_by_tag(self) -> dict[TagKey | None, list[Site]]:
        """Label and mark -> the sites inside a checkpoint with the tag."""
        return _group_by(self.checkpointed_sites, lambda s: key_of_tag(s.tag))

    @functools.cached_property
    def step(self) -> compat.Jaxpr:
        """The function and its gradients, dead code included."""

        def gradients(*leaves):
            out, pullback, _ = self._vjp(self.primal, leaves)
            return pullback([jnp.ones_like(x) for x in out])

        return compat.as_open(jax.make_jaxpr(gradients)(*self._structs))

    def trace_kept(self, policy: Callable[..., Any] | None = None) -> KeptValues:
        """Traces the forward pass of the differentiated function, down to the kept values.

        Args:
          policy: a policy for every checkpoint, in place of the checkpoints' own; None to keep these.
        """
        primal = self.primal if policy is None else _replace_policy(self.primal, policy)

        def forward(*leaves):
            out, pullback, aux = self._vjp(primal, leaves)
            return (out, aux), jax.tree.leaves(pullback)

        closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*self._structs)
        jaxpr = compat.as_open(closed)
        num_kept = len(shapes[1])
        used = [i >= len(jaxpr.outvars) - num_kept for i in range(len(jaxpr.outvars))]
        live, _ = compat.dce_jaxpr(jaxpr, used, instantiate=True)
        return KeptValues(Scope(jaxpr), Scope(live))

    def check_gradient(self) -> None:
        """Refuses a function with a loop that has no backward pass.

        Raises:
          ValueError: for a `lax.while_loop`, or a `lax.fori_loop` whose bounds are arguments, on the way from
            differentiated arguments to the output.
        """
        line = next((s.line for s in self.sites if s.eqn.primitive.name == "while"), None)
        if line is None:
            return
        try:
            self.step  # noqa: B018  # traces the backward pass
        except ValueError as error:
            if "Reverse-mode differentiation does not work" not in str(error):
                raise
            raise ValueError(
                f"The function has no gradient, which jax.grad refuses, too: the loop at {line} is a "
                "lax.while_loop or a lax.fori_loop whose bounds are not Python numbers. Use lax.scan, or "
                "fori_loop with Python numbers as bounds."
            ) from None

    @property
    def _structs(self) -> list[jax.ShapeDtypeStruct]:
        return [compat.struct_of(v.aval) for v in compat.as_open(self.primal).invars]

    def _vjp(self, primal: compat.ClosedJaxpr, leaves: Sequence[Any]):
        """Returns the outputs, their pullback to the differentiated leaves, and the auxiliary outputs.

        Raises:
          TypeError: for a checkpoint that saves a complex value.
        """
        run = compat.jaxpr_as_fun(primal)

        def run_free(*free):
            it = iter(free)
            full = [next(it) if d else x for x, d in zip(leaves, self.differentiated, strict=True)]
            out = run(*full)
            split = len(out) - self.num_aux
            return out[:split], out[split:]

        free = [x for x, d in zip(leaves, self.differentiated, strict=True) if d]
        try:
            return jax.vjp(run_free, *free, has_aux=True)
        except TypeError as error:
            if "reduce_precision does not accept dtype complex" not in str(error):
                raise
            raise TypeError(
                "The function has no gradient, which jax.grad refuses, too: jax.checkpoint cannot save "
                "complex values, and a policy here saves some. Offload or recompute them, or name and save "
                "their real and imaginary parts."
            ) from None


@dataclasses.dataclass(frozen=True)
class KeptValues:
    """The values of a forward pass kept for the backward pass, and the forward pass.

    Attributes:
      forward: the whole forward pass.
      live: the forward pass with the kept values for outputs, dead code removed.
    """

    forward: Scope
    live: Scope

    @functools.cached_property
    def labels(self) -> set[str]:
        """The labels in the forward pass, in custom_vjp forward rules, too."""
        return collect_labels(iterate_sites(self.forward))

    @property
    def values(self) -> list[Any]:
        """The kept values, except the function's inputs and constants, which are alive in any case.

        Slices of inputs are left out, too: `jaxoff.jit` reads slices in place.
        """
        inputs = {*self.live.jaxpr.invars, *self.live.jaxpr.constvars}
        pieces = (eqn for eqn in self.live.jaxpr.eqns if splits_stack(eqn) and eqn.invars[0] in inputs)
        inputs |= {v for eqn in pieces for v in eqn.outvars}
        unique = dict.fromkeys(v for v in self.live.jaxpr.outvars if not isinstance(v, compat.Literal))
        return [v for v in unique if v not in inputs]


def _group_by[K](sites: tuple[Site, ...], key: Callable[[Site], K]) -> dict[K, list[Site]]:
    groups: dict[K, list[Site]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return groups


def _check_arrays(tree: Any) -> None:
    """Refuses leaves of arguments that are no arrays."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            at = f"{'args' if path[0].idx == 0 else 'kwargs'}{jax.tree_util.keystr(path[1:])}"
            raise TypeError(
                f"Arguments are pytrees of arrays; got {leaf!r} of type {type(leaf).__name__} at {at}. "
                "Give static_argnums or static_argnames, as for jax.jit, or bind it by functools.partial."
            )


def _check_output(leaves: list[Any]) -> list[Any]:
    """Refuses outputs without a floating-point array, which have no gradient."""
    if not any(map(_is_inexact, leaves)):
        kinds = ", ".join(str(jax.typeof(leaf)) for leaf in leaves) or "no array"
        raise ValueError(
            f"The function has no gradient: it returns {kinds}, and a gradient is of a floating-point output."
        )
    return leaves


def _select_differentiated(args, kwargs, argnums) -> tuple[bool, ...]:
    """Says for each array leaf of the arguments whether gradients are taken with respect to the leaf."""
    if argnums is not None:
        wanted = {argnums} if isinstance(argnums, int) else set(argnums)
        for n in sorted(wanted):
            if not isinstance(n, int) or not -len(args) <= n < len(args):
                raise ValueError(f"argnums index the {len(args)} positional arguments, got {n!r}.")
        wanted = {n % len(args) for n in wanted}
    else:
        wanted = set(range(len(args)))
    by_argument = [
        jax.tree.map(lambda x, i=i: _is_inexact(x) and i in wanted, arg) for i, arg in enumerate(args)
    ]
    by_keyword = jax.tree.map(lambda x: argnums is None and _is_inexact(x), kwargs)
    return tuple(jax.tree.leaves((tuple(by_argument), by_keyword)))


def _is_inexact(x) -> bool:
    return jnp.issubdtype(jax.dtypes.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)


def _replace_policy(jaxpr, policy: Callable[..., Any]):
    """Replaces the policy of every `jax.checkpoint` in a program."""

    def rewrite(jaxpr: compat.Jaxpr) -> compat.Jaxpr:
        eqns = [
            eqn.replace(params={**eqn.params, "policy": policy}) if eqn.primitive is compat.remat_p else eqn
            for eqn in jaxpr.eqns
        ]
        return jaxpr.replace(eqns=eqns)

    return compat.rewrite_jaxprs(jaxpr, rewrite)
