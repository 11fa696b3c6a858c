"""Keys shared out over ranks, on torch.distributed."""

from __future__ import annotations

from nearfield.distributed.context import context_parallel, shard, unshard
from nearfield.distributed.group import RankError, Ranks
from nearfield.distributed.store import ShardedStore

__all__ = ["RankError", "Ranks", "ShardedStore", "context_parallel", "shard", "unshard"]
