"""Everything that depends on how one JAX release differs from the next.

The rest of the library uses documented JAX only. What stands here is exported by `jax.extend` and
`jax.interpreters` without a promise of stability, or looks inside a tracer; and two things are not exported
at all: the switch whether types say over which axes of a mesh a value differs, and the effect of naming an
axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax._src.core import NamedAxisEffect as _NamedAxisEffect
from jax.ad_checkpoint import Offloadable as Offloadable
from jax.ad_checkpoint import Recompute as Recompute
from jax.ad_checkpoint import Saveable as Saveable
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as _Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core import primitives as _primitives
from jax.interpreters import mlir as _mlir
from jax.interpreters.partial_eval import convert_constvars_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

name_p = _primitives.name_p
remat_p = _primitives.remat_p


def is_name(prim) -> bool:
    """Whether a primitive is the one that `jax.ad_checkpoint.checkpoint_name` binds."""
    return prim is name_p


def name_in(eqn: JaxprEqn) -> str | None:
    """The name that an equation gives its value, or None where it gives none."""
    if is_name(eqn.primitive):
        return eqn.params["name"]
    rewritten: Any = eqn.params.get("_prim")  # under jax_remat3
    return rewritten.name if type(rewritten).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `jax.checkpoint` put into an equation."""

    jaxpr: Jaxpr
    policy: Callable[..., Any] | None
    prevent_cse: bool | tuple[bool, ...]


def checkpoint_in(eqn: JaxprEqn) -> Checkpoint | None:
    """The checkpointed function that an equation applies, or None."""
    if eqn.primitive is remat_p:
        return Checkpoint(as_open(eqn.params["jaxpr"]), eqn.params["policy"], eqn.params["prevent_cse"])
    rewritten: Any = eqn.params.get("_prim")  # under jax_remat3
    if type(rewritten).__name__ == "RematTraced":
        return Checkpoint(as_open(rewritten.jaxpr), rewritten.policy, rewritten.prevent_cse)
    return None


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace with in the place of an abstract array."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of an abstract array."""
    return tuple(aval.shape)


def nbytes(aval: Any) -> int:
    """Bytes of an abstract array."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def nbytes_of(values: Iterable[Any]) -> int:
    """The bytes of some variables together."""
    return sum(nbytes(v.aval) for v in values)


def has_side_effects(jaxpr: Jaxpr) -> bool:
    """Whether a program does more than compute and communicate, which names the axes of a mesh."""
    return any(not isinstance(effect, _NamedAxisEffect) for effect in jaxpr.effects)


def is_host(aval) -> bool:
    """Whether an abstract array lives in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class ScanLayout:
    """How the operands and results of a scan equation divide."""

    num_consts: int
    num_carry: int
    length: int
    unroll: int | bool


def scan_in(eqn: JaxprEqn) -> ScanLayout | None:
    """The layout of a scan equation, or None for another equation."""
    if eqn.primitive is not _primitives.scan_p:
        return None
    params = eqn.params
    if "num_carry" in params:
        sizes = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        sizes = len(consts), len(carry)
    return ScanLayout(*sizes, params["length"], params["unroll"])


@dataclasses.dataclass(frozen=True)
class ControlFlow:
    """Programs that an equation runs.

    Attributes:
      iterations: how often it runs one of them.
      programs: the body of a loop, or the branches of which one is taken.
    """

    iterations: int
    programs: tuple[Jaxpr, ...]

    def total(self, of: Callable[[Jaxpr], float]) -> float:
        """A sum over all that runs: every iteration, the largest of branches."""
        return self.iterations * max(map(of, self.programs))


def control_flow(eqn: JaxprEqn) -> ControlFlow | None:
    """The programs of a loop or a condition, or None for another equation; a `while` counts one iteration."""
    if (layout := scan_in(eqn)) is not None:
        return ControlFlow(layout.length, (as_open(eqn.params["jaxpr"]),))
    if eqn.primitive.name == "while":
        return ControlFlow(1, (as_open(eqn.params["body_jaxpr"]),))
    if eqn.primitive.name == "cond":
        return ControlFlow(1, tuple(map(as_open, eqn.params["branches"])))
    return None


def pruned(eqn: JaxprEqn, is_used: Callable[[Var], bool]) -> JaxprEqn:
    """A loop or a condition without what only makes unused results; another equation as it is."""
    flow = control_flow(eqn)
    used = [v for v in eqn.outvars if is_used(v)]
    if flow is None or not used:
        return eqn
    operands = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    alone = flow.programs[0].replace(constvars=[], invars=operands, outvars=used, eqns=[eqn])
    return dce_jaxpr(alone, [True] * len(used), instantiate=True)[0].eqns[0]


def changed_by_loop(eqn: JaxprEqn) -> list[Var] | None:
    """The results that a `while` loop changes, or None for another equation."""
    if eqn.primitive.name != "while":
        return None
    body = eqn.params["body_jaxpr"].jaxpr
    given = body.invars[eqn.params["body_nconsts"] :]
    results = zip(eqn.outvars, given, body.outvars, strict=True)
    return [v for v, before, after in results if before is not after]


@dataclasses.dataclass(frozen=True)
class Producer:
    """The name that an equation gave a traced value.

    Attributes:
      name: the parameter of that equation.
      operand: the value before the name, where the trace shows it.
    """

    name: str
    operand: Any | None


def naming_of(x: Any) -> Producer | None:
    """The naming that made a traced value, or None where it was made otherwise or the trace does not tell.

    A value that came through the boundary of a jit, scan or checkpoint has no producer inside it.
    """
    outer = x
    while x is not None and not hasattr(x, "parent"):
        inner = getattr(x, "primal", None)  # a JVP or linearize tracer
        x = inner if inner is not None else getattr(x, "val", None)  # a vmap tracer
        if not isinstance(x, Tracer):
            return None
    parent = getattr(x, "parent", None)
    if parent is None or not is_name(parent.primitive):
        return None
    return Producer(parent.params["name"], parent.in_tracers[0] if x is outer else None)


def exclude_from_source_lines(path: str) -> None:
    """Let source lines of equations point at the caller of the functions in this file."""
    source_info_util.register_exclusion(path)


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code that made an equation, or '' where unknown."""
    text = source_info_util.summarize(eqn.source_info)
    location, _, function = text.partition(" (")
    parts = location.split(":")
    if len(parts) < 2:
        return ""
    return ":".join(parts[:2]) + (f" ({function}" if function else "")


def as_open(jaxpr) -> Jaxpr:
    """The jaxpr of a closed or an open one."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def constants_as_arguments(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, which takes what it closes over before its arguments."""
    return ClosedJaxpr(convert_constvars_jaxpr(closed.jaxpr), ())


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs in an equation's parameters, in order."""
    checkpoint = checkpoint_in(eqn)
    if checkpoint is not None:
        return [checkpoint.jaxpr]
    values = (v if isinstance(v, (tuple, list)) else (v,) for v in eqn.params.values())
    return [as_open(item) for items in values for item in items if isinstance(item, (Jaxpr, ClosedJaxpr))]


def with_policy(jaxpr, policy: Callable[..., Any]):
    """The same program with another policy in every `jax.checkpoint`."""

    def rewrite(jaxpr: Jaxpr) -> Jaxpr:
        eqns = [
            eqn.replace(params={**eqn.params, "policy": policy}) if eqn.primitive is remat_p else eqn
            for eqn in jaxpr.eqns
        ]
        return jaxpr.replace(eqns=eqns)

    return with_jaxprs(jaxpr, rewrite)


def with_jaxprs(jaxpr, rewrite: Callable[[Jaxpr], Jaxpr]):
    """The same program with it and every program in it rewritten, inner ones first."""

    def of_value(value):
        if isinstance(value, (tuple, list)):
            holds = any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value)
            return type(value)(map(of_value, value)) if holds else value
        return with_jaxprs(value, rewrite) if isinstance(value, (Jaxpr, ClosedJaxpr)) else value

    if isinstance(jaxpr, ClosedJaxpr) and ClosedJaxpr is not Jaxpr:
        return jaxpr.replace(jaxpr=with_jaxprs(jaxpr.jaxpr, rewrite))
    eqns = []
    for eqn in jaxpr.eqns:
        params = {key: of_value(value) for key, value in eqn.params.items()}
        eqns.append(eqn.replace(params=params))
    return rewrite(jaxpr.replace(eqns=eqns))


def num_shards(eqn: JaxprEqn) -> int:
    """How many devices run the jaxpr in an equation, each on a part of its arrays."""
    return eqn.params["mesh"].size if is_shard_map(eqn) else 1


def remat3_enabled() -> bool:
    """Whether the coming rewrite of `jax.checkpoint` is switched on."""
    return bool(getattr(jax.config, "jax_remat3", False))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose equations may stand in its place."""

    jaxpr: Jaxpr
    prevent_cse: bool = False
    checkpoint: bool = False


def inlinable_call(eqn: JaxprEqn) -> Call | None:
    """What an equation of a program that is not differentiated any more calls and can do without calling."""
    if checkpoint := checkpoint_in(eqn):
        flags = checkpoint.prevent_cse
        hides = any(flags) if isinstance(flags, tuple) else flags
        hides = hides and bool(eqn.params.get("differentiated", True))
        return Call(checkpoint.jaxpr, prevent_cse=hides, checkpoint=True)
    # Nothing differentiates a custom rule any more; the others are what is known of a loop in a checkpoint.
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "closed_call"):
        rule = eqn.params["call_jaxpr"]
        return None if rule.consts else Call(rule.jaxpr)
    if eqn.primitive is not _primitives.jit_p:
        return None
    closed, shardings = eqn.params["jaxpr"], (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    plain = not closed.consts and not any(eqn.params["donated_invars"])
    if not plain or any(type(s).__name__ != "UnspecifiedValue" for s in shardings):
        return None
    return Call(closed.jaxpr)


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation is the backward pass of a `jax.checkpoint`."""
    return checkpoint_in(eqn) is not None and bool(eqn.params.get("differentiated"))


def inside(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation of a called jaxpr, with the scope names that the call gives it."""
    scopes = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=scopes))


@functools.cache
def _a_barrier() -> JaxprEqn:
    return jax.make_jaxpr(jax.lax.optimization_barrier)(1.0).jaxpr.eqns[0]


def barrier(operands: list[Any], like: JaxprEqn) -> tuple[list[Var], JaxprEqn]:
    """An optimization barrier over values, in the context of another equation; the values behind it, too."""
    outs = [Var(v.aval) for v in operands]
    eqn = _a_barrier().replace(invars=operands, outvars=outs, source_info=like.source_info, ctx=like.ctx)
    return outs, eqn


def varying_axes(aval: Any) -> tuple[str, ...]:
    """The mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return tuple(sorted(getattr(getattr(aval, "mat", None), "varying", ())))


def empty(aval: Any, rows: int | None, *, is_whole: bool) -> jax.Array:
    """An array whose contents do not matter, like another one; a stack of so many, if rows are given.

    Args:
      aval: of the other one.
      rows: how many.
      is_whole: whether the compiler leaves it on one device.
    """
    scalar = _primitives.empty2_p.bind(dtype=aval.dtype, memory_space=aval.memory_space)
    if varying := varying_axes(aval):
        scalar = jax.lax.pcast(scalar, varying, to="varying")
    lead = () if rows is None else (rows,)
    shape, spec = (*lead, *aval.shape), jax.P(*(None for _ in lead), *aval.sharding.spec)
    sharding = aval.sharding.update(spec=spec)
    if not is_whole or not shape or is_host(aval) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.lax.broadcast(scalar, shape, out_sharding=sharding)
    return unwritten(scalar, shape, sharding)


# XLA has a custom call that allocates and does nothing else. JAX binds it without an operand
# (`jax.lax.empty`); with one it can be made to wait, and shares memory with what has died by then.
_unwritten_p = _Primitive("unwritten")


def unwritten(behind: jax.Array, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """An array that a GPU allocates and does not write; elsewhere all its elements are a scalar.

    Args:
      behind: that scalar, and what the allocation waits for.
      shape: of the array.
      sharding: of the array. The compiler must not divide it: each device would get it whole.
    """
    return _unwritten_p.bind(behind, shape=shape, sharding=sharding)


def _filled(behind, *, shape, sharding):
    return jax.lax.broadcast(behind, shape, out_sharding=sharding)


def _allocated(ctx, behind, *, shape, sharding):
    del shape, sharding  # the type of the result has both
    return jax.ffi.ffi_lowering("AllocateBuffer")(ctx, behind)


_unwritten_p.def_abstract_eval(
    lambda behind, *, shape, sharding: behind.update(shape=shape, sharding=sharding)
)
_mlir.register_lowering(_unwritten_p, _mlir.lower_fun(_filled, multiple_results=False))
_mlir.register_lowering(_unwritten_p, _allocated, platform="cuda")


def trace_like(eqn: JaxprEqn, fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """The program of a function where an equation stands, under the axes of the same mesh."""
    mesh, varies = eqn.ctx.cur_abstract_mesh, any(map(varying_axes, jax.tree.leaves(avals)))
    with eqn.ctx.manager, _config._check_vma(varies):
        return jax.make_jaxpr(fun, axis_env=list(mesh.shape.items()))(*avals)


def is_manual(eqn: JaxprEqn) -> bool | None:
    """Whether an equation is in a `jax.shard_map` over all axes of its mesh.

    None without a mesh, and on a mesh of a single device: there the compiler divides nothing.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    return None if mesh.empty or mesh.size == 1 else mesh.are_all_axes_manual


def transfer_in(eqn: JaxprEqn) -> str | None:
    """ "D2H" or "H2D" where an equation moves a value between device and host memory, or None."""
    if eqn.primitive is not _primitives.device_put_p or len(eqn.invars) != 1:
        return None
    source, target = is_host(eqn.invars[0].aval), is_host(eqn.outvars[0].aval)
    return {(False, True): "D2H", (True, False): "H2D"}.get((source, target))


def is_shard_map(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "shard_map"


def jit_in(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that a `jax.jit` equation calls, or None for another equation."""
    return eqn.params["jaxpr"] if eqn.primitive is _primitives.jit_p else None


def bind(eqn: JaxprEqn, operands: Sequence[Any], jaxpr: Jaxpr) -> list[Any]:
    """The results of an equation of a program for other operands."""
    given = {v: x for v, x in zip(eqn.invars, operands, strict=True) if isinstance(v, Var)}
    alone = jaxpr.replace(
        constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


type Meshes = tuple[jax.sharding.AbstractMesh, jax.sharding.Mesh]


def current_mesh() -> Meshes:
    """The abstract and the concrete mesh in force."""
    return jax.sharding.get_abstract_mesh(), _mesh.get_concrete_mesh()


@contextlib.contextmanager
def under_mesh(meshes: Meshes) -> Iterator[None]:
    """A context with the meshes of `current_mesh` in force."""
    abstract, concrete = meshes
    with contextlib.ExitStack() as stack:
        if not concrete.empty:
            stack.enter_context(jax.set_mesh(concrete))
        stack.enter_context(jax.sharding.use_abstract_mesh(abstract))
        yield
