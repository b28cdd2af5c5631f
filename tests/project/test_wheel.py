"""The wheel, built and installed outside the checkout."""

import email
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.project.readme import as_a_reader

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxoff", "pallas_kernels")
DEPENDENCIES = {"jax", "numpy", "rich", "scipy"}


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


def closure(requirements, extra=""):
    """The installed distributions that requirements name, and those that these require, by name."""
    found = {}
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            distribution = importlib.metadata.distribution(requirement.name)
            found[requirement.name] = distribution
            for name in requirement.extras or {""}:
                found |= closure(distribution.requires or [], name)
    return found


@pytest.fixture(scope="module")
def make_environment(wheel, tmp_path_factory):
    """Makes an environment of the wheel and what it requires with an extra; returns its Python."""
    installer = tmp_path_factory.mktemp("pip") / "venv"
    run(sys.executable, "-m", "venv", installer, cwd=installer.parent)

    def make(extra):
        folder = tmp_path_factory.mktemp("outside")
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        python = folder / "venv" / "bin" / "python"
        pip = (installer / "bin" / "python", "-m", "pip", "--python", python)
        run(*pip, "install", "--no-deps", "--no-index", "--no-input", wheel, cwd=folder)
        (site,) = (folder / "venv").glob("lib/python3*/site-packages")
        for distribution in closure(requirements_of(wheel), extra).values():
            tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
            for top in tops - {"__pycache__"}:
                if not (site / top).exists():  # two distributions may share a folder
                    (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
        return python

    return make


@pytest.fixture(scope="module")
def python(make_environment):
    """The interpreter of an environment with what `pip install jaxoff` installs."""
    return make_environment(extra="")


def outside(python, code):
    """Runs code in the fresh environment, in an empty folder, with warnings as errors."""
    return run(python, "-I", "-W", "error", "-c", code, cwd=python.parents[2])


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"jaxoff-{project()['version']}.dist-info/METADATA"))


def requirements_of(wheel):
    return metadata_of(wheel).get_all("Requires-Dist", [])


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"jaxoff-{project()['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    for package in PACKAGES:
        sources = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        data = {
            str(p.relative_to(ROOT)) for end in ("json", "txtpb") for p in (ROOT / package).rglob(f"*.{end}")
        }
        assert sources | data <= set(names)
        assert data or package != "jaxoff"
    assert "jaxoff/py.typed" in names
    tables = {str(p.relative_to(ROOT)) for p in (ROOT / "pallas_kernels/_mosaic/tiles").glob("*.json")}
    assert tables and tables <= set(names)
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheels_metadata(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cli", "cuda13", "plots"}
    required = requirements_of(wheel)
    assert {"jax<0.13,>=0.11.1", "jax[cuda13]; extra == 'cuda13'"} <= set(required)
    assert {Requirement(r).name for r in required if "extra" not in r} == DEPENDENCIES


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
    assert [Path(f).is_relative_to(python.parents[1]) for f in files] == [True] * 2
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


def test_what_ships_with_jaxoff_is_found_as_installed(python):
    printed = outside(
        python,
        """
import importlib.resources, jaxoff
print(jaxoff.Device.of("h200").name)
print((importlib.resources.files("jaxoff._device") / "data" / "h200.txtpb").is_file())
""",
    )
    assert printed.splitlines() == ["NVIDIA H200", "True"]


def test_extras_are_not_needed_before_they_are_used(python):
    printed = outside(
        python,
        """
import importlib.util, jaxoff
others = ("flax", "matplotlib", "models", "optax", "orbax", "typer")
print([name for name in others if importlib.util.find_spec(name)])
try:
    jaxoff.Frontier(()).draw("picture.png")
except ModuleNotFoundError as error:
    print(error)
""",
    )
    assert printed.splitlines() == [
        "[]",
        "Frontier.draw needs matplotlib, which is not installed. pip install 'jaxoff[plots]' adds it.",
    ]


def test_the_command_line_without_its_extra_says_how_to_install_it(python):
    command = [str(python), "-I", "-m", "jaxoff", "doctor"]
    done = subprocess.run(command, env=as_a_reader(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: the command jaxoff needs typer, which is not installed. pip install 'jaxoff[cli]' adds it.\n"
    )


def test_the_command_line_works_with_its_extra(make_environment):
    python = make_environment(extra="cli")
    script, cwd = python.parent / "jaxoff", python.parents[2]
    (cwd / "mine.py").write_text("def setup():\n    return 1 / 0\n")
    assert run(script, "--version", cwd=cwd) == f"jaxoff {project()['version']}\n"
    assert run(script, "--help", cwd=cwd) == run(python, "-I", "-m", "jaxoff", "--help", cwd=cwd)
    done = subprocess.run(
        [script, "plan", "mine:setup", "--device-gb", "1"],
        cwd=cwd,
        env=as_a_reader(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        f'  File "{cwd}/mine.py", line 2, in setup',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
