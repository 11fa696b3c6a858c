"""The results of `nearfield ruler` as one page: heat maps of scores, loss against keys read, and which heads opened the needle.

It is one file that asks for nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nearfield.app.ruler.drawing import Cell, Point, heat_map, joined_points
from nearfield.app.ruler.report import LEGEND, Heads, Results, loss
from nearfield.app.ruler.scores import Place, Score

STYLE = """
:root { color-scheme: light dark; --ink: #1c1917; --soft: #78716c; --paper: #faf9f6; --card: #ffffff; --line: #e7e5e4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7e5e4; --soft: #a8a29e; --paper: #161514; --card: #211f1e; --line: #3a3634; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.02em; }
h2 { font-size: 19px; margin: 44px 0 4px; }
h3 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 12px; max-width: 78ch; }
.soft { color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: 18px; margin-top: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
svg { display: block; max-width: none; font-family: inherit; }
.label { font-size: 12px; fill: var(--ink); }
.small { font-size: 10px; }
text.small:not([fill]) { fill: var(--soft); }
.score { font-size: 12px; font-weight: 600; }
.grid { stroke: var(--line); }
.zero { stroke: var(--soft); }
"""


def page(found: Results, about: Mapping[str, Any]) -> str:
    """The whole page."""
    where = about["environment"]
    title = f"Does {about['model']} still read?"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(_subtitle(found, where))}</p>']
    parts += [f"<p>{escape(said)}</p>" for said in _said(found)]
    for template in found.templates:
        parts += _section(found, template, about.get("ways", {}))
    parts += _needles(found)
    parts.append(f'<h2>How to read this</h2><p>{escape(LEGEND)}</p><p class="soft">{escape(_environment(about))}</p>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<body><main>{''.join(parts)}</main></body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n{body}</html>\n'


def _subtitle(found: Results, where: Mapping[str, Any]) -> str:
    device = where.get("gpu") or where["processor"]
    lengths = ", ".join(f"{length:,}" for length in found.lengths)
    tasks = f"{len(found.tasks)} task{'s' * (len(found.tasks) != 1)} of RULER"
    return f"{tasks} at {lengths} tokens; {len(found.answers):,} answers; {where['dtype']} on {device}"


def _said(found: Results) -> list[str]:
    """What came of it at the greatest length, in a sentence for each way."""
    length, told = found.lengths[-1], []
    for template in found.templates:
        exact = found.score(Place(template, "exact", length, None))
        for way in found.ways:
            score = found.score(Place(template, way, length, None))
            if way != "exact" and exact is not None and score is not None and score.loss is not None and score.p is not None:
                told.append(
                    f"At {length:,} tokens ({template}), {way} scores {score.mean:.1f} where exact attention scores "
                    f"{exact.mean:.1f}; a token of an answer reads {score.share:.1%} of the keys. On the same prompts the loss "
                    f"is {score.loss:+.1f} points (p = {score.p:.2g})."
                )
    return told


def _environment(about: Mapping[str, Any]) -> str:
    where = about["environment"]
    told = ", ".join(f"{name} {where[name]}" for name in ("nearfield", "torch", "transformers", "python"))
    packages = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"Prompts by {packages}, seed {about['seed']}. {told}. {where['date']}."


def _section(found: Results, template: str, ways: Mapping[str, str]) -> list[str]:
    how = "as they are" if template == "raw" else "in the model's chat template"
    parts = [f"<h2>All tasks, prompts {how}</h2>", f'<div class="card">{_table(found, template)}</div>']
    parts.append("<h2>Task by length</h2><p>The mean score; below it the loss to exact attention. Point at a field for more.</p>")
    parts.append('<div class="row">')
    for way in found.ways:
        said = f'<p class="soft">{escape(ways.get(way, ""))}</p>'
        parts.append(f'<div class="card"><h3>{escape(way)}</h3>{said}{_scores(found, template, way)}</div>')
    parts.append("</div>")
    lines = [(way, _points(found, template, way)) for way in found.ways if way != "exact"]
    lines = [(way, points) for way, points in lines if points]
    if lines:
        drawn = joined_points(lines, "keys read by a token of the answer, of all there are", "loss, in points")
        parts.append("<h2>Loss against keys read</h2><p>One dot for each length, larger for longer prompts.</p>")
        parts.append(f'<div class="card">{drawn}</div>')
    return parts


def _table(found: Results, template: str) -> str:
    names = ["way", *(f"{length:,}" for length in found.lengths), "all", "keys read", "s / prompt", "s / answer"]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for way in found.ways:
        cells = [escape(way)]
        for length in (*found.lengths, None):
            score = found.score(Place(template, way, length, None))
            cells.append("" if score is None else f'{score.mean:.1f} <span class="soft">{_range(score)} {loss(score)}</span>')
        whole = found.score(Place(template, way, None, None))
        cells += [""] * 3 if whole is None else [f"{whole.share:.1%}", f"{whole.reading:.2f}", f"{whole.writing:.2f}"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _range(score: Score) -> str:
    return f"{score.low:.0f}-{score.high:.0f}"


def _scores(found: Results, template: str, way: str) -> str:
    cells = [
        [_cell(found.score(Place(template, way, length, task)), way, task, length) for length in found.lengths]
        for task in (*found.tasks, None)
    ]
    return heat_map([*found.tasks, "all"], [f"{length:,}" for length in found.lengths], cells)


def _cell(score: Score | None, way: str, task: str | None, length: int) -> Cell:
    if score is None:
        return Cell(None)
    told = (
        f"{way}, {task or 'all tasks'}, {length:,} tokens: {score.mean:.1f}, 95% interval {score.low:.1f} to {score.high:.1f}, "
    )
    told += f"{score.answers} answers, {score.keys:,.0f} keys read ({score.share:.1%})"
    if score.loss is not None and score.p is not None:
        told += f"; loss {score.loss:+.1f}, p = {score.p:.3g}"
    return Cell(score.mean / 100, f"{score.mean:.0f}", "" if score.loss is None else loss(score), told)


def _points(found: Results, template: str, way: str) -> list[Point]:
    points = []
    for number, length in enumerate(found.lengths):
        score = found.score(Place(template, way, length, None))
        if score is not None and score.loss is not None and score.p is not None and score.share > 0:
            told = f"{way}, {length:,} tokens: loss {score.loss:+.1f} (p = {score.p:.3g}), {score.keys:,.0f} keys read"
            points.append(Point(score.share, score.loss, 4 + 1.5 * number, told))
    return points


def _needles(found: Results) -> list[str]:
    if not found.heads:
        return []
    said = (
        "Of the steps of an answer, the share in which a head opened a cell with a token of a needle that was asked for; and in "
        "which it gave such tokens at least a fifth of its weights. A column is a layer, a row a head; heads that share keys "
        "open cells together. Single needles, several, and chains of variables are counted alike."
    )
    parts = [f"<h2>Which heads opened the needle</h2><p>{said}</p>"]
    parts.append('<div class="row">')
    for heads in found.heads:
        for name, shares in (("opened it", heads.opened), ("looked at it", heads.looked)):
            title = f"<h3>{escape(heads.way)}: {name}</h3>"
            counted = f'<p class="soft">{heads.answers:,} answers, {heads.steps:,} steps; {_best(heads, shares)}</p>'
            parts.append(f'<div class="card">{title}{counted}{_by_head(heads, shares, name)}</div>')
    parts.append("</div>")
    return parts


def _best(heads: Heads, shares: list[list[float]]) -> str:
    share, layer, head = max((share, layer, head) for layer, line in enumerate(shares) for head, share in enumerate(line))
    return f"most: layer {heads.layers[layer]}, head {head}, {share:.0%}"


def _by_head(heads: Heads, shares: list[list[float]], name: str) -> str:
    count = max(map(len, shares))
    cells = [
        [
            Cell(line[head], told=f"layer {layer}, head {head}: {name} in {line[head]:.1%} of the steps")
            for layer, line in zip(heads.layers, shares, strict=True)
        ]
        for head in range(count)
    ]
    across = [str(layer) if layer % 4 == 0 or len(heads.layers) < 8 else "" for layer in heads.layers]
    down = [str(head) if head % 4 == 0 or count < 8 else "" for head in range(count)]
    return heat_map(down, across, cells, wide=max(6, min(18, 500 // len(heads.layers))), high=16)
