"""`plan`: a fixed method from a look at the inputs. `explain`: what the default would do with them, and why."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from nearfield import crossover
from nearfield._compat import sdpa
from nearfield.audit import CONFIDENCE
from nearfield.auto import Auto, look_times
from nearfield.bands import Window, check_window
from nearfield.cells.method import Cells
from nearfield.cells.sizes import MemoryPolicy
from nearfield.checks import check_generator
from nearfield.exact import Exact
from nearfield.kernels import backends
from nearfield.packed import is_jagged
from nearfield.pilot import Choice, expected_time, faster_budgets
from nearfield.problem import DTYPES, Call, Problem, check, is_traced, isolate_non_finite
from nearfield.sampling import Seeds
from nearfield.windows import reversed_problem

TIMED_ROWS, TIMED = 256, 3
"""Exact attention is timed on so many rows of one head, so many times; the shortest counts."""


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: Window | None = None,
    eps: float | None = None,
    unit: str = "output",
    crossover: int | None = None,
    share: int | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Cells | Exact:
    """The method that `Auto(eps)` would run on these inputs, fixed: `Cells` with all sizes given, or `Exact()`.

    It looks at no error itself any more, so it can be compiled, batched by vmap and captured in a CUDA graph, and inputs like
    these are served without a pilot. What was promised holds for these inputs.

    Args:
        eps, unit, crossover, share: those of `Auto`. The others are those of `attention`.

    Example:
        >>> from nearfield.synthetic import make
        >>> q, k, v = make("clustered", 1, 2, 4096, 32)
        >>> method = nearfield.plan(q, k, v, crossover=1024)
        >>> isinstance(method, nearfield.Cells), method.probes is not None
        (True, True)
        >>> out = torch.compile(nearfield.attention, fullgraph=True, backend="eager")(q, k, v, method=method)
    """
    if is_traced():
        raise RuntimeError(
            "plan looks at its inputs, which cannot be traced; call it before, outside of torch.compile and torch.func"
        )
    auto = Auto(eps, crossover, share, unit)
    logits = attn_mask, is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size
    problem, call = _prepared(query, key, value, *logits, generator, backend)
    method = _choice(auto, problem, call).method
    return _frozen(method, problem) if isinstance(method, Cells) else method


def _prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    offset: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    window_size: Window | None,
    generator: torch.Generator | None,
    backend: str,
) -> tuple[Problem, Call]:
    if is_jagged(query):
        raise ValueError(
            "query is a nested tensor, and which method is best depends on the length: pass sequences of one length as a plain "
            "tensor [batch, heads, length, dim], such as query.unbind()[0][None]; `attention` chooses for each length by itself"
        )
    problem = check(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size)
    backends.check_backend(backend, problem.query.device)
    check_generator(generator)
    if problem.window is not None and problem.window[1] < 0:
        problem = reversed_problem(problem)  # as a call does
    return isolate_non_finite(problem, False), Call(Seeds(generator, problem.query.device), backend)


def _choice(auto: Auto, problem: Problem, call: Call) -> Choice:
    if problem.is_empty or auto.prefers_exact(problem):
        return Choice(Exact(), [], None)
    return auto.choose(problem, call)


def _frozen(method: Cells, problem: Problem) -> Cells:
    """The same with all sizes given."""
    sizes = method.sizes(problem)
    return replace(method, cell_size=sizes.cell_size, probes=sizes.probes, segment=sizes.segment or None, share=sizes.share)


@dataclass(frozen=True)
class Explanation:
    """What would run, and why. `str` gives a table."""

    method: Cells | Exact | None
    """what would run; None: that depends on the values"""
    rows: dict[str, str]
    """the lines of the table"""
    data: dict[str, Any] = field(default_factory=dict)
    """the numbers behind them: `keys`, `crossover`, `budgets`, `steps`, `seconds_exact`, `time_ratio`, `memory_bytes`, ..."""

    def __str__(self) -> str:
        width = max(map(len, self.rows))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.rows.items())


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: Window | None = None,
    method: Auto | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Explanation:
    """What `attention` would do with these inputs, and why: method, budget, expected time, error and memory. It runs the pilot.

    Args:
        method: an `Auto(...)`; None: the default. The other arguments are those of `attention`.

    Example:
        >>> print(nearfield.explain(*torch.randn(3, 1, 2, 300, 64).unbind(0)))  # doctest: +ELLIPSIS
        call       2 heads of 300 queries and 300 keys, dimension 64, float32 on cpu, no mask
        crossover  ...
        method     Exact()
        ...
    """
    auto = Auto() if method is None else method
    if not isinstance(auto, Auto):
        raise TypeError(f"method must be a nearfield.Auto or None, got {method!r}; other methods always do what they say")
    logits = attn_mask, is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size
    problem, call = _prepared(query, key, value, *logits, generator, backend)
    choice = _choice(auto, problem, replace(call, diagnostics=True)) if auto.check else None
    seconds = _exact_seconds(problem.query, problem.key, problem.value, problem.is_causal)
    return _table(auto, problem, choice, seconds * problem.reach / max(1, problem.key.shape[2]), window_size)


def explain_sizes(
    n: int,
    heads: int = 8,
    dim: int = 64,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
) -> Explanation:
    """`explain` for a shape alone: which methods come into question. The values decide between them.

    Example:
        >>> nearfield.explain_sizes(1000, heads=2).method
        Exact()
    """
    for name, number in (("n", n), ("heads", heads), ("dim", dim)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    # One head, seen as many.
    one = torch.randn(1, 1, n, dim, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
    query = one.expand(1, heads, n, dim)
    problem = check(query, query, query, is_causal=causal)
    return _table(Auto(), problem, None, _exact_seconds(query, query, query, causal))


@torch.no_grad()
def _exact_seconds(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> float:
    """About how long exact attention takes, from some rows of one head (on a GPU, which works on many at a time, of all)."""
    if not query.numel() or not key.numel():
        return 0.0
    heads = query.shape[0] * query.shape[1]
    rows = query[:, :, :TIMED_ROWS]
    share = query.shape[2] / rows.shape[2] * (0.5 if is_causal else 1.0)
    if not query.is_cuda:
        rows, key, value = (x[:1, :1] for x in (rows, key, value))
        share *= heads
    seconds = []
    for _ in range(1 + TIMED):
        _wait(query)
        start = time.perf_counter()
        sdpa(rows, key, value, enable_gqa=rows.shape[1] != key.shape[1])
        _wait(query)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) * share


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _table(auto: Auto, problem: Problem, choice: Choice | None, seconds: float, window_size: Window | None = None) -> Explanation:
    """`choice`: what the pilot found; None: it was not run. `window_size`: as it was given."""
    on_gpu, limit = backends.runs_triton(problem.query.device), auto.limit(problem)
    sizes, keys = auto.cells.sizes(problem), problem.key.shape[2]
    method, why = _decision(auto, problem, choice)
    tried = choice is not None and bool(choice.steps)
    budgets = [] if isinstance(method, Exact) and not tried else _budgets(auto, problem)
    probes = None
    if not isinstance(method, Exact):
        probes = method.sizes(problem).probes if method is not None else budgets[0]
    ratio = 1.0 if probes is None else expected_time(sizes._replace(probes=probes), keys, limit, on_gpu)
    plain = _bytes(problem)
    memory = plain if probes is None else int(plain * (1.0 + MemoryPolicy.of(problem).beyond))
    rows = {
        "call": _call_line(problem, window_size),
        "crossover": _crossover_line(auto, problem, limit),
        "method": "exact attention or cells" if method is None else _short(method),
        "why": why,
    }
    if budgets:
        rows["budgets"] = f"{', '.join(map(str, budgets))} cells of {sizes.cell_size} keys are faster than exact attention"
    at_best = " at best" if method is None else ""
    rows["time"] = f"exact attention about {_time(seconds)}" + (f"; cells about {ratio:.2f} of that{at_best}" if probes else "")
    rows["error"] = _error_line(auto, method, choice)
    rows["memory"] = f"about {memory / 2**20:,.0f} MiB, of which inputs and output are {plain / 2**20:,.0f} MiB"
    data = {
        "keys": keys,
        "crossover": limit,
        "budgets": budgets,
        "steps": [] if choice is None else choice.steps,
        "audit": None if choice is None else choice.audit,
        "exact_heads": () if choice is None else choice.exact_heads,
        "eps": auto.tolerance,
        "seconds_exact": seconds,
        "time_ratio": ratio,
        "memory_bytes": memory,
    }
    return Explanation(method, rows, data)


def _budgets(auto: Auto, problem: Problem) -> list[int]:
    on_gpu = backends.runs_triton(problem.query.device)
    return faster_budgets(auto.cells.sizes(problem), problem.key.shape[2], auto.limit(problem), on_gpu)


def _why_exact(auto: Auto, problem: Problem) -> str:
    """Why exact attention runs although nobody has looked at values."""
    if problem.is_empty:
        return "there are no queries or no keys"
    limit, length, queries = auto.limit(problem), problem.key.shape[2], problem.query.shape[2]
    device, causal = problem.query.device, problem.is_causal
    if math.isinf(limit):
        if auto.crossover is None and not crossover.is_measured(device, problem.query.dtype, causal):
            return "nobody has measured from which length on cells are faster here; `nearfield bench --calibrate` does"
        return "cells were not faster here at any length that was measured"
    least = limit * (look_times(device, causal) if auto.check else 1)
    if length < least:
        than = " than cells and a look at their error" if auto.check else ""
        return f"below {least:,.0f} keys exact attention is faster{than}"
    if queries < least / 4:
        return f"{queries:,} queries are too few to repay grouping the keys; it takes {math.ceil(least / 4):,}"
    return "with so little work (heads times queries times keys) exact attention is faster than starting the kernels of cells"


def _decision(auto: Auto, problem: Problem, choice: Choice | None) -> tuple[Cells | Exact | None, str]:
    """What runs (None: the pilot will tell), and why."""
    if problem.has_general_mask:
        return Exact(), "a mask beyond key padding gets exact attention"
    if problem.window is not None and auto.prefers_exact(problem):
        return Exact(), "a window with bounds on both sides gets exact attention, which reads the keys inside alone"
    if problem.is_empty or auto.prefers_exact(problem):
        return Exact(), _why_exact(auto, problem)
    if not auto.check:
        return auto.cells, "beyond the crossover length cells are faster; check=False asks nothing about their error"
    if choice is None:
        if _budgets(auto, problem):
            return None, "a pilot looks at the values: cells if some budget is within eps, exact attention otherwise"
        return Exact(), "no number of cells to open would be faster than exact attention"
    if isinstance(choice.method, Cells):
        exact = f", but for {len(choice.exact_heads)} key-value heads that get exact attention" if choice.exact_heads else ""
        return choice.method, f"the smallest budget within eps={auto.tolerance} on the rows of the pilot{exact}"
    if not choice.steps:
        return Exact(), "no number of cells to open would be faster than exact attention"
    return Exact(), f"no budget that would be faster is within eps={auto.tolerance}: the best has {choice.best:.3g}"


def _call_line(problem: Problem, window_size: Window | None) -> str:
    batch, heads, queries, dim = problem.query.shape
    mask = "causal" if problem.is_causal else "no mask" if problem.attn_mask is None else "masked"
    mask = mask if check_window(window_size) is None else f"window {window_size}"
    where = f"{crossover.dtype_name(problem.query.dtype)} on {crossover.device_name(problem.query.device)}"
    many = f"{batch * heads} heads" if batch * heads > 1 else "1 head"
    return f"{many} of {queries:,} queries and {problem.key.shape[2]:,} keys, dimension {dim}, {where}, {mask}"


def _crossover_line(auto: Auto, problem: Problem, limit: float) -> str:
    factor = look_times(problem.query.device, problem.is_causal)
    times = f"; with a pilot {factor} times that" if auto.check and factor > 1 else ""
    if auto.crossover is not None:
        return f"{auto.crossover:,} keys, as given{times}"
    where = f"{crossover.dtype_name(problem.query.dtype)} on {crossover.device_name(problem.query.device)}"
    if limit == float("inf"):
        return f"not known for {where}, so always exact attention; `nearfield bench --calibrate` measures it"
    return f"from {limit:,.0f} keys on cells are faster with {where}{times}"


def _error_line(auto: Auto, method: Cells | Exact | None, choice: Choice | None) -> str:
    if isinstance(method, Exact):
        return "none beyond rounding"
    if choice is None or choice.audit is None:
        return f"at most {auto.tolerance} of the {auto.unit}, looked at before" if auto.check else "not looked at"
    audit = choice.audit
    return (
        f"{audit.pooled:.3g} of the rms norm of the output on {audit.rows} rows (at most {audit.pooled_bound:.3g} with "
        f"confidence {CONFIDENCE:.0%}); largest {audit.additive:.3g} of that of the values"
    )


def _bytes(problem: Problem) -> int:
    """Of inputs and output."""
    rows = problem.query.shape[:3].numel()
    entries = problem.query.numel() + problem.key.numel() + problem.value.numel() + rows * problem.value.shape[3]
    return entries * problem.query.element_size()


def _time(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _short(method: Cells | Exact) -> str:
    """What it was given, without what is as it is by default."""
    given = (f"{x.name}={getattr(method, x.name)!r}" for x in fields(method) if getattr(method, x.name) != x.default)
    return f"{type(method).__name__}({', '.join(given)})"
