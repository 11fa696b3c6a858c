"""Full softmaxes of rows, block by block, ready to be drawn from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.chunks import row_blocks
from nearfield.problem import Rows


def cumulative_weights(rows: Rows, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The weights of some rows, added up key by key, in blocks of bounded memory.

    `chosen` is `[flat]`, bool; the flat number of a row is batch entry * rows + row. A block has its rows of all batch entries.

    Yields:
        flat numbers `[r]`; sums e^(z_1 - top) + ... + e^(z_j - top) of the keys that a row sees, `[r, length]`, float64; and the
        logarithm of their normaliser, `[r]`. Memory: 12 bytes per row and key, 16 in float64.
    """
    batch, count = rows.visible.shape
    columns = chosen.view(batch, count).any(0).nonzero()[:, 0]
    for block in row_blocks((batch, len(columns)), 16 * max(1, rows.length)):
        here = columns[block]
        visible = rows.visible[:, here]
        logits = rows.queries[:, here] @ rows.keys.mT
        if bool((visible < rows.length).any()):
            logits.masked_fill_(torch.arange(rows.length, device=here.device) >= visible[..., None], -torch.inf)
        top = logits.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        # Sums in float64: those in float32 are measurably wrong from some 10^6 keys on.
        total = logits.sub_(top).exp_().cumsum(-1, dtype=torch.float64).flatten(0, 1)
        flat = (torch.arange(batch, device=here.device)[:, None] * count + here).flatten()
        yield flat, total, top.flatten().double() + total[:, -1].log()
