"""Algorithm 1 as a function: keys drawn from every row's softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.checks import MOST, check_generator, check_index, check_not_negative, check_positive, general_mask_error
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, Index
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.tally import Tally
from nearfield.paper.sampler import Sampler
from nearfield.problem import Problem, check, isolate_non_finite
from nearfield.results import Samples
from nearfield.sampling import Seeds


@torch.no_grad()
def sample(
    query: Tensor,
    key: Tensor,
    draws: int,
    index: Index | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    k: int | None = None,
    certify: bool = True,
    slack: float | None = None,
    always_lazy: bool = False,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Samples:
    """Keys drawn from softmax(scale q.k) of every row, independently, by lazy Gumbel sampling (paper, Algorithm 1).

    Args:
        query: `[..., heads, Lq, dim]`.
        key: `[..., kv_heads, Lk, dim]`.
        draws: how many keys to draw for each row, with replacement.
        index: finds the near keys; None: `ExactIndex()`.
        attn_mask, is_causal, scale, enable_gqa, backend: as for `nearfield.attention`; masks must be key padding.
        k, certify, slack, always_lazy: as for `nearfield.LazyGumbel`, which draws by the same code.
        generator: the source of all randomness; None: torch's default generator. The same state gives the same keys.
        check_finite: raise ValueError on NaN or inf. Otherwise rows that see one get the key -1 and are not certified.

    Returns:
        `Samples`: the keys `ids` `[..., heads, Lq, draws]`, -1 for rows that see no key; and for each row how many far keys
        were `looked_at`, whether it was drawn from its full softmax (`dense`), and whether its law is exact for
        certain (`certified`). Nothing has a gradient.

    Cost: the search, plus O(draws * (log k + E[m])) per row and one score for every key looked at, with E[m] <= n/k far keys per
    draw, (n/k) e^slack with a slack. A row whose draws would cost more than its full softmax is drawn from that; where
    that is so for most rows, or an index is not built yet and too dear for so few, no index is built or asked.

    Example:
        >>> found = nearfield.sample(q, k, draws=5, is_causal=True)
        >>> found.ids.shape, bool(found.certified.all())
        (torch.Size([1, 2, 64, 5]), True)
    """
    check_positive("draws", draws, most=MOST)
    check_positive("k", k, optional=True)
    check_not_negative("slack", slack, optional=True)
    index = ExactIndex() if index is None else index
    check_index("index", index)
    check_generator(generator)
    value = key.new_zeros(*key.shape[:-1], 1) if isinstance(key, Tensor) and not key.is_nested else key
    problem = check(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if problem.has_general_mask:
        assert problem.attn_mask is not None
        raise general_mask_error("sample", problem.attn_mask, "Leave out the keys that a row must not see.")
    backends.check_backend(backend, query.device)
    problem = isolate_non_finite(problem, check_finite)
    if problem.is_empty:
        return _nothing(problem, draws)
    with full_precision(problem.query):
        sampler = Sampler.of(problem.rows.detach(), index, k, draws, certify, slack, always_lazy, backend)
        return _draw(problem, sampler, Seeds(generator, problem.query.device))


def _draw(problem: Problem, sampler: Sampler, seeds: Seeds) -> Samples:
    visible = sampler.rows.visible
    parts: list[Tensor] = []
    looked_at, dense, certified = torch.zeros_like(visible), visible > 0, visible >= 0
    searches = Tally(sampler.built)
    for block, lazy, drawn in sampler.blocks(seeds):
        seen = lazy.rows.visible > 0
        found = lazy.spread(drawn.ids)
        parts.append(found if bool(seen.all()) else found.masked_fill(seen.logical_not()[..., None], PADDING))
        looked_at[:, block] = lazy.spread(drawn.evaluated)
        dense[:, block] = lazy.dense.view(seen.shape) & seen
        certified[:, block] = lazy.certified.view(seen.shape)
        if lazy.scored is not None:
            searches.add(lazy.scored, lazy.rows.visible.flatten())
    searches.warn(sampler.built)
    ids = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if problem.key_padding is not None:
        # Keys that padding hides are gone from the rows; name the others as the caller does.
        named = problem.kept_keys.gather(1, ids.clamp(min=0).flatten(1)).view_as(ids)
        ids = torch.where(ids == PADDING, PADDING, named)
    ids, looked_at, dense, certified = (problem.by_head(x) for x in (ids, looked_at, dense, certified))
    if problem.poison is not None:
        spoiled = problem.poison.isnan()
        ids = ids.masked_fill(spoiled[..., None], PADDING)
        looked_at, dense, certified = (x.masked_fill(spoiled, 0) for x in (looked_at, dense, certified))
    return Samples(*(problem.like_inputs(x) for x in (ids, looked_at, dense, certified)))


def _nothing(problem: Problem, draws: int) -> Samples:
    """The result where no row sees a key."""
    none = torch.zeros(problem.query.shape[:3], dtype=torch.long, device=problem.query.device)
    ids = torch.full((*none.shape, draws), PADDING, device=none.device)
    return Samples(*(problem.like_inputs(x) for x in (ids, none, none.bool(), none == 0)))
