"""Plans, reports and compiled facts as JSON-ready values, without the wording of messages.

`DOCUMENTS` maps a kind and a name to a function that makes the document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.golden.programs import environment

DOCUMENTS: dict[str, dict[str, Callable[[], Any]]] = {}


def document(kind: str, name: str) -> Any:
    with environment():
        return DOCUMENTS[kind][name]()
