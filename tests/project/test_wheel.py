"""The wheel, built and installed outside the checkout."""

import email
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.project.readme import as_a_reader

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxoff", "models", "pallas_kernels")


def run(*command, cwd):
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=as_a_reader(), capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.fail(
            f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment: the wheel, and after it this environment's other packages."""
    venv = tmp_path_factory.mktemp("outside") / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=venv.parent)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-input", wheel, cwd=venv.parent)
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv.parent
    ).strip()
    # A folder named in a .pth file is searched last; .pth files in it (an editable install's) are not read.
    Path(site, "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def outside(python, code):
    """Runs code in the fresh environment, in an empty folder, with warnings as errors."""
    return run(python, "-I", "-W", "error", "-c", code, cwd=python.parents[2])


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"jaxoff-{project()['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    for package in PACKAGES:
        sources = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        assert sources <= set(names)
    assert "jaxoff/py.typed" in names
    tables = {str(p.relative_to(ROOT)) for p in (ROOT / "pallas_kernels/_mosaic/tiles").glob("*.json")}
    assert tables and tables <= set(names)
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheels_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"jaxoff-{project()['version']}.dist-info/METADATA"))
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"jax<0.13,>=0.11.1", "jax[cuda13]; extra == 'cuda13'"} <= set(
        metadata.get_all("Requires-Dist", [])
    )


def test_the_installed_packages_are_the_wheels(python):
    printed = outside(
        python,
        f"""
import importlib, importlib.metadata, jaxoff
print(jaxoff.__version__, importlib.metadata.version("jaxoff"))
for name in {PACKAGES}:
    print(importlib.import_module(name).__file__)
print((importlib.resources.files("jaxoff") / "py.typed").is_file())
""".replace("import importlib,", "import importlib, importlib.resources,"),
    )
    versions, *files, typed = printed.splitlines()
    assert versions.split() == [project()["version"]] * 2
    assert [Path(f).is_relative_to(python.parents[1]) for f in files] == [True] * 3
    assert typed == "True"


def test_a_policy_works_as_installed(python):
    printed = outside(
        python,
        """
import jax, jax.numpy as jnp, jaxoff

def block(w, x):
    return jnp.sum(jaxoff.name(jnp.tanh(x @ w), "mlp.act") @ w.T)

w, x = jnp.linspace(-1, 1, 128).reshape(8, 16), jnp.ones((4, 8))
offloaded = jax.checkpoint(block, policy=jaxoff.policy(offload=["mlp.*"]))
print((jax.jit(jax.grad(offloaded))(w, x) == jax.jit(jax.grad(block))(w, x)).all())
print([(r.name, r.placement) for r in jaxoff.residuals(offloaded, w, x)])
""",
    )
    assert printed.splitlines() == ["True", "[('mlp.act', 'offload')]"]


@pytest.mark.parametrize("module", ["jaxoff", "models.train"])
def test_the_command_lines_work_as_installed(python, module):
    assert f"python -m {module}" in run(python, "-I", "-m", module, "--help", cwd=python.parents[2])
