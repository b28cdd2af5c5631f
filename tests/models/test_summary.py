"""The end of a run: sparkline, picture, table."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from models.compare import Comparison, Measurement
from models.summary import ASCII_BLOCKS, BLOCKS, Prediction, Summary, draw, environment, sparkline, versions
from models.work import Work

LOSSES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def test_the_sparkline_goes_from_the_largest_block_to_the_smallest():
    assert sparkline([7, 6, 5, 4, 3, 2, 1, 0]) == BLOCKS[::-1]
    assert sparkline([0, 7], blocks=ASCII_BLOCKS) == "_@"


def test_the_sparkline_averages_what_does_not_fit():
    assert sparkline([0, 0, 7, 7], width=2) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([0, 14, 0, 0, 7, 7], width=3) == BLOCKS[-1] + BLOCKS[0] + BLOCKS[-1]


@settings(deadline=None)
@given(LOSSES, st.integers(1, 80))
@example([0.0, -1e-308], 2)  # whose reciprocal is infinite
def test_any_losses_make_a_sparkline(values, width):
    line = sparkline(values, width=width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BLOCKS)


def test_nothing_and_a_flat_line():
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == BLOCKS[0] * 2


def size_of_png(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_the_picture_shows_what_was_measured(tmp_path: Path):
    draw(tmp_path / "a.png", [(1, 5.0), (2, 3.0)], [(2, 3.1)], 3.2, "title")
    draw(tmp_path / "b.png", [(1, 5.0), (2, 3.0)], [], 3.2, "title")
    draw(tmp_path / "c.png", [], [], 3.2, "title")
    assert {size_of_png(tmp_path / f"{name}.png") for name in "abc"} == {(960, 540)}
    assert len({(tmp_path / f"{name}.png").read_bytes() for name in "abc"}) == 3


def shown(summary: Summary, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    summary.show(Console(file=stream, width=160))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def summary(**changes) -> Summary:
    base: dict[str, Any] = dict(
        train=[(1, 5.5), (2, 2.0)],
        held_out=[(2, 2.0794415416798357)],
        byte_frequency=3.0,
        device_bytes=1_500_000,
        host_bytes=2_000_000_000,
        recompute_bytes=0,
        work=Work(tokens=2048, flops=10**12, peak_flops=None),
        step_ms=100.0,
        compile_s=3.0,
        peak_bytes=None,
        comparison=None,
    )
    return Summary(**(base | changes))


def test_the_table_gives_both_units_bytes_and_speed():
    text = shown(summary())
    assert "2.079 nats/byte = 3.000 bits/byte" in text
    assert "3.000 nats/byte = 4.328 bits/byte" in text
    assert "device 1.50 MB, host 2.00 GB, recomputed 0.00 MB" in text
    assert "20,480 tokens/s, 100.0 ms a step (median)" in text
    assert "5.500 █▁ 2.000" in text


def test_a_terminal_without_blocks_gets_ascii():
    assert "5.500 @_ 2.000" in shown(summary(), encoding="ascii")


def test_a_run_that_took_no_step_has_no_speed():
    text = shown(summary(step_ms=None, compile_s=None))
    assert "tokens/s" not in text
    content = summary(step_ms=None).to_dict()
    assert content["tokens_per_s"] is content["mfu"] is None
    assert content["work"]["tokens"] == 2048


def test_a_device_whose_peak_is_known_has_a_utilization():
    assert "MFU" not in shown(summary())
    work, twins = Work(2048, 10**12, 40e12), Comparison(Measurement("gpu", 50.0), Measurement("gpu", 200.0))
    there = summary(work=work, comparison=twins)
    text = shown(there)
    assert "20,480 tokens/s, MFU 25.0%, 100.0 ms a step (median)" in text
    assert "50.0 ms a step, 40,960 tokens/s, MFU 50.0%, peak memory not known" in text
    assert "200.0 ms a step, 10,240 tokens/s, MFU 12.5%, peak memory not known" in text
    assert there.to_dict()["mfu"] == 0.25


def test_the_comparison_says_what_the_policy_gains():
    ours, twin = (
        Measurement("gpu", 101.0, 30_000_000_000),
        Measurement("gpu", 100.0, 40_000_000_000),
    )
    text = shown(summary(comparison=Comparison(ours, twin), peak_bytes=31_000_000_000))
    assert "101.0 ms a step, 20,277 tokens/s, peak 30.00 GB" in text
    assert "100.0 ms a step, 20,480 tokens/s, peak 40.00 GB" in text
    assert "+1.0% step time, -10.00 GB peak device memory" in text
    assert "peak device memory    31.00 GB" in text


def test_on_a_cpu_no_difference_is_printed():
    twins = Comparison(Measurement("cpu", 101.0), Measurement("cpu", 100.0))
    text = shown(summary(comparison=twins, predicted=Prediction("NVIDIA H200", 24.9, 10**9, 0, 2 * 10**9)))
    assert "%" not in text
    assert "none: on a CPU nothing moves" in text
    assert "step 24.9 ms on NVIDIA H200; peak 1.00 GB of 2.00 GB; a CPU measures neither" in text


def test_a_twin_that_did_not_fit_is_told():
    ours, twin = (
        Measurement("gpu", 101.0, 30_000_000_000),
        Measurement(error="exit status 1: RESOURCE_EXHAUSTED"),
    )
    text = shown(summary(comparison=Comparison(ours, twin)))
    assert "not measured (exit status 1: RESOURCE_EXHAUSTED)" in text
    assert "step time" not in text


@pytest.mark.parametrize("name", ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "python"])
def test_the_environment_names_versions(name):
    assert f"{name} {versions()[name]}" in environment()
