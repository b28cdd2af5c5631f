"""Reports, compiled facts and plans as JSON-ready values, without the wording of messages.

`DOCUMENTS` maps a kind and a name to a function that makes the document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jaxoff
from bench.step_models import Workload
from tests.golden.compiled import COMPILED, Stored
from tests.golden.plans import PLANS
from tests.golden.steps import FORMS, LISTED, environment, policy_of, stacked_loss

DOCUMENTS: dict[str, dict[str, Callable[[], Any]]] = {**PLANS}


def document(kind: str, name: str) -> Any:
    with environment():
        return DOCUMENTS[kind][name]()


# What a refactoring may word anew, and where a source stands.
_WORDING = ("why", "what", "message", "source", "rule")


# Words of today's documents, and the words of the same things when the documents were stored.
_STORED_KEYS = {"iterations": "turns"}
_STORED_PLACEMENTS = {"save": "device", "offload": "host"}


def without_wording(value: Any) -> Any:
    """A document in the words of the stored documents, without prose or lines of a source."""
    if isinstance(value, dict):
        return {
            _STORED_KEYS.get(key, key): _STORED_PLACEMENTS.get(item, item)
            if key == "placement"
            else without_wording(item)
            for key, item in value.items()
            if key not in _WORDING
        }
    if isinstance(value, list | tuple):
        return [without_wording(item) for item in value]
    return value


def _add(kind: str, name: str, make: Callable[[], Any]) -> None:
    assert name not in DOCUMENTS.setdefault(kind, {}), name
    DOCUMENTS[kind][name] = make


# Reports of `explain`.


def _report(workload: str, how: str, policy: Any) -> Any:
    parsed = Workload.parse(workload)
    chosen = policy_of(parsed, policy) if isinstance(policy, str) else policy
    fun = stacked_loss(parsed, FORMS[how](chosen), marked=policy == "te_v1")
    shapes = parsed.shapes("unrolled" if how in LISTED else "scanned")
    return without_wording(jaxoff.explain(fun, *shapes).to_dict())


_MISSPELT = jaxoff.policy(offload=["x_inn", "attn"], save=["act"], min_bytes=1 << 40)

for _workload, _how, _policy in (
    ("dense-b4-l4", "scan", "some"),
    ("dense-b4-l4", "layers", "more"),
    ("dense-b4-l4", "loop", "te_v1"),
    ("dense-b4-l4", "first_scan", "some"),
    ("mlp-b4-l4", "blocks", "more"),
    ("mlp-b4-l4", "lax_scan", "offload_dots"),
    ("mlp-b4-l4", "scan", "te_v2"),
    ("mixtral-b4-l2", "scan", "megatron"),
    ("dense-b4-l4", "lax_scan", _MISSPELT),
):
    _label = _policy if isinstance(_policy, str) else "misspelt"
    _add("reports", f"{_workload}/{_how}/{_label}", functools.partial(_report, _workload, _how, _policy))


# Facts of `verify`.


def _facts(name: str) -> Any:
    text, arguments = COMPILED[name]
    return without_wording(jaxoff.verify(Stored(text), **arguments).to_dict())


for _name in COMPILED:
    _add("facts", _name, functools.partial(_facts, _name))
