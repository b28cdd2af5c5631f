"""`jaxoff plan`, `jaxoff explain` and `jaxoff --version`."""

import json
import operator
import sys

import pytest
from typer.testing import CliRunner

import jaxoff
from jaxoff.__main__ import app

SETUP = """
import jax, jax.numpy as jnp, jaxoff


def layer(x, w):
    return x + jax.nn.relu(jaxoff.name(x @ w, "up")) @ w.T, None


def step(w, x):
    loss = lambda w: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()
    return w - 0.1 * jax.grad(loss)(w)


def setup():
    w = jax.ShapeDtypeStruct((8, 512, 512), "bfloat16")
    return jaxoff.jit(step, donate_argnums=0), w, jax.ShapeDtypeStruct((4096, 512), "bfloat16")


def loss():
    w = jax.ShapeDtypeStruct((8, 512, 512), "bfloat16")
    fun = lambda w, x: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).var()
    return fun, w, jax.ShapeDtypeStruct((4096, 512), "bfloat16")


def misspelt():
    return jax.checkpoint(layer, policy=jaxoff.policy(save=["upp"])), jnp.ones((8, 8)), jnp.ones((8, 8))


def wrong():
    return step


def raises():
    raise RuntimeError("my own bug")


def mismatched():
    return step, jnp.ones((8, 512, 512)), jnp.ones((4096, 500))


def nested():
    return step, setup()[1:]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "my_setup.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_setup", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["plan", "--estimated", *arguments])


def test_it_prints_the_plan(run):
    result = run("my_setup:setup", "--device-gb", "1")
    assert result.exit_code == 0, result.output
    assert "up" in result.stdout
    assert "estimated peak" in result.stdout
    assert "NVIDIA H200" in result.stdout


def test_json_is_a_plan_and_the_frontier_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        "my_setup:setup", "--device-gb", "1", "--json", "--device", "h100", "--frontier", "curve.png"
    )
    found = json.loads(result.stdout)
    assert "H100" in found["device"]
    assert found["device_bytes"] == 10**9
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("my_setup:setup", "--device-gb", "0.001"), "no program fits"),
        (("my_setup", "--device-gb", "1"), "MODULE:FUNCTION, such as train:setup, got 'my_setup'"),
        (("my_setups:setup", "--device-gb", "1"), "No module named 'my_setups'"),
        (("my_setup:setupp", "--device-gb", "1"), "no function 'setupp'. Did you mean 'setup'?"),
        (("my_setup:wrong", "--device-gb", "1"), "returns (train step or loss, *arguments)"),
        (("my_setup:nested", "--device-gb", "1"), "got 1 for step(w, x): missing a required argument: 'x'"),
        (("my_setup:setup", "--device-gb", "1", "--device", "h20"), "Did you mean 'h200'?"),
        (
            ("my_setup:step", "--device-gb", "1"),
            "got step(w, x): missing a required argument: 'w'. Add a function such as `def setup()",
        ),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    first, *others = result.stderr.splitlines()
    assert message in first
    assert all(line.startswith("  ") and "B  " in line for line in others)  # the largest values of a plan
    assert bool(others) == (message == "no program fits")


def test_a_file_is_taken_as_a_module(run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.py").write_text(SETUP)
    result = run("folder/other.py:setup", "--device-gb", "1")
    assert result.exit_code == 0, result.output


def test_the_frontier_says_what_it_wrote(run):
    pytest.importorskip("matplotlib")
    result = run("my_setup:setup", "--device-gb", "1", "--frontier", "curve.png")
    assert result.stderr == "written curve.png\n"


def test_explain_prints_the_report_of_a_loss(run):
    result = CliRunner().invoke(app, ["explain", "my_setup:loss"])
    assert result.exit_code == 0, result.output
    assert "(carry)" in result.stdout and "No findings." in result.stdout
    as_json = CliRunner().invoke(app, ["explain", "my_setup:misspelt", "--json"])
    assert as_json.exit_code == 1
    assert [f["code"] for f in json.loads(as_json.stdout)["findings"]] == ["rule-matched-nothing"]


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    ("name", "lines", "last"),
    [
        ("my_setup:raises", ["raises"], "RuntimeError: my own bug"),
        ("my_setup:mismatched", ["step", "<lambda>", "layer"], "TypeError: dot_general requires"),
        ("bad_import:setup", ["<module>"], "ModuleNotFoundError: No module named 'not_there'"),
        ("bad_syntax:setup", [], "SyntaxError: invalid syntax"),
    ],
)
def test_an_error_of_the_users_code_shows_the_users_lines(run, tmp_path, command, name, lines, last):
    (tmp_path / "bad_import.py").write_text("import not_there\n\n\ndef setup(): ...\n")
    (tmp_path / "bad_syntax.py").write_text("def setup(:\n")
    budget = ["--device-gb", "1", "--estimated"] if command == "plan" else []
    result = CliRunner().invoke(app, [command, name, *budget])
    assert result.exit_code == 2
    files = [line for line in result.stderr.splitlines() if line.startswith("  File ")]
    assert all(str(tmp_path) in line for line in files)
    called = [line.rpartition(", in ")[2] for line in files if ", in " in line]
    assert [name for name in lines if name in called] == lines
    assert result.stderr.splitlines()[-1].startswith(last)
    assert "JAX has removed" not in result.stderr


def test_an_error_of_jaxoff_passes_through(run, monkeypatch):
    monkeypatch.setattr("jaxoff._residuals.report.analyse", operator.attrgetter("nonsense"))
    result = CliRunner().invoke(app, ["explain", "my_setup:loss"])
    assert isinstance(result.exception, AttributeError)


def test_the_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"jaxoff {jaxoff.__version__}\n")
