"""The line of an equation in a user's code, where libraries of layers make the equation."""

import jax
import jax.numpy as jnp
import pytest

from jaxoff._jaxpr import compat


def run(path, source, **names):
    """The names that a file with a source defines."""
    exec(compile(source, path, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("file", "is_model"),
    [
        ("flax/linen/linear.py", False),
        ("haiku/_src/conv.py", False),
        ("haiku/_src/nets/resnet.py", True),
        ("penzai/core/named_axes.py", False),
        ("penzai/models/transformer/llama.py", True),
        ("qwix/_src/interception.py", False),
        ("transformers/models/gpt2/modeling_flax_gpt2.py", True),
    ],
)
def test_the_line_is_the_models_and_not_the_layers(file, is_model):
    path = f"/env/lib/python3.12/site-packages/{file}"
    library = run(path, "def apply(x):\n    return jnp.sin(x)\n", jnp=jnp)
    model = run("/src/model.py", "\n\ndef model(x):\n    return apply(x) * 2\n", apply=library["apply"])
    sine, double = jax.make_jaxpr(model["model"])(1.0).eqns
    assert compat.source_line(sine) == (f"{path}:2 (apply)" if is_model else "/src/model.py:4 (model)")
    assert compat.source_line(double) == "/src/model.py:4 (model)"
