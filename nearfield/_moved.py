"""Import paths of version 0.1: most work until version 0.3, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "budgets": "paper.budgets",
    "cache": "cells.cache",
    "cache.graph": "cells.cache.graph",
    "cache.store": "cells.cache.store",
    "calibrate": "app.calibrate",
    "cli": "app.cli",
    "demo": "app.demo",
    "environment": "app.environment",
    "evaluate": "app.evaluate",
    "evaluate.models": "app.evaluate.models",
    "gradients": "paper.gradients",
    "gradients.walks": "paper.walks",
    "gradients.printed": "paper.walks",
    "index.base": "knn.index.base",
    "index.candidates": "knn.index.candidates",
    "index.exact": "knn.index.exact",
    "index.faiss": "knn.index.faiss",
    "index.kmeans": "knn.index.kmeans",
    "index.lsh": "knn.index.lsh",
    "index.mips": "knn.index.lift",
    "index.prefixes": "knn.index.prefixes",
    "lazy_gumbel": "paper.lazy",
    "methods": "problem",
    "methods.auto": "auto",
    "methods.base": "problem",
    "methods.cells": "cells.method",
    "methods.exact": "exact",
    "methods.gumbel": "paper.gumbel",
    "methods.topk": "knn.topk",
    "partition": "cells.partition",
    "partition.base": "cells.partition",
    "partition.blocks": "cells.partition.equal",
    "partition.hashing": "cells.partition.equal",
    "partition.kmeans": "cells.partition.kmeans",
    "remember": "app.remember",
}
"""Old and new names of modules, below `nearfield`."""

SHORT = {"index": "knn.index"}
"""Short names that stay: `nearfield.index` can be imported too."""


class _Redirect(MetaPathFinder, Loader):
    """Finds a module under its old name: an empty module that takes every attribute from the new one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        known = old in MOVED or old in SHORT
        return ModuleSpec(name, self, is_package=True) if package == "nearfield" and known else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        new = f"nearfield.{SHORT.get(name) or MOVED[name]}"
        if name in MOVED:
            told = f"{module.__name__} is now {new}; the old name is removed in version 0.3"
            warnings.warn(told, DeprecationWarning, stacklevel=2)
        home = importlib.import_module(new)
        module.__doc__ = home.__doc__
        module.__dict__.update(__getattr__=lambda name: getattr(home, name), __dir__=lambda: dir(home))


def attribute(name: str) -> ModuleType:
    """`nearfield.partition` and other modules that `import nearfield` alone used to make available."""
    if name in MOVED:
        return importlib.import_module(f"nearfield.{name}")
    raise AttributeError(f"module 'nearfield' has no attribute {name!r}")


def redirect() -> None:
    """Have Python look here for modules of nearfield that it does not find."""
    if not any(type(finder).__name__ == _Redirect.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Redirect())
