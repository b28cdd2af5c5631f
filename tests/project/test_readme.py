"""Every code block of README.md runs."""

from pathlib import Path

import pytest

from tests.project import commands, readme

ROOT = Path(__file__).parents[2]
BLOCKS = readme.parse((ROOT / "README.md").read_text())


def programs(blocks=BLOCKS):
    """Our own commands: the block that each stands in, and whether it is the block's only one."""
    for block in blocks:
        if block.language in readme.SHELL:
            found = [commands.understand(words) for words in commands.split(block.code, block.language)]
            ours = [program for program in found if program is not None]
            for program in ours:
                yield block, program, len(ours) == 1


def main_job():
    """The block and the program that the README asks a reader to run first."""
    block, program, _ = next(found for found in programs() if found[1].module == "models.train")
    return block, program


def test_the_readme_shows_what_a_reader_needs():
    assert {block.language for block in BLOCKS} >= {"python", "bash"}
    assert any(block.output for block in BLOCKS if block.language in readme.PYTHON)
    modules = {program.module for _, program, _ in programs()}
    assert modules >= {"models.train", "jaxoff"}


def test_python_blocks_run_and_print_what_the_readme_shows():
    blocks = [block for block in BLOCKS if block.language in readme.PYTHON]
    for block, printed in zip(blocks, readme.run_python(blocks), strict=True):
        readme.compare(block, printed)


def test_commands_run(tmp_path):
    """Every command of ours that needs no GPU, training for two steps.

    Outputs are compared where a command runs as it is printed.
    """
    folder = commands.link_checkout(tmp_path)
    trained = []
    for block, program, alone in programs():
        if not block.gpus:
            trained += [program] * (program.module == "models.train")
            shorter = program.shorter()
            printed = commands.run_program(shorter, folder, timeout_s=240, quick_compiles=shorter != program)
            if alone and shorter == program:
                readme.compare(block, printed)
    assert trained


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "gpus", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(8, marks=pytest.mark.multi_gpu(8))]
)
def test_gpu_commands_run(gpus, tmp_path):
    folder = commands.link_checkout(tmp_path)
    found = [program for block, program, _ in programs() if block.gpus == gpus]
    assert found
    for program in found:
        commands.run_program(program.shorter(), folder, timeout_s=600)


@pytest.mark.long  # two minutes; test_commands_run runs its first steps
def test_the_main_job_as_printed(tmp_path):
    block, program = main_job()
    readme.compare(block, commands.run_program(program, commands.link_checkout(tmp_path), timeout_s=600))
