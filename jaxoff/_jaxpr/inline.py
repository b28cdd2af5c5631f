"""Calls replaced by their equations, so that the scheduler can order all equations of a program together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxoff._jaxpr import compat, remat3
from jaxoff._jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var

type Renamed = dict[Var, Any]


def inline_calls(
    eqns: Iterable[JaxprEqn], renamed: Renamed, *, checkpoints: bool = True
) -> Iterator[JaxprEqn]:
    """Replaces `jax.checkpoint` and plain `jax.jit` calls by the equations in them, at any depth.

    A differentiated `jax.checkpoint` with `prevent_cse` puts a single barrier over all of its operands. Its
    first equation then waits for the last reload from the host. Here each operand gets a barrier of its own.

    Args:
      eqns: equations in program order.
      renamed: variable -> atom to read in its place. The results of inlined calls are added.
      checkpoints: whether `jax.checkpoint` calls are replaced, too.

    Yields:
      Equations with the same results.
    """
    eqns = list(eqns)
    pinned = {v for eqn in eqns if remat3.is_checkpoint(eqn) for v in eqn.invars} if checkpoints else set()
    for eqn in eqns:
        operands = [resolve(renamed, v) for v in eqn.invars]
        if eqn.primitive.name == "optimization_barrier" and not pinned.isdisjoint(eqn.outvars):
            # By jax_remat3, over cotangents and a checkpoint's operands, which get barriers of their own.
            renamed.update(zip(eqn.outvars, operands, strict=True))
            continue
        call = compat.inlinable_call(eqn)
        if call is None or (call.checkpoint and not checkpoints):
            yield remat3.write_name(eqn.replace(invars=operands))
            continue
        if call.prevent_cse:
            for i, operand in enumerate(operands):
                if isinstance(operand, Var) and not compat.is_host(operand.aval):
                    (operands[i],), barrier = compat.make_barrier([operand], like=eqn)
                    yield barrier
        body, values = instantiate(call.jaxpr, operands, like=eqn)
        results: Renamed = {}
        yield from inline_calls(body, results, checkpoints=checkpoints)
        for out, value in zip(eqn.outvars, values, strict=True):
            renamed[out] = resolve(results, value)


def inline_program(jaxpr: Jaxpr, *, checkpoints: bool = True) -> Jaxpr:
    """A program with its calls replaced by their equations; options as for `inline_calls`."""
    renamed: Renamed = {}
    eqns = list(inline_calls(jaxpr.eqns, renamed, checkpoints=checkpoints))
    return jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in jaxpr.outvars])


type _Written = tuple[Sequence[JaxprEqn], Sequence[Any]]  # equations, and the results of the one they replace


def write_otherwise(jaxpr: Jaxpr, write: Callable[[JaxprEqn], JaxprEqn | _Written]) -> Jaxpr:
    """A program with some equations written as others; the program itself where none is.

    Args:
      jaxpr: the program.
      write: an equation -> the equation with the same results, or equations with results in their place.
    """
    renamed: Renamed = {}
    eqns: list[JaxprEqn] = []
    for given in jaxpr.eqns:
        eqn = given.replace(invars=[resolve(renamed, v) for v in given.invars]) if renamed else given
        written = write(eqn)
        if isinstance(written, JaxprEqn):
            eqns.append(written)
        else:
            eqns += written[0]
            renamed.update(zip(eqn.outvars, written[1], strict=True))
    if not renamed:
        return compat.replace_equations(jaxpr, eqns)
    return jaxpr.replace(eqns=eqns, outvars=[resolve(renamed, v) for v in jaxpr.outvars])


def inline_calls_with(is_sought: Callable[[JaxprEqn], bool], jaxpr: Jaxpr) -> Jaxpr:
    """A program with the equations of the calls among whose own one is sought; `jax.checkpoint` stays."""

    def inline(eqn: JaxprEqn) -> JaxprEqn | _Written:
        call = compat.inlinable_call(eqn)
        if call is None or call.checkpoint or not any(map(is_sought, call.jaxpr.eqns)):
            return eqn
        return instantiate(call.jaxpr, eqn.invars, like=eqn)

    return write_otherwise(jaxpr, inline)


def separate_calls(jaxpr: Jaxpr) -> Jaxpr:
    """A program whose programs have variables of their own. JAX traces once what is called twice."""
    seen: set[Var] = set()

    def separate(jaxpr: Jaxpr) -> Jaxpr:
        eqns = [compat.map_programs(eqn, separate) for eqn in jaxpr.eqns]
        made = [*jaxpr.invars, *(v for eqn in eqns for v in eqn.outvars)]
        fresh: Renamed = {} if seen.isdisjoint(made) else {v: Var(v.aval) for v in made}
        seen.update(made)
        if fresh:
            eqns = [
                eqn.replace(
                    invars=[resolve(fresh, v) for v in eqn.invars], outvars=[fresh[v] for v in eqn.outvars]
                )
                for eqn in eqns
            ]
        # The constants keep their variables, whose values come with them.
        return jaxpr.replace(
            invars=[resolve(fresh, v) for v in jaxpr.invars],
            eqns=eqns,
            outvars=[resolve(fresh, v) for v in jaxpr.outvars],
        )

    return separate(jaxpr)


def split_scalars(eqns: Iterable[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Moves scalars without operands, and the constants of filled arrays, out of a program.

    Each scalar becomes an argument of the remaining equations. A barrier over the argument can delay an array
    filled with the scalar.

    Returns:
      The remaining equations, and the equations of the scalars.
    """
    scalars, rest = [], []
    for eqn in eqns:
        operands = [v for v in eqn.invars if isinstance(v, Literal)]
        if eqn.primitive.name == "broadcast_in_dim" and len(operands) == len(eqn.invars) == 1:
            constant, barrier = compat.make_barrier(list(eqn.invars), like=eqn)
            scalars.append(barrier)
            rest.append(eqn.replace(invars=[*constant]))
        elif not eqn.invars and not any(compat.shape_of(v.aval) for v in eqn.outvars):
            scalars.append(eqn)
        else:
            rest.append(eqn)
    return rest, scalars


# Equations of a mask or a fill: fused into the kernel that reads the mask.
CHEAP = frozenset(
    {"add", "and", "broadcast_in_dim", "convert_element_type", "eq", "ge", "gt", "iota", "le",
     "lt", "mul", "ne", "neg", "not", "or", "pvary", "reshape", "select_n", "squeeze", "sub", "transpose"}
)  # fmt: skip


def make_masks_inside(
    body: Jaxpr, consts: Iterable[tuple[Any, Var]], makers: Mapping[Var, JaxprEqn], least_nbytes: int = 0
) -> Jaxpr:
    """A body that makes the masks and fills among the loop's constants itself.

    As operands of a loop they would be arrays in memory.

    Args:
      body: the body of a loop.
      consts: operands of the loop with their arguments in the body.
      makers: variable -> the equation outside of the loop.
      least_nbytes: the least size of a mask or fill that the body makes.
    """
    done: Renamed = {}
    eqns: list[JaxprEqn] = []

    def can_make(v: Any) -> bool:
        if isinstance(v, Literal):
            return True
        eqn = makers.get(v)
        return eqn is not None and eqn.primitive.name in CHEAP and all(map(can_make, eqn.invars))

    def make(v: Any) -> Any:
        if isinstance(v, Literal) or v in done:
            return resolve(done, v)
        operands = [make(w) for w in makers[v].invars]
        done.update((w, Var(w.aval)) for w in makers[v].outvars)
        eqns.append(makers[v].replace(invars=operands, outvars=[done[w] for w in makers[v].outvars]))
        return done[v]

    made: Renamed = {
        argument: make(v)
        for v, argument in consts
        if isinstance(v, Var) and compat.nbytes(argument.aval) >= least_nbytes and can_make(v)
    }
    renamed = (eqn.replace(invars=[resolve(made, v) for v in eqn.invars]) for eqn in body.eqns)
    return body.replace(eqns=[*eqns, *renamed], outvars=[resolve(made, v) for v in body.outvars])


def share_scalars(eqns: Iterable[JaxprEqn], renamed: Renamed) -> list[JaxprEqn]:
    """Equations that make each scalar once: conditions are then chosen by the same index.

    Between the parts of a `jax.shard_map`, a scalar that differs between devices is a row of one number: the
    equations read the scalar itself.

    Args:
      eqns: equations, in program order.
      renamed: variable -> what the equations read in its place; gets the scalars that are left out.
    """
    found = list[JaxprEqn]()
    in_rows: Renamed = {}  # row -> its scalar
    made = dict[Any, Var]()  # how a scalar is made -> the scalar
    for given in eqns:
        eqn = given.replace(invars=[resolve(renamed, v) for v in given.invars])
        if eqn.primitive.name in CHEAP:
            (out,), atoms = eqn.outvars, eqn.invars
            if not compat.shape_of(out.aval):
                operands = (repr(v) if isinstance(v, Literal) else v for v in atoms)
                first = made.setdefault((eqn.primitive.name, str(eqn.params), str(out.aval), *operands), out)
                if eqn.primitive.name == "reshape" and isinstance(atoms[0], Var):
                    first = in_rows.get(atoms[0], first)
                if first is not out and first.aval == out.aval:
                    renamed[out] = first
                    continue
            elif len(atoms) == 1 and not compat.shape_of(atoms[0].aval):
                in_rows[out] = atoms[0]
        found.append(eqn)
    return found


_ROUNDED_TO = {
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32: "bfloat16",
    jax.lax.DotAlgorithmPreset.F16_F16_F32: "float16",
}


def round_operands(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Rounds operands ahead of the products whose algorithm rounds them, once for all readers.

    `jax.nn.dot_product_attention` takes products of float32 gradients by the algorithm BF16_BF16_F32. XLA
    rounds in each product; a barrier between two of them would keep the float32 operand as well.
    """
    rounded: dict[tuple[Var, str], Var] = {}
    for eqn in eqns:
        dtype = _ROUNDED_TO.get(eqn.params["precision"]) if eqn.primitive.name == "dot_general" else None
        operands = list(eqn.invars)
        for i, v in enumerate(operands):
            if dtype is None or not isinstance(v, Var) or compat.struct_of(v.aval).dtype != "float32":
                continue
            if (v, dtype) not in rounded:
                made, (rounded[v, dtype],) = trace_call(lambda x, t=dtype: x.astype(t), [v], like=eqn)
                yield from made
            operands[i] = rounded[v, dtype]
        yield eqn.replace(invars=operands)


def instantiate(jaxpr: Jaxpr, operands: Sequence[Any], like: JaxprEqn) -> tuple[list[JaxprEqn], list[Any]]:
    """Copies the equations of a program for given operands, into the scopes of equation `like`.

    Each variable is replaced by a fresh variable, because a program may be called more than once.

    Returns:
      The equations, and the results of the program.
    """
    inner: Renamed = dict(zip(jaxpr.invars, operands, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        outs = [Var(v.aval) for v in eqn.outvars]
        invars = [resolve(inner, v) for v in eqn.invars]
        eqns.append(_into_scopes_of(like, eqn).replace(invars=invars, outvars=outs))
        inner.update(zip(eqn.outvars, outs, strict=True))
    return eqns, [resolve(inner, v) for v in jaxpr.outvars]


def trace_call(
    fun: Callable[..., Any], operands: Sequence[Any], like: JaxprEqn
) -> tuple[list[JaxprEqn], list[Any]]:
    """Traces a function for given operands (pytrees) into the scopes of equation `like`.

    Returns:
      The equations, and the leaves of the function's results.
    """
    closed = compat.trace_like(like, fun, jax.tree.map(lambda v: v.aval, operands))
    return instantiate(closed.jaxpr, jax.tree.leaves(operands), like)


def trace_scan(
    run: Callable[..., Sequence[Any]],
    operands: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    like: JaxprEqn,
    *,
    length: int,
    unroll: int | bool = 1,
) -> tuple[list[JaxprEqn], list[Any]]:
    """Traces a scan in the direction of scan `like` into its scopes.

    Args:
      run: a body (*constants, *carry, *rows) -> (*carry, *rows).
      operands: constants, carry and stacks.
      like: a scan.
      length, unroll: of the scan.

    Returns:
      The equations, and the results of the scan.
    """

    scan = functools.partial(scan_like, run, like=like, length=length, unroll=unroll)
    return trace_call(scan, [list(part) for part in operands], like)


def scan_like(
    run: Callable[..., Sequence[Any]],
    consts: Sequence[Any],
    carry: Sequence[Any],
    rows: Sequence[Any],
    *,
    like: JaxprEqn,
    length: int,
    unroll: int | bool = 1,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Runs a scan of a body as for `trace_scan`; returns its carry and its stacks."""

    def step(carry, row):
        values = run(*consts, *carry, *row)
        return tuple(values[: len(carry)]), tuple(values[len(carry) :])

    reverse = like.params["reverse"]
    return jax.lax.scan(step, tuple(carry), tuple(rows), length=length, reverse=reverse, unroll=unroll)


def make_program(
    like: Jaxpr, arguments: Sequence[Var], eqns: Sequence[JaxprEqn], results: Sequence[Any]
) -> Jaxpr:
    """A program without constants of given equations, with the rest, such as the source, of another."""
    return like.replace(
        invars=[*arguments],
        eqns=[*eqns],
        outvars=[*results],
        effects=frozenset[Any]().union(*(eqn.effects for eqn in eqns)),
        debug_info=like.debug_info.with_unknown_names(),
    )


def resolve(renamed: Renamed, atom: Any) -> Any:
    """Looks up the atom to read in place of `atom`. An atom without an entry stays."""
    return atom if isinstance(atom, Literal) else renamed.get(atom, atom)


def _into_scopes_of(call: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """Puts the scopes of a call ahead of the scopes of an equation in the called jaxpr.

    An equation of library code gets the source of the call: JAX traces its own functions once for all calls.
    """
    own, outer = eqn.source_info, call.source_info
    traceback = own.traceback if compat.has_user_code(own.traceback) else outer.traceback
    return eqn.replace(
        source_info=own.replace(name_stack=outer.name_stack + own.name_stack, traceback=traceback)
    )
