"""What `target` refuses, and what it needs to be installed."""

import sys

import pytest

from jaxoff._device.target import target


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(
        ValueError,
        match=r"one of a100, b200, h100, h100-pcie, h200, or the path.*got 'H200'\. Did you mean 'h200'\?",
    ):
        target("H200")


@pytest.mark.parametrize("devices", [0, -2])
def test_less_than_one_device_is_refused(devices):
    with pytest.raises(ValueError, match=f"at least 1; got {devices}"):
        target("h200", devices)


@pytest.mark.parametrize("devices", [1.5, True, "2"])
def test_devices_are_a_whole_number(devices):
    with pytest.raises(TypeError, match="a whole number; got"):
        target("h200", devices)


def test_a_file_that_describes_no_gpu_is_refused(tmp_path):
    file = tmp_path / "other.txt"
    file.write_text("core_count: 3\n")
    with pytest.raises(
        ValueError, match=r"gpu_target_config\.pbtxt, with gpu_device_info.*other\.txt' without"
    ):
        target(file)
    with pytest.raises(FileNotFoundError):
        target(tmp_path / "none.txt")


def test_without_jaxs_cuda_plugin_it_says_what_to_install(monkeypatch):
    for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setitem(sys.modules, plugin, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax\[cuda13\]'"):
        target()
