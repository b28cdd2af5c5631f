"""`python -m jaxoff plan`."""

import json

import pytest
from typer.testing import CliRunner

import jaxoff
from jaxoff.__main__ import app

SETUP = """
import jax, jax.numpy as jnp, jaxoff


def layer(x, w):
    return x + jaxoff.name(jnp.tanh(x @ w), "act") @ w.T, None


def loss(w, x):
    return jaxoff.scan(layer, x, w, policy=jaxoff.policy())[0].sum()


def setup():
    w = jax.ShapeDtypeStruct((8, 512, 512), "bfloat16")
    return loss, w, jax.ShapeDtypeStruct((4096, 512), "bfloat16")


def wrong():
    return loss


def nested():
    return loss, setup()[1:]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "my_setup.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *arguments: CliRunner().invoke(app, ["plan", *arguments])


def test_it_prints_the_plan(run):
    result = run("my_setup:setup", "--device-gb", "1")
    assert result.exit_code == 0, result.output
    assert "act" in result.stdout
    assert "device peak" in result.stdout


def test_first_layers_are_placed_otherwise(run):
    arguments = "my_setup:setup", "--device-gb", "0.08"
    assert run(*arguments).stdout.startswith("name ")
    result = run(*arguments, "--first-layers")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("layers ")


def test_json_is_a_plan_and_the_frontier_a_picture(run, tmp_path):
    result = run("my_setup:setup", "--device-gb", "1", "--json", "--gpus", "4", "--frontier", "curve.png")
    found = jaxoff.Plan.from_dict(json.loads(result.stdout))
    assert found.device == jaxoff.Device.of("h200").sharing(4)
    assert found.device_bytes == 10**9
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("my_setup:setup", "--device-gb", "0.01"), "the smallest budget is"),
        (("my_setup", "--device-gb", "1"), "MODULE:FUNCTION, such as train:setup, got 'my_setup'"),
        (("my_setups:setup", "--device-gb", "1"), "No module named 'my_setups'"),
        (("my_setup:setupp", "--device-gb", "1"), "no function 'setupp'. Did you mean 'setup'?"),
        (("my_setup:wrong", "--device-gb", "1"), "returns (loss, *arguments)"),
        (("my_setup:nested", "--device-gb", "1"), "got 1 for loss(w, x): missing a required argument: 'x'"),
        (("my_setup:setup", "--device-gb", "1", "--device", "h20"), "Did you mean 'h200'?"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
