"""The `nearfield` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def wide_console(width: int) -> Console:
    """A console for tables: as wide as the terminal. A file has no width, and rich's 80 columns would cut the tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)
