"""Which package may import what, and what an import costs and changes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"jaxoff", "models", "pallas_kernels"}
ALLOWED = {
    "jaxoff": {"jaxoff", "jax", "numpy", "rich", "scipy"},
    "pallas_kernels": {"pallas_kernels", "jax", "numpy"},
    "models": {
        "models",
        "jaxoff",
        "pallas_kernels",
        "jax",
        "numpy",
        "flax",
        "optax",
        "orbax",
        "rich",
        "typer",
        "matplotlib",
    },
}
EXTRA = {"jaxoff/__main__.py": {"typer"}, "jaxoff/_frontier.py": {"matplotlib"}}


def imported(source: str, package: str) -> set[str]:
    """The modules that a module's source imports, wherever in it; relative ones as their package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {package} if node.level else {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_imported_finds_every_form():
    source = """
import a.b, c as d
from e.f import g
from . import h
from ..i import j
def late():
    import k
if TYPE_CHECKING:
    from l import m
"""
    assert imported(source, "here") == {"a.b", "c", "e.f", "e.f.g", "here", "k", "l", "l.m"}


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages_import_only_what_they_may(package):
    assert sources(package)
    wrong = {}
    for path in sources(package):
        name = str(path.relative_to(ROOT))
        allowed = ALLOWED[package] | EXTRA.get(name, set()) | sys.stdlib_module_names
        if excess := roots(imported(path.read_text(), package)) - allowed:
            wrong[name] = sorted(excess)
    assert wrong == {}


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages_keep_to_the_public_modules_of_one_another(package):
    wrong = {}
    for path in sources(package):
        others = {m for m in imported(path.read_text(), package) if m.split(".")[0] in OURS - {package}}
        if private := {m for m in others if any(part.startswith("_") for part in m.split("."))}:
            wrong[str(path.relative_to(ROOT))] = sorted(private)
    assert wrong == {}


@pytest.mark.parametrize("package", sorted(OURS))
def test_what_depends_on_a_jax_release_stands_in_one_module(package):
    private = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
    users = {
        str(path.relative_to(ROOT))
        for path in sources(package)
        if any(m == p or m.startswith(f"{p}.") for m in imported(path.read_text(), package) for p in private)
    }
    assert users <= {f"{package}/_compat.py"}


def fresh(code):
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_import_jaxoff_is_light():
    loaded = roots(set(fresh("import sys, jaxoff; print(*sys.modules)")))
    assert "jaxoff" in loaded
    assert (
        loaded & {"flax", "orbax", "optax", "rich", "typer", "matplotlib", "models", "pallas_kernels"}
        == set()
    )


def test_import_pallas_kernels_is_light():
    loaded = roots(set(fresh("import sys, pallas_kernels; print(*sys.modules)")))
    assert "pallas_kernels" in loaded
    assert loaded & {"flax", "orbax", "optax", "rich", "typer", "matplotlib", "models", "jaxoff"} == set()


@pytest.mark.parametrize("package", sorted(OURS))
def test_import_changes_no_setting_and_starts_no_device(package):
    code = f"""
import os, jax
before = dict(os.environ), dict(jax.config.values)
import {package}
print(before == (dict(os.environ), dict(jax.config.values)))
jax.config.update("jax_num_cpu_devices", 1)  # raises once a backend has started
"""
    assert fresh(code) == ["True"]
