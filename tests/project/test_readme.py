"""Every code block of README.md and of the pages in docs runs, and README.md stays short."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.project import commands, readme

ROOT = Path(__file__).parents[2]
MAX_LINES, MAX_WORDS = 180, 1100
PAGES = {
    str(path.relative_to(ROOT)): readme.parse(path.read_text())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]


def python_blocks(page):
    return [block for block in PAGES[page] if block.language in readme.PYTHON]


PROGRAMS_IN_PYTHON = [page for page in PAGES if python_blocks(page)]


def programs(blocks):
    """Our own commands: the block that each stands in, and whether it is the block's only one."""
    for block in blocks:
        if block.language in readme.SHELL:
            found = [commands.understand(words) for words in commands.split(block.code, block.language)]
            ours = [program for program in found if program is not None]
            for program in ours:
                yield block, program, len(ours) == 1


def all_programs():
    """Our own commands of all pages, a command of several pages once."""
    found = {}
    for blocks in PAGES.values():
        for block, program, alone in programs(blocks):
            found.setdefault(program, (block, program, alone))
    return found.values()


def main_job():
    """The block and the program that the README asks a reader to run first."""
    block, program, _ = next(found for found in programs(README) if found[1].module == "models.train")
    return block, program


def test_the_readme_shows_what_a_reader_needs():
    assert {block.language for block in README} >= {"python", "bash"}
    assert any(block.output for block in README if block.language in readme.PYTHON)
    modules = {program.module for _, program, _ in programs(README)}
    assert modules >= {"models.train", "jaxoff"}


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split()) <= MAX_WORDS


def test_the_figures_of_the_readme_are_those_of_the_budgets_page():
    measured = set(re.findall(r"[0-9.]+, [0-9.]+", (ROOT / "docs" / "budgets.md").read_text()))
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if "GB: " in line]
    assert len(rows) == 4
    assert {cell for row in rows for cell in re.findall(r"[0-9.]+, [0-9.]+", row)} <= measured


@pytest.fixture(scope="module")
def printed():
    """What the Python blocks of each page print."""
    return dict(
        zip(
            PROGRAMS_IN_PYTHON,
            readme.run_pages([python_blocks(page) for page in PROGRAMS_IN_PYTHON]),
            strict=True,
        )
    )


@pytest.mark.parametrize("page", PROGRAMS_IN_PYTHON)
def test_python_blocks_run_and_print_what_the_page_shows(page, printed):
    assert not isinstance(printed[page], str), printed[page]
    for block, text in zip(python_blocks(page), printed[page], strict=True):
        readme.compare(block, text)


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_commands_run(is_first, tmp_path):
    """Every command of ours that needs no GPU, training for two steps, at first README's.

    Outputs are compared where a command runs as it is printed.
    """
    folder = commands.link_checkout(tmp_path)
    trained = []
    for block, program, alone in all_programs():
        is_training = program.module == "models.train"
        if not block.gpus and is_first == (not is_training or not program.arguments):
            trained += [program] * is_training
            shorter = program.shorter()
            text = commands.run_program(shorter, folder, timeout_s=240, quick_compiles=shorter != program)
            if alone and shorter == program:
                readme.compare(block, text)
    assert trained


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "gpus", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(8, marks=pytest.mark.multi_gpu(8))]
)
def test_gpu_commands_run(gpus, tmp_path):
    folder = commands.link_checkout(tmp_path)
    found = [program for block, program, _ in all_programs() if block.gpus == gpus]
    assert found
    for program in found:
        # Tests share a card: one layer of nano with its state takes 20 GB, two take 40.
        quick = program.shorter()
        fewer = tuple("num_layers=1" if word == "num_layers=2" else word for word in quick.arguments)
        commands.run_program(dataclasses.replace(quick, arguments=fewer), folder, timeout_s=600)


@pytest.mark.long  # two minutes; test_commands_run runs its first steps
def test_the_main_job_as_printed(tmp_path):
    block, program = main_job()
    readme.compare(block, commands.run_program(program, commands.link_checkout(tmp_path), timeout_s=600))
