"""vLLM's platform for CPUs, which takes the backend that is asked for."""

from __future__ import annotations

from typing import Any

from nearfield.kernels.cards import LEAST_CAPABILITY
from nearfield.vllm import SUPPORTED, check_version
from nearfield.vllm.pages import MOST_KEYS

check_version()

from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402


class CpuPlatformWithCells(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        cache = vllm_config.cache_config
        if vllm_config.attention_config.backend == AttentionBackendEnum.CUSTOM and not cache.user_specified_block_size:
            cache.block_size = MOST_KEYS

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        from nearfield.vllm.backend import CellsBackend

        # As vLLM asks on a GPU by itself. Here there is no card, so that it is new enough.
        reasons = CellsBackend.validate_configuration(device_capability=LEAST_CAPABILITY, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(
                f"nearfield's backend for vLLM {SUPPORTED} does not serve this model: {', '.join(reasons)}; choose another "
                f"backend. Asked for: {attn_selector_config}"
            )
        return str(AttentionBackendEnum.CUSTOM.get_path())
