"""The pages of docs: links lead somewhere, the references are complete, and the site builds."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxoff
import pallas_kernels
from jaxoff._report.finding import FindingCode
from jaxoff._runtime.environment import VARIABLES
from jaxoff._runtime.judgements import _RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read(path):
    """The text of a page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text()))


def anchors(path):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {re.sub(r" +", "-", text.strip()) for text in words}


def broken_links(path):
    for target in LINK.findall(read(path)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def first_column(path):
    """The code words in the first column of the tables of a page."""
    return re.findall(r"^\| `([^`]+)`", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken_links(path)) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](#a-b-c) [y](#a-c) [z](other.md) [w](https://example.org) `[v](no.md)`\n")
    assert list(broken_links(page)) == ["#a-c", "other.md"]


def test_pages_of_docs_link_within_docs():
    """The site holds the folder alone."""
    outside = [
        (str(path.relative_to(ROOT)), target)
        for path in PAGES
        for target in LINK.findall(read(path))
        if "://" not in target and not (path.parent / target.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


def test_the_navigation_holds_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


def test_the_reference_holds_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    names = [f"jaxoff.{name}" for name, value in vars(jaxoff).items() if is_public(name, value)]
    names += [f"pallas_kernels.{name}" for name in pallas_kernels.__all__]
    assert sorted(listed) == sorted(names)


def is_public(name, value):
    return not name.startswith("_") and not inspect.ismodule(value)


def test_the_findings_page_holds_every_code():
    assert sorted(first_column(DOCS / "reference" / "findings.md")) == sorted(FindingCode)


def test_the_flags_page_holds_every_setting_that_the_doctor_judges():
    listed = set(first_column(DOCS / "reference" / "flags.md"))
    judged = {names[-1] for _, names, _ in _RULES}
    assert judged <= listed
    assert {name for name in VARIABLES if name.startswith("XLA_P")} <= listed


@pytest.mark.long  # only where the group "docs" is installed, as .ci/run does
def test_the_site_builds(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: uv sync --group docs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "reference" / "api" / "index.html").exists()
