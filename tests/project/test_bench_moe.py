"""The MoE layer's benchmark runs on a small layer, and finds a wrong variant."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import moe as bench
from bench import moe_peers as peers
from bench import moe_table
from bench.moe_shapes import MEASURED, SHAPES, draw_routing

OPTIONS = ["--shapes", "tiny", "--routings", "balanced", "--repeats", "1"]


@pytest.mark.long
def test_a_run_checks_times_and_counts_and_tells_of_what_is_not_there(tmp_path, monkeypatch):
    def wrong(data):
        parts = peers._jax_parts(lambda x, p, e, w1, w2: 2 * x * p.sum(), data)
        return {"forward": parts["forward"], "forward+backward": parts["forward+backward"]}

    def missing(data):
        raise ModuleNotFoundError("No module named 'sonicmoe'")

    monkeypatch.setattr(peers, "VARIANTS", {"ours": peers.ours, "wrong": wrong, "sonicmoe": missing})
    monkeypatch.setattr(bench, "SAMPLE_MS", 0.1)
    out = tmp_path / "moe.json"
    bench.main([*OPTIONS, "--activations", "swiglu", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {c["variant"]: c["ok"] for c in result["checks"]} == {"ours": True, "wrong": False}
    timed = [(row["variant"], row.get("part")) for row in result["rows"] if "ms" in row]
    assert timed == [("ours", "forward"), ("ours", "forward+backward")]
    assert [row["variant"] for row in result["rows"] if "error" in row] == ["sonicmoe"]
    shape = SHAPES["tiny"]
    (kept,) = result["kept"]
    assert kept["nbytes_per_token"] == 2 * shape.width + 4 * shape.top_k * shape.hidden


def test_zipf_routing_is_uneven_and_a_tokens_experts_differ():
    shape = SHAPES["olmoe"]
    loads = {}
    for kind in ("balanced", "zipf"):
        probs, experts = jax.jit(draw_routing, static_argnums=(0, 1))(shape, kind)
        assert (np.diff(np.sort(np.asarray(experts[:64]), axis=1), axis=1) > 0).all()
        np.testing.assert_allclose(probs[:64].sum(axis=1), 1.0, rtol=1e-5)
        loads[kind] = jnp.bincount(experts.reshape(-1), length=shape.experts)
    assert int(loads["zipf"].max()) > 3 * int(loads["balanced"].max())
    with pytest.raises(ValueError, match="unknown kind 'even'; choose from balanced, zipf"):
        draw_routing(shape, "even")


def test_operations_are_those_of_the_products():
    shape = SHAPES["nano"]
    assert shape.flops("squared_relu", "forward") == 2 * 2 * shape.rows * shape.width * shape.hidden
    assert shape.flops("swiglu", "forward+backward") == 9 * 2 * shape.rows * shape.width * shape.hidden
    assert "tiny" not in MEASURED


@pytest.mark.parametrize(("device", "name"), [("h100", "moe-layer.md"), ("h200", "moe-layer-h200.md")])
def test_the_page_is_that_of_the_results(device, name):
    root = Path(__file__).parents[2]
    found = sorted((root / "bench" / "results" / "moe").glob(f"layer_{device}_*.json"))
    page = moe_table.markdown(json.loads(path.read_text()) for path in found)
    assert (root / "docs" / name).read_text() == page


def test_a_slower_case_is_bold_and_a_missing_peer_is_left_out():
    case = {"shape": "olmoe", "activation": "swiglu", "routing": "zipf", "part": "forward"}
    rows = [case | {"variant": "ours", "ms": 2.0}, case | {"variant": "separate", "ms": 1.0}]
    rows.append(case | {"variant": "sonicmoe", "error": "not installed"})
    page = moe_table.markdown([{"rows": rows, "provenance": {"device": "1 x card"}}])
    row = "| 16k, 64, 8, 2048 x 1024 | SwiGLU, zipf, forward | 2 | **1 (2.00)** | - |"
    assert page.rstrip().splitlines()[-1] == row
