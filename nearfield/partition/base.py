"""What every partition promises."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor


class Partition(Protocol):
    """A way to group keys into cells: a frozen dataclass whose fields are integers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, keys: Tensor, cells: int) -> Tensor:
        """The cell of each key, a number below `cells`: `[batch, length, dim]` -> `[batch, length]`, int64.

        Each entry of the batch is grouped by itself, and the same keys always get the same cells. Some cells may stay empty.
        """
        ...
