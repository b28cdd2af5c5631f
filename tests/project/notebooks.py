"""Runs the code cells of a notebook, without Jupyter.

`python -m tests.project.notebooks FILE...` writes what the cells print into the notebooks.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def list_code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> Iterator[str]:
    """Runs the code cells in order, in one namespace. Yields what each prints.

    A cell's file is called `cell N`, so that tables with source lines are the same everywhere.
    """
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for number, cell in enumerate(list_code(notebook), 1):
        code, file = "".join(cell["source"]), f"cell {number}"
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, file, "exec"), names)
        yield printed.getvalue()


def output_of(cell: dict[str, Any]) -> str:
    """What the notebook says that a cell prints."""
    return "".join(text for output in cell["outputs"] for text in output["text"])


def write_outputs(path: Path) -> None:
    """Runs a notebook, and writes what its cells print into it."""
    notebook = json.loads(path.read_text())
    for number, (cell, text) in enumerate(zip(list_code(notebook), run(notebook), strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_outputs(Path(name))
