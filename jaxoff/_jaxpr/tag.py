"""The tag of a named or marked value: a checkpoint name with the mark attached."""

from __future__ import annotations

from typing import Literal

Mark = Literal["offload", "not_offload"]


class Tag(str):
    """The argument of `checkpoint_name` for `name` and the marks: a name with the mark of its value.

    A tag equals its text, so JAX's own policies, which compare names by text, see the same name.

    Attributes:
      label: the user's name, or None for a mark on a value without a name.
      mark: "offload", "not_offload", or None.
    """

    label: str | None
    mark: Mark | None

    def __new__(cls, label: str | None, mark: Mark | None = None):
        tag = super().__new__(cls, label if label is not None else f"mark_{mark}")
        tag.label, tag.mark = label, mark
        return tag

    @classmethod
    def of(cls, text: str) -> Tag:
        """The tag of a name in a program, also of a name from `checkpoint_name` itself."""
        return text if isinstance(text, Tag) else cls(text)

    def __reduce__(self):
        return Tag, (self.label, self.mark)
