"""`generate`: Transformers' own, with a `CellCache`: a batch, or prompts of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.steps import check_numbers
from nearfield.checks import MOST, check_positive
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.model_step import last_logits, stepping
from nearfield.hf.register import is_registered


class Steps(NamedTuple):
    """How steps are served; see `generate`."""

    graph: bool | None
    compile: bool


Prompts = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


@torch.no_grad()
def generate(
    model: Any,
    prompts: Prompts,
    *,
    cache: CellCache | None = None,
    graph: bool | None = None,
    compile: bool = False,
    **options: Any,
) -> Any:
    """Continue prompts with a `CellCache`.

    Args:
        model: a causal language model of Transformers whose attention `hf.register` has made
            (`model.set_attn_implementation("nearfield")`).
        prompts: token ids `[length]` or `[batch, length]`, with an `attention_mask` among the options where there is padding. Or
            a list of prompts of different lengths, each a tensor `[length]` or a list of numbers: each is read by itself, but for
            its last token, and keeps a cache of its own; from there on all of them are continued together. Nothing is padded, and
            each gets the tokens that it gets alone (up to the rounding of products with more rows; with sampling, other draws).
            So it is with a batch that is padded on the left, unless a `cache` is given, or the options ask for beams or several
            results. Rules of Transformers that count tokens (`max_length`, n-grams that are not to be repeated) see the padded
            batch; use `max_new_tokens`.
        cache: what to use; None: `CellCache(config=model.config)`. If it has tokens already, prompts begin with them and have at
            least one more. For a list of prompts, a cache made by `CellCache.batch` whose requests have read all of their
            prompts but the last token; None: they are read here.
        graph: whether a step of the whole model, from token to logits, is captured in a CUDA graph and replayed, so that a step
            takes as long as its kernels do. It is captured again when a segment is closed. None: where it can be, and there are
            no beams. True: an error says why where it cannot be.
        compile: whether `torch.compile` makes fewer kernels of what lies between the attention of two layers, for the steps in
            that graph. The first step of a model then takes many seconds more, and those after it less time. It needs a graph.
        options: those of `model.generate`. For a list of prompts, `prefill_chunk_size` counts for each of them.

    Returns:
        What `model.generate` returns: token ids `[batch, length]`, prompts first, or its dictionary. For a list of prompts, a
        list of token ids `[length]`, each up to its first end-of-sequence token.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, eos_token_id=None, **small))
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> found = hf.generate(model, [torch.arange(40), torch.arange(12)], max_new_tokens=8, do_sample=False)
        >>> [len(x) for x in found]
        [48, 20]
    """
    _check_model(model)
    if graph is not None and not isinstance(graph, bool):
        raise TypeError(f"graph must be True, False or None, got {graph!r}")
    if not isinstance(compile, bool):
        raise TypeError(f"compile must be True or False, got {compile!r}")
    if compile and graph is False:
        raise ValueError("compile=True is for steps in a CUDA graph; leave out graph=False, or compile")
    if "past_key_values" in options:
        raise ValueError("past_key_values is what this function chooses; pass a CellCache as cache=..., or leave it out")
    if _option(model, options, "use_cache") is False:
        raise ValueError("use_cache=False, but this function decodes with a cache; leave it out, or call model.generate")
    check_positive("prefill_chunk_size", _option(model, options, "prefill_chunk_size"), optional=True, most=MOST)
    steps = Steps(True if compile else graph, compile)
    if isinstance(prompts, Tensor) and not prompts.is_nested:
        check_numbers("prompts", prompts)
        if prompts.dim() not in (1, 2) or not prompts.numel() or not _are_numbers(prompts):
            raise ValueError(
                f"prompts must be token ids [length] or [batch, length], got {prompts.dtype} of shape {tuple(prompts.shape)}"
            )
        if prompts.dim() == 2:
            return _continue_batch(model, prompts.to(model.device, torch.long), cache, steps, options)
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 1:
            options["attention_mask"] = mask[None]
        found = _continue_batch(model, prompts[None].to(model.device, torch.long), cache, steps, options)
        return found[0] if isinstance(found, Tensor) and len(found) == 1 else found
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be token ids, or a list of them, got {type(prompts).__name__}")
    return _continue_requests(model, [_as_ids(x, i, model.device) for i, x in enumerate(prompts)], cache, steps, options)


def read_prompt(model: Any, ids: Tensor, cache: CellCache, chunk: int | None = None) -> None:
    """Let a model read token ids `[length]` into a cache, without an answer; `chunk` tokens at a time."""
    last = last_logits(model.forward)
    for part in ids[None].split(chunk or max(1, len(ids)), 1):
        if part.shape[1]:
            model(input_ids=part, past_key_values=cache, use_cache=True, **last)


def _continue_batch(model: Any, ids: Tensor, cache: CellCache | None, steps: Steps, options: dict[str, Any]) -> Any:
    mask = options.get("attention_mask")
    single = _is_one(model, options, "num_beams") and _is_one(model, options, "num_return_sequences")
    if cache is None and single and isinstance(mask, Tensor) and mask.shape == ids.shape and "position_ids" not in options:
        starts = _starts(mask)
        if starts is not None:
            caches = _read_prompts(model, [row[start:] for row, start in zip(ids, starts, strict=True)], options)
            return _run(model, ids, CellCache.batch(caches, padding=min(starts)), steps, options)
    if cache is not None:
        _check_is_longer(ids.shape[1], _checked(cache))
    return _run(model, ids, CellCache(config=model.config) if cache is None else cache, steps, options)


def _check_is_longer(length: int, cache: CellCache) -> None:
    """Raise unless a prompt has tokens that the cache has not. Transformers would append all of it to what it has."""
    cache.check_alike()
    held = cache.get_seq_length()
    if length <= held:
        can_crop = length > 1 and all(isinstance(layer, CellLayer) for layer in cache.layers)
        back = f"cache.crop({length - 1})" if can_crop else "cache.reset()"
        raise ValueError(
            f"cache has {held} tokens already, so prompts must begin with them and have more, got prompts of {length}; pass all "
            f"tokens so far and new ones after them, go back with {back}, or pass a new cache"
        )


def _run(model: Any, ids: Tensor, cache: CellCache, steps: Steps, options: dict[str, Any]) -> Any:
    if steps.graph is False or (steps.graph is None and not _is_one(model, options, "num_beams")):
        return model.generate(ids, past_key_values=cache, **options)
    if not _is_one(model, options, "num_beams"):
        asked = "compile" if steps.compile else "graph"
        raise ValueError(f"{asked}=True, but beams change places at every step; leave out {asked}, or num_beams")
    with stepping(model, cache, *steps):
        return model.generate(ids, past_key_values=cache, **options)


def _is_one(model: Any, options: dict[str, Any], name: str) -> bool:
    return (_option(model, options, name) or 1) == 1


def _starts(mask: Tensor) -> list[int] | None:
    """Where the tokens of each row begin in a batch that is padded on the left; None: there is no padding, or other padding."""
    counts = mask.bool().cpu()
    starts = (~counts).sum(1)
    if bool(counts.all()) or not torch.equal(counts, torch.arange(counts.shape[1]) >= starts[:, None]):
        return None
    return starts.tolist() if int(starts.max()) < counts.shape[1] else None


def _option(model: Any, options: dict[str, Any], name: str) -> Any:
    """As Transformers finds it: given, or in a configuration that is given, or in that of the model."""
    for place in (options.get("generation_config"), model.generation_config):
        if options.get(name) is None and getattr(place, name, None) is not None:
            return getattr(place, name)
    return options.get(name)


def _read_prompts(model: Any, prompts: list[Tensor], options: dict[str, Any]) -> list[CellCache]:
    """A cache for each prompt, which holds all of its tokens but the last."""
    chunk = _option(model, options, "prefill_chunk_size")
    options.pop("prefill_chunk_size", None)
    caches = [CellCache(config=model.config) for _ in prompts]
    for ids, own in zip(prompts, caches, strict=True):
        read_prompt(model, ids[:-1], own, chunk)
    return caches


def _continue_requests(model: Any, prompts: list[Tensor], cache: CellCache | None, steps: Steps, options: dict[str, Any]) -> Any:
    if not prompts:
        raise ValueError("there are no prompts; pass token ids, or a list of them")
    for name in ("attention_mask", "position_ids", "inputs_embeds"):
        if options.get(name) is not None:
            raise ValueError(f"{name} is not for a list of prompts, which need none; leave it out, or pass prompts as one tensor")
    for name in ("num_beams", "num_return_sequences"):
        if not _is_one(model, options, name):
            raise ValueError(f"{name}={_option(model, options, name)} needs prompts of one length; pass them as one tensor")
    if cache is None:
        cache = CellCache.batch(_read_prompts(model, prompts, options))
    expected = [len(ids) - 1 for ids in prompts]
    if _checked(cache).lengths != expected:
        raise ValueError(
            f"the cache must hold all tokens of each prompt but the last, {expected}, got {cache.lengths}; make it with "
            "CellCache.batch, of caches that have read no more, or leave it out"
        )
    longest = cache.get_seq_length() + 1  # with the padding that it was made with
    # Padding is in no cache; Transformers wants a rectangle. Its penalties for repeated tokens count all of it, so they get none
    # that a prompt does not have.
    ids = torch.stack([torch.cat([x[:1].expand(longest - len(x)), x]) for x in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(x) for x in prompts]).long().to(ids.device)
    found = _run(model, ids, cache, steps, {"attention_mask": mask, **options})
    if not isinstance(found, Tensor):
        return found
    end = _option(model, options, "eos_token_id")
    ends = torch.as_tensor([] if end is None else end, device=found.device).view(-1)
    return [_own_tokens(row, longest - len(prompt), longest, ends) for row, prompt in zip(found, prompts, strict=True)]


def _own_tokens(row: Tensor, start: int, longest: int, ends: Tensor) -> Tensor:
    """The tokens of one request: without padding before it, and after its end."""
    ended = torch.isin(row[longest:], ends).nonzero()
    return row[start : longest + int(ended[0]) + 1] if len(ended) else row[start:]


def _as_ids(prompt: Any, number: int, device: torch.device) -> Tensor:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0, 0)
    check_numbers(f"prompt {number}", ids)
    if ids.dim() != 1 or not len(ids) or not _are_numbers(ids):
        what = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(prompt, Tensor) else repr(prompt)[:80]
        raise ValueError(f"prompt {number} must be at least one token id, [length], got {what}; tokenize texts first")
    return ids.to(device=device, dtype=torch.long)


def _are_numbers(ids: Tensor) -> bool:
    return not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool


def _checked(cache: Any) -> CellCache:
    if not isinstance(cache, CellCache):
        raise TypeError(f"cache must be a CellCache or None, got {type(cache).__name__}; other caches go to model.generate")
    return cache


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise TypeError(f"model must be a causal language model of Transformers, got {type(model).__name__}")
    name = getattr(config.get_text_config(decoder=True), "_attn_implementation", None) or "eager"
    if not is_registered(name):
        raise ValueError(
            f"a CellCache is for attention that nearfield has registered, and this model has {name!r}; call hf.register() and "
            'model.set_attn_implementation("nearfield") first'
        )
