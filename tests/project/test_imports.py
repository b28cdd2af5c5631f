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
# The private packages of jaxoff, by floor: each imports itself and lower floors only.
FLOORS = (
    {"_report"},
    {"_jaxpr"},
    {"_policy", "_runtime"},
    {"_device", "_state"},
    {"_residuals", "_budget"},
    {"_compiled"},
    {"_schedule", "_layers"},
    {"_profile", "_plan"},
    {"_cli"},
)
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
EXTRA = {
    "jaxoff/__main__.py": {"typer"},
    "jaxoff/_plan/frontier.py": {"matplotlib"},
    "jaxoff/_schedule/nnx_jit.py": {"flax"},
}


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
def test_what_depends_on_a_jax_release_stands_in_modules_of_its_own(package):
    private = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
    users = {
        str(path.relative_to(ROOT))
        for path in sources(package)
        if any(m == p or m.startswith(f"{p}.") for m in imported(path.read_text(), package) for p in private)
    }
    assert users <= {
        "jaxoff/_jaxpr/compat.py",
        "jaxoff/_jaxpr/lowered.py",
        "jaxoff/_jaxpr/trace_state.py",
        "pallas_kernels/_compat.py",
    }


def private_package(path: Path) -> str | None:
    """The private package of jaxoff that holds a module, or None for `__init__` and `__main__`."""
    parts = path.relative_to(ROOT / "jaxoff").parts
    return parts[0] if len(parts) > 1 else None


def test_every_private_package_has_a_floor():
    assert {private_package(path) for path in sources("jaxoff")} - {None} == set(FLOOR_OF)


def test_private_packages_import_only_lower_floors():
    wrong = []
    for path in sources("jaxoff"):
        package = private_package(path)
        if package is None:
            continue
        for module in imported(path.read_text(), package):
            parts = module.split(".")
            other = parts[1] if parts[0] == "jaxoff" and len(parts) > 1 else None
            if other in FLOOR_OF and other != package and FLOOR_OF[other] >= FLOOR_OF[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            if parts[0] == "jaxoff" and (other is None or not other.startswith("_")):
                wrong.append(f"{path.relative_to(ROOT)} imports the public {module}")
    assert sorted(set(wrong)) == []


def test_only_plain_names_inside_private_packages():
    for path in sources("jaxoff"):
        if private_package(path) is not None:
            assert not path.stem.startswith("_") or path.stem == "__init__", path


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
