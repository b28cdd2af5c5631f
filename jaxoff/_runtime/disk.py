"""Facts of a program on disk, for later processes: times of its recipes, compiled memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

# Options of `jax.config` which change the compiled program and are not in the program's text.
_CONFIG = ("jax_compiler_enable_remat_pass", "jax_disable_most_optimizations", "jax_optimization_level")


def cache_folder() -> Path:
    """The folder: `JAXOFF_CACHE_DIR` of the environment, or `jaxoff` among the user's caches."""
    given = os.environ.get("JAXOFF_CACHE_DIR")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxoff"
    )


def make_key(program: str, devices: int, device: Any, *more: Any) -> str:
    """The key of a program: of its text, the devices, the versions, XLA's flags, and what the caller adds.

    Args:
      program: the text of the lowered program.
      devices: the number of devices.
      device: a device at hand.
      more: such as compiler options.
    """
    options = os.environ.get("XLA_FLAGS"), *(str(jax.config.values.get(name)) for name in _CONFIG)
    versions = device.client.platform_version, jax.__version__
    facts = program, devices, device.device_kind, versions, options, more
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def read_facts(kind: str, key: str) -> dict[str, Any]:
    """The facts of a kind under a key; empty without a sound file."""
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((cache_folder() / f"{kind}-{key}.json").read_text())
        return facts if isinstance(facts, dict) else {}
    return {}


def write_text(kind: str, text: str) -> Path:
    """Keeps a text under its own digest, for a compiler option that names a file; returns the file.

    Where the folder cannot be written, the file is in a new folder for temporary files.

    Raises:
      OSError: where no file can be written.
    """
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.pbtxt"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            _replace(folder / name, text)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="jaxoff-"))
        _replace(folder / name, text)
    return folder / name


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def write_facts(kind: str, key: str, facts: dict[str, Any]) -> None:
    """Keeps facts under a key, where the folder can be written."""
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / f"{kind}-{key}.json", json.dumps(facts, indent=1) + "\n")
