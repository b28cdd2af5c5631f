"""The notebooks of the documentation: their cells run, and print what stands below them."""

import json
from pathlib import Path

import pytest

from tests.project.notebooks import list_code, output_of, run

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_two_notebooks_and_the_page_of_notebooks_links_them():
    page = (FOLDER / "index.md").read_text()
    assert len(NOTEBOOKS) == 2
    assert all(f"]({path.name})" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_print_what_stands_below_them(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    cells = list_code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = [strip(text) for text in run(notebook)]
    assert printed == [strip(output_of(cell)) for cell in cells]
    assert sum(map(bool, printed)) >= 4


def strip(text: str) -> list[str]:
    """The lines of a text without the spaces that fill a table."""
    return [line.rstrip() for line in text.splitlines()]
