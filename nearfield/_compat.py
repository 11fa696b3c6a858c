"""Every hook into private parts of torch, Triton and Transformers, each with the versions it was seen in.

Nothing else in the package uses a private name of another library. When one of them changes, this is the file to mend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch._compile
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

F = TypeVar("F", bound=Callable[..., Any])


def in_functorch_transform() -> bool:
    """Whether this runs inside a transform of torch.func (vmap, grad). Seen in torch 2.11 and 2.13.

    There is no public way to ask. Where the private one is gone, vmap itself raises when a value is looked at.
    """
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents (torch.autograd.forward_ad). Seen in torch 2.11 and 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


def meeting_store() -> Any:
    """The store by which the processes of a job found each other, to ask who is still there. Seen in torch 2.13."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_dtensor(x: Any) -> bool:
    """Whether this is a `DTensor`, without importing the module that has them. Seen in torch 2.13."""
    return type(x).__name__ == "DTensor" and type(x).__module__.startswith("torch.distributed.")


DispatchMode = TorchDispatchMode
"""The base of classes that see every operation of a thread. Seen in torch 2.11 and 2.13."""


def in_dispatch_mode() -> bool:
    """Whether such a class sees this. Seen in torch 2.11 and 2.13."""
    return bool(torch._C._len_torch_dispatch_stack())


def constant_for_compile(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without importing the compiler and Triton. Seen in torch 2.11 and 2.13."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def outside_of_compiled(function: F) -> F:
    """`torch.compiler.disable`, without importing the compiler where nothing is compiled. Seen in torch 2.11 and 2.13."""
    disabled = torch._compile._disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return disabled(*args, **options) if torch.compiler.is_compiling() else function(*args, **options)

    return cast(F, called)


def compiled_steps(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for calls of one shape, of a function that goes through many layers. Seen in torch 2.11 and 2.13.

    A layer knows its number, so what is in a layer is compiled once for each, for each batch size and for each model. The
    compiler would give up after eight, without a word.
    """
    import torch._dynamo

    compiled, config = torch.compile(function, dynamic=False), torch._dynamo.config

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        with config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16):
            return compiled(*args, **options)

    return called


def version_of(x: Tensor) -> int | None:
    """How often a tensor was changed in place; None for inference tensors, which have no version. Seen in torch 2.11 and 2.13."""
    return None if x.is_inference() else x._version


# Torch's CPU flash attention returns the log-normaliser, and its backward pass takes a global one. Seen in torch 2.11 and 2.13.
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# That of GPUs does, too; a causal mask ends at the last key of the last row. Seen in torch 2.11 and 2.13.
gpu_flash = torch.ops.aten._scaled_dot_product_flash_attention
_gpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def gpu_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of `gpu_flash`, from the output and lse of all that a row attends to. Seen in torch 2.13."""
    # Only dropout reads the state of random numbers. The lse is read as if it were contiguous.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return _gpu_flash_backward(
        grad,
        query,
        key,
        value,
        output,
        lse.contiguous(),
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=query.shape[2],
        max_k=key.shape[2],
        dropout_p=0.0,
        is_causal=is_causal,
        philox_seed=state,
        philox_offset=state,
        scale=scale,
    )


@functools.cache
def has_gpu_flash(device: torch.device) -> bool:
    """Whether `gpu_flash` serves this card: NVIDIA's from Ampere on. Others may align a causal mask in another way. Seen in torch
    2.11 and 2.13."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def has_gpu_flash_backward(device: torch.device, dim: int) -> bool:
    """Whether `gpu_flash_backward` serves heads of so many columns on this card, where `gpu_flash` does: there are cards that
    have no room for 193 to 224. Seen in torch 2.13."""
    capability = torch.cuda.get_device_capability(device)
    return not 192 < dim <= 224 or not ((8, 6) <= capability < (9, 0) or capability >= (12, 0))


def _float32_products(a: Tensor, b: Tensor) -> Tensor:
    """Products of half precision as they are summed up, in float32. Seen in torch 2.11 and 2.13."""
    return torch.bmm(a, b, out_dtype=torch.float32)


# Older versions of torch do not have them.
float32_products = _float32_products if "dtype" in torch.ops.aten.bmm.overloads() else None


sdpa = torch._C._nn.scaled_dot_product_attention
"""Torch's own attention, whoever may have put something else (`nearfield.attention`, say) in the place of
`F.scaled_dot_product_attention`. Seen in torch 2.11 and 2.13."""


def wrapper_tensor(cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass with a shape and no numbers. Seen in torch 2.11 and 2.13."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which calls on tensor subclasses reach torch itself. Seen in torch 2.11 and 2.13."""
    return torch._C.DisableTorchFunctionSubclass()


def raw_stream(device: int) -> int:
    """The current CUDA stream as Triton wants it. Seen in torch 2.11 and 2.13."""
    return torch._C._cuda_getCurrentRawStream(device)


def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(x) for x in triton.__version__.split(".")[:2])


def is_compiled_by_triton(function: Any) -> bool:
    """False in Triton's interpreter. Seen in Triton 3.6 and 3.9."""
    from triton.runtime.jit import JITFunction

    return isinstance(function, JITFunction)


def launcher(function: Any, compiled: Any, grid: tuple[int, ...]) -> Callable[..., None] | None:
    """A function of a stream, addresses of tensors and the other arguments that starts a compiled kernel; None where Triton has
    none.

    Seen in Triton 3.6 and 3.9; older versions take other arguments. What Triton's own function does before it calls into C takes
    three times as long as the call, and looking up the address of a tensor there longer than here. So the call is made
    directly where it is known; hooks on launches (`triton.knobs.runtime`) see only the first one of each kind then.
    """
    version = triton_version()
    if compiled is None or version < (3, 4) or not is_compiled_by_triton(function):
        return None
    sizes = (*grid, 1, 1)[:3]
    run = compiled.run
    if version == (3, 6) and not run.global_scratch_size and not run.profile_scratch_size:
        start, flags = (
            run.launch,
            (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None),
        )
        kernel = compiled.function
        return lambda stream, addresses, others: start(*sizes, stream, kernel, *flags, *addresses, *others)
    runner = compiled[sizes]
    return lambda stream, addresses, others: runner(*addresses, *others, stream=stream)


def is_kernel_failure(error: Exception) -> bool:
    """Whether Triton raised this because a kernel does not compile with its block sizes, or does not fit on the card.

    Seen in Triton 3.6 and 3.9. What its passes cannot do is a RuntimeError that names the pass manager.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    failed_pass = type(error) is RuntimeError and "PassManager" in str(error)
    return failed_pass or isinstance(error, OutOfResources | PTXASError | CompilationError)


def has_dependent_launch() -> bool:
    """Whether Triton knows programmatic dependent launch. Seen in Triton 3.6 and 3.9.

    Older versions look up every name in a kernel, even in a branch that is not compiled, and fail where one is missing.
    """
    from triton.language.extra import cuda

    return triton_version() >= (3, 6) and hasattr(cuda, "gdc_wait")


def masking_utils() -> Any:
    """The module that makes masks in Transformers. Seen in Transformers 5.17 and 5.22."""
    from transformers import masking_utils

    return masking_utils


def attention_name(model: Any) -> str:
    """What `model.set_attn_implementation` has set. Seen in Transformers 5.17 and 5.22."""
    return model.config.get_text_config()._attn_implementation


def mask_function_parts(function: Callable[..., Any]) -> tuple[str, Any] | None:
    """The kind of a mask function that Transformers has made, and what it was made of; None for functions it does not know.

    Kinds are "and" (functions), "window" (its width), "both sides" (the reach), "chunks" (their size) and "packed" (which
    sequence each position belongs to). They are recognised by the names of functions and of the variables these close over.
    Seen in Transformers 5.17 and 5.22.
    """
    if getattr(function, "__module__", None) != masking_utils().__name__:
        return None
    cells = getattr(function, "__closure__", None) or ()
    inside = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    match function.__qualname__.partition(".")[0], inside:
        case "and_masks", {"mask_functions": functions}:
            return "and", functions
        case "sliding_window_overlay", {"sliding_window": int(window)}:
            return "window", window
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(reach)}:
            return "both sides", reach
        case "chunked_overlay", {"chunk_size": int(size)}:
            return "chunks", size
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as sequence_of}:
            return "packed", sequence_of
    return None


class _NoPackedWeight:
    """Keeps torch's encoder off its fused path; None would fail at `requires_grad`. Seen in torch 2.11 and 2.13."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError("Attention has no in_proj_weight: its weights are q_proj.weight, k_proj.weight and v_proj.weight")


class NoFusedEncoder:
    """A base class of modules that replace `nn.MultiheadAttention` in torch's encoder. Seen in torch 2.11 and 2.13.

    The encoder reads these attributes of its `self_attn` to decide whether it may bypass the module with a fused kernel, or
    hand it nested tensors. With these values it does neither.
    """

    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = _NoPackedWeight()
    batch_first = True
