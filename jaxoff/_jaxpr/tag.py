"""The tag of a named or marked value, as it travels through JAX as a checkpoint name."""

from __future__ import annotations

from typing import Literal

Mark = Literal["offload", "not_offload"]


class Tag(str):
    """What `name` and the marks hand to `checkpoint_name`: a name that remembers the mark on its value.

    It compares equal to its text, so stock policies that select names by text see the same name.

    Attributes:
      label: the name that the user gave, or None for a mark on a value without a name.
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
        """The tag of a name that reached a policy, whoever made it."""
        return text if isinstance(text, Tag) else cls(text)

    def __reduce__(self):
        return Tag, (self.label, self.mark)
