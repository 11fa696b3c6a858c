"""What a person may choose, with `--additional-config '{"nearfield": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from nearfield.checks import check_positive
from nearfield.vllm.attend import Reach

PREFILLS = ("exact", "cells")
EXACT_BELOW_ON_GPU, NEVER = 8192, 1 << 40
"""As `exact_below`."""
KEY = "nearfield"
ALIKE = 0.85
"""Of names, from 0 to 1: one that is as near to ours as this is ours misspelt, and no other plug-in's."""


@dataclass(frozen=True)
class Settings:
    """
    Args:
        probes: cells that a row opens; None: those of 9 sqrt(n) keys, as many as a `CellCache` opens on a GPU.
        window: how many of the latest keys are read one by one at least.
        exact_below: rows that see fewer keys read all of them; None: fewer than 8,192 on a GPU, and on a CPU all rows do, where
            vLLM's own kernel is faster than cells at all lengths that were measured.
        prefill: how the rows of a prompt attend: "exact", or by "cells" as those of an answer do.
    """

    probes: int | None = None
    window: int = 64
    exact_below: int | None = None
    prefill: str = "exact"

    def __post_init__(self) -> None:
        check_positive("probes", self.probes, optional=True)
        check_positive("window", self.window)
        check_positive("exact_below", self.exact_below, least=0, optional=True)
        if self.prefill not in PREFILLS:
            raise ValueError(f"prefill must be one of {PREFILLS}, got {self.prefill!r}")

    def reach(self, on_card: bool) -> Reach:
        """What rows read key by key."""
        usual = EXACT_BELOW_ON_GPU if on_card else NEVER
        return Reach(self.window, usual if self.exact_below is None else self.exact_below, self.probes)

    @staticmethod
    def of(additional_config: Any) -> Settings:
        """From vLLM's `additional_config`, which other plug-ins may use too."""
        whole = additional_config if isinstance(additional_config, Mapping) else {}
        others = [name for name in whole if isinstance(name, str) and name != KEY]
        meant = get_close_matches(KEY, others, n=1, cutoff=ALIKE)
        if meant:
            raise ValueError(f'additional_config has "{meant[0]}", which nobody reads; write "{KEY}"')
        given = whole.get(KEY, {})
        known = [field.name for field in fields(Settings)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ValueError(f'additional_config["{KEY}"] must have some of {known}, got {given!r}')
        return Settings(**given)
