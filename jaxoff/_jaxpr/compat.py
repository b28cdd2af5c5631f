"""Code that depends on the JAX release; `lowered` and `trace_state` have the rest.

The rest of the library uses documented JAX only. This module uses `jax.extend` and `jax.interpreters`, whose
names may change between releases, and looks inside tracers. Three names come from `jax._src`: the switch for
types with the mesh axes over which a value differs, the effect of naming an axis, the error of shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src.core import NamedAxisEffect as _NamedAxisEffect
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.interpreters import remat as _remat
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
from jax.extend.source_info_util import user_context as user_context
from jax.interpreters import mlir as _mlir
from jax.interpreters.partial_eval import convert_constvars_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

from jaxoff._jaxpr.meshes import explicit_mesh
from jaxoff._jaxpr.number_bits import bits_of

name_p = _primitives.name_p
remat_p = _primitives.remat_p

# Primitives that run a Pallas kernel.
KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})


def is_name(prim) -> bool:
    """Whether `jax.ad_checkpoint.checkpoint_name` binds this primitive."""
    return prim is name_p


def name_in(eqn: JaxprEqn) -> str | None:
    """The name in a `checkpoint_name` equation, or None for another equation."""
    if is_name(eqn.primitive):
        return eqn.params["name"]
    rewritten: Any = eqn.params.get("_prim")  # under jax_remat3
    return rewritten.name if type(rewritten).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The function and the options in a `jax.checkpoint` equation."""

    jaxpr: Jaxpr
    policy: Callable[..., Any] | None
    prevent_cse: bool | tuple[bool, ...]


def checkpoint_in(eqn: JaxprEqn) -> Checkpoint | None:
    """The checkpoint in a `jax.checkpoint` equation, or None for another equation."""
    if eqn.primitive is remat_p:
        return Checkpoint(as_open(eqn.params["jaxpr"]), eqn.params["policy"], eqn.params["prevent_cse"])
    rewritten: Any = eqn.params.get("_prim")  # under jax_remat3
    if type(rewritten).__name__ == "RematTraced":
        return Checkpoint(as_open(rewritten.jaxpr), rewritten.policy, rewritten.prevent_cse)
    return None


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The `jax.ShapeDtypeStruct` of an abstract array, to trace functions with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of an abstract array."""
    return tuple(aval.shape)


def nbytes(aval: Any) -> int:
    """Bytes of an abstract array; 0 for a value that is no array."""
    return (math.prod(aval.shape) * bits_of(aval.dtype) + 7) // 8 if hasattr(aval, "shape") else 0


def nbytes_of(values: Iterable[Any]) -> int:
    """The sum of the bytes of variables."""
    return sum(nbytes(v.aval) for v in values)


def has_side_effects(jaxpr: Jaxpr | JaxprEqn) -> bool:
    """Whether a program or equation has effects other than the names of mesh axes, which collectives have."""
    return any(not isinstance(effect, _NamedAxisEffect) for effect in jaxpr.effects)


def is_ref(aval) -> bool:
    """Whether an abstract value is a mutable array, of `jax.new_ref`."""
    return hasattr(aval, "inner_aval")


def is_host(aval) -> bool:
    """Whether an abstract array lives in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class ScanLayout:
    """The layout of a scan equation: how operands and results divide into constants, carry, xs and ys."""

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
    """The programs in a loop or a condition: its body, or its branches.

    `iterations` is the number of iterations of a loop; 1 for a condition.
    """

    iterations: int
    programs: tuple[Jaxpr, ...]

    def sum_over_runs(self, cost: Callable[[Jaxpr], float]) -> float:
        """Sums the cost of a program over all iterations. Of branches that compute, the mean counts."""
        costs = [*map(cost, self.programs)]
        return self.iterations * sum(costs) / count_computing(costs)


def count_computing(costs: Collection[float]) -> int:
    """The number of branches that compute, by their costs, and do not only pass values on; at least 1."""
    return max(1, sum(cost > max(costs) / 20 for cost in costs))


def control_flow(eqn: JaxprEqn) -> ControlFlow | None:
    """The programs of a loop or a condition, or None otherwise. A `while` loop counts as 1 iteration."""
    if (layout := scan_in(eqn)) is not None:
        return ControlFlow(layout.length, (as_open(eqn.params["jaxpr"]),))
    if eqn.primitive.name == "while":
        return ControlFlow(1, (as_open(eqn.params["body_jaxpr"]),))
    if eqn.primitive.name == "cond":
        return ControlFlow(1, tuple(map(as_open, eqn.params["branches"])))
    return None


def is_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop."""
    return eqn.primitive.name == "while" or scan_in(eqn) is not None


@dataclasses.dataclass(frozen=True)
class Naming:
    """The `checkpoint_name` equation of a traced value.

    Attributes:
      name: the name.
      operand: the value before the equation, or None where the trace does not show the value.
    """

    name: str
    operand: Any | None


def find_naming(x: Any) -> Naming | None:
    """Finds the `checkpoint_name` equation whose result is a traced value.

    Returns None if another equation made the value, or if the trace does not show the equation: inside a jit,
    scan or checkpoint, the trace does not show the equations of values from outside.
    """
    outer = x
    while x is not None and not hasattr(x, "parent"):
        inner = getattr(x, "primal", None)  # a JVP or linearize tracer
        x = inner if inner is not None else getattr(x, "val", None)  # a vmap tracer
        if not isinstance(x, Tracer):
            return None
    parent = getattr(x, "parent", None)
    if parent is None or (name := name_in(parent)) is None:
        return None
    return Naming(name, parent.in_tracers[0] if x is outer else None)


# Files of libraries of layers that a user's model calls, but not their whole models; and how many frames deep
# the calls are at most.
_OF_LAYERS = re.compile(
    r"/(site|dist)-packages/(equinox|flax|haiku(?!/_src/nets/)|optax|einops|penzai(?!/models/)|qwix)/"
)
_FRAMES = 100


def exclude_from_source_lines(path: str) -> None:
    """Lets source lines of equations point at the callers of the functions in a file."""
    source_info_util.register_exclusion(path)


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code for an equation, or '' where unknown.

    Of code of a library of layers, such as Flax, the line of its caller.
    """
    text = source_info_util.summarize(eqn.source_info)
    if _OF_LAYERS.search(text):
        frames = source_info_util.summarize(eqn.source_info, num_frames=_FRAMES).splitlines()[::-1]
        text = next((frame for frame in frames if not _OF_LAYERS.search(frame)), text)
    location, _, function = text.partition(" (")
    parts = location.split(":")
    if len(parts) < 2:
        return ""
    return ":".join(parts[:2]) + (f" ({function}" if function else "")


@functools.lru_cache(maxsize=4096)
def has_user_code(traceback: Any) -> bool:
    """Whether a traceback of `source_info` goes through code of the user."""
    info = source_info_util.SourceInfo(traceback, source_info_util.new_name_stack())
    return ":" in source_info_util.summarize(info)


def as_open(jaxpr) -> Jaxpr:
    """The open jaxpr of a closed jaxpr; an open jaxpr unchanged."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def move_constants_to_arguments(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Turns the constants of a program into arguments, ahead of its other arguments."""
    return ClosedJaxpr(convert_constvars_jaxpr(closed.jaxpr), ())


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs in the parameters of an equation, in order."""
    checkpoint = checkpoint_in(eqn)
    if checkpoint is not None:
        return [checkpoint.jaxpr]
    values = (v if isinstance(v, (tuple, list)) else (v,) for v in eqn.params.values())
    return [as_open(item) for items in values for item in items if isinstance(item, (Jaxpr, ClosedJaxpr))]


def map_programs(eqn: JaxprEqn, fun: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """An equation with each program among its parameters replaced by a function of the open program.

    The programs of Pallas kernels stay. Where all stay, so does the equation: JAX lowers a function that
    several equations call once, and knows it by the object of its program.
    """
    if eqn.primitive.name in KERNELS:
        return eqn

    def replace(value):
        if isinstance(value, (tuple, list)):
            found = list(map(replace, value))
            return value if _is_same(found, value) else getattr(value, "_make", type(value))(found)
        return map_open(value, fun) if isinstance(value, (Jaxpr, ClosedJaxpr)) else value

    params = {key: replace(value) for key, value in eqn.params.items()}
    return eqn if _is_same(params.values(), eqn.params.values()) else eqn.replace(params=params)


def _is_same(found: Collection[Any], given: Collection[Any]) -> bool:
    return len(found) == len(given) and all(map(operator.is_, found, given))


def map_open(program: Any, fun: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A program, open or closed, with its open program replaced by a function of it."""
    jaxpr = as_open(program)
    found = fun(jaxpr)
    if found is jaxpr:
        return program
    return found if jaxpr is program else program.replace(jaxpr=found)


def rewrite_jaxprs(jaxpr, rewrite: Callable[[Jaxpr], Jaxpr]):
    """Rewrites a program and all programs in its equations, from the inside out."""

    def rewrite_open(jaxpr: Jaxpr) -> Jaxpr:
        return rewrite(replace_equations(jaxpr, (map_programs(eqn, rewrite_open) for eqn in jaxpr.eqns)))

    return map_open(jaxpr, rewrite_open)


def replace_equations(jaxpr: Jaxpr, eqns: Iterable[JaxprEqn]) -> Jaxpr:
    """A program with other equations; the same object where the equations are."""
    found = list(eqns)
    return jaxpr if _is_same(found, jaxpr.eqns) else jaxpr.replace(eqns=found)


def holds_tracers(closed: ClosedJaxpr) -> bool:
    """Whether constants of a program belong to a trace."""
    return any(isinstance(const, Tracer) for const in closed.consts)


def is_asked_under_remat3(prim: _Primitive) -> bool:
    """Whether `jax.checkpoint` asks policies about the results of a primitive under `jax_remat3`."""
    return is_name(prim) or prim in _remat.rules


@dataclasses.dataclass(frozen=True)
class InlinableCall:
    """The jaxpr of a call, for `jaxoff._jaxpr.inline` to replace the call by its equations.

    Attributes:
      jaxpr: the called program.
      prevent_cse: whether the call is a differentiated `jax.checkpoint` with `prevent_cse`.
      checkpoint: whether the call is a `jax.checkpoint`.
    """

    jaxpr: Jaxpr
    prevent_cse: bool = False
    checkpoint: bool = False


def inlinable_call(eqn: JaxprEqn) -> InlinableCall | None:
    """The call of an equation, if the equations of the called program may replace the call; else None.

    Only for programs after differentiation: a custom derivative rule has no effect there.
    """
    if checkpoint := checkpoint_in(eqn):
        flags = checkpoint.prevent_cse
        hides = any(flags) if isinstance(flags, tuple) else flags
        hides = hides and bool(eqn.params.get("differentiated", True))
        return InlinableCall(checkpoint.jaxpr, prevent_cse=hides, checkpoint=True)
    called = called_program(eqn)
    return None if called is None or called.consts else InlinableCall(called.jaxpr)


def called_program(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a call that is no more than its equations, but for `jax.checkpoint`; else None."""
    # eval_jaxpr and closed_call hold the known part of a loop in a checkpoint, after partial evaluation.
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "closed_call"):
        return eqn.params["call_jaxpr"]
    if eqn.primitive is not _primitives.jit_p:
        return None
    # What an inner call donates has no effect.
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return eqn.params["jaxpr"] if all(type(s).__name__ == "UnspecifiedValue" for s in shardings) else None


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation is the backward pass of a `jax.checkpoint`."""
    return checkpoint_in(eqn) is not None and bool(eqn.params.get("differentiated"))


@functools.cache
def _trace_barrier() -> JaxprEqn:
    return jax.make_jaxpr(jax.lax.optimization_barrier)(1.0).jaxpr.eqns[0]


def make_barrier(operands: list[Any], like: JaxprEqn) -> tuple[list[Var], JaxprEqn]:
    """Makes an optimization barrier over values, with the scopes and the mesh of equation `like`.

    Returns the results of the barrier, and its equation.
    """
    outs = [Var(v.aval) for v in operands]
    eqn = _trace_barrier().replace(invars=operands, outvars=outs, source_info=like.source_info, ctx=like.ctx)
    return outs, eqn


def varying_axes(aval: Any) -> tuple[str, ...]:
    """The mesh axes over which a value differs between devices, inside `jax.shard_map`."""
    return tuple(sorted(getattr(getattr(aval, "mat", None), "varying", ())))


def varies_with(aval: Any, others: Iterable[Any]) -> bool:
    """Whether a value differs between devices over all axes over which one of the other values does."""
    return {axis for other in others for axis in varying_axes(other)}.issubset(varying_axes(aval))


def empty_scalar(aval: Any) -> jax.Array:
    """Makes a scalar with arbitrary contents, of an abstract array's dtype, memory and varying axes."""
    return vary_like(_primitives.empty2_p.bind(dtype=aval.dtype, memory_space=aval.memory_space), aval)


def vary_like(x: jax.Array, aval: Any) -> jax.Array:
    """An array that differs between devices for JAX, inside of `jax.shard_map`, where another does."""
    varying = varying_axes(aval)
    return jax.lax.pcast(x, varying, to="varying") if varying else x


def define_primitive(
    name: str,
    abstract_eval: Callable[..., Any],
    function: Callable[..., jax.Array],
    lower_on_gpu: Callable[..., Any] | None = None,
) -> _Primitive:
    """Defines a primitive of one result: its type, the function that it runs, and its lowering for a GPU."""
    primitive = _Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    _mlir.register_lowering(primitive, _mlir.lower_fun(function, multiple_results=False))
    if lower_on_gpu is not None:
        _mlir.register_lowering(primitive, lower_on_gpu, platform="cuda")
    return primitive


def trace_like(eqn: JaxprEqn, fun: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """Traces a function under the mesh axes of an equation, or else those of its operands' types."""
    mesh, leaves = eqn.ctx.cur_abstract_mesh, jax.tree.leaves(avals)
    mesh = next(filter(None, map(explicit_mesh, leaves)), mesh) if mesh.empty else mesh
    with (
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),
        _config._check_vma(any(map(varying_axes, leaves))),
    ):
        return jax.make_jaxpr(fun, axis_env=list(mesh.shape.items()))(*avals)


def is_manual(eqn: JaxprEqn) -> bool | None:
    """Whether an equation is in a `jax.shard_map` over all axes of its mesh.

    None without a mesh, and on a mesh of a single device: there the compiler divides nothing.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    return None if mesh.empty or mesh.size == 1 else mesh.are_all_axes_manual


def transfer_in(eqn: JaxprEqn) -> str | None:
    """The direction of a copy between device and host memory: "D2H", "H2D", or None for another equation."""
    if eqn.primitive is not _primitives.device_put_p or len(eqn.invars) != 1:
        return None
    source, target = is_host(eqn.invars[0].aval), is_host(eqn.outvars[0].aval)
    return {(False, True): "D2H", (True, False): "H2D"}.get((source, target))
