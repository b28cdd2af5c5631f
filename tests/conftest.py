"""What every test runs under: the devices, the markers, and how many processes share the work."""

import gc
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest


def _gpu_expected() -> bool:
    """Whether jax will start on a GPU, told without importing it: its platforms are read once, on import."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()


XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Code that is slower and compiled faster: the tests compile much and run little.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    # XLA's newer emitters of fused kernels for a CPU take two thirds of a compilation. The older ones
    # contract products and sums where the processor can, in some programs: tests of bits see it.
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_max_isa": "AVX",
    # A program in parts is compiled by several threads, which wait for the cores that other tests use.
    "--xla_cpu_parallel_codegen_split_count": "1",
    # Kernels of a GPU that is not there cannot be timed, only compiled in vain.
    "--xla_gpu_autotune_level": "0",
    # Products by Triton take half of the time of a compilation for a GPU; those of cuBLAS are as good for the
    # tests, but for a few, which ask for Triton.
    "--xla_gpu_enable_triton_gemm": "false",
}


if _gpu_expected():
    # Several processes, workers or programs that a test runs, share its memory: none takes all of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    # Otherwise jax's CUDA plugin, which compiles for GPUs that are not there, looks for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    given = os.environ.get("XLA_FLAGS", "")
    # Programs for a GPU share most kernels with the program before: assembled once, they take half of
    # the time. Each process has a file of its own, since XLA writes it without a lock.
    kernels = tempfile.NamedTemporaryFile(prefix="jaxoff-kernels-")  # noqa: SIM115  (deleted at exit)
    flags = XLA_FLAGS | {"--xla_gpu_kernel_cache_file": kernels.name}
    added = [f"{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


# A collection of garbage goes through all that jax keeps of the programs before, thousands of times.
gc.set_threshold(50_000, 20, 20)

# No test learns from another what a program takes: the folder of such facts is none.
os.environ["JAXOFF_CACHE_DIR"] = os.devnull


@pytest.fixture
def card(tmp_path_factory):
    """The GPU, while no other test runs a program on it in a process of its own.

    Such a program may need most of the memory: that of the training guide takes 49 GB, which with the
    workers' own arrays leaves nothing of 80.
    """
    from bench.card_lock import hold_card

    with hold_card(tmp_path_factory.getbasetemp().parent / "card"):  # a folder that all workers share
        yield


def pytest_addoption(parser, pluginmanager):
    parser.addoption(
        "--require-gpu", action="store_true", help="gpu and multi_gpu tests that would be skipped fail"
    )
    if not pluginmanager.hasplugin("xdist"):  # addopts names its options
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option, help="no effect: pytest-xdist is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process a core for the whole suite.

    Chosen files run in this process, where prints and debuggers work. So does everything on a GPU, whose
    memory has to hold what the processes do at a time: `-n 7` fits an H200.
    """
    if _gpu_expected() or config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), 8)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The file that takes minutes goes first, and of the tests with `some_cases` the other cases are long.

    Begun last, one process would wait for the file alone. The cases left in are spread evenly over all.
    """
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    cases = {}
    for item in items:
        if (marker := item.get_closest_marker("some_cases")) is not None:
            cases.setdefault((item.path, item.originalname, marker.args[0]), []).append(item)
    for (_, _, count), found in cases.items():
        last = len(found) - 1
        kept = {round(i * last / max(1, count - 1)) for i in range(count)}
        for i in set(range(len(found))) - kept:
            found[i].add_marker("long")


def pytest_runtest_setup(item):
    if (reason := _unmet(item)) is not None:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.config.getoption("--require-gpu") and _needed_gpus(item) > 0:
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {item.nodeid} was skipped: {_reason_of(report)}"
    return report


def _needed_gpus(item) -> int:
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        return multi.args[0] if multi.args else 2
    return 1 if item.get_closest_marker("gpu") is not None else 0


def _unmet(item) -> str | None:
    """Why this machine cannot run a test, or None where it can."""
    needed = _needed_gpus(item)
    if needed:
        found = _gpu_count()
        if found < needed:
            return f"needs {needed} GPU{'s' * (needed > 1)}, jax has {found}"
    if item.get_closest_marker("aot") is not None and not _has_cuda_plugin():
        return "needs jax's CUDA plugin: pip install 'jax[cuda13]' (no GPU needed)"
    return None


def _gpu_count() -> int:
    import jax  # not before XLA_FLAGS is set, and not for a run that selects no such test

    return sum(device.platform == "gpu" for device in jax.devices())


def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


def _reason_of(report) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
