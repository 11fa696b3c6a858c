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
        flat numbers `[r]`; the sums P_1 + ... + P_j of a row's softmax, `[r, length]`, float64; and the logarithm of its
        normaliser, `[r]`.
    """
    batch, count = rows.visible.shape
    columns = chosen.view(batch, count).any(0).nonzero()[:, 0]
    # A million weights at a time fit into the caches of a CPU; more of them take up to three times as long.
    for block in row_blocks((batch, len(columns)), 64 * max(1, rows.length), on_gpu=chosen.is_cuda):
        here = columns[block]
        visible = rows.visible[:, here].clamp(min=1)  # A row that sees nothing is never drawn from, but must not be NaN.
        logits = rows.queries[:, here] @ rows.keys.mT
        if bool((visible < rows.length).any()):
            logits.masked_fill_(torch.arange(rows.length, device=here.device) >= visible[..., None], -torch.inf)
        weights = logits.softmax(-1)
        # Sums in float64: those in float32 are measurably wrong from some 10^6 keys on.
        total = weights.cumsum(-1, dtype=torch.float64)
        # log Z = z_j - log P_j for any key j. The one where the sums pass 1/2 has a weight, and is found without looking at all.
        half = torch.searchsorted(total, total[..., -1:] / 2)
        log_total = (logits.gather(-1, half).double() - weights.gather(-1, half).double().log()).flatten()
        flat = (torch.arange(batch, device=here.device)[:, None] * count + here).flatten()
        del logits, weights, half  # memory that the next block, or the draws, can use again
        yield flat, total.flatten(0, 1), log_total
