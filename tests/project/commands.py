"""Checks the shell commands of a Markdown file: which are known, and what is done with each.

Ours (`jaxoff` or `python -m jaxoff`, `python -m models.train`) are parsed by their own command lines, and
run: training with few steps, in a folder of links to the checkout. The others (installing, tests, lint) are
checked for the names that they use: extras, groups, markers, paths.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer.main

from tests.project.readme import BlockError, as_a_reader

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
GROUPS = set(PROJECT["dependency-groups"])
MARKERS = {marker.split(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}

TYPER_APPS = {"jaxoff": "jaxoff.__main__", "models.train": "models.train"}
SHORTER = {"models.train": ("--steps", "2", "--eval-batches", "1")}
# Typer exports the kinds of this error and not their base.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
# `doctor` exits with 1 where there is no GPU.
GOOD_STATUS = {"jaxoff": (0, 1)}


@dataclasses.dataclass(frozen=True)
class Program:
    """`python -m module arguments`, to be run with some environment variables set."""

    module: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def shorter(self) -> Program:
        """The same command, made quick: a later option wins over an earlier."""
        return dataclasses.replace(self, arguments=self.arguments + SHORTER.get(self.module, ()))


def split(code: str, language: str) -> Iterator[list[str]]:
    """The commands of a block, as words.

    Raises:
      BlockError: for pipes and redirections, and for output between the commands of a console block.
    """
    for line in code.replace("\\\n", " ").splitlines():
        if language == "console" and line.strip():
            if not line.startswith("$ "):
                raise BlockError(f"output stands in a ```text block of its own, got {line!r}.")
            line = line[2:]
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", ";"):
                if words:
                    yield words
                words = []
            elif set(word) <= set("|&<>();"):
                raise BlockError(f"commands here are joined by && and ; alone, got {word!r} in {line!r}.")
            else:
                words.append(word)


def understand(words: Sequence[str]) -> Program | None:
    """Checks a command. Returns what there is to run, or None.

    Raises:
      BlockError: for a command that is not known, or that names what does not exist.
    """
    variables = []
    words = list(words)
    while words and re.match(r"^\w+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    match words:
        case ["git", "clone", *_] | ["cd", _] | ["uv", "lock", *_] | []:
            return None
        case ["pip" | "pip3", "install", *rest] | ["uv", "pip", "install", *rest]:
            return _check_install(rest)
        case ["python" | "python3", "-m", "pip", "install", *rest]:
            return _check_install(rest)
        case ["uv", "sync", *rest]:
            return _check_uv_options(rest, [])
        case ["uv", "run", *rest]:
            options = []
            while rest and rest[0].startswith("-"):
                takes_value = rest[0] in ("--extra", "--group", "--only-group")
                options += rest[: 1 + takes_value]
                rest = rest[1 + takes_value :]
            _check_uv_options(options, rest)
            return _tool(rest, tuple(variables))
        case ["python" | "python3" | "jaxoff", *_]:
            return _tool(words, tuple(variables))
        case [path, *_] if "/" in path:
            _check_path(path, executable=True)
            return None
    raise BlockError(f"not a command that is known here: {shlex.join(words)}")


def _tool(words: Sequence[str], variables: tuple[tuple[str, str], ...]) -> Program | None:
    match list(words):
        case ["pytest", *rest] | ["python" | "python3", "-m", "pytest", *rest]:
            return _check_pytest(rest)
        case ["jaxoff", *rest]:
            return _parsed(Program("jaxoff", tuple(rest), variables))
        case ["python" | "python3", "-m", module, *rest] if module in TYPER_APPS:
            return _parsed(Program(module, tuple(rest), variables))
        case ["python" | "python3", path, *_] if path.endswith(".py"):
            return _check_path(path)
        case ["ruff", "check" | "format", *rest]:
            return _check_paths(rest)
        case ["pyright"] | ["pre-commit", *_]:
            return None
    raise BlockError(f"not a program that is known here: {shlex.join(words)}")


def _parsed(program: Program) -> Program:
    """Lets the program's own command line parse its arguments, without running it."""
    command = typer.main.get_command(importlib.import_module(TYPER_APPS[program.module]).app)
    try:
        context = command.make_context(program.module, list(program.arguments))
        if subcommands := getattr(command, "commands", None):
            name, *rest = program.arguments or ("",)
            if name not in subcommands:
                raise BlockError(f"python -m {program.module} has {', '.join(subcommands)}, got {name!r}.")
            subcommands[name].make_context(name, rest, parent=context)
    except typer.Exit:  # --help
        return program
    except USAGE_ERROR as error:
        raise BlockError(f"python -m {program.module}: {error}") from error
    return program


def _check_install(words: Sequence[str]) -> None:
    for word in words:
        match = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?(?:[=<>!~].*)?", word)
        if word in ("-e", "--editable", "-U", "--upgrade"):
            continue
        if match is None or match[1] not in (".", "uv", "jax", "jaxoff"):
            raise BlockError(f"pip install is for uv, jax, jaxoff and . here, got {word!r}.")
        if match[1] in (".", "jaxoff"):
            _check_known("extra", (match[2] or "").split(",") if match[2] else (), EXTRAS)


def _check_uv_options(options: Sequence[str], words: Sequence[str]) -> None:
    values = list(zip(options, [*options[1:], *words[:1], ""], strict=False))
    _check_known("extra", [value for option, value in values if option == "--extra"], EXTRAS)
    _check_known(
        "group", [value for option, value in values if option in ("--group", "--only-group")], GROUPS
    )


def _check_pytest(words: Sequence[str]) -> None:
    rest = iter(words)
    for word in rest:
        if word == "-m":
            named = set(re.findall(r"\w+", next(rest, ""))) - {"and", "or", "not"}
            _check_known("marker", named, MARKERS)
        elif word in ("-k", "-n", "--numprocesses"):
            next(rest, None)
        elif not word.startswith("-"):
            _check_path(word.split("::")[0])


def _check_paths(words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("-"):
            _check_path(word)


def _check_path(path: str, *, executable: bool = False) -> None:
    if not (ROOT / path).exists():
        raise BlockError(f"no such file in the checkout: {path}")
    if executable and not os.access(ROOT / path, os.X_OK):
        raise BlockError(f"not executable: {path}")


def _check_known(what: str, got, known: set[str]) -> None:
    if unknown := set(got) - known:
        raise BlockError(
            f"unknown {what} {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}."
        )


def link_checkout(folder: Path) -> Path:
    """A folder that looks like the checkout and takes what commands write."""
    for path in ROOT.iterdir():
        if path.name in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] or path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def run_program(program: Program, folder: Path, *, timeout_s: float, quick_compiles: bool = False) -> str:
    """Runs a program in a folder. Returns what it prints.

    XLA compiles as it does for a reader, or with `quick_compiles` as it does for the tests. It has none of
    their fake devices.

    Raises:
      BlockError: where it fails.
    """
    run = subprocess.run(
        [sys.executable, "-m", program.module, *program.arguments],
        cwd=folder,
        env=as_a_reader(quick_compiles=quick_compiles) | dict(program.variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if run.returncode not in GOOD_STATUS.get(program.module, (0,)):
        command = shlex.join(["python", "-m", program.module, *program.arguments])
        raise BlockError(f"{command}: exit status {run.returncode}\n{run.stdout}\n{run.stderr}")
    return run.stdout
