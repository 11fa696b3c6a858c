"""Where bench_peers_gpu.py finds other attention methods: among the installed packages or in a folder of repositories.

Some of them import at their top what attention itself does not need, or an extension that has to be compiled. Here only the files
that are needed are imported, and the rest is replaced: by torch's own kernels where something is called, by nothing elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def look_in(folder: Path) -> None:
    """Make the packages in `folder` and in each of its subfolders importable, after those that are installed."""
    if not folder.is_dir():
        raise NotADirectoryError(f"--peers must be a folder, got {folder}")
    for path in (folder, *sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))):
        if str(path.absolute()) not in sys.path:
            sys.path.append(str(path.absolute()))


def bare_package(name: str, *subpackages: str) -> None:
    """Make a package and some of its subpackages importable without running their `__init__.py`.

    Raises ImportError where the package is not found. What has been imported already is left alone.
    """
    if name in sys.modules:
        return
    found = importlib.machinery.PathFinder.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"there is no package {name}")
    folders = [Path(folder) for folder in found.submodule_search_locations]
    for module in (name, *(f"{name}.{sub}" for sub in subpackages)):
        below = Path(*module.split(".")[1:]) if "." in module else Path()
        bare = ModuleType(module)
        bare.__path__ = [str(folder / below) for folder in folders]
        bare.__dict__["__version__"] = "0"  # some ask for it
        sys.modules[module] = bare


def stand_in(name: str, **contents: Any) -> None:
    """A module of this name with these contents, where no such module can be imported."""
    if name in sys.modules:
        return
    parents = name.split(".")[:-1]
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except ImportError:  # its parent does not exist
        pass
    for depth in range(1, len(parents) + 1):
        if ".".join(parents[:depth]) not in sys.modules:
            stand_in(".".join(parents[:depth]))
    module = ModuleType(name)
    module.__dict__.update(contents)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module


def in_present_triton(name: str) -> None:
    """Import a module whose kernels transpose inside of `tl.dot`, as Triton 2.0 allowed: from a copy that does so before."""
    if name in sys.modules:
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ImportError(f"there is no module {name}")
    text = Path(found.origin).read_text(encoding="utf-8")
    text = re.sub(r"tl\.dot\((.+), (\w+), trans_b=True\)", r"tl.dot(\1, tl.trans(\2))", text)
    text = re.sub(r"tl\.dot\((.+), (\w+), trans_a=True\)", r"tl.dot(tl.trans(\1), \2)", text)
    # A file and not a string: Triton reads the source of its kernels again.
    copy = Path(tempfile.mkdtemp()) / Path(found.origin).name
    copy.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def errors_of(loaders: Iterable[tuple[str, Callable[[], Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """What could be loaded, and of the rest why not."""
    loaded, missing = {}, {}
    for name, load in loaders:
        try:
            loaded[name] = load()
        except Exception as error:  # a peer may fail in any way of its own while it is imported
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return loaded, missing


def torch_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    dropout_p: float = 0.0,
    **ignored: Any,
) -> tuple[Tensor, Tensor, None, None]:
    """flash-attn's function of this name by torch's own kernel: output `[rows, heads, dim]`, logsumexp `[heads, rows]`."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k, dropout_p, causal, False, scale=softmax_scale
    )
    return found[0], found[1], None, None


def torch_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    dropout_p: float = 0.0,
    **ignored: Any,
) -> None:
    """flash-attn's function of this name by torch's own kernel; writes dq, dk and dv."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the random numbers for dropout, of which there is none
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q.int(),
        cu_seqlens_k.int(),
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        state,
        unused,
        scale=softmax_scale,
    )
    for written, gradient in zip((dq, dk, dv), found, strict=True):
        written.copy_(gradient)
