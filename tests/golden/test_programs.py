"""No program changes: the lowered text of each is the stored one."""

import jax
import pytest

from tests.golden import store
from tests.golden.programs import PROGRAMS, lowered
from tests.golden.text import difference, digest, stable_text

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.device_count() < 8, reason="goldens are of 8 CPU devices"
)

# Seconds each, in a form or of a model that another program has as well.
LONG = {
    "gpu-any/mixtral-b4-l2/first_layers/megatron",
    "gpu-any/mixtral-b4-l2/lax_scan/some",
    "gpu-any/nano-b4-l2/layers/some",
    "cpu/nano-b2-l2/loop/some",
}


# Under "te_v1" and "megatron" some programs offload less than asked: no backward pass reads a marked value.
@pytest.mark.filterwarnings("ignore:(nothing-offloaded|offload-not-done):UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in PROGRAMS]
)
def test_the_program_is_the_stored_one(name):
    if not store.index():
        pytest.skip(store.missing(name, store.index()))
    assert store.missing(name, store.index()) is None
    if changed := store.program_difference(name, stable_text(lowered(name))):
        pytest.fail(changed, pytrace=False)


def test_stored_texts_are_those_of_the_index():
    if not store.index():
        pytest.skip(store.missing("", store.index()))
    found = {name: digest(text) for name, text in store.texts().items()}
    assert found == {name: row["sha256"] for name, row in store.index().items()}
    assert found.keys() == PROGRAMS.keys()


def test_no_text_names_a_file():
    if not store.index():
        pytest.skip(store.missing("", store.index()))
    assert [name for name, text in store.texts().items() if ".py" in text or "loc(" in text] == []


def test_a_difference_names_operations_and_shows_lines():
    old = "a\n  %1 = stablehlo.add %0, %0 : tensor<2xf32>\n  %2 = stablehlo.sine %1 : tensor<2xf32>\nz"
    new = old.replace("sine", "cosine").replace("%2", "%7")
    found = difference(old, new)
    assert "stablehlo.cosine +1, stablehlo.sine -1" in found
    assert "+  % = stablehlo.cosine % : tensor<2xf32>" in found
    assert "stablehlo.add" in found and "+  % = stablehlo.add" not in found
    assert "+  %7 = stablehlo.sine" in difference(old, old.replace("%2", "%7"))


def test_a_long_difference_is_cut():
    old, new = ("\n".join(f"{word} {i}" for i in range(5000)) for word in ("old", "new"))
    assert "more lines of the diff" in difference(old, new) and difference(old, new).count("\n") < 70
