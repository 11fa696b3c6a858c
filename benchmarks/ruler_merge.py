"""Answers to RULER that several runs have given, such as one for each half of the tasks on one GPU, as those of one run.

nearfield ruler MODEL --tasks niah_single_1,vt --out A
nearfield ruler MODEL --tasks qa_1,qa_2 --out B
python benchmarks/ruler_merge.py BOTH A B     # writes BOTH/answers.jsonl, BOTH/ruler.json and BOTH/ruler.html

The runs must be of the same model, seed and kind of device; the environment is that of the first. Where two of them have answered
the same prompt in the same way, the answer of the first counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nearfield.app.ruler.command import WRITTEN, save
from nearfield.app.ruler.record import Key, Record
from nearfield.app.ruler.ways import WAYS


def merge(folder: Path, runs: list[Path]) -> Record:
    """A record in `folder` with all answers of these runs. Raises ValueError where they do not belong together."""
    path = folder / "answers.jsonl"
    if path.exists():
        raise ValueError(f"{path} is there already; name another folder, or remove it")
    digests = {way.name: way.digest for way in WAYS.values()}
    first = json.loads((runs[0] / "answers.jsonl").open().readline())
    about = {name: value for name, value in first.items() if name != "format"}
    read = [Record(run / "answers.jsonl", about, digests) for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    made = Record(path, about, digests)
    for one in read:
        for key, answer in one.answers.items():
            if key not in made.answers:
                made.add(key, {name: value for name, value in answer.items() if name not in Key._fields})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what to write")
    parser.add_argument("runs", type=Path, nargs="+", help="folders that `nearfield ruler` has written")
    options = parser.parse_args()
    made = merge(options.folder, options.runs)
    told = json.loads((options.runs[0] / WRITTEN[0]).read_text())
    about = {name: told[name] for name in ("environment", *(x for x in made.about if x != "format"), "ways")}
    save(made, about)
    print(f"{len(made.answers):,} answers of {len(options.runs)} runs are in {options.folder}")


if __name__ == "__main__":
    main()
