"""The benchmark of all-to-all collectives, at a tiny size."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

from bench import all_to_all

TINY = ["--rows", "32", "--width", "8", "--turns", "2", "--repeats", "3", "--capacities", "1.1", "2"]


@pytest.mark.long  # test_a_ragged_collective_brings_the_rows_of_a_padded_one runs both
def test_padded_collectives_are_timed_and_bring_rows_back(tmp_path):
    all_to_all.main(["--out", str(out := tmp_path / "a.json"), *TINY])
    result = json.loads(out.read_text())
    assert result["options"]["rows"] == "32"
    rows = [row for row in result["rows"] if row["exchange"] == "padded"]
    assert [(row["capacity"], row["options"], row["same"]) for row in rows] == [
        (capacity, options, True) for capacity in (1.1, 2.0) for options in ("default", "captured")
    ]
    assert all(0 < row["min_ms"] <= row["ms"] for row in rows)
    assert all("ms" in row or "error" in row for row in result["rows"])


def reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as jax describes it: each row goes to an offset in the output of a device."""
    gathered = [lax.all_gather(v, axis_name) for v in (operand, input_offsets, send_sizes, output_offsets)]
    here, row = lax.axis_index(axis_name), lax.iota(jnp.int32, output.shape[0])
    for operand_i, starts, sizes, places in zip(*gathered, strict=True):
        at = row - places[here]
        taken = (at >= 0) & (at < sizes[here])
        brought = operand_i[jnp.where(taken, starts[here] + at, 0)]
        output = jnp.where(taken[:, None], brought, output)
    return output


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("capacity", [1.0, 1.3, 8.0])
def test_a_ragged_collective_brings_the_rows_of_a_padded_one(monkeypatch, capacity):
    monkeypatch.setattr(lax, "ragged_all_to_all", reference)
    mesh = jax.make_mesh((4,), (all_to_all.AXIS,), axis_types=(AxisType.Auto,))
    x, sent = all_to_all.arguments(mesh, 32, 8, capacity)
    P, AXIS = all_to_all.P, all_to_all.AXIS

    def both(x, sent):
        came = lax.all_to_all(sent, AXIS, 0, 0, tiled=True)
        return tuple(send(x, sent, came) for send in all_to_all.COLLECTIVES.values())

    run = jax.shard_map(both, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    padded, ragged = jax.jit(run)(x, sent)
    assert jnp.abs(padded).sum() > 0
    assert (padded == ragged).all()
    there_and_back = all_to_all.program(all_to_all.send_ragged, mesh, 3, {})
    assert (there_and_back(x, sent) == x).all()
