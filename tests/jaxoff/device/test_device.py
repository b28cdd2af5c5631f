"""Profiles of devices: those that are shipped, those of files, and those that are measured."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jaxoff
from jaxoff import Device, SharedLink
from jaxoff._device import at_hand
from jaxoff._device.at_hand import KINDS, AtHand, find_profile
from jaxoff._device.calibration import Constant
from jaxoff._device.measure import matrix_flops, memory_gbps
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
    assert jitted.device == Device.of("h200")  # a CPU has no profile
    with jax.sharding.use_abstract_mesh(mesh):
        assert jitted.device == Device.of("h100")
        assert jaxoff.jit(jax.numpy.sin, device=PROFILE).device == PROFILE


@pytest.mark.gpu
def test_the_gpu_at_hand_is_the_default():
    assert jaxoff.jit(jax.numpy.sin).device.name == jax.devices()[0].device_kind


def test_a_device_is_a_profile_or_the_name_of_one():
    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: (x + jaxoff.name(jnp.tanh(x @ w), "act"), None))
        return jax.lax.scan(layer, x, w)[0].sum()

    args = jax.ShapeDtypeStruct((2, 8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    a100 = Device.of("a100")
    assert jaxoff.jit(loss, device="a100").device == jaxoff.jit(loss, device=a100).device == a100
    assert str(jaxoff.explain(loss, *args, device="a100")) == str(jaxoff.explain(loss, *args, device=a100))
    for take in (jaxoff.jit, lambda fun, device: jaxoff.explain(fun, *args, device=device)):
        with pytest.raises(ValueError, match="'a10'"):
            take(loss, device="a10")
        with pytest.raises(TypeError, match="or the name of one, such as 'h200'; got 100"):
            take(loss, device=100)


def test_the_h100s_profile_is_what_one_measured():
    h100 = Device.of("h100")
    assert (h100.flops, h100.memory_gbps, h100.d2h_gbps, h100.h2d_gbps) == (652.5e12, 2918, 50.7, 50.6)
    assert (h100.name, h100.both_gbps, h100.shared_links) == ("NVIDIA H100 80GB HBM3", 85.4, ())
    assert "calibration: the H200's" in h100.source
    assert h100.calibration == Device.of("h200").calibration


@pytest.mark.parametrize("name", ["a100", "b200", "gh200", "h100", "h100-pcie", "h200"])
def test_every_profile_says_whether_it_was_measured(name):
    device = Device.of(name)
    origin = "measured" if name in ("h100", "h200") else "data sheet"
    assert device.source.startswith(f"{origin}: ")
    assert KINDS[device.name] == name
    assert find_profile(device.name, "") == AtHand(device)


def test_data_sheets_are_scaled_by_the_shares_of_measured_cards():
    b200, a100 = Device.of("b200"), Device.of("a100")
    assert (b200.flops, b200.memory_gbps, b200.d2h_gbps) == (round(0.658 * 2250) * 1e12, 0.85 * 8000, 50.2)
    assert (a100.flops, a100.memory_gbps, a100.d2h_gbps) == (round(0.658 * 312) * 1e12, 1733, 25.1)
    # The shares of the two measured cards, by 989.4 TFLOP/s, 3350 and 4800 GB/s, and 64 GB/s.
    measured = [(Device.of(name), memory) for name, memory in (("h100", 3350), ("h200", 4800))]
    assert sum(d.flops / 989.4e12 for d, _ in measured) / 2 == pytest.approx(0.658, abs=1e-3)
    assert sum(d.memory_gbps / memory for d, memory in measured) / 2 == pytest.approx(0.85, abs=5e-3)
    assert sum(d.d2h_gbps / 64 for d, _ in measured) / 2 == pytest.approx(0.785, abs=3e-3)


@pytest.mark.parametrize(
    ("kind", "capability", "nearest"),
    [
        ("NVIDIA H100 NVL", "9.0", "NVIDIA H100 80GB HBM3 (measured)"),
        ("NVIDIA H20", "9.0", "NVIDIA H200 (measured)"),
        ("NVIDIA GB200", "10.0", "NVIDIA B200 (data sheet)"),
        ("NVIDIA GH200 144G HBM3e", "9.0", "NVIDIA GH200 480GB (data sheet)"),
        ("NVIDIA RTX PRO 6000", "10.3", "NVIDIA B200 (data sheet)"),
        ("NVIDIA L40", "8.9", "NVIDIA A100-SXM4-80GB (data sheet)"),
        ("Tesla T4", "7.5", "NVIDIA A100-SXM4-80GB (data sheet)"),
    ],
)
def test_another_card_is_planned_by_the_nearest_with_a_finding(kind, capability, nearest):
    found = find_profile(kind, capability)
    (finding,) = found.findings
    assert finding.code == "device-not-known"
    assert f"No profile of the {kind} at hand" in finding.message
    assert f"nearest, {nearest}. jaxoff.Device.measure()" in finding.message
    assert found.device.name == nearest.partition(" (")[0]


class Card:
    device_kind, compute_capability, process_index, platform = "NVIDIA L40", "8.9", 0, "gpu"


def test_the_card_at_hand_is_the_default(monkeypatch):
    """On a machine whose JAX says that it has a GPU without a profile."""
    a100 = Device.of("a100")
    w = jnp.ones((3, 64, 64))

    def layer(x, w):
        return jnp.tanh(jaxoff.name(x, "x_in") @ w), None

    def loss(w, device=None):
        policy = jaxoff.policy(offload=["x_in"])
        return jaxoff.scan(layer, w[0], w, policy=policy, device=device)[0].sum()

    assert jaxoff.jit(loss).device == Device.of("h200")
    monkeypatch.setattr(at_hand.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(at_hand.jax, "local_devices", lambda: [Card()])
    report = jaxoff.explain(functools.partial(loss, device=a100), w)
    assert report.findings[-1].code == "device-not-known"
    assert report.traffic == jaxoff.explain(functools.partial(loss, device=a100), w, device=a100).traffic
    assert "device-not-known" not in {f.code for f in jaxoff.explain(loss, w, device=a100).findings}
    step = jaxoff.jit(jax.grad(loss))
    assert step.device == a100
    monkeypatch.undo()
    monkeypatch.setattr("jaxoff._schedule.jitted.profile_at_hand", lambda: find_profile("NVIDIA L40", "8.9"))
    with pytest.warns(UserWarning, match="device-not-known: No profile of the NVIDIA L40 at hand"):
        step(w)
    assert [f.code for f in step.findings] == ["device-not-known"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxoff.jit(jax.grad(loss), device=a100)(w)
        jaxoff.jit(lambda w: w + 1)(w)  # copies nothing, so that no rate matters


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
    known = "a100, b200, gh200, h100, h100-pcie, h200"
    with pytest.raises(ValueError, match=rf"one of {known}, or the path .* got 'h20'. Did you mean 'h200'"):
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
