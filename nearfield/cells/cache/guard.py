"""`Guard`: a store looks at the error of a step now and then, and opens more cells where it is too large."""

from __future__ import annotations

import logging
from typing import NamedTuple

_log = logging.getLogger("nearfield")

EVERY = 32
"""Steps from one look to the next."""
MUCH = 0.25
"""Where a step reads this share of all keys, somebody should know."""


class Guard(NamedTuple):
    """What a store has found out about its error, and what it does about it."""

    eps: float
    """the error that a step may have, pooled over heads: in units of the rms norm of the exact output"""
    every: int = EVERY
    factor: int = 1
    """so many times the usual number of cells is opened"""
    next_look: int = 0
    """the number of keys from which on the next step is looked at"""
    error: float | None = None
    """that of the last step that was looked at, as it was served; None: none was yet"""
    looks: int = 0
    """how many steps were looked at"""

    def is_due(self, keys: int) -> bool:
        """Whether a step is looked at that finds so many keys, its own among them."""
        return keys >= self.next_look

    def looked(self, keys: int, error: float, factor: int, share: float) -> Guard:
        """After a look: this error was served, with this factor, and this share of all keys was read for it."""
        if share > MUCH and factor > self.factor:
            _log.warning(
                "a layer of a cell cache reads %.0f%% of its %d keys because of eps=%g, and is off by %.2g; where that is most "
                "layers, exact attention is as fast, and a larger eps is faster",
                100 * share,
                keys,
                self.eps,
                error,
            )
        return self._replace(factor=factor, next_look=keys + self.every, error=error, looks=self.looks + 1)
