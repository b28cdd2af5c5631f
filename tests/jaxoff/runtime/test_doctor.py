import dataclasses
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxoff._runtime import doctor
from jaxoff._runtime.environment import DeviceInfo, Environment, collect
from jaxoff._runtime.flags import CAPTURED_BY_DEFAULT, parse_captured_commands, parse_xla_flags
from jaxoff._runtime.host import find_gpu_nodes, find_processor_nodes
from jaxoff._runtime.link import Link, measure_link
from jaxoff._runtime.table import print_diagnosis

GPU = DeviceInfo("gpu", "NVIDIA H200", 105_000_000_000, ("device", "pinned_host", "unpinned_host"))
PACKAGES = {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2",
    "flax": "0.12.10",
}
HEALTHY = Environment(
    python="3.12.1",
    packages=PACKAGES,
    devices=(GPU,),
    nvidia_gpu=True,
    host_bytes=128 * 2**30,
    config={"jax_remat3": "False"},
    link=Link(54.6, 55.1, 101.4, 512_000_000),
)
CPU = dataclasses.replace(
    HEALTHY,
    packages={"jax": "0.11.2", "jaxlib": "0.11.2"},
    devices=(DeviceInfo("cpu", "cpu", None, ("device", "pinned_host")),),
    nvidia_gpu=False,
    link=None,
    link_skipped="no GPU",
)


def changed(environment=HEALTHY, **changes):
    return dataclasses.replace(environment, **changes)


def codes(environment):
    return [problem.code for problem in doctor.diagnose(environment).problems]


def message(environment):
    (problem,) = doctor.diagnose(environment).problems
    return problem.message


def setting(name, environment):
    (found,) = [s for s in doctor.diagnose(environment).settings if s.name == name]
    return found


def printed(environment, **console):
    out = io.StringIO()
    print_diagnosis(doctor.diagnose(environment), Console(file=out, highlight=False, **console))
    return out.getvalue()


def test_a_healthy_gpu_has_no_problem():
    diagnosis = doctor.diagnose(HEALTHY)
    assert diagnosis.problems == ()
    assert diagnosis.exit_status == 0
    assert diagnosis.pinned_pool_bytes == 64 * 2**30
    assert "harms" not in {s.verdict for s in diagnosis.settings}


def test_supported_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    oldest, below = (".".join(map(str, v)) for v in (doctor.OLDEST_JAX, doctor.FIRST_UNKNOWN_JAX))
    assert f"jax>={oldest},<{below}" in project["dependencies"]


@pytest.mark.parametrize("version", ["0.11.1", "0.11.2rc1", "0.12.0.1", "0.12.5"])
def test_supported_versions_pass(version):
    packages = dict.fromkeys(PACKAGES, version)
    assert codes(changed(packages=packages)) == []


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0"])
def test_jaxlibs_that_compute_wrong_gradients_are_refused(version):
    environment = changed(packages=dict.fromkeys(PACKAGES, version))
    assert codes(environment) == ["wrong-gradients", "unsupported-version", "unsupported-version"]
    assert doctor.diagnose(environment).exit_status == 1
    first = doctor.diagnose(environment).problems[0].message
    assert f"jaxlib {version} computes wrong gradients" in first
    assert "openxla/xla#46231" in first
    assert "pip install 'jax>=0.11.1,<0.13'" in first


def test_wrong_gradients_are_a_matter_of_gpus():
    assert "wrong-gradients" not in codes(changed(CPU, packages={"jax": "0.11.0", "jaxlib": "0.11.0"}))


def test_a_future_jax_is_not_supported():
    packages = dict.fromkeys(PACKAGES, "0.13.0")
    assert codes(changed(packages=packages)) == ["unsupported-version"] * 2


def test_a_plugin_of_another_release():
    environment = changed(packages=PACKAGES | {"jax-cuda13-plugin": "0.11.1"})
    assert codes(environment) == ["mixed-versions"]
    assert "pip install 'jax[cuda13]==0.11.2'" in message(environment)


def test_no_gpu_is_useless():
    assert codes(CPU) == ["no-gpu"]
    assert message(CPU).startswith("no GPU: ")
    assert doctor.diagnose(CPU).exit_status == 1


def test_no_gpu_says_what_hides_one():
    seen = changed(CPU, nvidia_gpu=True)
    assert "pip install 'jaxoff[cuda13]'" in message(seen)
    assert "JAX_PLATFORMS=cpu leaves it out" in message(changed(seen, variables={"JAX_PLATFORMS": "cpu"}))
    assert "did not start" in message(changed(seen, packages=PACKAGES))
    assert "NVIDIA" not in message(CPU)


def test_a_backend_that_does_not_start():
    environment = changed(devices=(), backend_error="no such platform: cuda")
    assert codes(environment) == ["no-backend"]
    assert "no such platform: cuda" in message(environment)


def test_a_device_without_pinned_host_memory():
    bare = dataclasses.replace(GPU, memory_kinds=("device", "unpinned_host"))
    assert codes(changed(devices=(GPU, bare))) == ["no-pinned-host"]
    assert "device, unpinned_host" in message(changed(devices=(bare,)))


def pool(value, **changes):
    return changed(variables={doctor.POOL_VARIABLE: value}, **changes)


def test_the_pinned_pool_is_compared_with_host_memory():
    assert codes(changed(host_bytes=64 * 2**30)) == []
    assert codes(changed(host_bytes=32 * 2**30)) == ["pool-beyond-memory"]
    assert codes(changed(host_bytes=None)) == []
    assert codes(pool("24", host_bytes=32 * 2**30)) == []
    assert doctor.diagnose(pool("24")).pinned_pool_bytes == 24 * 2**30


def test_a_pool_beyond_memory_is_a_warning():
    assert doctor.diagnose(pool("512")).exit_status == 0


def test_processors_far_from_a_gpu_are_a_warning():
    far = changed(nodes={"gpus": (0, 1), "process": (0,)})
    assert codes(far) == ["far-host-memory"]
    assert "A GPU is at memory node 1, and this process runs on processors of node 0 only" in message(far)
    assert doctor.diagnose(far).exit_status == 0
    assert "GPUs at 0, 1, this process at 0" in printed(far)
    for near in (changed(nodes={"gpus": (0, 1), "process": (0, 1)}), changed(nodes={"gpus": (0,)}), HEALTHY):
        assert codes(near) == []


def test_memory_nodes_are_those_of_the_system(tmp_path):
    files = {"sys/devices/system/node/node0/cpulist": "1000-1007\n"}
    (own,) = sorted(os.sched_getaffinity(0))[:1]
    files["sys/devices/system/node/node3/cpulist"] = f"{own},2000\n"
    for gpu, node in (("0000:3b:00.0", 1), ("0000:af:00.0", 3)):
        files[f"proc/driver/nvidia/gpus/{gpu}/information"] = ""
        files[f"sys/bus/pci/devices/{gpu}/numa_node"] = f"{node}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (find_gpu_nodes(tmp_path), find_processor_nodes(tmp_path)) == ((1, 3), (3,))
    (tmp_path / "sys/bus/pci/devices/0000:af:00.0/numa_node").write_text("-1\n")
    assert find_gpu_nodes(tmp_path) == ()


def test_a_pool_that_xla_cannot_read():
    assert codes(pool("64GB")) == ["pool-not-a-number"]
    assert doctor.diagnose(pool("64GB")).pinned_pool_bytes == 64 * 2**30
    assert codes(pool("0")) == ["no-pinned-pool"]
    assert doctor.diagnose(pool("0")).exit_status == 1


HARMFUL_FLAGS = [
    {"xla_gpu_enable_pipelined_host_offloading": "true"},
    {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"},
    {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT_REGIONS"},
    {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
    {"xla_gpu_enable_command_buffer": "", "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
]
HARMLESS_FLAGS = [
    {"xla_gpu_enable_pipelined_host_offloading": "false"},
    {"xla_gpu_experimental_parallel_collective_overlap_limit": "1"},
    {"xla_gpu_command_buffer_scheduling_mode": "LHS"},
    {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_deterministic_ops": "true"},
    {"xla_allow_excess_precision": "false"},
]


@pytest.mark.parametrize("flags", HARMFUL_FLAGS, ids=str)
def test_harmful_flags_fail(flags):
    diagnosis = doctor.diagnose(changed(xla_flags=flags))
    assert [problem.code for problem in diagnosis.problems] == ["harmful-setting"]
    assert list(flags)[-1] in diagnosis.problems[0].message
    assert diagnosis.exit_status == 1


@pytest.mark.parametrize("flags", HARMLESS_FLAGS, ids=str)
def test_harmless_flags_pass(flags):
    assert codes(changed(xla_flags=flags)) == []


def test_gpu_flags_are_no_problem_without_a_gpu():
    assert codes(changed(CPU, xla_flags=HARMFUL_FLAGS[0])) == ["no-gpu"]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_optimization_levels_that_pipeline_host_copies(level):
    assert codes(changed(config={"jax_optimization_level": level})) == ["harmful-setting"]
    assert codes(changed(config={"jax_optimization_level": "O0"})) == []


def test_what_overlaps_copies_is_named():
    why = setting("xla_gpu_command_buffer_scheduling_mode", HEALTHY).why
    assert "jaxoff.jit in place of jax.jit overlaps them" in why
    given = changed(xla_flags={"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"})
    assert "unset for jaxoff.jit" in setting("xla_gpu_command_buffer_scheduling_mode", given).why


def test_remat3_loses_names():
    assert codes(changed(config={"jax_remat3": "True"})) == ["harmful-setting"]


def test_concurrent_graphs_on_several_gpus_need_their_collectives():
    mode = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    captured = {"xla_gpu_enable_command_buffer": "+COLLECTIVES"}
    name = "xla_gpu_command_buffer_scheduling_mode"
    assert setting(name, changed(xla_flags=mode)).verdict == "helps"
    assert setting(name, changed(xla_flags=mode, devices=(GPU, GPU))).verdict == "harms"
    assert setting(name, changed(xla_flags=mode | captured, devices=(GPU, GPU))).verdict == "helps"


def test_either_name_of_the_memory_fraction():
    old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    assert setting(old, changed(variables={old: "0.9"})).value == "0.9"
    assert setting(new, changed(variables={new: "0.8"})).value == "0.8"
    assert "75%" in setting(new, HEALTHY).why


def test_captured_commands():
    assert parse_captured_commands(None) == CAPTURED_BY_DEFAULT
    assert parse_captured_commands("") == frozenset()
    assert parse_captured_commands("fusion, CUBLAS") == {"FUSION", "CUBLAS"}
    assert parse_captured_commands("+WHILE,-FUSION") == CAPTURED_BY_DEFAULT - {"FUSION"} | {"WHILE"}


def test_xla_flags_are_read_as_xla_reads_them(tmp_path):
    text = "--xla_a --xla_b=1 --xla_c='' --xla_b=2 --xla_d='x y'"
    flags = {"xla_a": "true", "xla_b": "2", "xla_c": "", "xla_d": "x y"}
    assert parse_xla_flags(text) == flags
    file = tmp_path / "flags"
    file.write_text(text.replace(" --", "\n--"))
    assert parse_xla_flags(str(file)) == flags
    assert parse_xla_flags("") == {}
    assert parse_xla_flags(str(tmp_path / "absent")) == {}


def test_printed_text_is_plain_in_a_file():
    text = printed(HEALTHY)
    assert "\x1b" not in text
    assert all(ord(c) < 128 for c in text)
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert "D2H 54.6 GB/s, H2D 55.1 GB/s, both at once 101.4 GB/s" in text
    assert "1 x NVIDIA H200, 105.00 GB for jax" in text
    assert "device, pinned_host, unpinned_host" in text
    assert "at most 64 GiB of 128 GiB" in text
    assert text.rstrip().endswith("OK    offload is right and of use here.")


def test_without_a_gpu_there_is_no_pinned_pool_to_compare():
    text = printed(changed(CPU, host_bytes=24 * 2**30))
    assert "host memory   24 GiB" in text and "pinned pool" not in text


def test_printed_text_has_colour_on_a_terminal():
    assert "\x1b[" in printed(HEALTHY, force_terminal=True, width=120)


def test_printed_text_says_what_fails_and_what_warns():
    text = printed(pool("512", xla_flags=HARMFUL_FLAGS[0]))
    assert "FAIL  xla_gpu_enable_pipelined_host_offloading=true (XLA_FLAGS)" in text
    assert "WARN  XLA's pinned pool" in text
    assert text.index("FAIL") < text.index("WARN")
    assert "OK  " not in text


def test_printed_text_survives_square_brackets():
    assert "jax[cuda13]==0.11.2" in printed(changed(packages=PACKAGES | {"jax-cuda13-pjrt": "0.11.1"}))


def test_to_dict_is_json():
    again = json.loads(json.dumps(doctor.diagnose(CPU).to_dict()))
    assert again["exit_status"] == 1
    assert again["problems"][0]["code"] == "no-gpu"
    assert again["environment"]["packages"]["jax"] == "0.11.2"


def run_doctor(*args, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-m", "jaxoff", "doctor", *args],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_on_a_cpu():
    run = run_doctor("--json", JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_gpu_deterministic_ops=true")
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    assert [problem["code"] for problem in report["problems"]] == ["no-gpu"]
    assert report["environment"]["packages"]["jax"] == jax.__version__
    assert report["environment"]["xla_flags"] == {"xla_gpu_deterministic_ops": "true"}
    assert report["environment"]["devices"][0]["platform"] == "cpu"


def test_the_command_names_a_platform_that_is_not_there():
    run = run_doctor(JAX_PLATFORMS="tpu")
    assert run.returncode == 1, run.stderr
    assert "FAIL  jax could not start a backend" in run.stdout
    assert "Traceback" not in run.stderr


def test_collect_sees_this_process():
    environment = collect(link=False)
    assert len(environment.devices) == len(jax.devices())
    assert environment.backend == jax.devices()[0].platform
    assert "pinned_host" in environment.devices[0].memory_kinds
    assert environment.config["jax_remat3"] == "False"
    assert "jax_optimization_level" not in environment.config  # jax's word for an unset level is UNKNOWN
    assert setting("jax_optimization_level", environment).value is None
    assert environment.host_bytes is not None
    assert environment.host_bytes > 2**30


def test_measure_link_counts_bytes_and_seconds():
    link = measure_link(jax.devices()[0], nbytes=1_000_000, repeats=3)
    assert link.nbytes == 1_000_000
    assert min(link.d2h_gbps, link.h2d_gbps, link.both_gbps) > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_the_command_on_a_gpu():
    run = subprocess.run(
        [sys.executable, "-m", "jaxoff", "doctor", "--json"],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(run.stdout)
    assert [p["code"] for p in report["problems"] if p["fatal"]] == [], run.stdout
    assert run.returncode == 0
    link = report["environment"]["link"]
    slower = min(link["d2h_gbps"], link["h2d_gbps"])
    assert slower > 5  # a PCIe gen3 link or better
    assert link["both_gbps"] > 1.2 * slower  # two engines
