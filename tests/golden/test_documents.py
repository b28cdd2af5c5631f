"""Reports, compiled facts and plans stay as stored, but for the wording of their messages."""

import json

import pytest

from tests.golden import store
from tests.golden.documents import DOCUMENTS, document, without_wording
from tests.golden.test_programs import pytestmark  # noqa: F401

# Seconds each, at a budget between those of two other plans of the program.
LONG = {"nano-b4-l4/48.3GB", "nano-b4-l4/50GB", "mixtral-b4-l4/40GB", "decoder-python/54GB"}
NAMES = [
    pytest.param(kind, name, marks=[pytest.mark.long] * (name in LONG))
    for kind, makers in DOCUMENTS.items()
    for name in makers
]


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=lambda text: text.replace(" ", "-"))
def test_the_document_is_the_stored_one(kind, name):
    stored = store.documents(kind)
    if not stored:
        pytest.skip(store.missing(name, stored))
    assert store.missing(name, stored) is None
    if changed := store.document_difference(kind, name, document(kind, name)):
        pytest.fail(changed, pytrace=False)


def test_stored_documents_are_those_that_are_made():
    for kind, makers in DOCUMENTS.items():
        if not store.documents(kind):
            pytest.skip(store.missing("", store.documents(kind)))
        assert store.documents(kind).keys() == makers.keys()


def test_compiled_programs_have_findings_of_several_kinds():
    if not store.documents("facts"):
        pytest.skip(store.missing("", store.documents("facts")))
    codes = {f["code"] for facts in store.documents("facts").values() for f in facts["findings"]}
    assert codes >= {"offload-vanished", "device-memory-not-lower", "copy-not-overlapped", "graph-cut"}
    assert codes >= {"kernel-touches-host", "value-copied-twice", "computed-again"}


def test_a_difference_names_the_field(monkeypatch):
    old = {"a": [{"ms": 1.0, "n": 3, "name": "x"}], "b": True}
    monkeypatch.setattr(store, "documents", lambda kind: {"p": old})
    near = json.loads(json.dumps(old))
    near["a"][0]["ms"] += 1e-12
    assert store.document_difference("reports", "p", near) is None
    far = {"a": [{"ms": 1.1, "n": 4, "name": "x"}]}
    found = store.document_difference("reports", "p", far)
    assert "p.a[0].ms: 1.0 -> 1.1" in found and "p.a[0].n: 3 -> 4" in found
    assert 'p.b: true -> "(absent)"' in found and "name" not in found


def test_wording_is_left_out():
    assert without_wording({"why": "since", "n": [{"message": "m", "code": "c"}]}) == {"n": [{"code": "c"}]}
