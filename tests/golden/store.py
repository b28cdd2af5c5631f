"""Where goldens are stored, a set for each locked version of jax, and how new programs are compared."""

from __future__ import annotations

import functools
import json
import lzma
import math
from pathlib import Path
from typing import Any

import jax

from tests.golden.text import difference, digest

FOLDER = Path(__file__).parent
COMMAND = "python -m tests.golden.renew"
RELATIVE = 1e-9
MAX_CHANGES = 30
_MARK = "=== "


def paths(kind: str = "") -> tuple[Path, Path]:
    """The index and the compressed texts of the installed jax, or with a kind the documents' file twice."""
    stem = f"jax-{jax.__version__}"
    if kind:
        return FOLDER / f"{stem}.{kind}.json", FOLDER / f"{stem}.{kind}.json"
    return FOLDER / f"{stem}.json", FOLDER / f"{stem}.txt.xz"


@functools.cache
def index() -> dict[str, Any]:
    """Digests and numbers of lines of the stored programs, by name; empty for a jax without goldens."""
    path, _ = paths()
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def texts() -> dict[str, str]:
    """The stored programs by name."""
    _, path = paths()
    parts = lzma.decompress(path.read_bytes()).decode().split(f"\n{_MARK}")
    return dict(part.split("\n", 1) for part in parts[1:])


def store(programs: dict[str, str]) -> None:
    """Writes programs, and forgets the stored ones."""
    index_path, texts_path = paths()
    rows = {
        name: {"sha256": digest(text), "lines": text.count("\n")} for name, text in sorted(programs.items())
    }
    index_path.write_text(json.dumps(rows, indent=1) + "\n")
    # Equal parts of programs are far from each other: the dictionary is larger than all texts.
    joined = "".join(f"\n{_MARK}{name}\n{text}" for name, text in sorted(programs.items()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 25}]
    texts_path.write_bytes(lzma.compress(joined.encode(), filters=filters))
    index.cache_clear()
    texts.cache_clear()


@functools.cache
def documents(kind: str) -> dict[str, Any]:
    """The stored documents of a kind by name; empty for a jax without goldens."""
    path, _ = paths(kind)
    return json.loads(path.read_text()) if path.exists() else {}


def store_documents(kind: str, found: dict[str, Any]) -> None:
    """Writes documents, a line a value, and forgets the stored ones."""
    path, _ = paths(kind)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    documents.cache_clear()


def missing(name: str, stored: dict[str, Any]) -> str | None:
    """Why there is nothing to compare with, or None."""
    if not stored:
        return f"no goldens for jax {jax.__version__}: {COMMAND} makes them"
    return None if name in stored else f"no golden is called {name!r}: {COMMAND} makes the missing ones"


def program_difference(name: str, text: str) -> str | None:
    """How a program differs from the stored one, or None."""
    if digest(text) == index()[name]["sha256"]:
        return None
    old = index()[name]["lines"]
    return (
        f"the program {name!r} is another one: {old} lines stored, {text.count(chr(10))} new.\n"
        f"{difference(texts()[name], text)}\n"
        f"Where the change is meant: {COMMAND} {name}"
    )


def document_difference(kind: str, name: str, new: Any) -> str | None:
    """How a document differs from the stored one, or None. Floats may differ by `RELATIVE`."""
    changes = list(_changes(name, documents(kind)[name], json.loads(json.dumps(new))))
    if not changes:
        return None
    more = [f"... {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []
    listed = "\n".join([*changes[:MAX_CHANGES], *more])
    return f"{kind} of {name!r}, stored -> new:\n{listed}\nWhere the change is meant: {COMMAND} {name}"


def _changes(path: str, old: Any, new: Any):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _changes(f"{path}.{key}", old.get(key, "(absent)"), new.get(key, "(absent)"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{path}[{i}]", a, b)
    elif not _equal(old, new):
        yield f"  {path}: {_short(old)} -> {_short(new)}"


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=1e-15)
    return old == new and type(old) is type(new)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
