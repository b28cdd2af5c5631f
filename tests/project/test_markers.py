"""Markers, options and devices of tests, tried on a small project of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os
import jax
import pytest

def test_devices():
    assert len(jax.devices()) == int(os.environ["EXPECTED_DEVICES"])
    assert os.environ.get("EXPECTED_FLAG", "") in os.environ["XLA_FLAGS"]

@pytest.mark.gpu
def test_one():
    pass

@pytest.mark.multi_gpu(4)
def test_four():
    pass

@pytest.mark.gpu
@pytest.mark.xfail(strict=False)
def test_expected_to_fail():
    pytest.fail("as it does")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    return tmp_path


def run(project, *arguments, devices=8, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "EXPECTED_DEVICES": str(devices), **variables}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_its_tests_are_skipped_with_the_reason_and_xdist_is_not_needed(project):
    done = run(project, "-p", "no:xdist")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 3 skipped" in done.stdout
    assert "needs 1 GPU, jax has 0" in done.stdout
    assert "needs 4 GPUs, jax has 0" in done.stdout


def test_require_gpu_fails_what_would_be_skipped(project):
    done = run(project, "tests/test_small.py", "--require-gpu")
    assert done.returncode == 1, done.stdout
    assert "1 passed, 3 errors" in done.stdout
    assert re.search(r"--require-gpu: \S+test_four was skipped: .*needs 4 GPUs, jax has 0", done.stdout)


@pytest.mark.long
def test_the_whole_suite_uses_the_cores_and_chosen_files_one_process(project):
    pytest.importorskip("xdist")
    cores = len(os.sched_getaffinity(0))
    assert re.search(rf"\b{min(cores, 8)} workers?\b", run(project).stdout)
    assert "worker" not in run(project, "tests/test_small.py").stdout


@pytest.mark.long
def test_the_users_xla_flags_are_kept(project):
    flag = "--xla_allow_excess_precision=false"
    done = run(project, "tests/test_small.py", XLA_FLAGS=flag, EXPECTED_FLAG=flag)
    assert done.returncode == 0, done.stdout
    count = "--xla_force_host_platform_device_count=2"
    done = run(project, "tests/test_small.py", devices=2, XLA_FLAGS=count, EXPECTED_FLAG=count)
    assert done.returncode == 0, done.stdout


def test_an_unknown_marker_is_an_error(project):
    (project / "tests" / "test_typo.py").write_text("import pytest\n@pytest.mark.gpus\ndef test(): pass\n")
    done = run(project, "tests/test_typo.py")
    assert done.returncode != 0
    assert "'gpus' not found in `markers`" in done.stdout


def test_of_some_cases_those_left_out_are_long_and_the_others_are_spread(project):
    lines = [
        "import pytest",
        "@pytest.mark.some_cases(3)",
        "@pytest.mark.parametrize('i', range(10))",
        "def test_some(i):",
        "    assert i in (0, 4, 9)",
    ]
    (project / "tests" / "test_small.py").write_text("\n".join(lines))
    assert "3 passed, 7 deselected" in run(project, "tests", "-n", "0").stdout
    assert "7 failed, 3 deselected" in run(project, "tests", "-n", "0", "-m", "long").stdout
    assert "1 failed" in run(project, "tests/test_small.py::test_some[5]").stdout  # asked for, it runs
