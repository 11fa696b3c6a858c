"""Results over disjoint sets of keys, merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them: output and log-normaliser.

    With O_i and Z_i = e^{lse_i} the output and the normaliser over part i,

        O = sum_i Z_i O_i / sum_i Z_i,        lse = log sum_i Z_i.

    This is exact where the parts are, and differentiable in outputs and lses. Where they are estimates by `Cells` or `TopK`, it
    is the estimate with the sums of all parts. Time and memory are O(parts * rows * value_dim).

    Args:
        outputs: `[..., length, value_dim]`, one for each part, all of one shape and dtype.
        lses: `[..., length]`, as `attention(..., return_lse=True)` returns them; -inf for rows that see no key of a part, whose
            output then does not count, whatever it holds. +inf is no normaliser: such a row becomes NaN. FlashAttention writes
            +inf for rows that see no key; pass `lse.masked_fill(lse == torch.inf, -torch.inf)`.

    Returns:
        The merged output, in the dtype of the outputs, and the merged lse. Rows that see no key of any part are zero, and their
        lse is -inf. So merged results can be merged again.

    Example:
        >>> first = nearfield.attention(q, k[:, :, :32], v[:, :, :32], return_lse=True)
        >>> second = nearfield.attention(q, k[:, :, 32:], v[:, :, 32:], return_lse=True)
        >>> output, lse = nearfield.merge(*zip(first, second))
        >>> torch.allclose(output, F.scaled_dot_product_attention(q, k, v), atol=1e-6)
        True
    """
    _check(outputs, lses)
    parts = torch.stack(tuple(lses))
    # Rows that see nothing at all: a difference of infinities would make them, and their gradients, NaN.
    unseen = parts == -torch.inf
    blind = unseen.all(0)
    parts = parts.masked_fill(blind, 0.0)
    share = parts.softmax(0).masked_fill(blind, 0.0)
    output = (share[..., None] * torch.stack(tuple(outputs)).masked_fill(unseen[..., None], 0.0)).sum(0)
    return output.to(outputs[0].dtype), parts.logsumexp(0).masked_fill(blind, -torch.inf)


def _check(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, given in (("outputs", outputs), ("lses", lses)):
        if not isinstance(given, list | tuple):
            raise TypeError(f"{name} must be a list of tensors, one for each part of the keys, got {type(given).__name__}")
        for number, x in enumerate(given):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name}[{number}] must be a tensor of floating point numbers, got {got}")
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge needs one lse for each output, and at least one of them; got {len(outputs)} and {len(lses)}")
    shape, dtype = outputs[0].shape, outputs[0].dtype
    for number, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or output.dtype != dtype:
            raise ValueError(
                f"all outputs must have one shape and dtype: outputs[0] is {dtype} of shape {tuple(shape)}, "
                f"outputs[{number}] {output.dtype} of shape {tuple(output.shape)}"
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"lses[{number}] must have the shape of its output without the last dimension, {tuple(shape[:-1])}, "
                f"got {tuple(lse.shape)}"
            )
