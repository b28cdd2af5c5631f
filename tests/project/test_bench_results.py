"""Every file of results is listed with its claim, and every file that a text cites is there."""

import re
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
CITING = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/LOG.md", "jaxoff/**/h200.json")
PAGES = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))
CITED = re.compile(r"\b(?:bench/)?results/([\w{},*./-]+\.(?:json|png|txt))")


def expand(path):
    """The paths that braces stand for, as in a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(words) for words in product(*parts)]


def test_braces_stand_for_several_paths():
    assert expand("planner/a_{b,c-d}_e.json") == ["planner/a_b_e.json", "planner/a_c-d_e.json"]


def test_every_file_is_listed_once_with_its_claim():
    sections = re.split(r"^## ", (RESULTS / "README.md").read_text(), flags=re.MULTILINE)[1:]
    listed = []
    for section in sections:
        folder = section.split("\n", 1)[0]
        rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
        names = (re.findall(r"`([\w.-]+\.(?:json|png|txt))`", row[2]) for row in rows)
        listed += [f"{folder}/{name}" for found in names for name in found]
    assert sorted(listed) == sorted(
        path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.*") if path != RESULTS / "README.md"
    )


@pytest.mark.parametrize("text", CITING + PAGES)
def test_every_cited_file_is_there(text):
    (file,) = ROOT.glob(text)
    paths = [path for found in CITED.findall(file.read_text()) for path in expand(found)]
    assert [path for path in paths if not list(RESULTS.glob(path))] == []
