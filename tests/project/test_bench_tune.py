"""The parts of the tuning script that need no GPU."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from bench import tune_grouped_mlp as tune
from bench.grouped_mlp_shapes import PRODUCTS, TINY, Shape
from pallas_kernels._mosaic import tuning
from pallas_kernels._mosaic.tuning import Config, Configs

NANO = tune.ALL_SHAPES["nano-16k"]
A_RUN = {
    "device": "1 x NVIDIA H200",
    "versions": {"jax": "1"},
    "date": "2026-11-21T15:36:50+00:00",
    "commit": "04fed9e",
    "command": "python -m bench.tune_grouped_mlp",
}


def row_of(shape, product, config, **more):
    row = {"shape": shape, "groups": "dirichlet", "product": product, "best": dataclasses.asdict(config)}
    return row | {"best_ms": 1.0, "rule_over_best": 1.05, "in_use_over_best": 1.0} | more


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", tune.ALL_SHAPES)
def test_candidates_fit_and_fill_the_shared_memory(name, product):
    shape = tune.ALL_SHAPES[name]
    found = tune.tile_candidates(product, shape, thorough=True)
    assert len(found) == len(set(found)) > 4
    for config in found:
        assert tune.smem_nbytes(product, shape, config) <= tune.SMEM_LIMIT
        longer = dataclasses.replace(config, stages=config.stages + 2)
        assert longer.stages > 6 or tune.smem_nbytes(product, shape, longer) > tune.SMEM_LIMIT
    assert {config.block_columns for config in found} == {128, 192, 256}
    assert set(tune.tile_candidates(product, shape, thorough=False)) < set(found)


@pytest.mark.parametrize("choose", [tuning.apply_rule, tuning.choose_configs])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", tune.ALL_SHAPES)
def test_what_is_chosen_fits(name, product, choose):
    shape = tune.ALL_SHAPES[name]
    assert tune.smem_nbytes(product, shape, tune.of_shape(choose, shape, product)) <= tune.SMEM_LIMIT


@pytest.mark.parametrize(
    ("product", "name", "config", "operands", "outputs"),
    [
        ("F1", "nano-16k", Config(256, stages=4, slots=2), 4 * (128 + 256) * 128, 4 * 64 * 128),
        ("B2", "nano-16k", Config(192, stages=4, slots=3), 4 * (128 + 192) * 128, 6 * 64 * 128),
        # Three chunks of a, and where a is scaled a slot for it.
        ("B1", "nano-16k", Config(192, stages=4, slots=1), 4 * (128 + 192) * 128, (6 + 2) * 64 * 128),
        ("B1", "mixtral", Config(192, stages=4, slots=1), 4 * (128 + 192) * 128, 6 * 64 * 128),
    ],
)
def test_shared_memory_by_hand(product, name, config, operands, outputs):
    rest = tune.smem_nbytes(product, tune.ALL_SHAPES[name], config) - operands - outputs
    assert 2048 < rest < 2048 + 256  # what the compiler takes, and the barriers


def test_an_order_is_listed_once_and_keeps_the_tile():
    config = Config(192, stages=4, slots=3)
    found = tune.order_candidates("F1", NANO, config)  # 1856 columns: ten blocks
    assert all(dataclasses.replace(c, minor=1, width=64) == config for c in found)
    assert [(c.minor, c.width) for c in found] == [(1, 2), (1, 4), (0, 2), (0, 4), (0, 8)]
    # Two blocks of columns are walked alike at any width from two on.
    few = Shape("few", experts=4, width=128, hidden=384, rows=512)
    assert [(c.minor, c.width) for c in tune.order_candidates("F1", few, config)] == [(0, 2)]


def test_the_table_reads_back(tmp_path, monkeypatch):
    rows = [
        row_of(name, product, Config(128 + 64 * (i % 3), stages=3 + i % 3, slots=1 + i, minor=i % 2))
        for name in ("nano-16k", "dsv3")
        for i, product in enumerate(PRODUCTS)
    ]
    rows.append(row_of("mixtral", "F1", Config(256)))  # five products are missing
    found = tune.choices(rows)
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "nvidia_h200.json").write_text(tune.table_json(found, A_RUN))
    monkeypatch.setattr(tuning.importlib.resources, "files", lambda package: tmp_path)
    read = tuning.load_table.__wrapped__("NVIDIA H200")
    nano, dsv3, mixtral = (tune.key_of(tune.ALL_SHAPES[n]) for n in ("nano-16k", "dsv3", "mixtral"))
    assert nano == (2688, 1856, 512)
    assert read == {nano: Configs(**found[nano]), dsv3: Configs(**found[dsv3])}
    assert read[nano].grad_w2 == Config(**rows[3]["best"])
    origin = json.loads(tune.table_json(found, A_RUN))
    assert {key: origin[key] for key in ("date", "commit", "command")}.items() <= A_RUN.items()
    assert origin["device"] == "NVIDIA H200"
    assert f"# {mixtral}: fc1 only" in tune.report(rows, A_RUN)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(256), "Config(256)"),
        (Config(192, slots=3, minor=0, width=8), "Config(192, slots=3, minor=0, width=8)"),
        (Config(128, stages=6), "Config(128, stages=6)"),
    ],
)
def test_a_config_is_written_without_its_defaults(config, text):
    assert tune.config_literal(config) == text


def test_every_product_has_its_field():
    assert sorted(tune.FIELDS.values()) == sorted(field.name for field in dataclasses.fields(Configs))


def test_the_report_names_what_is_too_far_and_what_is_missing():
    rows = [
        row_of("nano-16k", "F1", Config(256), rule_over_best=1.0699),
        row_of("scout", "B2", Config(192), rule_over_best=1.0701),
        {"shape": "dsv3", "product": "B1", "groups": "dirichlet", "error": "no candidate ran"},
    ]
    lines = tune.report(rows, A_RUN).splitlines()
    rule = lines.index("the rule's time over the best, at most 1.07 is wanted:")
    assert lines[rule + 1 : rule + 4] == [
        "  1.070  scout B2  TOO FAR",
        "  1.070  nano-16k F1",
        "  missing  dsv3 B1: it did not run",
    ]
    used = lines.index("the used configs' time over the best, at most 1.07 is wanted:")
    assert lines[used + 1] == "  1.000  nano-16k F1"


def test_a_search_goes_on_past_what_fails_and_refuses_other_results(monkeypatch):
    good, other, broken = Config(192), Config(128), Config(256)

    def program_of(product, config, data):
        if config == broken:
            raise NotImplementedError("no such tile")
        value = jnp.full((4,), 2.0 if config == other else 1.0)
        return tune.Program(lambda sizes: sizes, lambda sizes: value)

    monkeypatch.setattr(tune, "program_of", program_of)
    data = tune.Data(TINY, *[jnp.zeros(())] * 8)
    search = tune.Search("F1", data, jnp.zeros((4,), jnp.int32))
    search.compile([good, other, broken])
    search.time([good, other, broken], 2, "tiles")
    assert search.best(3) == [good]
    assert search.results[good]["ms"] > 0
    assert "differs from the rule's by 1.0e+00" in search.results[other]["error"]
    assert search.results[broken]["error"] == "NotImplementedError: no such tile"


@pytest.mark.long
def test_a_run_writes_each_product_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    seen = []

    def fake(product, data, sizes, *, repeats, thorough, turns):
        seen.append((data.shape.name, product, int(sizes.sum()), repeats, thorough))
        return {key: value for key, value in row_of("", product, Config(128)).items() if key != "shape"}

    monkeypatch.setattr(tune, "tune", fake)
    out = tmp_path / "tiles.json"
    words = ["--out", str(out), "--shapes", "tiny", "--thorough"]
    tune.main([*words, "--products", "F1,B2"])
    tune.main([*words, "--products", "F1,B4", "--limit-s", "100"])
    assert seen == [("tiny", product, TINY.rows, 3, True) for product in ("F1", "B2", "B4")]
    result = json.loads(out.read_text())
    assert [(row["shape"], row["product"], row["run"]) for row in result["rows"]] == [
        ("tiny", "F1", 0), ("tiny", "B2", 0), ("tiny", "B4", 1)
    ]  # fmt: skip
    assert len(result["runs"]) == 2
    assert {"date", "device", "versions", "command"} <= result["runs"][0].keys()
    tune.main([*words, "--products", "B1", "--limit-s", "0"])
    assert len(seen) == 3


def test_results_of_two_devices_do_not_mix(tmp_path):
    path = tmp_path / "tiles.json"
    assert tune.load(path, A_RUN) == {"runs": [A_RUN], "rows": []}
    path.write_text(json.dumps({"runs": [A_RUN], "rows": []}))
    assert tune.load(path, A_RUN)["runs"] == [A_RUN, A_RUN]
    with pytest.raises(SystemExit, match="another device: 1 x NVIDIA H200, and this is 1 x NVIDIA H100"):
        tune.load(path, A_RUN | {"device": "1 x NVIDIA H100"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --out, the result file, or --table"),
        (["--out", "a", "--table", "b"], "either --out, the result file, or --table"),
        (["--out", "a", "--shapes", "nano"], "unknown: nano; choose from nano-8k"),
        (["--out", "a", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_a_wrong_command_line_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        tune.parse(words)
    assert message in capsys.readouterr().err


def test_configs_are_those_of_the_kernels():
    mixtral = tune.ALL_SHAPES["mixtral"]
    dimensions = (mixtral.experts, mixtral.width, mixtral.hidden)
    for choose in (tuning.apply_rule, tuning.choose_configs):
        want = choose(dimensions, mixtral.rows)
        got = {field: tune.of_shape(choose, mixtral, product) for product, field in tune.FIELDS.items()}
        assert Configs(**got) == want
