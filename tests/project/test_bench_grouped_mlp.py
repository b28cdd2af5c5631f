"""The parts of the grouped MLP's benchmark that need no GPU."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from bench import grouped_mlp, grouped_mlp_peers, grouped_mlp_table
from bench.grouped_mlp_peers import Program
from bench.grouped_mlp_shapes import GROUPS, MEASURED, PRODUCTS, SHAPES, TINY, WHOLE, group_sizes

H200_NBYTES = 139 * 2**30


@pytest.fixture(scope="module")
def data():
    return grouped_mlp_peers.make_data(TINY)


@pytest.fixture(scope="module")
def sizes():
    return jnp.asarray(group_sizes("zipf", TINY.experts, TINY.rows))


def reference(x, w1, w2, p, sizes):
    return pallas_kernels.grouped_mlp(x, w1, w2, sizes, probs=p, implementation="reference")


def options(tmp_path, *words):
    return grouped_mlp.parse(["--out", str(tmp_path / "out.json"), *words])


def test_shapes_are_those_of_the_models():
    got = {name: dataclasses.astuple(SHAPES[name])[1:] for name in MEASURED}
    assert got == {
        "nano-8k": (128, 2688, 1856, 49152),
        "nano-16k": (128, 2688, 1856, 98304),
        "nano-32k": (128, 2688, 1856, 196608),
        "super-4k": (64, 1024, 2688, 262144),
        "super-512": (64, 1024, 2688, 32768),
        "ultra-4k": (64, 2048, 5120, 262144),
        "ultra-512": (64, 2048, 5120, 32768),
        "mixtral": (8, 4096, 14336, 32768),
        "dsv3": (8, 7168, 2048, 32768),
    }


@pytest.mark.parametrize("name", MEASURED)
def test_shapes_fit_the_gpu_and_not_its_cache(name):
    shape = SHAPES[name]
    assert shape.peak_nbytes() < H200_NBYTES
    assert shape.weight_nbytes() > 4 * 60e6  # an H200 caches 60 MB
    assert shape.width % 64 == shape.hidden % 64 == 0


def test_flops_of_the_whole_are_those_of_its_products():
    shape = SHAPES["dsv3"]
    assert shape.flops("F1") == 2 * 32768 * 7168 * 2048
    for part, products in WHOLE.items():
        assert shape.flops(part) == sum(shape.flops(product) for product in products)
    assert WHOLE["forward"] + WHOLE["backward"] == WHOLE["forward+backward"] == PRODUCTS


@pytest.mark.parametrize("name", [*MEASURED, "tiny"])
@pytest.mark.parametrize("kind", GROUPS)
def test_group_sizes_give_every_row_to_an_expert(kind, name):
    shape = SHAPES[name]
    drawn = group_sizes(kind, shape.experts, shape.rows)
    assert drawn.dtype == np.int32
    assert drawn.shape == (shape.experts,)
    assert drawn.min() >= 0
    assert drawn.sum() == shape.rows


def test_group_sizes_are_the_same_each_time_and_differ_by_seed():
    first, again, other = (group_sizes("dirichlet", 64, 10_000, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_zipf_shares_fall_as_one_over_rank_in_random_order():
    drawn = group_sizes("zipf", 128, 100_000)
    descending = np.sort(drawn)[::-1]
    wanted = descending[0] / np.arange(1, 129)
    assert np.abs(descending - wanted).max() <= 1.01
    assert (drawn != descending).any()
    assert (drawn != descending[::-1]).any()


def test_dirichlet_groups_are_uneven_and_even_ones_are_not():
    drawn = group_sizes("dirichlet", 128, 128 * 1000)
    assert drawn.max() > 2 * 1000
    assert drawn.min() < 1000 / 2
    assert set(group_sizes("even", 3, 10).tolist()) == {3, 4}


def test_an_unknown_draw_is_refused():
    with pytest.raises(ValueError, match=r"unknown kind 'gauss'; choose from dirichlet, zipf, even"):
        group_sizes("gauss", 4, 16)


def test_data_is_as_after_the_activation(data):
    assert data.x.shape == data.dy.shape == (TINY.rows, TINY.width)
    assert data.a.shape == data.pa.shape == data.dz.shape == (TINY.rows, TINY.hidden)
    zero = np.asarray(data.a == 0)
    assert 0.45 < zero.mean() < 0.55
    np.testing.assert_array_equal(np.asarray(data.dz)[zero], 0)
    assert 0.05 <= float(data.p.min()) < float(data.p.max()) <= 1.0
    np.testing.assert_array_equal(data.p, data.p.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_ceiling_is_the_dense_product(data, product):
    x, dy, a, pa, dz, w1, w2 = (
        np.asarray(value, np.float32)
        for value in (data.x, data.dy, data.a, data.pa, data.dz, data.w1[0], data.w2[0])
    )
    want = {"F1": x @ w1, "F2": a @ w2, "B1": dy @ w2.T, "B2": pa.T @ dy, "B3": dz @ w1.T, "B4": x.T @ dz}
    program = grouped_mlp_peers.dense_xla(data)[product]
    got = grouped_mlp.call_once(program, jnp.zeros(TINY.experts, jnp.int32))
    np.testing.assert_allclose(np.asarray(got, np.float32), want[product], rtol=2e-2, atol=0.2)


def test_ragged_dot_computes_the_forward_pass(data, sizes):
    got = grouped_mlp.call_once(grouped_mlp_peers.ragged_dot(data)["forward"], sizes)
    want = reference(data.x, data.w1, data.w2, data.p, sizes)
    difference = np.linalg.norm(np.asarray(got - want, np.float32))
    assert difference < grouped_mlp.TOLERANCE * np.linalg.norm(np.asarray(want, np.float32))


def test_ragged_dot_is_refused_where_it_does_not_fit(data):
    large = dataclasses.replace(data, shape=SHAPES["nano-16k"])
    with pytest.raises(NotImplementedError, match="needs about 68 GB"):
        grouped_mlp_peers.ragged_dot(large)


def test_parts_of_an_op_agree_with_each_other(data, sizes):
    parts = grouped_mlp_peers.jax_parts(reference, data)
    y, gradients = grouped_mlp.call_once(parts["forward+backward"], sizes)
    np.testing.assert_array_equal(grouped_mlp.call_once(parts["forward"], sizes), y)
    for alone, with_forward in zip(grouped_mlp.call_once(parts["backward"], sizes), gradients, strict=True):
        np.testing.assert_array_equal(alone, with_forward)
    shapes = [gradient.shape for gradient in gradients]
    assert shapes == [data.x.shape, data.w1.shape, data.w2.shape, data.p.shape]


def test_what_waits_for_backward_is_counted_by_row(data, sizes):
    counted = grouped_mlp_peers.jax_parts(reference, data)["forward+backward"].saved_per_row
    assert counted is not None
    assert counted(sizes) == 2 * TINY.width + 2 * TINY.hidden


def test_wrong_and_missing_results_are_found(data, sizes):
    def scaled(x, w1, w2, p, sizes):
        return reference(x, w1, w2, p, sizes) * jnp.bfloat16(1.1)

    def not_a_number(x, w1, w2, p, sizes):
        return reference(x, w1, w2, p, sizes).at[0, 0].set(jnp.nan)

    def failing(x, w1, w2, p, sizes):
        raise NotImplementedError("no such kernel")

    ops = {"good": reference, "scaled": scaled, "not_a_number": not_a_number, "failing": failing}
    built = {name: grouped_mlp_peers.jax_parts(op, data) for name, op in ops.items()}
    found = {check["variant"]: check for check in grouped_mlp.check(built, data, sizes)}
    assert {name: check["ok"] for name, check in found.items()} == {
        "good": True, "scaled": False, "not_a_number": False, "failing": False,
    }  # fmt: skip
    assert found["good"]["against"] == "reference"
    assert max(found["good"]["errors"].values()) == 0.0
    assert found["scaled"]["errors"]["y"] == pytest.approx(0.1, rel=0.05)
    assert found["failing"]["error"] == "NotImplementedError: no such kernel"


def recording(log, name, *, once=False, state_nbytes=0):
    """A program that says when it runs."""

    def prepare(sizes):
        log.append(f"prepare {name}")
        return object()

    def call(state):
        log.append(name)
        return state

    return Program(prepare, call, lambda result: None, once=once, state_nbytes=state_nbytes)


def test_variants_are_interleaved(sizes):
    log = []
    programs = {name: recording(log, name) for name in "ab"}
    rows = grouped_mlp.measure(programs, sizes, flops=10**9, repeats=4, target_ms=0.0)
    assert [name for name in log if name in "ab"][-8:] == list("abbaabba")
    for row in rows.values():
        assert row["calls"] == 1
        assert row["min_ms"] <= row["q1_ms"] <= row["ms"] <= row["q3_ms"] <= row["max_ms"]
        assert row["tflops"] == pytest.approx(1e-3 / row["ms"] * 1e3)


def test_a_state_for_one_call_is_made_anew_and_not_kept_in_numbers(sizes):
    log = []
    grouped_mlp.sample_ms(recording(log, "a", once=True), sizes, calls=3)
    assert log == ["prepare a"] * 3 + ["a"] * 3
    log.clear()
    grouped_mlp.sample_ms(recording(log, "a"), sizes, calls=3)
    assert log == ["prepare a"] + ["a"] * 3
    half = recording(log, "a", once=True, state_nbytes=grouped_mlp.MAX_STATE_NBYTES // 2)
    assert grouped_mlp.choose_calls(half, sizes, target_ms=1e6) == 2


def test_a_failing_variant_does_not_stop_the_others(sizes):
    def fail(state):
        raise RuntimeError("out of\nmemory")

    calls = iter(range(100))

    def fail_later(state):
        if next(calls) > 4:
            raise RuntimeError("went away")

    programs = {
        "bad": Program(lambda sizes: sizes, fail),
        "later": Program(lambda sizes: sizes, fail_later),
        "good": Program(lambda sizes: sizes, lambda sizes: sizes + 1),
    }
    rows = grouped_mlp.measure(programs, sizes, flops=1, repeats=8, target_ms=0.0)
    assert rows["bad"] == {"error": "RuntimeError: out of memory"}
    assert rows["later"] == {"error": "RuntimeError: went away"}
    assert rows["good"]["ms"] > 0


def test_median_and_quartiles():
    got = grouped_mlp.summary([5.0, 1.0, 2.0, 4.0, 3.0])
    assert got == {"ms": 3.0, "min_ms": 1.0, "q1_ms": 2.0, "q3_ms": 4.0, "max_ms": 5.0}
    assert set(grouped_mlp.summary([7.0]).values()) == {7.0}


@pytest.mark.long
def test_a_shape_runs_and_what_fails_is_recorded(tmp_path):
    def unavailable(data):
        raise ImportError("No module named 'peer'")

    def ours(data):
        return grouped_mlp_peers.jax_parts(reference, data)

    variants = {"ours": ours, "peer": unavailable, "xla_dense": grouped_mlp_peers.dense_xla}
    o = options(tmp_path, "--shapes", "tiny", "--groups", "zipf", "--repeats", "1")
    o.variants, o.products = tuple(variants), ("F1", "forward")
    result, saved = {"rows": [], "checks": []}, []
    grouped_mlp.run_shape("tiny", variants, o, result, lambda: saved.append(json.dumps(result)))
    measured = {(row.get("product"), row["variant"]): row for row in result["rows"]}
    assert set(measured) == {(None, "peer"), ("F1", "xla_dense"), ("forward", "ours")}
    assert measured[None, "peer"]["error"] == "ImportError: No module named 'peer'"
    assert measured["forward", "ours"]["ms"] > 0
    assert [check["ok"] for check in result["checks"]] == [True]
    assert len(set(saved)) == 3  # after the check and after each product


@pytest.mark.long
def test_the_program_writes_a_result_that_says_how_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which the program would set
    out = tmp_path / "out.json"
    grouped_mlp.main(
        f"--out {out} --shapes tiny --groups even --repeats 1 --per-gemm --variants xla_dense".split()
    )
    result = json.loads(out.read_text())
    assert {"date", "device", "versions", "commit", "peers"} <= set(result)
    assert [row["product"] for row in result["rows"]] == list(PRODUCTS)
    assert all(row["tflops"] > 0 for row in result["rows"])
    assert result["shapes"]["tiny"] == dataclasses.asdict(TINY)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x", "--shapes", "nano"], "unknown: nano; choose from nano-8k, "),
        (["--out", "x", "--memory", "--variants", "cublas"], "--memory needs a whole step, got cublas"),
        (["--out", "x", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        ([], "--out is needed"),
    ],
)
def test_the_command_line_says_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit):
        grouped_mlp.parse(words)
    assert message in capsys.readouterr().err


def test_memory_that_cannot_be_read_is_an_error_with_a_name(capsys, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU has memory statistics")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    grouped_mlp.main(["--memory-of", "torch_function", "--shapes", "tiny"])
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == "tiny"
    assert found["variant"] == "torch_function"
    assert found["error"]


def row(shape, product, variant, ms, tflops):
    times = {"ms": ms, "min_ms": ms, "q1_ms": ms, "q3_ms": ms, "max_ms": ms, "calls": 1}
    return {
        "shape": shape,
        "groups": "zipf",
        "product": product,
        "variant": variant,
        "tflops": tflops,
        **times,
    }


@pytest.fixture
def speed():
    """On dsv3 all is won; on nano-8k (384 rows an expert) one product and the backward pass are lost."""
    rows = []
    for product in PRODUCTS:
        rows += [row("dsv3", product, v, 1.0, t) for v, t in (("ours", 720), ("torch", 600), ("cublas", 800))]
        lost = 400 if product == "B3" else 600
        rows += [row("nano-8k", product, v, 1.0, t) for v, t in (("ours", lost), ("torch", 500))]
        rows += [row("nano-8k", product, v, 1.0, t) for v, t in (("cublas", 700), ("xla_dense", 750))]
    rows.append(row("dsv3", "F1", "torch_with_activation", 1.0, 450))
    for part, ours, torch in (("forward", 2.0, 2.5), ("backward", 4.0, 5.0), ("forward+backward", 6.0, 7.5)):
        rows += [row("dsv3", part, "ours", ours, 700), row("dsv3", part, "torch_compiled", torch, 560)]
    rows += [
        row("nano-8k", "backward", "ours", 4.0, 500),
        row("nano-8k", "backward", "torch_compiled", 2.0, 1000),
    ]
    rows.append({"shape": "dsv3", "variant": "tokamax", "error": "ImportError: none"})
    wrong = {"shape": "dsv3", "groups": "zipf", "variant": "ours", "errors": {"y": 0.5}, "ok": False}
    return {
        "device": "1 x GPU", "date": "2026-11-21", "versions": {"jax": "0.11.2"}, "peers": {"torch": None},
        "commit": "abc", "command": "python -m bench.grouped_mlp",
        "shapes": {name: vars(SHAPES[name]) for name in ("dsv3", "nano-8k")},
        "rows": rows, "checks": [wrong], "memory": [],
    }  # fmt: skip


@pytest.fixture
def memory():
    def held(variant, gigabytes, per_row):
        at = {"shape": "dsv3", "groups": "dirichlet", "variant": variant}
        return at | {"beyond_inputs_bytes": gigabytes * 10**9, "saved_bytes_per_row": per_row}

    failed = {"shape": "dsv3", "variant": "torch_compiled", "error": "RuntimeError: x"}
    rows = [held("ours", 3, 18432), held("torch", 5, 40000), held("tokamax", 2, 36864), failed]
    return {"rows": [], "checks": [], "memory": rows}


def cells(text, *start):
    """The cells after those given, of the only line that starts with them."""
    head = "| " + " | ".join(start) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(head)]
    return [cell.strip() for cell in line[len(head) : -1].split("|")]


def test_products_are_set_against_the_ceiling_and_torch(speed):
    text = grouped_mlp_table.products_table(grouped_mlp_table.combine([speed]))
    won = "720 (0.90; 1.20)"
    assert cells(text, "dsv3", "zipf") == ["720 (0.90; 1.20; 1.60)", *[won] * 5]
    # The ceiling is the faster of two, and too few rows an expert for its floor; torch's floor holds.
    assert cells(text, "nano-8k", "zipf") == ["600 (0.80; 1.20)"] * 4 + [
        "**400 (0.53; 0.80)**",
        "600 (0.80; 1.20)",
    ]
    assert cells(text, "geometric mean")[1] == "0.85; 1.20"


def test_a_product_far_from_the_ceiling_is_bold_where_rows_are_many(speed):
    for entry in speed["rows"]:
        if entry["shape"] == "dsv3" and entry.get("variant") == "ours" and entry["product"] == "F2":
            entry["tflops"] = 0.84 * 800
    text = grouped_mlp_table.products_table(grouped_mlp_table.combine([speed]))
    assert cells(text, "dsv3", "zipf")[1] == "**672 (0.84; 1.12)**"


def test_parts_are_set_against_each_peer(speed):
    text = grouped_mlp_table.whole_table(grouped_mlp_table.combine([speed]), "backward")
    assert cells(text, "dsv3", "zipf") == ["4.00 ms", "700", "0.88", "5.00 ms, 1.25x"]
    assert cells(text, "nano-8k", "zipf") == ["4.00 ms", "500", "0.67", "**2.00 ms, 0.50x**"]
    assert cells(text, "geometric mean") == ["", "", "", "0.76", "**0.79x**"]


def test_memory_is_set_side_by_side_and_what_holds_less_is_bold(memory):
    text = grouped_mlp_table.memory_table(grouped_mlp_table.combine([memory]))
    assert cells(text, "dsv3") == ["3.00 GB, 18432 B", "5.00 GB, 40000 B", "**2.00 GB**, 36864 B"]


def test_the_page_names_its_source_and_its_failures(speed, memory):
    page = grouped_mlp_table.markdown(grouped_mlp_table.combine([speed, memory]))
    assert "1 x GPU, 2026-11-21; jax 0.11.2; commit abc" in page
    assert "- dsv3, tokamax: ImportError: none" in page
    assert "- dsv3, zipf, ours: results differ: y 5.0e-01" in page
    assert "- dsv3, torch_compiled: RuntimeError: x" in page
    headings = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    parts = [f"Whole op: {part}" for part in WHOLE]
    assert headings == ["Products", *parts, "Memory of forward and backward", "Not measured"]


def test_of_two_files_the_later_holds(speed):
    later = json.loads(json.dumps(speed))
    later["rows"] = [row("dsv3", "forward", "ours", 1.0, 1400)]
    text = grouped_mlp_table.whole_table(grouped_mlp_table.combine([speed, later]), "forward")
    assert cells(text, "dsv3", "zipf")[:2] == ["1.00 ms", "1400"]


def test_tables_and_chart_are_written(speed, memory, tmp_path):
    for name, content in {"speed": speed, "memory": memory}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page, chart = tmp_path / "table.md", tmp_path / "chart.png"
    files = [str(tmp_path / "speed.json"), str(tmp_path / "memory.json")]
    grouped_mlp_table.main([*files, "--markdown", str(page), "--chart", str(chart)])
    assert "### Products" in page.read_text()
    assert chart.read_bytes().startswith(b"\x89PNG")
    results = grouped_mlp_table.combine([memory])
    with pytest.raises(ValueError, match=r"no result has a time of 'forward\+backward'"):
        grouped_mlp_table.draw(results, chart)
