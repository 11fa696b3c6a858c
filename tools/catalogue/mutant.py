"""One way to break the package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    """below `nearfield/`"""
    old: str
    """must occur exactly once"""
    new: str
    tests: tuple[str, ...]
    """what should notice: arguments of pytest, below `tests/`"""

    def apply(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1:
            raise SystemExit(
                f"mutant {self.name!r}: the text to replace occurs {count} times in nearfield/{self.file}:\n{self.old}"
            )
        return source.replace(self.old, self.new)
