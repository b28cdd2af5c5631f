"""Each device's table of tiles: its origin, its entries, and the table of a device without one."""

import dataclasses
import datetime
import hashlib
import json
from importlib import resources

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels._mosaic import tuning

TABLES = list((resources.files("pallas_kernels._mosaic") / "tiles").iterdir())
MIXTRAL = (8, 4096, 14336)
H100 = "NVIDIA H100 80GB HBM3"


def on(kind):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_a_table_names_its_card_date_commit_and_command(file):
    table = json.loads(file.read_text())
    assert file.name == tuning.name_table(table["device"])
    assert datetime.date.fromisoformat(table["date"][:10])
    assert table["commit"] and table["command"].startswith("python -m bench.tune_grouped_mlp")
    loaded = tuning.load_table(table["device"])
    assert len(loaded) == len(table["tiles"]) > 0, "no two entries for one shape"
    assert all(bucket & (bucket - 1) == 0 for _, _, bucket in loaded)


def test_a_shape_in_the_table_takes_its_entry_and_another_the_rule():
    table = tuning.load_table("NVIDIA H200")
    with on("NVIDIA H200"):
        assert tuning.choose_configs(MIXTRAL, 32768) == table[4096, 14336, 4096]
        assert tuning.choose_configs(MIXTRAL, 32768) != tuning.apply_rule(MIXTRAL, 32768)
        assert tuning.choose_configs(MIXTRAL, 16384) == tuning.apply_rule(MIXTRAL, 16384)


@pytest.mark.parametrize("kind", [H100, "interpreter", "cpu"])
def test_a_device_without_a_table_takes_the_h200s(kind):
    assert tuning.load_table(kind) == tuning.load_table("NVIDIA H200")
    with on(kind):
        assert tuning.choose_configs(MIXTRAL, 32768).fc1 == tuning.Config(192, slots=3, width=8)


def test_an_h100_prefers_wide_tiles_earlier_but_for_the_activations_gradient():
    shape, rows = (128, 2048, 768), 128 * 1024
    with on(H100):
        wide, few = tuning.choose_configs(shape, rows), tuning.choose_configs(shape, rows // 2)
    with on("NVIDIA H200"):
        narrow = tuning.choose_configs(shape, rows)
    assert wide.grad_act == few.grad_act == narrow.grad_act
    for name in ("fc1", "fc2", "grad_x", "grad_w1", "grad_w2"):
        chosen = [getattr(configs, name).block_columns for configs in (wide, few, narrow)]
        assert chosen == [256, 192, 192]


def widths(shape, rows):
    """The strips of each product, by name."""
    chosen = dataclasses.asdict(tuning.choose_configs(shape, rows))
    return {name: config["width"] for name, config in chosen.items()}


def test_an_h100_walks_outputs_of_many_blocks_and_weight_gradients_in_strips():
    shape, rows = (128, 2688, 1856), 128 * 768  # 14 blocks of fc2 and grad_x, 10 of the others
    row_by_row = 64
    with on("NVIDIA H200"):
        assert set(widths(shape, rows).values()) == {row_by_row}
    with on(H100):
        found = widths(shape, rows)
        weights = {name: found.pop(name) for name in ("grad_w1", "grad_w2")}
        assert found == {"fc1": row_by_row, "fc2": 4, "grad_act": row_by_row, "grad_x": 4}
        assert set(weights.values()) == {2}
        assert widths(MIXTRAL, 16384)["grad_w1"] == 8, "rows of an expert that do not stay in the L2 cache"


def test_gated_products_take_their_own_tiles_and_the_others_those_of_their_width():
    with on("NVIDIA H200"):
        gated, plain = (
            tuning.choose_configs((8, 512, 768), 4096, 2),
            tuning.choose_configs((8, 512, 384), 4096),
        )
    assert (gated.fc1.block_columns, gated.grad_act.block_columns) == (128, 128)
    assert (gated.fc2, gated.grad_x, gated.grad_w2) == (plain.fc2, plain.grad_x, plain.grad_w2)


def test_a_device_with_a_table_takes_its_own(tmp_path, monkeypatch):
    entry = json.loads(next(file for file in TABLES if file.name == "nvidia_h200.json").read_text())
    entry["tiles"][0]["fc1"]["block_columns"] = 64
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "nvidia_h100_pcie.json").write_text(json.dumps(entry))
    monkeypatch.setattr(tuning.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(tuning, "load_table", tuning.load_table.__wrapped__)
    with on("NVIDIA H100 PCIe"):
        assert tuning.choose_configs(MIXTRAL, 32768).fc1.block_columns == 64


def test_the_choices_for_many_shapes_are_those_that_were_measured():
    """A changed rule or table changes the hash; then measure the kernels again and update the hash."""
    widths = (64, 128, 192, 256, 320, 576, 1024, 1856, 2048, 2688, 2880, 4096, 5120, 7168, 8192, 14336)
    chosen = [
        (tuning.choose_configs((experts, width, hidden), rows), tuning.scales_dy((experts, width, hidden)))
        for experts in (1, 8, 64, 128, 512)
        for width in widths
        for hidden in widths
        for rows in (8, 4096, 32768, 98304, 262144, 2097152)
    ]
    assert len(set(chosen)) == 50
    assert hashlib.sha256(repr(chosen).encode()).hexdigest()[:16] == "100d151883e6cd00"
