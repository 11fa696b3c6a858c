"""What comes back from a method, from a gradient and from a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a method returns."""

    output: Tensor
    """`[batch, heads, length, value_dim]`, in any dtype: the caller casts it to that of the inputs"""
    lse: Tensor | None = None
    """`[batch, heads, length]`: log of the softmax normaliser; required if `Call.diagnostics` is set, and with a gradient
    if `Call.return_lse` is"""
    stderr: Tensor | None = None
    """`[batch, heads, length]`: estimated standard error of a row; None: the method estimates none"""
    info: dict[str, Any] = field(default_factory=dict)
    """how it was made; becomes part of `Estimate.info`"""


def mean_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over all rows of what parts of a call say of themselves; each says how many `rows` it has."""
    info: dict[str, Any] = {}
    for name in ("keys_per_query", "keys_used", "promise_met"):
        if any(name in part for part in parts):
            # Parts that are exact attention use all keys that they look at, and keep any promise.
            found = [part.get(name, 1.0 if name == "promise_met" else part["keys_per_query"]) for part in parts]
            info[name] = sum(part["rows"] * x for part, x in zip(parts, found, strict=True)) / sum(x["rows"] for x in parts)
    return info


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the three inputs of attention."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Audit:
    """Rows recomputed exactly, and what they say about all rows.

    With this `confidence`, at most a fraction `1 - quantile` of all rows has an error above `additive` (or `relative`). This
    holds for any data and any method, because the audited rows are chosen at random after the estimate was made. It
    bounds the share of bad rows, not every single row.
    """

    rows: int
    """how many rows were recomputed"""
    quantile: float
    confidence: float
    additive: float
    """largest audited ||estimate - exact||, in units of the rms norm of the values"""
    relative: float
    """largest audited ||estimate - exact|| / ||exact||"""
    additive_errors: Tensor
    """`[rows]`"""
    relative_errors: Tensor
    """`[rows]`"""
    pooled: float = 0.0
    """sqrt(sum ||estimate - exact||^2 / sum ||exact||^2) over the audited rows: their error in units of the rms norm
    of the output"""
    pooled_bound: float = math.inf
    """with this `confidence`, the pooled error of all rows but a fraction of at most 1 - ((1 - confidence) / 2)^(1 / rows), those
    that are worse than the worst audited one; see `audit.pooled_bound`. Infinite where so few rows cannot tell."""
    heads: tuple[Audit, ...] | None = None
    """what the rows of each head say about that head, each with this confidence by itself; None: not asked for (`per_head`)"""

    def __str__(self) -> str:
        told = (
            f"with confidence {self.confidence:.0%}, {self.quantile:.1%} of the rows are within {self.additive:.3g} "
            f"of exact attention (in units of the rms value norm; relative {self.relative:.3g})\n"
            f"pooled over rows, the error is {self.pooled:.3g} of the rms norm of the output (at most {self.pooled_bound:.3g})"
        )
        if self.heads is None:
            return told
        lines = [f"{'head':>4}  {'rows':>5}  {'additive':>8}  {'relative':>8}"]
        lines += [f"{i:>4}  {x.rows:>5}  {x.additive:>8.3g}  {x.relative:>8.3g}" for i, x in enumerate(self.heads)]
        return "\n".join([told, *lines])

    def plot(self) -> Any:
        """A figure of the errors of the audited rows, and of each head if it was audited by itself. Needs matplotlib.

        Example:
            >>> est = nearfield.estimate(q, k, v, method=nearfield.TopK(k=16), audit=59, per_head=True)
            >>> est.audit.plot().savefig("/dev/null", format="png")
        """
        figure, axes = new_figure(1 if self.heads is None else 2)
        draw_audit(axes[0], self)
        if self.heads is not None:
            for number, head in enumerate(self.heads):
                errors = head.relative_errors.tolist()
                axes[1].plot([number] * len(errors), errors, "o", color=BLUE, alpha=0.3, markersize=3, markeredgewidth=0)
            worst = [head.relative for head in self.heads]
            axes[1].plot(range(len(worst)), worst, "_", color=ORANGE, markersize=12, label="largest")
            axes[1].xaxis.get_major_locator().set_params(integer=True)
            axes[1].set(title="Audited rows by head", xlabel="head", ylabel="relative error")
            axes[1].legend(frameon=False)
        return figure


@dataclass(frozen=True)
class Samples:
    """The result of `nearfield.sample`: keys drawn from every row's softmax."""

    ids: Tensor
    """`[..., heads, rows, draws]`, int64: the keys; -1 for a row that sees no key, or that sees NaN or inf"""
    looked_at: Tensor
    """`[..., heads, rows]`: m, the keys outside the near set that a draw looked at, summed over the draws; 0 for `dense` rows"""
    dense: Tensor
    """`[..., heads, rows]`, bool: the row was drawn from its full softmax, for which all of its keys were looked at"""
    certified: Tensor
    """`[..., heads, rows]`, bool: the draws follow the softmax exactly, by the bounds of the index or by the given slack"""


@dataclass(frozen=True, repr=False)
class Estimate:
    """The result of `nearfield.estimate`."""

    output: Tensor
    """`[..., length, value_dim]`: what `attention` returns; a jagged nested tensor for jagged inputs, as `lse` and `stderr`"""
    lse: Tensor
    """`[..., length]`: log of the (estimated) softmax normaliser; float32, or float64 for float64 inputs"""
    stderr: Tensor | None = None
    """`[..., length]`: estimated standard error of a row, as a norm over the columns; None: the method estimates none.
    It estimates the error and does not bound it."""
    audit: Audit | None = None
    """None: not asked for"""
    info: dict[str, Any] = field(default_factory=dict)
    """how the estimate was made: method, backend, keys per query, and what else the method reports"""

    def __str__(self) -> str:
        """What is known, in at most ten lines."""
        lines = [f"Estimate by {shorten(str(self.info.get('method', 'a method')), 150)}"]
        if "chosen" in self.info:
            lines.append(f"  chosen   {self.info['chosen']!r}")
        lines.append(f"  output   {list(self.output.shape)}, {self.output.dtype}, {self.output.device}")
        lse, stderr = _all_rows(self.lse), None if self.stderr is None else _all_rows(self.stderr)
        if lse.numel():
            lines.append(f"  lse      {float(lse.min()):.4g} to {float(lse.max()):.4g}")
        if stderr is not None and stderr.numel():
            lines.append(f"  stderr   {float(stderr.mean()):.3g} on average, at most {float(stderr.max()):.3g}")
        if "keys_per_query" in self.info:
            lines.append(f"  keys     {self.info['keys_per_query']:,.1f} looked at for a query")
        if self.audit is None:
            lines.append("  audit    none: pass audit=59 to know the error")
        else:
            rows, pooled = str(replace(self.audit, heads=None)).splitlines()
            lines += [f"  audit    {rows}", f"           {pooled}"]
            if self.audit.heads:
                relative = [head.relative for head in self.audit.heads]
                lines.append(f"  by head  the worst is head {relative.index(max(relative))}, relative error {max(relative):.3g}")
        known = {"method", "chosen", "keys_per_query", "audit", "steps", "parts"}
        others = ", ".join(f"{name}={value}" for name, value in self.info.items() if name not in known)
        return "\n".join([*lines, f"  info     {shorten(others, 120)}"])

    __repr__ = __str__

    def plot(self) -> Any:
        """A figure of what is known: log-normalisers and standard errors by position, and the audit. Needs matplotlib.

        Example:
            >>> est = nearfield.estimate(q, k, v, method=nearfield.TopK(k=16, tail=16), audit=59)
            >>> est.plot().savefig("/dev/null", format="png")
        """
        figure, axes = new_figure(1 + (self.stderr is not None) + (self.audit is not None))
        panels = list(axes)
        draw_rows(panels.pop(0), self.lse, "Log-normaliser")
        if self.stderr is not None:
            draw_rows(panels.pop(0), self.stderr, "Standard error of a row")
        if self.audit is not None:
            draw_audit(panels.pop(0), self.audit)
        return figure


def _all_rows(numbers: Tensor) -> Tensor:
    """The numbers of all rows, of a nested tensor too."""
    return numbers.values() if numbers.is_nested else numbers


BLUE, ORANGE, GREY = "#2b6cb0", "#c05621", "#718096"


def new_figure(panels: int) -> tuple[Any, Any]:
    """A figure with so many panels side by side, and these; raises where matplotlib is missing. Touches no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'nearfield[plots]'") from error
    figure = Figure(figsize=(4.6 * panels, 3.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def figure_colours(count: int) -> list[Any]:
    """So many colours, from dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * number / max(1, count - 1)) for number in range(count)]


def draw_audit(axes: Any, audit: Audit) -> None:
    """Which share of the audited rows is within which error."""
    share = [(number + 1) / max(1, audit.rows) for number in range(audit.rows)]
    both = (("of the rms value norm", audit.additive_errors, BLUE), ("of the exact row", audit.relative_errors, ORANGE))
    for name, errors, colour in both:
        axes.plot(errors.sort().values.tolist(), share, drawstyle="steps-post", color=colour, label=name)
    bound = f"{audit.quantile:.1%} of all rows\nare within {audit.additive:.3g}"
    axes.axvline(audit.additive, color=GREY, linestyle="--", linewidth=1, label=bound)
    axes.set(title=f"{audit.rows} audited rows", xlabel="error", ylabel="share of rows within", ylim=(0, 1.03))
    axes.legend(frameon=False, loc="lower right")


def draw_rows(axes: Any, numbers: Tensor, title: str) -> None:
    """Numbers `[..., length]` by position: the middle, and where 90% of batch entries and heads lie. They may be jagged."""
    numbers = numbers.detach()
    if numbers.is_nested:
        numbers = torch.nested.to_padded_tensor(numbers.transpose(1, 2), math.nan).transpose(1, 2)
    rows = numbers.double().cpu().reshape(-1, numbers.shape[-1])
    rows = rows.masked_fill(~rows.isfinite(), float("nan"))
    low, middle, high = rows.nanquantile(rows.new_tensor([0.05, 0.5, 0.95]), 0)
    axes.fill_between(range(len(middle)), low.tolist(), high.tolist(), color=BLUE, alpha=0.2, linewidth=0, label="5% to 95%")
    axes.plot(middle.tolist(), color=BLUE, linewidth=1.2, label="median of heads")
    axes.set(title=title, xlabel="position")
    axes.legend(frameon=False)
