"""`ShardedStore`: the keys and values of one layer on several ranks, which grow token by token, and attention to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nearfield.cells.cache.attention import scaled_queries
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.steps import ExactRows, check_new
from nearfield.cells.cache.store import CellStore, Near
from nearfield.cells.method import Cells
from nearfield.checks import check_positive
from nearfield.distributed.deal import Deal
from nearfield.distributed.decode import BALANCES, attend_together, exact_together
from nearfield.distributed.group import Agreement, Ranks, told
from nearfield.distributed.layout import ZigZag
from nearfield.distributed.share import Share

_MADE: WeakKeyDictionary[Ranks, int] = WeakKeyDictionary()
"""How many stores were made with these ranks that were not told which layer they are."""


class ShardedStore(CellStore):
    """A `CellStore` whose keys are shared out over ranks.

    Every rank makes the same calls with the same tensors, as the copies of a model do that all ranks run. Of what is appended, a
    rank keeps the keys of its own segments, and groups these into cells; the others only count them. Which segment is whose
    follows from lengths alone (`nearfield.distributed.deal`). A query attends on each rank to the keys that this one has, and the
    outputs are merged. They are the same on all ranks bit by bit, and those of one machine with the same segments, up to
    rounding: the cells that are opened are the best ones of all.

    Args:
        method: `Cells(...)`, as for `CellStore`.
        mesh: a `DeviceMesh` of one dimension, such as `mesh["cp"]`, or a process group. Stores that are used together, such as
            those of a model's layers, share one `Ranks(mesh)`.
        balance: "global": the best cells of all ranks are opened, as many as one machine would open; ranks compare their scores
            for that. "local": each rank opens as many, its own best ones, and asks nobody; a rank that has what a query looks for
            then opens too little of it, and the others what is of no use.
        check: whether ranks compare what they are called with in each step; see `Ranks.agree`. Those are 64 bytes, which go
            together with what a step exchanges first, if that is small and on the CPU. They are compared before anything is done
            with it, and otherwise before anything else is exchanged.
        audit: as in `CellStore`; so are the next three. A look at the error takes two more exchanges.
        offload: of each rank's own keys, in its own machine's memory.
        group_from: of keys on all ranks together.
        eps: the same on all ranks.
        layer: which layer of a model this is. Ranks compare it, so that one which has started a step again does not go on with
            others that are in another layer. None: stores that share one `Ranks` are counted as they are made.

    `length`, `closed`, `cells` and `probes` count the keys and cells of all ranks; `held` and `nbytes` are of this one. To look
    at `keys` and `values`, all ranks have to ask: they are gathered. Rows of a chunk of a prompt are served like those of steps.

    What is appended, marked, cropped and selected is the rank's own business. If one rank does so and another does not, or is
    interrupted in it, the next `attend` says which.

    In every process that torchrun starts, after `torch.distributed.init_process_group()`:

        store = ShardedStore(nearfield.Cells(), mesh)
        store.append(key, value)
        output = store.attend(query[:, :, -1:])
    """

    def __init__(
        self,
        method: Cells | None,
        mesh: Any,
        *,
        balance: str = "global",
        check: bool = True,
        audit: bool = False,
        offload: bool = False,
        group_from: int | None = None,
        eps: float | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(method, audit=audit, offload=offload, resident=0 if offload else None, group_from=group_from, eps=eps)
        if balance not in BALANCES:
            raise ValueError(f"balance must be one of {', '.join(BALANCES)}, got {balance!r}")
        check_positive("layer", layer, optional=True, least=0)
        self.ranks = Ranks.of(mesh, check)
        self.balance = balance
        if layer is None:
            layer = _MADE.get(self.ranks, 0)
            _MADE[self.ranks] = layer + 1
        self.layer = layer
        given = {"balance": balance, "group_from": group_from, "eps": eps, "layer": layer}
        self._settings: dict[str, Any] = {"method": repr(self.method), **given}
        """what has to be alike on all ranks from the start"""

    @property
    def share(self) -> Share | None:
        """What this rank has of the keys; None before the first one."""
        state: Any = self.state
        return state

    @property
    def held(self) -> int:
        """How many keys this rank has."""
        return 0 if self._state is None else self._state.keys.length

    @property
    def summary(self) -> str:
        return f"{super().summary}, on {self.ranks.size} ranks; {self.held} keys here"

    @property
    def keys(self) -> Tensor | None:
        """`[batch, heads, length, dim]` in the order in which they came: a copy, to look at. All ranks have to ask."""
        return self._gathered("keys")

    @property
    def values(self) -> Tensor | None:
        """Likewise."""
        return self._gathered("values")

    def _gathered(self, name: str) -> Tensor | None:
        share = self.share
        if share is None:
            return None
        deal = share.deal
        with self.ranks.together(name):
            self._start_agree(name).wait()
            own = share.own.in_order(getattr(share.own, name))
            most = max(map(deal.held, range(self.ranks.size)))
            parts = self.ranks.gather(name, torch.nn.functional.pad(own, (0, 0, 0, most - own.shape[2])))
        found = own.new_empty((*own.shape[:2], deal.length, own.shape[3]))
        for rank, part in enumerate(parts):
            positions = deal.positions(rank, slice(0, deal.length), own.device)
            found[:, :, positions] = part[:, :, : len(positions)]
        return found

    def append_shard(self, key: Tensor, value: Tensor, layout: ZigZag) -> None:
        """Add a prompt that the ranks have read in `layout`, of which each has its own tokens: keys and values
        `[batch, heads, own, dim]`. The store must be empty."""
        wrong: Exception | None = None
        try:
            self._check_shard(key, value, layout)
        except (TypeError, ValueError) as error:
            wrong = error
        with self.ranks.together("append_shard"):
            given = {"length": layout.length, "key": _like(key), "value": _like(value)}
            self.ranks.agree("append_shard", **given, error=told(wrong), **self._settings)
            if wrong is not None:
                raise wrong
            key, value = key.detach(), value.detach()
            sizes = self._sizes(key.is_cuda)
            if sizes.next_end(0, layout.length) == 0:  # so few that a rank may have all of them
                key, value = (layout.joined(self.ranks.gather("keys", _padded(x, layout.most)), 2) for x in (key, value))
                self.append(key, value)
                return
        self.sizes = sizes
        empty: Any = self._empty_state(key, value).but(guard=self._guard)
        self._state = empty.append_shard(key, value, layout)

    def _check_shard(self, key: Tensor, value: Tensor, layout: ZigZag) -> None:
        if self.length:
            raise ValueError(f"a prompt that is sharded already goes to an empty store, and this one has {self.length} keys")
        check_new(key, value, None)
        if layout.size != self.ranks.size or key.shape[2] != layout.on(self.ranks.rank):
            raise ValueError(
                f"each of {self.ranks.size} ranks must be given its keys of {layout}, got {key.shape[2]}; make shares with "
                "layout.own(x, 2, rank)"
            )

    def restore(self, share: Share) -> None:
        """Hold what `load_shares` has read, in the place of all there was."""
        state: Any = share.but(guard=self._guard)
        self.sizes = share.deal.sizes
        self._state = state

    def close(self, prepared: object = None, query: Tensor | None = None) -> None:
        """Close all segments that the next query sees through cells, each on its rank. `attend` does this by itself."""
        super().close(None, query)

    def wants_cells(self, keys: int) -> bool:
        """Never: the cells of a prompt's own attention are of segments that no rank has for itself."""
        return False

    def reserve(self, keys: int) -> None:
        raise ValueError("keys that are shared out over ranks have no room made in advance; append them")

    @torch.no_grad()
    def attend(self, query: Tensor, scale: float | None = None, near: Near | None = None) -> Tensor:
        """Attention of queries `[batch, heads, rows, dim]`, those of the latest `rows` keys, the same on all ranks. Each sees the
        keys of all ranks up to its own."""
        share: Any = self.share
        wrong: Exception | None = None
        try:
            self._check_rows(self._require_state(), query, scale)
            if self.watch is not None:
                raise ValueError("keys that are shared out over ranks are not watched: no rank sees what the others open")
        except (TypeError, ValueError) as error:
            wrong = error
        with self.ranks.together("attend"):
            numbers = []
            if wrong is None and query.shape[2] > 1:
                numbers = [int(share.values.view(slice(share.own.closed, share.own.length)).isfinite().all())]
            given = {"query": _described(query), "scale": scale, "audit": self.audit}
            # On a CPU, what ranks say goes together with what they exchange first, when each has looked at its own keys; on a
            # GPU, it arrives while this rank looks at them.
            held = share is None or share.sinks.device.type == "cpu"
            agreement = self._start_agree("attend", numbers, held, **given, error=told(wrong))
            if wrong is not None or numbers:
                found = agreement.wait()
                if wrong is not None:
                    raise wrong
                self._all_finite = all(row[0] for row in found)
            output = super().attend(query, scale)
            self.ranks.settle()
            return output

    def _start_agree(self, call: str, numbers: Sequence[int] = (), held: bool = False, **facts: Any) -> Agreement:
        share = self.share
        moving = {} if share is None else share.facts
        return self.ranks.start_agree(f"ShardedStore.{call}", numbers, moving, held, **facts, **self._settings)

    def _empty_state(self, key: Tensor, value: Tensor) -> CacheState:
        empty = super()._empty_state(key, value)
        share: Any = Share(empty, Deal(self.sizes, self.ranks.size), self.ranks.rank)
        return share

    def _next_end(self, state: Any, position: int) -> int:
        return state.closed if position < self._next_close(state) else state.deal.segments[state.closed_segments].stop

    def _next_close(self, state: Any) -> int:
        segments = state.deal.segments
        if state.closed_segments == len(segments):  # there are no others yet
            return self.sizes.next_close(state.closed)
        return segments[state.closed_segments].stop + self.sizes.window

    def _are_finite(self, state: CacheState, keys: slice) -> bool:
        """As all ranks have said of their own: they must all take as many rows at a time."""
        return self._all_finite

    def _is_chunk(self, state: CacheState, rows: int) -> bool:
        return False

    def _attend_rows(self, state: Any, query: Tensor, first: int, scale: float, factor: int | None = None) -> Tensor:
        probes = self._opening(state.closed, state.cells, factor).most
        queries = scaled_queries(query, state.heads, scale)
        return attend_together(self.ranks, state, queries, first, query.shape[2], probes, self.balance)

    def _exact_rows(self, state: Any, query: Tensor, output: Tensor, first: int, scale: float) -> ExactRows:
        with torch.autocast(query.device.type, enabled=False):
            return exact_together(self.ranks, state, scaled_queries(query, state.heads, scale), output, first)


def _like(x: Tensor) -> Any:
    """What has to be alike, of keys or values that the ranks have shares of."""
    described = _described(x)
    return [*described[:2], *described[3:]] if isinstance(described, list) else described


def _described(x: object) -> Any:
    return [*x.shape, str(x.dtype)] if isinstance(x, Tensor) else type(x).__name__


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[2]))
