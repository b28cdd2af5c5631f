"""Profiles of GPUs: what is read from them, and the arithmetic of what covers what."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from bench import timeline
from jaxoff._profile.gpu_trace import CopyTime, Event, Trace, read
from jaxoff._profile.intervals import subtract, sum_lengths, unite

TRACES = Path(__file__).parents[2] / "data" / "traces"
STOCK, CONCURRENT = (TRACES / f"scan_offloaded_{kind}.xplane.pb" for kind in ("default", "conc"))

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-2, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=12,
)


def points(some):
    """The unit steps that integer intervals cover: the same thing, counted."""
    return {step for start, end in some for step in range(start, end)}


@given(intervals)
def test_a_union_covers_the_same_points_once(some):
    joined = unite(some)
    assert points(joined) == points(some)
    assert sum_lengths(joined) == len(points(some))
    assert all(start < end for start, end in joined)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(joined))


@given(intervals, intervals)
def test_what_lies_outside_is_the_difference(some, cover):
    bare = subtract(some, cover)
    assert points(bare) == points(some) - points(cover)
    assert unite(bare) == bare
    assert sum_lengths(bare) == sum_lengths(unite([*some, *cover])) - sum_lengths(unite(cover))


def event(kind, start, end, gpu=0, stream=1, nbytes=None):
    return Event(f"some {kind}", kind, gpu, stream, float(start), float(end - start), nbytes)


def test_copies_are_exposed_where_no_kernel_of_their_own_gpu_runs():
    trace = Trace(
        (
            event("kernel", 0, 10),
            event("D2H", 8, 14, stream=2, nbytes=600),
            event("H2D", 12, 16, stream=3, nbytes=400),
            event("kernel", 15, 20, stream=4),
            event("D2D", 20, 21),
            event("memset", 21, 23),
            event("kernel", 10, 15, gpu=1),
            event("H2D", 14, 17, gpu=1, nbytes=5),
        )
    )
    first, second = trace.times()
    assert (first.gpu, first.kernel_ms, first.d2d_ms, first.memset_ms) == (0, 15, 1, 2)
    assert first.d2h == CopyTime(count=1, nbytes=600, busy_ms=6, exposed_ms=4)
    assert first.h2d == CopyTime(count=1, nbytes=400, busy_ms=4, exposed_ms=3)
    assert first.exposed_ms == 5, "from 10 to 15: both directions at once count once"
    assert (second.gpu, second.kernel_ms, second.h2d.exposed_ms, second.d2h.count) == (1, 5, 2, 0)
    assert trace.span_ms == 23
    assert sum_lengths(trace.list_exposed("D2H", "H2D")) == 7, "GPU 0 from 10 to 15, GPU 1 from 15 to 17"


def test_a_window_cuts_what_reaches_over_its_edges():
    trace = Trace((event("kernel", 0, 10), event("D2H", 8, 14, nbytes=600), event("kernel", 15, 20)))
    cut = trace.between(9, 15)
    assert [(e.kind, *e.interval) for e in cut.events] == [("kernel", 9, 10), ("D2H", 9, 14)]
    assert sum_lengths(cut.list_exposed("D2H")) == 4


def test_bandwidth_is_bytes_over_busy_time():
    assert CopyTime(2, 10**9, 20.0, 0.0).bandwidth_gbps == 50
    assert CopyTime(0, 0, 0.0, 0.0).bandwidth_gbps == 0
    assert CopyTime(6, 900, 3.0, 1.5).per_call(3) == CopyTime(2, 300, 1.0, 0.5)


def test_a_profile_of_copies_in_line_with_the_kernels():
    trace = read(STOCK)
    (gpu,) = trace.times()
    assert trace.gpus == (0,)
    assert {e.stream for e in trace.events} == {14}
    for copy in (gpu.d2h, gpu.h2d):
        assert (copy.count, copy.nbytes) == (24, 24 * 2**27)  # 2 calls, 4 layers, 3 residuals of 134 MB
        assert copy.exposed_ms == pytest.approx(copy.busy_ms)
        assert 55 < copy.bandwidth_gbps < 56
    assert gpu.d2h.busy_ms == pytest.approx(58.19, abs=0.01)
    assert gpu.kernel_ms == pytest.approx(295.76, abs=0.01)
    assert gpu.exposed_ms == pytest.approx(gpu.d2h.busy_ms + gpu.h2d.busy_ms)
    assert trace.span_ms == pytest.approx(414.57, abs=0.01)


def test_a_profile_of_copies_beside_the_kernels_of_many_streams():
    trace = read(CONCURRENT)
    (gpu,) = trace.times()
    assert len({e.stream for e in trace.events}) == 28
    assert (gpu.d2h.count, gpu.h2d.count) == (24, 24)
    assert gpu.d2h.exposed_ms == pytest.approx(0.34, abs=0.01)
    assert gpu.h2d.exposed_ms == pytest.approx(5.32, abs=0.01)
    assert gpu.kernel_ms == pytest.approx(321.07, abs=0.01)
    of_kernels = sum(e.duration_ms for e in trace.events if e.kind == "kernel")
    assert of_kernels > gpu.kernel_ms, "kernels that run side by side count once"


def test_a_kernel_that_is_named_like_a_copy_is_a_kernel():
    kinds = {e.name: e.kind for e in read(STOCK).events}
    assert kinds["memcpy128"] == "kernel"
    assert kinds["MemcpyD2D"] == "D2D"
    assert kinds["Memset 0"] == "memset"


SPACE = """
planes {{ name: "/host:CPU" lines {{ name: "Stream #1" events {{ metadata_id: 1 duration_ps: 5000000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "host" }} }} }}
planes {{
  name: "/device:GPU:3"
  lines {{ name: "XLA Ops" events {{ metadata_id: 1 duration_ps: 9000000000 }} }}
  lines {{ name: "Stream #7(MemcpyOther)" events {{
    metadata_id: 1 offset_ps: 2000000000 duration_ps: 1000000000
    stats {{ metadata_id: 1 str_value: "kind_src:{} kind_dst:{} size:64 dest:0 async:1" }} }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "{}" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "memcpy_details" }} }}
}}
"""


@pytest.mark.parametrize(
    ("name", "source", "destination", "kind"),
    [
        ("MemcpyP2P", "device", "device", "D2D"),
        ("MemcpyOther", "device", "pinned", "D2H"),
        ("MemcpyOther", "pageable", "device", "H2D"),
        ("MemcpyOther", "pinned", "pageable", "H2H"),
        ("MemcpyH2D", "unknown", "device", "H2D"),
    ],
)
def test_only_streams_of_gpus_are_read_and_copies_told_by_their_ends(
    tmp_path, name, source, destination, kind
):
    serialized = ProfileData.text_proto_to_serialized_xspace(SPACE.format(source, destination, name))
    (tmp_path / "host.xplane.pb").write_bytes(serialized)
    assert read(tmp_path).events == (Event(name, kind, 3, 7, 2.0, 1.0, 64),)


def test_a_profile_of_the_cpu_has_no_events(tmp_path):
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
    trace = read(tmp_path)
    assert trace == Trace(())
    assert (trace.span_ms, trace.times(), trace.gpus) == (0, (), ())
    assert "0 events" in str(trace)


def test_a_folder_holds_one_profile(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"xplane\.pb file, or a folder.*holds none"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read(tmp_path / "missing")
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        shutil.copy(STOCK, tmp_path / run)
    with pytest.raises(ValueError, match=r"holds 2 profiles.*give one of one/.*, two/"):
        read(tmp_path)
    assert read(tmp_path / "one") == read(STOCK)


def test_a_trace_prints_as_a_table_and_converts_to_json():
    trace = read(CONCURRENT)
    header, kernels, d2h, *_ = str(trace).splitlines()
    assert header.split() == ["GPU", "what", "busy", "ms", "exposed", "ms", "count", "bytes", "GB/s"]
    assert kernels.split() == ["0", "kernels", "321.07"]
    assert d2h.split() == ["0", "D2H", "66.97", "0.34", "24", "3.22", "GB", "48.1"]
    content = json.loads(json.dumps(trace.to_dict()))
    assert len(content["events"]) == len(trace.events)
    assert content["gpus"][0]["h2d"]["count"] == 24
    assert Event(**content["events"][0]) == trace.events[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.events = ()


def pixels(path):
    from matplotlib import image

    return image.imread(path)[..., :3]


def amount(picture, colour):
    from matplotlib.colors import to_rgb

    return int((abs(picture - to_rgb(colour)).max(axis=-1) < 0.02).sum())


def test_a_timeline_shows_exposed_copies_where_there_are_any(tmp_path):
    drawn = {}
    for kind, path in (("stock", STOCK), ("concurrent", CONCURRENT)):
        timeline.main([f"{kind}={path}", "--out", str(tmp_path / "p.png"), "--to", "165"])
        drawn[kind] = pixels(tmp_path / "p.png")
    red = {kind: amount(picture, timeline.EXPOSED) for kind, picture in drawn.items()}
    blue = {kind: amount(picture, timeline.COLOURS["kernel"]) for kind, picture in drawn.items()}
    assert red["stock"] > 4 * red["concurrent"] > 0
    assert blue["concurrent"] > 1.2 * blue["stock"]


def test_timelines_stand_below_one_another(tmp_path):
    timeline.main([f"a={STOCK}", f"b={CONCURRENT}", "--out", str(tmp_path / "two.png")])
    timeline.main([f"a={STOCK}", "--out", str(tmp_path / "one.png")])
    assert pixels(tmp_path / "two.png").shape[0] > 1.5 * pixels(tmp_path / "one.png").shape[0]


def test_a_layer_lies_between_two_runs_of_its_marker():
    trace = read(STOCK)
    runs = [e.start_ms for e in trace.events if "flash_fprop" in e.name]
    assert len(runs) == 16  # 2 calls, 4 layers, forward and again
    window = timeline.window_of_layer(trace, 1, timeline.MARKER)
    assert window == (runs[1], runs[2])
    shown = timeline.panel("stock", trace, None, window)
    assert [e.kind for e in shown.trace.events].count("D2H") == 3
    assert "17.3 ms shown" in shown.title() and "to host 7.3 ms (7.3 exposed)" in shown.title()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "99"], "a number from 0 to 14"),
        (["--layer", "0", "--marker", "missing"], "none matches 'missing'.*memcpy128 \\(96\\)"),
        (["--from", "9000"], "--from lies before --to"),
        (["--from", "414.6", "--to", "500"], "profile ends at 414.6 ms"),
        (["--gpu", "3"], "one of \\(0,\\); got 3"),
        (["--layer", "0", "--to", "5"], "one or the other"),
    ],
)
def test_a_window_that_is_not_there_is_refused(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        timeline.main([f"stock={STOCK}", "--out", str(tmp_path / "p.png"), *options])
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not (tmp_path / "p.png").exists()
