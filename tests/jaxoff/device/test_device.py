"""Profiles of devices: those that are shipped, those of files, and those that are measured."""

import dataclasses
import json

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jaxoff
from jaxoff import Device, SharedLink
from jaxoff._device.calibration import Constant
from jaxoff._device.measure import matrix_flops, memory_gbps
from jaxoff._device.profile import find_device
from jaxoff._runtime.link import measure_links

PROFILE = Device(
    flops=1e12,
    memory_gbps=1000,
    d2h_gbps=20,
    h2d_gbps=24,
    both_gbps=30,
    shared_links=(SharedLink(4, 8, 10, 12), SharedLink(2, 15, 16, 20)),
    name="mine",
)


def test_the_shipped_profile_is_what_everything_is_planned_with_by_default():
    from jaxoff._device.profile import H200

    assert Device.of("h200") == H200
    assert (H200.flops, H200.memory_gbps, H200.d2h_gbps, H200.h2d_gbps) == (650e12, 4000, 50, 50)
    assert H200.source


def test_a_program_is_planned_for_the_gpu_that_it_is_for():
    jitted = jaxoff.jit(jax.numpy.sin)
    mesh = AbstractMesh(
        (),
        (),
        abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda"),
    )
    assert jitted.device == find_device() == Device.of("h200")  # a CPU has no profile
    with jax.sharding.use_abstract_mesh(mesh):
        assert jitted.device == find_device() == Device.of("h100")
        assert jaxoff.jit(jax.numpy.sin, device=PROFILE).device == find_device(PROFILE) == PROFILE


@pytest.mark.gpu
def test_the_gpu_at_hand_is_the_default():
    assert find_device().name == jax.devices()[0].device_kind


def test_the_h100s_profile_is_what_one_measured():
    h100 = Device.of("h100")
    assert (h100.flops, h100.memory_gbps, h100.d2h_gbps, h100.h2d_gbps) == (652.5e12, 2918, 50.7, 50.6)
    assert (h100.name, h100.both_gbps, h100.shared_links) == ("NVIDIA H100 80GB HBM3", 85.4, ())
    assert "calibration: the H200's" in h100.source
    assert h100.calibration == Device.of("h200").calibration


def test_every_fitted_constant_says_its_unit_and_its_origin():
    fitted = Device.of("h200").calibration
    constants = {field.name: getattr(fitted, field.name) for field in dataclasses.fields(fitted)}
    assert constants["product_share"].value == 1.18
    for name, constant in constants.items():
        assert constant.unit and constant.origin, name
        low, high = constant.range or (constant.value, constant.value)
        assert low <= constant.value <= high, name
    assert "origin" not in repr(fitted) and len(repr(Device.of("h200"))) < 1000


def test_a_calibration_of_its_own_is_saved_and_the_default_is_not(tmp_path):
    assert "calibration" not in PROFILE.to_dict()
    share = Constant(1.0, "share of flops", (0.9, 1.1), "made up")
    mine = dataclasses.replace(
        PROFILE, calibration=dataclasses.replace(PROFILE.calibration, product_share=share)
    )
    mine.save(tmp_path / "mine.json")
    assert Device.of(tmp_path / "mine.json") == mine != PROFILE
    assert mine.to_dict()["calibration"]["product_share"]["range"] == [0.9, 1.1]
    fields = mine.to_dict()
    del fields["calibration"]["idle_clock"]
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"JSON that Device.save wrote, got .*idle_clock"):
        Device.of(tmp_path / "mine.json")


def test_a_file_gives_back_what_was_saved(tmp_path):
    PROFILE.save(tmp_path / "mine.json")
    assert Device.of(tmp_path / "mine.json") == Device.of(str(tmp_path / "mine.json")) == PROFILE
    assert hash(Device.of(tmp_path / "mine.json")) == hash(PROFILE)


@pytest.mark.parametrize(
    ("gpus", "rates"),
    [(1, (20, 24, 30)), (2, (15, 16, 20)), (3, (8, 10, 12)), (4, (8, 10, 12)), (8, (4, 5, 6))],
)
def test_a_link_is_shared_with_the_next_measured_number_of_gpus(gpus, rates):
    shared = PROFILE.sharing(gpus)
    assert (shared.d2h_gbps, shared.h2d_gbps, shared.both_gbps) == rates
    assert shared.flops == PROFILE.flops


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"one of h100, h200, or the path .* got 'h20'. Did you mean 'h200'"):
        Device.of("h20")
    with pytest.raises(FileNotFoundError):
        Device.of(tmp_path / "nowhere.json")
    for text in ("nothing", json.dumps(PROFILE.to_dict() | {"speed": 3})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"JSON that Device.save wrote, got .*bad.json"):
            Device.of(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="h2d_gbps of a Device is a rate above 0, got 0"):
        dataclasses.replace(PROFILE, h2d_gbps=0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PROFILE.sharing(0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures there")
def test_a_cpu_is_not_measured():
    with pytest.raises(RuntimeError, match="times a GPU, and jax runs on cpu here"):
        Device.measure()


def test_rates_are_counted_in_operations_and_bytes(monkeypatch):
    """By a clock under which every call takes a quarter of a second."""
    from jaxoff._device import measure

    monkeypatch.setattr(measure, "_seconds", lambda fun, args, steady_s: 0.25)
    cpu = jax.devices("cpu")[0]
    assert matrix_flops(cpu, (16, 8, 32)) == 6 * 2 * 16 * 8 * 32 * 4
    assert memory_gbps(cpu, nbytes=1 << 10) == pytest.approx(2 * (1 << 10) * 4 / 1e9)


def test_links_of_several_devices_are_those_of_one_of_them():
    link = measure_links(jax.devices("cpu")[:2], nbytes=1 << 16, repeats=2)
    assert link.nbytes == 1 << 16
    assert min(link.d2h_gbps, link.h2d_gbps, link.both_gbps) > 0


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path):
    found = Device.measure()
    assert found.name == jax.devices()[0].device_kind
    assert 1e13 < found.flops < 1e16
    assert 100 < found.memory_gbps < 20_000
    assert found.both_gbps is not None
    assert 1 < found.d2h_gbps < found.both_gbps < 1000
    found.save(tmp_path / "here.json")
    assert jaxoff.Device.of(tmp_path / "here.json") == found
