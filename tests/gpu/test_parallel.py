"""On several GPUs: the bits of residuals on the host are those on the device, on every axis of the mesh."""

import json

import pytest

from bench import parallel

STEPS = 60
SIZES = ["--widths", "nano", "--seq", "1024", "--microbatches", "4", "--layers", "4", "--capacity", "2"]
# Narrow enough to be quick; the residuals of a tick are still some megabytes.
MOVED = ["--offload", "attn.norm_in,attn.proj_in,mlp.norm_in,moe.act", "--save", "moe.probs,head.norm_in"]


def bits(tmp_path, *options):
    """What 60 steps of training compare to, with other tokens in each."""
    out = tmp_path / "bits.json"
    parallel.main(["--out", str(out), *SIZES, *MOVED, "--bits", str(STEPS), *options])
    return json.loads(out.read_text())["bits"]


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("mesh", ["pipe=2", "expert=2", "fsdp=2"])
def test_bits_on_two_gpus(mesh, tmp_path):
    found = bits(tmp_path, "--mesh", mesh, "--virtual", "2" if "pipe" in mesh else "1")
    assert found.get("ok"), found
    assert found["losses"] == STEPS  # never the same number twice


@pytest.mark.multi_gpu(4)
@pytest.mark.parametrize("mesh", ["expert=2,pipe=2", "data=2,fsdp=2"])
def test_bits_on_four_gpus(mesh, tmp_path):
    found = bits(tmp_path, "--mesh", mesh, "--virtual", "2" if "pipe" in mesh else "1")
    assert found.get("ok"), found
    assert found["losses"] == STEPS


@pytest.mark.multi_gpu(2)
def test_copies_of_the_pipeline_run_beside_kernels(tmp_path):
    out = tmp_path / "pipe.json"
    options = ["--mesh", "pipe=2", "--virtual", "2", "--layers", "4", "--microbatches", "4", "--repeats", "3"]
    parallel.main(["--out", str(out), *options, "--variants", "jaxoff,saved", "--sample-ms", "100"])
    ours, saved = json.loads(out.read_text())["rows"]
    assert ours["moved_bytes"] > 0 == saved["moved_bytes"]
    assert ours["kernel_host_bytes"] == 0
    assert len(ours["gpus"]) == 2
    for gpu in ours["gpus"]:
        assert gpu["exposed_ms"] < 0.1 * (gpu["d2h_busy_ms"] + gpu["h2d_busy_ms"]), gpu
    assert all(r is not None and r > 0.9 for r in ours["r"]), ours["r"]
