"""The origin of a result file: machine, versions, flags, commit, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import jax


def provenance(options: dict[str, Any]) -> dict[str, Any]:
    """The machine, versions, flags, commit and command of this run, JSON-ready."""
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "versions": {
            p: _version(p) for p in ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy")
        },
        "python": sys.version.split()[0],
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "command": f"python -m {_module()} {' '.join(_arguments())}",
        "options": {key: str(value) for key, value in options.items() if key != "out"},
        "flags": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("XLA_", "JAX_"))},
    }


def _arguments() -> list[str]:
    """The command line without the place of the result."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return arguments


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else sys.argv[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
