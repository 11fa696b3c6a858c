"""Which keys a row sees by its place: causal masks, and windows as FlashAttention has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Row i sees the keys from i + first to i + last; None: no bound on that side."""

    first: int | None
    last: int | None

    def keys_of(self, rows: slice, length: int) -> slice:
        """The range of keys, among so many, that some of these rows see; at least one key, as rows that see none need a hidden
        one."""
        start = 0 if self.first is None else max(0, min(rows.start + self.first, length - 1))
        stop = length if self.last is None else max(start + 1, min(rows.stop + self.last, length))
        return slice(start, stop)

    def mask(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """`[rows, keys]`: True where a row sees a key."""
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        return self.sees(row, torch.arange(keys.start, keys.stop, device=device))

    def sees(self, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys, both given by their places and broadcast together."""
        if self.first is None:
            assert self.last is not None
            return key <= row + self.last
        after = key >= row + self.first
        return after if self.last is None else after & (key <= row + self.last)

    def ends(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the keys that each row sees begin, and where they end: `[rows]` each, equal for rows that see none."""
        row = torch.arange(rows, device=device)
        start = torch.zeros_like(row) if self.first is None else (row + self.first).clamp(0, length)
        stop = torch.full_like(row, length) if self.last is None else (row + self.last + 1).clamp(0, length)
        return start, torch.maximum(start, stop)


Window = tuple[int, int]
"""How many keys before and after its own place a row sees; -1: all of them."""


def check_window(window_size: object) -> Window | None:
    """The argument `window_size` of a call; None where it bounds nothing."""
    if window_size is None:
        return None
    pair = tuple(window_size) if isinstance(window_size, tuple | list) else ()
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < -1 for x in pair):
        raise ValueError(
            "window_size must be two integers (left, right), the numbers of keys that a row sees before and after its own place, "
            f"-1 for no bound, or None; got {window_size!r}"
        )
    return None if pair == (-1, -1) else (pair[0], pair[1])


LARGE = 1 << 31
"""No call has as many rows and keys. Sums of larger offsets may not fit into 64 bits."""


def _nearer(window: Window | None, offset: int, most: int) -> tuple[Window | None, int]:
    """A window and an offset that mean the same, the offset and both bounds no further than `most` from the first key."""

    def clamp(x: int) -> int:
        return max(-most, min(x, most))

    near = clamp(offset)
    if window is None:
        return None, near
    left, right = window
    left = near - clamp(offset - left) if left >= 0 else left
    return (left, clamp(offset + right) - near if right >= 0 else right), near


def resolve(window: Window | None, is_causal: bool, offset: int, queries: int, keys: int) -> tuple[Window | None, bool, int]:
    """A window, `is_causal` and `offset` as what they mean together: a window that bounds the left side, or none.

    Row i stands at key i + offset. With a causal mask it sees nothing after that. A bound that hides nothing in a call of this
    size is none. A window that bounds the right side alone is a causal mask with another offset.
    """
    if not (is_causal or window):
        return None, is_causal, 0
    if type(offset) is int and abs(offset) >= LARGE:
        window, offset = _nearer(window, offset, queries + keys)
    if window is None:
        return None, is_causal, offset
    left, right = window
    if is_causal:
        right = 0
    if left >= queries - 1 + offset:
        left = -1
    if right >= 0 and right >= keys - 1 - offset:
        right = -1
    if left >= 0:
        return (left, right), False, offset
    return (None, True, offset + right) if right >= 0 else (None, False, 0)
