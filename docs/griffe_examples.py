"""For the documentation site: `Example:` in a docstring is a section of doctests, which Griffe knows as `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Renames the heading before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub(r"\1Examples:", obj.docstring.value)
