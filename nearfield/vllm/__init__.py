"""A backend for vLLM: attention to its pages through cells, with chunked prefill and prefix caching left on.

pages         where the cells of a block lie, behind its keys and values
blocks        a block that has become full is grouped into cells
attend        rows attend to the pages of their request, in PyTorch
kernels       both for cards, in Triton
steps         how pages and a step go into the kernels
settings      what a person may choose
backend       vLLM's interface
stock         vLLM's own kernel for CPUs, for rows that read all of their keys
cpu_platform  vLLM's platform for CPUs, which takes the backend

vLLM finds `register` and `platform` by the entry points of this package, in every process.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.32"
"""The minor version of vLLM that this was written for. Its interface for backends changes with every one."""
BACKEND = "nearfield.vllm.backend.CellsBackend"
PLATFORM = "nearfield.vllm.cpu_platform.CpuPlatformWithCells"
SWITCH = "NEARFIELD_VLLM_CPU"
"""vLLM's own platform for CPUs takes no other backend. With this variable set to 1, ours takes its place."""
NAMES = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """The version of vLLM that is installed."""
    for name in NAMES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raise unless the version of vLLM is the one that this was written for."""
    found = installed()
    if found is None or found.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise ImportError(
            f"nearfield.vllm needs vLLM {SUPPORTED}.*, and vLLM {found} is installed; pip install 'nearfield[vllm]', or choose "
            "another attention backend"
        )


def register() -> None:
    """Make `--attention-config '{"backend": "CUSTOM"}'` mean cells. Called in every process of vLLM, maybe several times.

    Nothing else changes, and no version is checked, before somebody asks for that backend.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError):
        return  # A version without this registry has no CUSTOM that somebody could ask for.
    register_backend(custom, BACKEND)


def platform() -> str | None:
    """The platform for CPUs that takes the backend, if `NEARFIELD_VLLM_CPU` is 1."""
    return PLATFORM if os.environ.get(SWITCH) == "1" else None
