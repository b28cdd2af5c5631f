"""Runs the code blocks of Markdown files.

- ```python blocks run in order, in one namespace for each file, each as a file example.py.
- ```bash and ```console blocks (there, after "$ ") hold commands that a reader types in the checkout.
  `commands.py` says which are known, and what is done with each.
- ```text blocks are pictures, except after a line `<!-- output -->`: then they are what the block before them
  prints, to the letter. After `<!-- output, abridged -->`, "..." stands for any text.
- A line `<!-- gpu -->` or `<!-- 8 gpus -->` before a block of commands: without so many they are only parsed.

A block in any other language is an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PYTHON, SHELL, TEXT = ("python",), ("bash", "console"), ("text",)
MARKER = re.compile(r"^<!-- (output|output, abridged|gpu|[0-9]+ gpus) -->$")

DRIVER = """
import contextlib, io, json, sys, traceback

def run(codes):
    namespace, printed = {"__name__": "__main__"}, []
    for code in codes:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(code, "example.py", "exec"), namespace)
        except Exception:
            return traceback.format_exc()
        printed.append(out.getvalue())
    return printed

print(json.dumps([run(codes) for codes in json.load(sys.stdin)]))
"""


class BlockError(Exception):
    """A code block that does not do what the text says."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
      language: the word after the fence.
      code: its lines.
      line: the number of its first line in the file.
      output: what it should print; None where the text does not say.
      abridged: whether "..." in the output stands for any text.
      gpus: how many GPUs it needs.
    """

    language: str
    code: str
    line: int
    output: str | None = None
    abridged: bool = False
    gpus: int = 0


def parse(text: str) -> tuple[Block, ...]:
    """The code blocks of a Markdown text, outputs attached to the blocks that print them.

    Raises:
      BlockError: for an open fence, an unknown language, or a marker that stands before the wrong thing.
    """
    blocks: list[Block] = []
    for marker, block in _fenced(text):
        if block.language not in PYTHON + SHELL + TEXT:
            known = ", ".join(PYTHON + SHELL + TEXT)
            raise BlockError(f"line {block.line}: a code block is in one of {known}, got {block.language!r}.")
        if marker is None or "gpu" in marker:
            if marker is not None and block.language not in SHELL:
                raise BlockError(f"line {block.line}: <!-- {marker} --> stands before commands.")
            number = 0 if marker is None else 1 if marker == "gpu" else int(marker.split()[0])
            blocks.append(dataclasses.replace(block, gpus=number))
        elif block.language not in TEXT or not blocks or blocks[-1].language in TEXT:
            raise BlockError(
                f"line {block.line}: <!-- {marker} --> stands between a block and its ```text output."
            )
        else:
            blocks[-1] = dataclasses.replace(blocks[-1], output=block.code, abridged="abridged" in marker)
    return tuple(blocks)


def _fenced(text: str) -> Iterator[tuple[str | None, Block]]:
    """Each fenced block with the marker on the line that is not blank before it."""
    marker = None
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if match := MARKER.match(line.strip()):
            marker = match[1]
        elif line.startswith("```"):
            fence = line[: len(line) - len(line.lstrip("`"))]
            code: list[str] = []
            for _, inner in lines:
                if inner.rstrip() == fence:
                    break
                code.append(inner)
            else:
                raise BlockError(f"line {number}: this code block is not closed.")
            yield marker, Block(line.strip("`").strip(), "\n".join(code), number + 1)
            marker = None
        elif line.strip() and marker is not None:
            raise BlockError(f"line {number}: <!-- {marker} --> stands before a code block, got text.")


def compare(block: Block, printed: str) -> None:
    """Checks what a block printed against the output that the text shows.

    Raises:
      BlockError: where they differ by more than white space at the ends of lines.
    """
    if block.output is None:
        return
    shown, got = _trimmed(block.output), _trimmed(printed)
    pattern = ".*".join(map(re.escape, shown.split("..."))) if block.abridged else re.escape(shown)
    if not re.fullmatch(pattern, got, re.DOTALL):
        raise BlockError(f"line {block.line}: this block prints\n{got}\nand the text shows\n{shown}")


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).rstrip()


def as_a_reader(*, quick_compiles: bool = False) -> dict[str, str]:
    """The environment without the tests' fake devices; their way to compile only with `quick_compiles`."""
    environment = dict(os.environ)
    flags = environment.pop("XLA_FLAGS", "").split()
    if quick_compiles:
        environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    return environment


def run_pages(pages: Sequence[Sequence[Block]]) -> list[list[str] | str]:
    """What the Python blocks of each page print, or the traceback of the first block that raises or warns.

    All pages run in one process, which imports jax once, and compiles as the tests do.

    Raises:
      BlockError: where the process itself fails.
    """
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVER],
        input=json.dumps([[block.code for block in blocks] for blocks in pages]),
        env=as_a_reader(quick_compiles=True) | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode != 0:
        raise BlockError(f"the process of the Python blocks fails:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def run_python(blocks: Sequence[Block]) -> list[str]:
    """What each Python block of a page prints.

    Raises:
      BlockError: where one raises or warns.
    """
    (printed,) = run_pages([blocks])
    if isinstance(printed, str):
        raise BlockError(f"a Python block fails:\n{printed}")
    return printed
