"""Sections as HTML. Everything is in the one file: style, figures, tables."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment, Finding, Section, Table

STYLE = (Path(__file__).parent / "page.css").read_text()
VERDICTS = {
    "confirmed": "confirmed",
    "refuted": "refuted",
    "partly": "partly",
    "untested": "untested",
    "beyond": "beyond the paper",
}
ON = {"cpu": "on a CPU", "cuda": "on a GPU"}


def page(title: str, lead: str, sections: Sequence[str], contents: Sequence[tuple[str, str]]) -> str:
    links = "".join(f'<a href="#{name}">{text(label)}</a>' for name, label in contents)
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{text(title)}</title>\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<header><h1>{text(title)}</h1>{lead}<nav>{links}</nav></header>\n"
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def anchor(name: str, mark: str) -> str:
    return f"{name}-{mark}" if mark else name


def section(experiment: Experiment, told: Section, saved: dict[str, Any], figures: Path, mark: str = "") -> str:
    """One experiment: what the paper says, what was done here, findings, figures, tables, where it was measured.

    `mark`: the device, in a second section about the same experiment.
    """
    where = f", {ON[mark]}" if mark else ""
    parts = [f'<section id="{anchor(experiment.name, mark)}"><h2>{text(experiment.title)}{where}</h2>']
    parts.append(f'<div class="pair"><div><h3>The paper</h3><p>{text(told.paper)}</p></div>')
    parts.append(f"<div><h3>Here</h3><p>{text(told.here)}</p></div></div>")
    parts += [finding(found) for found in told.findings]
    parts += [figure(figures / f"{name}.svg", caption, mark) for name, caption in told.captions.items()]
    parts += [table(found) for found in told.tables]
    parts += [f'<p class="note">{text(note)}</p>' for note in told.notes]
    parts.append(measured(experiment.name, saved))
    return "\n".join(parts) + "</section>"


def finding(found: Finding) -> str:
    why = f'<p class="why">{text(found.why)}</p>' if found.why else ""
    return (
        f'<article class="{found.verdict}"><span class="verdict">{VERDICTS[found.verdict]}</span>'
        f'<p class="claim">{text(found.claim)}</p><p>{text(found.evidence)}</p>{why}</article>'
    )


def figure(path: Path, caption: str, mark: str = "") -> str:
    drawn = path.read_text()
    drawn = drawn[drawn.index("<svg") :]
    # Ids are per file in SVG and per page in HTML.
    drawn = re.sub(r'(id="|href="#|url\(#)', lambda found: f"{found[1]}{anchor(path.stem, mark)}-", drawn)
    drawn = re.sub(
        r'(<svg[^>]*?) width="[^"]*pt"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", drawn, count=1), count=1
    )
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r' xmlns(:xlink)?="[^"]*"', "", drawn).replace("xlink:href", "href")
    return (
        f'<figure role="img" aria-label="{html.escape(caption[:120])}">{drawn}<figcaption>{text(caption)}</figcaption></figure>'
    )


def table(found: Table) -> str:
    head = "".join(f"<th>{text(cell)}</th>" for cell in found.head)
    body = "".join("<tr>" + "".join(f"<td>{entry(cell)}</td>" for cell in line) + "</tr>" for line in found.body)
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details open><summary>{text(found.title)}</summary><div class="wide">{inside}</div></details>'


def entry(words: str) -> str:
    """What a cell of a table holds: marked up, unless it has several lines, which are shown as they are."""
    if "\n" not in words:
        return text(words)
    return f"<pre>{html.escape(words, quote=False)}</pre>"


def measured(name: str, saved: dict[str, Any]) -> str:
    where = []
    for place in saved["environments"]:
        gpu = f", {place['gpu']}" if place.get("gpu") else ""
        where.append(
            f"{place['processor']}, {place['threads']} of {place['cpus']} threads{gpu}, torch {place['torch']}, "
            f"nearfield {place['nearfield']}, {place['date'][:10]}"
        )
    spent = sum(unit["seconds"] for unit in saved["units"].values())
    size = " small sizes (--quick);" if saved["quick"] else ""
    return (
        f'<p class="measured">{name}.json:{size} seed {saved["seed"]}, {len(saved["units"])} units of work in {spent:,.0f} s; '
        f"{text('; '.join(where))}.</p>"
    )


def text(words: str) -> str:
    """Escaped, with `code`, ^{superscripts} and _{subscripts}."""
    words = html.escape(words, quote=False)
    words = re.sub(r"`([^`]*)`", r"<code>\1</code>", words)
    words = re.sub(r"\^\{([^}]*)\}", r"<sup>\1</sup>", words)
    return re.sub(r"_\{([^}]*)\}", r"<sub>\1</sub>", words)
