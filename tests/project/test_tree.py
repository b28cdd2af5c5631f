"""What holds for every file of the tree."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import jaxoff

ROOT = Path(__file__).parents[2]
# Folders of one machine: a home, a checkout.
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
MAX_LINES = 450


def tree():
    """The files under version control, and those that would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.fail(f"the tree's files are those that git lists, and git says: {listed.stderr}")
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file() and name]


def texts():
    for path in tree():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:  # a picture
            continue


def test_machine_paths_are_recognised():
    home = "/ho" + "me/ann/x"
    assert MACHINE_PATH.search(f"see {home}")
    assert MACHINE_PATH.search("'/ro" + "ot/.cache'")
    assert not MACHINE_PATH.search("https://example.org/ro" + "ot/x and models/work/x")


def test_no_file_names_a_path_of_one_machine():
    found = {
        str(path.relative_to(ROOT)): hit[0] for path, text in texts() if (hit := MACHINE_PATH.search(text))
    }
    assert found == {}


def test_modules_are_short():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in tree()
        if path.suffix == ".py"
    }
    assert len(lengths) > 20
    assert {name: n for name, n in lengths.items() if n >= MAX_LINES} == {}


# A function for each table that prints, and the commands named after public functions.
SAME_NAMES = {"render", "explain", "plan"}


def test_no_name_of_a_module_has_two_meanings():
    defined: dict[str, list[str]] = {}
    for path in sorted((ROOT / "jaxoff").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            name = node.name.id if isinstance(node, ast.TypeAlias) else getattr(node, "name", "_")
            if not name.startswith("_"):
                defined.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in defined.items() if len(paths) > 1 and name not in SAME_NAMES}
    assert not twice


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == version
    assert jaxoff.__version__ == version
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert [p["version"] for p in locked if p["name"] == "jaxoff"] == [version]


def test_the_lock_holds_the_jax_that_is_measured():
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert {p["name"]: p["version"] for p in locked if p["name"] in ("jax", "jaxlib")} == {
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
    }


def test_ci_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"(^|\s)uv run pytest$", script.read_text(), re.MULTILINE)
    assert "uv run pytest" in (ROOT / "README.md").read_text()
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
