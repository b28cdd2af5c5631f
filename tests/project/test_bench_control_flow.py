"""The benchmark of steps with control flow in their layers, at tiny sizes."""

import json

import jax
import numpy as np
import pytest

from bench import control_flow


def test_a_result_has_all_variants(tmp_path):
    out = tmp_path / "result.json"
    tiny = ["--sizes", "tiny", "--steps", "1", "--samples", "2", "--device-gb", "0.0049", "--out", str(out)]
    control_flow.main(["--program", "skipped", *tiny])
    result = json.loads(out.read_text())
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows.keys() == {"written", "checkpoint", "dots", "within 0.0049 GB"}
    assert all(row["ms"] > 0 and np.isfinite(row["loss"]) for row in rows.values())
    assert result["program"] == "skipped" and result["provenance"]["command"]


@pytest.mark.long
@pytest.mark.parametrize("program", ["kinds", "skipped", "chunks", "maps"])
def test_variants_are_the_same_step(program):
    steps = {
        name: control_flow.build(program, control_flow.TINY, wrap, "xla")
        for name, wrap in control_flow.WRAPS.items()
    }
    state = steps["written"].initialize(jax.random.key(0))
    batch = steps["written"].make_batch(jax.random.key(1))
    losses = [float(jax.jit(step.fun)(state, batch)[1]) for step in steps.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
