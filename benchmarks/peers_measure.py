"""Measuring the methods of bench_peers_gpu.py side by side: a test of each, its error, its memory, and times in turn."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_timing import BACKENDS, CUDA, DEVICE, DTYPE, QKV, Call, backends, fastest, hopeful, interleaved, peak_megabytes, wait
from peers_inputs import exact_rows, row_errors, some_rows
from peers_methods import Arguments, Peer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BUDGET_MS = 1500.0 if CUDA else 20.0
TESTED = 2048
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = 0.01, 0.05
"""Mean relative error of a row, and relative error of a gradient, with which a peer that reads all keys passes. Rounding to
bfloat16 makes 0.002 and about 0.005."""

Result = dict[str, Any]


class Entry(NamedTuple):
    """One method with one of its settings."""

    label: str
    peer: Peer
    arguments: Arguments


class BrokenCard(Exception):
    """After this nothing works on the card in this process. `results` has what was found before, the culprit among it."""

    def __init__(self, results: dict[str, Result]) -> None:
        super().__init__("the card's context is broken")
        self.results = results


def entries_of(peers: dict[str, Peer], n: int) -> list[Entry]:
    """All settings of all peers, those that say the same once."""
    found: list[Entry] = []
    for name, peer in peers.items():
        for label, arguments in peer.settings(n).items():
            if not any(other.peer is peer and other.arguments == arguments for other in found):
                found.append(Entry(label if name == "nearfield" else f"{name}, {label}", peer, arguments))
    return found


def self_test(peer: Peer, dim: int, training: bool, n: int = TESTED) -> Result:
    """Whether the peer agrees with exact attention when it reads all keys, on Gaussian inputs, where every key counts."""
    generator = torch.Generator().manual_seed(0)
    heads = (peer.group, 1, 1) if peer.group > 1 else (2, 2, 2)
    query, key, value = (torch.randn(1, count, n, dim, generator=generator).to(DEVICE, DTYPE) for count in heads)
    call = _attended(peer, (query, key, value), peer.everything(n), training)
    output, gradients = call()
    rows = some_rows(n, n)
    off = row_errors(peer.usual_layout(output), exact_rows((query, key, value), rows), rows)
    found: Result = {"n": n, "error": off["mean"], "not_finite": off["not_finite"]}
    passed = off["mean"] < FORWARD_TOLERANCE and not off["not_finite"]
    if training:
        exact = _exact_gradients((query, key, value))
        own = [peer.usual_layout(x).double() for x in gradients]
        found["gradient_errors"] = [float((x - want).norm() / want.norm()) for x, want in zip(own, exact, strict=True)]
        passed &= all(error < GRADIENT_TOLERANCE for error in found["gradient_errors"])
    return found | {"passed": passed}


def _exact_gradients(inputs: QKV) -> tuple[Tensor, ...]:
    """Of the sum of outputs times `_upstream`, in float64."""
    leaves = tuple(x.detach().double().requires_grad_() for x in inputs)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(output, leaves, _upstream(inputs[0]).double())


def _upstream(query: Tensor) -> Tensor:
    """The gradient that comes in, `[1, heads, n, dim]`: the same for everyone."""
    generator = torch.Generator(query.device).manual_seed(2)
    return torch.randn(query.shape, generator=generator, device=query.device, dtype=torch.float32).to(query.dtype)


class Attended:
    """A call of a peer on inputs in its own layout; with gradients in training. Returns (output, gradients)."""

    def __init__(self, attend: Callable[..., Tensor], own: QKV, upstream: Tensor | None) -> None:
        self._attend = attend
        self._upstream = upstream
        self.own = own if upstream is None else tuple(x.detach().requires_grad_() for x in own)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.own, *(() if self._upstream is None else (self._upstream,)))

    def __call__(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._upstream is None:
            with torch.no_grad():
                return self._attend(*self.own), ()
        output = self._attend(*self.own)
        return output, torch.autograd.grad(output, self.own, self._upstream)


def _attended(peer: Peer, inputs: QKV, arguments: Arguments, training: bool, layouts: dict[Any, Any] | None = None) -> Attended:
    """`layouts` keeps what has been made for other peers with the same layout."""
    layouts = {} if layouts is None else layouts
    kind = (peer.heads_first, peer.takes_groups)
    if kind not in layouts:
        upstream = None
        if training:
            upstream = _upstream(inputs[0])
            upstream = upstream if peer.heads_first else upstream.transpose(1, 2).contiguous()
        layouts[kind] = peer.own_layout(inputs), upstream
    own, upstream = layouts[kind]
    return Attended(functools.partial(peer.attend, **arguments), own, upstream)


def _sdpa(inputs: QKV, training: bool, tried: tuple[str, ...] | None) -> dict[str, Attended]:
    """By backend; where several heads of queries share keys, with these as they are and repeated."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    upstream = _upstream(query) if training else None
    found = {}
    for suffix, times in (("", 1), (", repeated", group)) if group > 1 else (("", 1),):
        own = query, *(x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value))
        for name in backends():
            if tried is None or name + suffix in tried:
                found[name + suffix] = Attended(functools.partial(_backend, name), own, upstream)  # type: ignore[arg-type]
    return found


def _backend(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] != key.shape[1]
    if name not in BACKENDS:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups)
    with sdpa_kernel(BACKENDS[name]):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups)


def measure(
    inputs: QKV,
    entries: list[Entry],
    training: bool,
    rows: int,
    tried: tuple[str, ...] | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> tuple[Result, dict[str, Result]]:
    """What SDPA's fastest backend does, and each of the entries; of those that fail, `failed` says why, and that is all."""
    chosen = some_rows(inputs[0].shape[2], rows)
    exact = None if training else exact_rows(inputs, chosen)
    ways = _sdpa(inputs, training, tried)
    backend, milliseconds = fastest(dict(ways))
    best = ways[backend]
    # Copies of repeated keys that are not the fastest way need not stay.
    ways.clear()
    sdpa: Result = {"backend": backend, "tried_ms": milliseconds, "hopeful": list(hopeful(milliseconds))}
    if exact is not None:
        sdpa["errors"] = row_errors(best()[0], exact, chosen)
    sdpa["peak_megabytes"] = peak_megabytes(best, best.tensors)
    results: dict[str, Result] = {}
    calls: dict[str, Attended] = {}
    layouts: dict[Any, Any] = {}
    for entry in entries:
        told(entry.label)
        try:
            results[entry.label], calls[entry.label] = _first(entry, inputs, training, exact, chosen, layouts)
        except Exception as error:  # whatever a peer raises is a finding about it, and written down as such
            results[entry.label] = {"failed": reason(error)}
            calls.pop(entry.label, None)
            if broken():
                raise BrokenCard({name: found for name, found in results.items() if "failed" in found}) from error
            if CUDA:
                torch.cuda.empty_cache()
    told("timing")
    runs = _timed({"SDPA": best, **calls}, results)
    sdpa |= {"ms": statistics.median(runs["SDPA"]), "runs_ms": runs["SDPA"]}
    for name in calls:
        if name in runs:
            results[name] |= {"ms": statistics.median(runs[name]), "runs_ms": runs[name]}
            results[name] |= {"speedup": sdpa["ms"] / results[name]["ms"], "memory_over_sdpa": _over(results[name], sdpa)}
    return sdpa, results


def _first(
    entry: Entry, inputs: QKV, training: bool, exact: Tensor | None, rows: Tensor, layouts: dict[Any, Any]
) -> tuple[Result, Attended]:
    """All but the time: the first call, which compiles, then error, share of keys and memory."""
    peer = entry.peer
    with torch.no_grad():
        own = _attended(peer, inputs, entry.arguments, training, layouts).own
        arguments = peer.fitted(own, entry.arguments)
    call = _attended(peer, inputs, arguments, training, layouts)
    start = time.perf_counter()
    output, _ = call()
    wait()
    found: Result = {"peer": peer.name, "arguments": arguments, "first_call_seconds": time.perf_counter() - start}
    if exact is not None:
        found["errors"] = row_errors(peer.usual_layout(output), exact, rows)
    del output
    with torch.no_grad():
        found["share"] = peer.share(tuple(x.detach() for x in call.own), arguments)  # type: ignore[arg-type]
    found["peak_megabytes"] = peak_megabytes(call, call.tensors)
    return found, call


def _timed(calls: dict[str, Call], results: dict[str, Result]) -> dict[str, list[float]]:
    """In turn; if one of them raises now although it did not before, each by itself."""
    try:
        return interleaved(calls, BUDGET_MS)
    except Exception as error:  # whose it was shows when each runs by itself
        if broken():
            raise BrokenCard({}) from error
    runs: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            runs |= interleaved({name: call}, BUDGET_MS / len(calls))
        except Exception as error:
            results[name] = {"failed": reason(error)}
            if broken():
                raise BrokenCard(results) from error
    return runs


def _over(own: Result, sdpa: Result) -> float | None:
    if own["peak_megabytes"] is None:
        return None
    return own["peak_megabytes"]["total"] / sdpa["peak_megabytes"]["total"]


def reason(error: Exception) -> str:
    """What went wrong, on one line that is not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def broken() -> bool:
    """Whether an error has left the card unusable for this process."""
    if not CUDA:
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=DEVICE)
    except Exception:  # whatever it raises, the card does not answer
        return True
    return False


def averaged(found: list[Any]) -> Any:
    """Over layers: the mean of numbers, and of the rest the first; a method that failed in one layer has failed."""
    first = found[0]
    if isinstance(first, dict):
        failed = next((x for x in found if "failed" in x), None)
        if failed is not None:
            return failed
        return {name: averaged([x[name] for x in found]) for name in first if all(name in x for x in found)}
    if isinstance(first, float) and all(isinstance(x, float) for x in found):
        return math.fsum(found) / len(found)
    return first
