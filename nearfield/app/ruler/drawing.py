"""Pictures for a page, as SVG in plain text: heat maps, and points that lines join."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SEQUENCE = ((247, 243, 233), (190, 216, 190), (98, 171, 158), (38, 116, 130), (20, 62, 92))
"""From nothing to all, also for eyes that see no red or green."""

COLOURS = ("#c2410c", "#1d6fb8", "#15803d", "#7c3aed", "#be185d", "#a16207", "#0e7490", "#57534e")
"""Of ways; they come again after the last."""

EMPTY = "#8882"


def shade(value: float) -> str:
    """The colour of a value from 0 to 1."""
    return "#{:02x}{:02x}{:02x}".format(*_mixed(value))


def ink(value: float) -> str:
    """A colour for text on `shade(value)`."""
    red, green, blue = _mixed(value)
    return "#1c1917" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _mixed(value: float) -> tuple[int, int, int]:
    at = min(1.0, max(0.0, value)) * (len(SEQUENCE) - 1)
    first = min(int(at), len(SEQUENCE) - 2)
    red, green, blue = (round(a + (at - first) * (b - a)) for a, b in zip(SEQUENCE[first], SEQUENCE[first + 1], strict=True))
    return red, green, blue


@dataclass(frozen=True)
class Cell:
    """One field of a heat map."""

    value: float | None
    """from 0 to 1; None: nothing was measured"""
    text: str = ""
    below: str = ""
    """smaller"""
    told: str = ""
    """when pointed at"""


def heat_map(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]], wide: int = 74, high: int = 30) -> str:
    """Rows of cells with names on the left and above. A name that is empty takes no room."""
    left = 8 + max((round(7.2 * len(name)) for name in rows), default=0)
    top = 22 if any(columns) else 4
    parts = [
        f'<text x="{left + wide * (i + 0.5):.1f}" y="15" text-anchor="middle" class="label">{escape(name)}</text>'
        for i, name in enumerate(columns)
        if name
    ]
    for j, (name, line) in enumerate(zip(rows, cells, strict=True)):
        y = top + high * j
        if name:
            parts.append(f'<text x="{left - 8}" y="{y + high / 2 + 4:.1f}" text-anchor="end" class="label">{escape(name)}</text>')
        parts += [_field(left + wide * i, y, wide, high, cell) for i, cell in enumerate(line)]
    width, height = left + wide * len(columns) + 2, top + high * len(rows) + 2
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'


def _field(x: float, y: float, wide: int, high: int, cell: Cell) -> str:
    fill = EMPTY if cell.value is None else shade(cell.value)
    gap = 1 if wide > 20 else 0.5
    told, corner = f"<title>{escape(cell.told)}</title>" if cell.told else "", 2 if wide > 20 else 0
    box = f'<rect x="{x}" y="{y}" width="{wide - gap}" height="{high - gap}" rx="{corner}" fill="{fill}">{told}</rect>'
    if cell.value is None or not cell.text:
        return box
    colour, middle = ink(cell.value), x + wide / 2
    at = y + high / 2 + (4 if not cell.below else -1)
    look = f'x="{middle:.1f}" text-anchor="middle" fill="{colour}"'
    text = f'<text {look} y="{at:.1f}" class="score">{escape(cell.text)}</text>'
    if cell.below:
        text += f'<text {look} y="{at + 11:.1f}" class="small">{escape(cell.below)}</text>'
    return box + text


@dataclass(frozen=True)
class Point:
    x: float
    """a share, above 0"""
    y: float
    size: float
    told: str


def joined_points(lines: Sequence[tuple[str, Sequence[Point]]], x_name: str, y_name: str) -> str:
    """Points of several lines over a logarithmic axis of shares, each line in a colour of its own, and what they are called."""
    width, left, right, top, bottom = 720, 56, 150, 16, 46
    height = max(340, top + bottom + 20 * len(lines))  # so that all names are seen
    every = [point for _, points in lines for point in points]
    low_x = 10 ** math.floor(math.log10(min((point.x for point in every), default=0.01)) + 1e-9)
    low_x = min(low_x, 0.1)
    low_y, high_y = min((0.0, *(p.y for p in every))), max((1.0, *(p.y for p in every)))
    room = 0.08 * (high_y - low_y)
    low_y, high_y = low_y - room, high_y + room

    def across(x: float) -> float:
        return left + (width - left - right) * math.log(x / low_x) / math.log(1 / low_x)

    def up(y: float) -> float:
        return height - bottom - (height - top - bottom) * (y - low_y) / (high_y - low_y)

    parts = []
    share = low_x
    while share <= 1.0001:
        for tick in (share, 2 * share, 5 * share):
            if tick <= 1.0001:
                x = across(tick)
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" class="grid"/>')
                parts.append(
                    f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle" class="small">{100 * tick:g}%</text>'
                )
        share *= 10
    for y in ticks(low_y, high_y):
        kind = "zero" if y == 0 else "grid"
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{up(y):.1f}" y2="{up(y):.1f}" class="{kind}"/>')
        parts.append(f'<text x="{left - 6}" y="{up(y) + 4:.1f}" text-anchor="end" class="small">{y:g}</text>')
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(point.x):.1f},{up(point.y):.1f}" for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.6"/>')
        for point in points:
            told = f"<title>{escape(point.told)}</title>"
            parts.append(
                f'<circle cx="{across(point.x):.1f}" cy="{up(point.y):.1f}" r="{point.size:.1f}" fill="{colour}">{told}</circle>'
            )
        at = top + 14 + 20 * number
        parts.append(f'<circle cx="{width - right + 18}" cy="{at - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{width - right + 30}" y="{at}" class="label">{escape(name)}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle" class="label">{escape(x_name)}</text>')
    turned = f'transform="translate(14 {(top + height - bottom) / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle" class="label">{escape(y_name)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two others, about five."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
