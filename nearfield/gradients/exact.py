"""The gradients of softmax attention, exactly (paper, Lemma on attention gradients)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.problem import Rows

BLOCK_ELEMENTS = 1 << 22


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the three inputs of attention."""

    query: Tensor
    key: Tensor
    value: Tensor


def exact_gradients(rows: Rows, grad_output: Tensor) -> Gradients:
    """D^V = P^T D^O;  D^Q_i = sum_k P_ik (D^P_ik - <D^P_i, P_i>) K_k;  D^K_i = sum_k P_ki (D^P_ki - <D^P_k, P_k>) Q_k.

    D^P_ij = <D^O_i, V_j>. Taken over blocks of rows: time O(rows * length * dim), no row-by-key matrix is kept.
    """
    batch, count, _ = rows.queries.shape
    grad = Gradients(torch.empty_like(rows.queries), torch.zeros_like(rows.keys), torch.zeros_like(rows.values))
    step = max(1, BLOCK_ELEMENTS // max(1, batch * rows.length))
    for start in range(0, count, step):
        block = slice(start, start + step)
        part, upstream = rows.at(block), grad_output[:, block]
        hidden = torch.arange(rows.length, device=rows.keys.device) >= part.visible[..., None]
        weights = (part.queries @ rows.keys.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)
        weights = weights.masked_fill(part.visible[..., None] == 0, 0.0)
        grad_weights = upstream @ rows.values.transpose(1, 2)
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
        grad.query[:, block] = grad_logits @ rows.keys
        grad.key.add_(grad_logits.transpose(1, 2) @ part.queries)
        grad.value.add_(weights.transpose(1, 2) @ upstream)
    return grad
