"""Rows on their way to the experts of other devices and back: padded against ragged all-to-all.

A padded all-to-all sends room for `capacity` times the rows of an even router; `lax.ragged_all_to_all` sends
the actual rows. Variants alternate in one process, compiled by default and captured in CUDA graphs with edges
by data, as `jaxoff.jit` compiles loops.

    python -m bench.all_to_all --out all_to_all.json

XLA's CPU has no ragged all-to-all: the row of this variant then holds the error.
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
from bench.rounds import time_in_rounds
from jaxoff._runtime import flags

AXIS = "expert"
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "captured": dict(flags.choose_options(scanned=1, jaxlib=importlib.metadata.version("jaxlib"))),
}

type Collective = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def send_padded(x_SD: jax.Array, _: jax.Array, __: jax.Array) -> jax.Array:
    """Sends parts of equal size, S / n rows to each of n devices."""
    return lax.all_to_all(x_SD, AXIS, 0, 0, tiled=True)


def send_ragged(x_SD: jax.Array, sent_n: jax.Array, came_n: jax.Array) -> jax.Array:
    """Sends the first `sent_n` rows of each part to the same places of the receivers; zeros follow them."""
    parts = sent_n.size
    room = x_SD.shape[0] // parts
    starts = room * lax.iota(jnp.int32, parts)
    here = jnp.full((parts,), room * lax.axis_index(AXIS), jnp.int32)
    return lax.ragged_all_to_all(x_SD, jnp.zeros_like(x_SD), starts, sent_n, here, came_n, axis_name=AXIS)


COLLECTIVES: dict[str, Collective] = {"padded": send_padded, "ragged": send_ragged}


def program(collective: Collective, mesh: jax.sharding.Mesh, trips: int, options: dict[str, Any]) -> Any:
    """Sends rows there and back `trips` times; each trip leaves the rows unchanged."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    def there_and_back(x_SD, sent_n):
        came_n = lax.all_to_all(sent_n, AXIS, 0, 0, tiled=True)

        def trip(x, _):
            return collective(collective(x, sent_n, came_n), came_n, sent_n), None

        return lax.scan(trip, x_SD, length=trips)[0]

    return jax.jit(there_and_back, compiler_options=options or None)


def arguments(mesh: jax.sharding.Mesh, rows: int, width: int, capacity: float) -> tuple[jax.Array, jax.Array]:
    """Rows of each device by destination, with zeros behind each part, and the number of rows in each part.

    Each device sends between 80 and 120% of an even share, and at most the room of a part.
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
    """Rows for each capacity: milliseconds of a collective under a set of options, or an error."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    for capacity in o.capacities:
        args = arguments(mesh, o.rows, o.width, capacity)
        sent_bytes = int(jnp.sum(args[1])) * 2 * o.width // mesh.size  # of a device, its own rows included
        found, calls = {}, {}
        for kind, options in itertools.product(COLLECTIVES, OPTIONS):
            row = {"capacity": capacity, "exchange": kind, "options": options, "sent_bytes": sent_bytes}
            found[kind, options] = row
            try:
                step = program(COLLECTIVES[kind], mesh, o.turns, OPTIONS[options])
                row["same"] = bool(jnp.array_equal(step(*args), args[0]))
                calls[kind, options] = functools.partial(step, *args)
            except Exception as error:  # the backend lacks the collective, or the program fails
                row["error"] = describe(error)
        for key, times in time_in_rounds(calls, o.repeats).items():
            found[key] |= summary([ms / (2 * o.turns) for ms in times])
        for (kind, options), row in found.items():
            say(f"{capacity} {kind:7} {options:9} {row.get('ms', row.get('error'))}")
        yield list(found.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A padded all-to-all of rows against a ragged one.")
    parser.add_argument("--out", type=Path, required=True, help="the result file, JSON")
    parser.add_argument("--rows", type=int, default=98304, help="rows of a device, including rows for itself")
    parser.add_argument("--width", type=int, default=2688, help="width of a row, in 16-bit numbers")
    parser.add_argument(
        "--capacities", type=float, nargs="+", default=[1.25, 2.0], help="room, of an even share"
    )
    parser.add_argument("--turns", type=int, default=8, help="trips there and back in a program")
    parser.add_argument("--repeats", type=int, default=16, help="samples of each program")
    o = parser.parse_args(arguments)
    result = provenance(vars(o)) | {"rows": []}
    for rows in measure(o):
        result["rows"] += rows
        o.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
