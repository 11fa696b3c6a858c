"""Answers to RULER that several runs have given, such as one for each half of the tasks on one GPU, as those of one run.

nearfield ruler MODEL --tasks niah_single_1,vt --out A
nearfield ruler MODEL --tasks qa_1,qa_2 --out B
python benchmarks/ruler_merge.py BOTH A B     # writes BOTH/answers.jsonl, BOTH/ruler.json and BOTH/ruler.html

The runs must be of the same model, seed and GPU, and of one version of the record; the environment is that of the first. Where
two of them have answered the same prompt in the same way, the answer of the first counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nearfield.app.ruler.command import WRITTEN, save
from nearfield.app.ruler.record import Key, Record
from nearfield.app.ruler.ways import WAYS

ANSWERS = "answers.jsonl"


def merge(folder: Path, runs: list[Path]) -> Record:
    """A record in `folder` with all answers of these runs. Raises ValueError where they do not belong together."""
    path = folder / ANSWERS
    if path.exists():
        raise ValueError(f"{path} is there already; name another folder, or remove it")
    for run in runs:
        if not (run / ANSWERS).exists():
            raise ValueError(f"{run / ANSWERS} does not exist; name folders that `nearfield ruler` has written")
    cards = {told(run)["environment"].get("gpu") for run in runs if (run / WRITTEN[0]).exists()}
    if len(cards) > 1:
        raise ValueError(f"these runs are of several kinds of GPU ({', '.join(sorted(map(str, cards)))}); keep them apart")
    with (runs[0] / ANSWERS).open() as file:
        about = {name: value for name, value in json.loads(file.readline()).items() if name != "format"}
    digests = {way.name: way.digest for way in WAYS.values()}
    read = [_answers(run, about, digests) for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    made = Record(path, about, digests)
    for answers in read:
        for key, answer in answers.items():
            if key not in made.answers:
                made.add(key, {name: value for name, value in answer.items() if name not in Key._fields})
    return made


def told(run: Path) -> dict[str, Any]:
    """What a run has written about itself."""
    found: dict[str, Any] = json.loads((run / WRITTEN[0]).read_text())
    return found


def _answers(run: Path, about: dict[str, Any], digests: dict[str, str]) -> dict[Key, dict[str, Any]]:
    """Those of a run, which may still go on: a record mends its file, so a copy is read."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copy(run / ANSWERS, place))
        found = Record(copy, about, digests)
    if found.unreadable:
        print(f"{run / ANSWERS}: {found.unreadable} damaged answers are left out")
    return found.answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what to write")
    parser.add_argument("runs", type=Path, nargs="+", help="folders that `nearfield ruler` has written")
    options = parser.parse_args()
    try:
        made = merge(options.folder, options.runs)
    except ValueError as error:
        parser.error(str(error))
    first = told(options.runs[0])
    about = {name: first[name] for name in ("environment", *(x for x in made.about if x != "format"), "ways")}
    save(made, about)
    print(f"{len(made.answers):,} answers of {len(options.runs)} runs are in {options.folder}")


if __name__ == "__main__":
    main()
