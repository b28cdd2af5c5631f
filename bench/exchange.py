"""Rows on their way to the experts of other devices and back: a padded all-to-all against a ragged one.

A padded all-to-all sends room for `capacity` times what an even router sends; `lax.ragged_all_to_all` sends
what there is. Variants go in turns in one process, by default and captured in CUDA graphs with edges by data,
as `jaxoff.jit` has them.

    python -m bench.exchange --out exchange.json

XLA's CPU has no ragged all-to-all: there that variant's row holds the error.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.grouped_mlp import describe, say, summary
from bench.provenance import provenance
from bench.rounds import times_in_rounds
from jaxoff._runtime import flags

AXIS = "expert"
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "captured": dict(flags.for_program(scanned=1, jaxlib=importlib.metadata.version("jaxlib"))),
}

type Exchange = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def padded(x_SD: jax.Array, _: jax.Array, __: jax.Array) -> jax.Array:
    """Sends parts of equal size, S / n rows to each of n devices."""
    return lax.all_to_all(x_SD, AXIS, 0, 0, tiled=True)


def ragged(x_SD: jax.Array, sent_n: jax.Array, came_n: jax.Array) -> jax.Array:
    """Sends the first rows of each part, as many as `sent_n` says, to the same places; zeros behind them."""
    parts = sent_n.size
    room = x_SD.shape[0] // parts
    starts = room * lax.iota(jnp.int32, parts)
    here = jnp.full((parts,), room * lax.axis_index(AXIS), jnp.int32)
    return lax.ragged_all_to_all(x_SD, jnp.zeros_like(x_SD), starts, sent_n, here, came_n, axis_name=AXIS)


EXCHANGES: dict[str, Exchange] = {"padded": padded, "ragged": ragged}


def program(exchange: Exchange, mesh: jax.sharding.Mesh, turns: int, options: dict[str, Any]) -> Any:
    """There and back, some turns; each leaves the rows as they were."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    def there_and_back(x_SD, sent_n):
        came_n = lax.all_to_all(sent_n, AXIS, 0, 0, tiled=True)

        def turn(x, _):
            return exchange(exchange(x, sent_n, came_n), came_n, sent_n), None

        return lax.scan(turn, x_SD, length=turns)[0]

    return jax.jit(there_and_back, compiler_options=options or None)


def arguments(mesh: jax.sharding.Mesh, rows: int, width: int, capacity: float) -> tuple[jax.Array, jax.Array]:
    """Rows of each device by destination, with zeros behind each part, and how many there are in each.

    Each device sends between 80 and 120% of an even share, and no more than there is room for.
    """
    parts = mesh.size
    room = min(rows, math.ceil(capacity * rows / parts))
    share = jax.random.uniform(jax.random.key(0), (parts, parts), minval=0.8, maxval=1.2) * rows / parts
    sent = jnp.minimum(share.astype(jnp.int32), room)
    held = lax.iota(jnp.int32, room) < sent.reshape(-1)[:, None]
    made = jax.random.normal(jax.random.key(1), (parts * parts, room, width), jnp.bfloat16)
    x = jnp.where(held[:, :, None], made, 0).reshape(-1, width)
    by_device = NamedSharding(mesh, P(AXIS))
    return jax.device_put(x, by_device), jax.device_put(sent.reshape(-1), by_device)


def measure(o: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Rows for each capacity: milliseconds of one exchange under a set of options, or an error."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    for capacity in o.capacities:
        args = arguments(mesh, o.rows, o.width, capacity)
        sent_bytes = int(jnp.sum(args[1])) * 2 * o.width // mesh.size  # of a device, its own too
        found, calls = {}, {}
        for kind, options in itertools.product(EXCHANGES, OPTIONS):
            row = {"capacity": capacity, "exchange": kind, "options": options, "sent_bytes": sent_bytes}
            found[kind, options] = row
            try:
                step = program(EXCHANGES[kind], mesh, o.turns, OPTIONS[options])
                row["same"] = bool(jnp.array_equal(step(*args), args[0]))
                calls[kind, options] = functools.partial(step, *args)
            except Exception as error:  # the backend does not have it, or it fails
                row["error"] = describe(error)
        for key, times in times_in_rounds(calls, o.repeats).items():
            found[key] |= summary([ms / (2 * o.turns) for ms in times])
        for (kind, options), row in found.items():
            say(f"{capacity} {kind:7} {options:9} {row.get('ms', row.get('error'))}")
        yield list(found.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A padded all-to-all of rows against a ragged one.")
    parser.add_argument("--out", type=Path, required=True, help="the result file, JSON")
    parser.add_argument("--rows", type=int, default=98304, help="that a device has to send, its own too")
    parser.add_argument("--width", type=int, default=2688, help="of a row, in 16-bit numbers")
    parser.add_argument(
        "--capacities", type=float, nargs="+", default=[1.25, 2.0], help="room, of an even share"
    )
    parser.add_argument("--turns", type=int, default=8, help="there and back in a program")
    parser.add_argument("--repeats", type=int, default=16, help="samples of each program")
    o = parser.parse_args(arguments)
    result = provenance(vars(o)) | {"rows": []}
    for rows in measure(o):
        result["rows"] += rows
        o.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
