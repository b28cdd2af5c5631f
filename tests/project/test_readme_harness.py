"""The harness that runs README.md finds what is wrong with one."""

import pytest

from tests.project import commands, readme

GOOD = """
Text.

```python
x = 1
print(x, "  ")
```

<!-- output -->
```text
1
```

```python
print(x + 1)
```

<!-- gpu -->
```bash
pip install uv && uv run python -m models.train --steps 3
```

```text
a -> b
```
"""


def checked(text):
    blocks = readme.parse(text)
    python = [block for block in blocks if block.language in readme.PYTHON]
    for block, printed in zip(python, readme.run_python(python), strict=True):
        readme.compare(block, printed)
    return blocks


def test_a_good_text_passes():
    blocks = checked(GOOD)
    assert [(b.language, b.line, b.gpus) for b in blocks] == [
        ("python", 5, 0),
        ("python", 15, 0),
        ("bash", 20, 1),
        ("text", 24, 0),
    ]
    assert [b.output for b in blocks] == ["1", None, None, None]


def test_commands_for_several_gpus():
    (bash,) = [block for block in readme.parse(GOOD.replace("<!-- gpu -->", "<!-- 8 gpus -->")) if block.gpus]
    assert (bash.language, bash.gpus) == ("bash", 8)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("```text\n1\n", "```text\n2\n", "this block prints\n1\nand the text shows\n2"),
        ("print(x + 1)", "print(y)", "NameError"),
        ("print(x + 1)", "import warnings; warnings.warn('old')", "UserWarning: old"),
        ("x = 1", "x = ", "SyntaxError"),
        ("```text\na", "```\na", "one of python, bash, console, text, got ''"),
        ("```text\na", "```rust\na", "got 'rust'"),
        ("a -> b\n```", "a -> b", "line 23: this code block is not closed"),
        ("<!-- output -->\n", "<!-- output -->\nMore.\n", "stands before a code block, got text"),
        ("<!-- gpu -->", "<!-- output -->", "between a block and its ```text output"),
        ("```python\nprint(x + 1)", "<!-- gpu -->\n```python\nprint(x + 1)", "stands before commands"),
    ],
)
def test_a_bad_text_fails(good, bad, message):
    assert good in GOOD
    with pytest.raises(readme.BlockError) as error:
        checked(GOOD.replace(good, bad))
    assert message in str(error.value)


def test_abridged_output():
    block = readme.Block("python", "", 1, output="first ...\nlast", abridged=True)
    readme.compare(block, "first 1.5 s\nsecond\nlast  \n")
    with pytest.raises(readme.BlockError):
        readme.compare(block, "first 1.5 s\nsecond\nlast but one\n")
    with pytest.raises(readme.BlockError):
        readme.compare(readme.Block("python", "", 1, output="first ..."), "first 1\n")


def understood(code, language="bash"):
    return [commands.understand(words) for words in commands.split(code, language)]


def test_commands_are_understood():
    code = """
# a comment
git clone https://example.org/jaxoff && cd jaxoff
pip install 'jaxoff[cuda13]'
uv sync --locked --extra cuda13
uv run pytest -m 'gpu and not slow' tests/project
JAX_PLATFORMS=cpu uv run --extra cuda13 python -m models.train \\
    --steps 7
uv run ruff check .
python -m jaxoff doctor --json
jaxoff plan train:setup --device-gb 60
.ci/run
"""
    assert [program for program in understood(code) if program is not None] == [
        commands.Program("models.train", ("--steps", "7"), (("JAX_PLATFORMS", "cpu"),)),
        commands.Program("jaxoff", ("doctor", "--json")),
        commands.Program("jaxoff", ("plan", "train:setup", "--device-gb", "60")),
    ]
    assert understood("$ uv run pytest\n\n$ python -m jaxoff doctor", "console")[0] is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("make all", "not a command that is known here: make all"),
        ("uv run make", "not a program that is known here: make"),
        ("uv run python -m models.trian", "not a program"),
        ("uv run python -m models.train --stepz 3", "--stepz"),
        ("uv run python -m models.train --steps many", "valid integer"),
        ("uv run python -m jaxoff doktor", "has doctor"),
        ("uv run python -m jaxoff doctor --yaml", "--yaml"),
        ("pip install 'jaxoff[cuda99]'", "unknown extra cuda99; there are cli, cuda13, plots"),
        ("pip install jaxof", "got 'jaxof'"),
        ("uv sync --extra cuda99", "unknown extra cuda99"),
        ("uv run --extra cuda99 pytest", "unknown extra cuda99"),
        ("uv sync --group all", "unknown group all"),
        ("uv run pytest -m gpus", "unknown marker gpus"),
        ("uv run pytest tests/nowhere", "no such file in the checkout: tests/nowhere"),
        ("uv run python bench/nowhere.py", "no such file"),
        ("./LICENSE", "not executable"),
        ("uv run pytest | tail", "got '|'"),
    ],
)
def test_commands_that_are_wrong(code, message):
    with pytest.raises(readme.BlockError) as error:
        understood(code)
    assert message in str(error.value)


def test_output_between_console_commands():
    with pytest.raises(readme.BlockError, match="a ```text block of its own"):
        understood("$ uv run pytest\n3 passed", "console")


def test_a_command_that_fails(tmp_path):
    folder = commands.link_checkout(tmp_path)
    program = commands.Program("models.train", ("--data", "nowhere.txt"))
    with pytest.raises(readme.BlockError, match=r"(?s)exit status 2.*nowhere\.txt"):
        commands.run_program(program.shorter(), folder, timeout_s=120)


def test_variables_reach_a_program(tmp_path):
    program = commands.Program(
        "jaxoff", ("doctor", "--no-link", "--json"), (("XLA_FLAGS", "--xla_gpu_deterministic_ops=true"),)
    )
    printed = commands.run_program(program, commands.link_checkout(tmp_path), timeout_s=120)
    assert '"xla_gpu_deterministic_ops": "true"' in printed
