"""An extension of griffe for the pages of `mkdocs.yml`: examples of docstrings are code."""

import re

import griffe


class CodeExamples(griffe.Extension):
    """Renames the section "Example" to "Examples", whose `>>>` lines griffe renders as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
