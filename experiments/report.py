"""The report: one page from whatever results are in a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from experiments import look, page
from experiments.catalogue import EXPERIMENTS
from experiments.settings import place
from experiments.store import read, say_again

LEAD = (
    "The experiments of “kNN Attention Demystified: A Theoretical Exploration for Scalable Transformers”, run again with the "
    "methods of `nearfield`: what the paper says, what was measured, and why they differ where they do. Verdicts and numbers "
    "are computed from the saved results."
)


def build(results: Path, out: Path) -> Path:
    """Write the page about the experiments whose results are complete; figures are drawn, and findings said, anew.

    Where there are results of two devices, those of the second are told apart, and their claims, which are the same, are not
    counted again.
    """
    sections, contents, verdicts, missing = [], [], Counter[str](), []
    for name, experiment in EXPERIMENTS.items():
        found = {device: place(results, device) for device in experiment.devices}
        found = {device: folder for device, folder in found.items() if _is_complete(folder / f"{name}.json")}
        if not found:
            missing.append(name)
        for number, (device, folder) in enumerate(found.items()):
            saved = read(folder / f"{name}.json")
            rows = [row for unit in saved["units"].values() for row in unit["rows"]]
            look.save(experiment.draw(rows), folder / "figures")
            told = experiment.tell(rows)
            say_again(folder / f"{name}.json", saved, told.findings)
            mark = device if number else ""
            if not mark:
                verdicts.update(finding.verdict for finding in told.findings)
            sections.append(page.section(experiment, told, saved, folder / "figures", mark))
            contents.append((page.anchor(name, mark), experiment.title + (f", {page.ON[mark]}" if mark else "")))
    if not sections:
        raise ValueError(
            f"there are no complete results in {results}; run `python -m experiments all` first (add --quick for small sizes)"
        )
    tally = "".join(
        f'<span class="{verdict}">{verdicts[verdict]} {label}</span>'
        for verdict, label in page.VERDICTS.items()
        if verdicts[verdict]
    )
    lead = f'<p class="lead">{page.text(LEAD)}</p><div class="tally">{tally}</div>'
    if missing:
        lead += f'<p class="measured">Not run, or not to the end: {", ".join(missing)}.</p>'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.page("The paper's experiments, run again", lead, sections, contents))
    return out


def _is_complete(path: Path) -> bool:
    return path.exists() and bool(read(path)["complete"])
