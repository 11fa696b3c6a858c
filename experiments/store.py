"""Results on disk: one JSON file per experiment, written anew after every unit of work: an interrupt loses one at most."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.corpus import Corpus, named
from experiments.experiment import Done, Finding, Rows
from experiments.settings import Settings
from nearfield.app.environment import environment


class Store(Mapping[str, Rows]):
    """The rows of the units that are done, by key, and the file that holds them."""

    def __init__(self, name: str, settings: Settings, fresh: bool = False) -> None:
        self.path = settings.folder / f"{name}.json"
        self._content: dict[str, Any] = {
            "experiment": name,
            **settings.identity(),
            "complete": False,
            "environments": [],
            "findings": [],
            "units": {},
        }
        self._device = settings.device
        if self.path.exists() and not fresh:
            self._resume(read(self.path))

    def _resume(self, saved: dict[str, Any]) -> None:
        for name in ("experiment", "quick", "seed", "device"):
            if saved.get(name) != self._content[name]:
                raise ValueError(
                    f"{self.path} holds results with {name}={saved.get(name)!r}, and this run has "
                    f"{name}={self._content[name]!r}; "
                    "use --out for another folder, or --fresh to start over"
                )
        self._content = saved

    def __getitem__(self, key: str) -> Rows:
        return self._content["units"][key]["rows"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content["units"])

    def __len__(self) -> int:
        return len(self._content["units"])

    def digest(self, key: str) -> str:
        """Of the sizes that a unit was measured with; nothing where it has none."""
        return self._content["units"][key].get("digest", "")

    def check_text(self, corpus: Corpus) -> None:
        """Refuse to go on where saved rows are about another text: measuring them again would overwrite them."""
        for row in all_rows(self):
            if row.get("sha256", corpus.sha256) != corpus.sha256:
                other = named(row.get("corpus", "another text"), row["sha256"])
                raise ValueError(
                    f"{self.path} holds results about {other}, and this run reads {corpus}; "
                    "name the first with --text, use --out for another folder, or --fresh to start over"
                )

    def save(self, key: str, rows: Rows, seconds: float, digest: str = "") -> None:
        """Keep the rows of one unit, with the environment and the digest of the sizes they were measured with."""
        here = environment(self._device)
        known: list[dict[str, Any]] = self._content["environments"]
        number = next((i for i, other in enumerate(known) if _same(here, other)), len(known))
        known[number : number + 1] = [here]  # new, or with today's date
        made = {"digest": digest} if digest else {}
        unit = {"environment": number, "seconds": round(seconds, 3), **made, "rows": plain(rows)}
        self._content["units"][key] = unit
        self._content["complete"] = False
        self._write()

    def finish(self, keys: Sequence[str], findings: Sequence[Finding]) -> None:
        """Every unit that is told is there: put them in this order, and drop the others, which are of an older plan, with the
        environments that nothing else was measured in."""
        units = {key: self._content["units"][key] for key in keys}
        used = sorted({unit["environment"] for unit in units.values()})
        places = [self._content["environments"][number] for number in used]
        units = {key: {**unit, "environment": used.index(unit["environment"])} for key, unit in units.items()}
        finished = {**self._content, "environments": places, "units": units, "findings": _plain(findings), "complete": True}
        if finished != self._content:
            self._content = finished
            self._write()

    def _write(self) -> None:
        write(self.path, self._content)


def say_again(path: Path, saved: dict[str, Any], findings: Sequence[Finding]) -> None:
    """Let a file say what is said about its rows today."""
    if saved["findings"] != _plain(findings):
        write(path, {**saved, "findings": _plain(findings)})


def write(path: Path, content: dict[str, Any]) -> None:
    """At once: whoever reads finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".json.part")
    beside.write_text(_json(content))
    os.replace(beside, path)


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it, or use --fresh to start over") from None


def all_rows(done: Done) -> Rows:
    return [row for key in done for row in done[key]]


def plain(x: Any) -> Any:
    """Numbers that JSON knows, to six digits: more are noise in every result here. Not finite becomes null."""
    if isinstance(x, bool) or x is None or isinstance(x, str | int):
        return x
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    raise TypeError(f"results hold numbers, words, lists and dicts; got {type(x).__name__}")


def _plain(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def _json(content: dict[str, Any]) -> str:
    """One line per row: a diff shows what changed, and the file stays small."""
    units = content["units"]
    head = json.dumps({name: value for name, value in content.items() if name != "units"}, indent=1)
    lines = []
    for key, unit in units.items():
        rows = ",\n    ".join(json.dumps(row) for row in unit["rows"])
        about = json.dumps({name: value for name, value in unit.items() if name != "rows"})[:-1]
        lines.append(f'  {json.dumps(key)}: {about}, "rows": [\n    {rows}]}}')
    body = ",\n".join(lines)
    return f'{head[:-2]},\n "units": {{\n{body}\n }}\n}}\n'


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two environments differ in nothing but the date."""
    return {**one, "date": ""} == {**other, "date": ""}
