"""`python -m jaxoff plan`."""

import json

import pytest
from typer.testing import CliRunner

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


def wrong():
    return step


def nested():
    return step, setup()[1:]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "my_setup.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
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
        (("my_setup:wrong", "--device-gb", "1"), "returns (train step, *arguments)"),
        (("my_setup:nested", "--device-gb", "1"), "got 1 for step(w, x): missing a required argument: 'x'"),
        (("my_setup:setup", "--device-gb", "1", "--device", "h20"), "Did you mean 'h200'?"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
