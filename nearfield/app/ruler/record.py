"""Answers on disk, one line of JSON each, written as soon as there is one: whatever ends a run, nothing measured is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAME = "nearfield-ruler"
FORMAT = f"{NAME} 4"


class Key(NamedTuple):
    """Which answer."""

    template: str
    length: int
    task: str
    sample: int
    way: str


class Record:
    """The answers of one model, on one kind of device, to prompts by one seed.

    A line that was cut off, by a full disk or a crash, is removed when the file is opened again, and one that cannot be read is
    left out: these answers are written anew.

    Args:
        path: the file. Its first line is `about`, and a file that begins otherwise is refused.
        ways: digests of ways by their names. A file with answers by a way of one of these names and another digest is refused,
            too: nobody could tell them from those that are to come.
    """

    def __init__(self, path: Path, about: dict[str, Any], ways: Mapping[str, str] | None = None) -> None:
        self.path, self.about, self.ways = path, {"format": FORMAT, **about}, ways or {}
        self.answers: dict[Key, dict[str, Any]] = {}
        self.unreadable = 0
        if path.exists() and path.stat().st_size:
            self._load()
        if not path.exists() or not path.stat().st_size:
            self._append(self.about)

    def _load(self) -> None:
        whole = self.path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        lines = whole[:kept].splitlines()
        if lines:
            self._check(lines[0])
        for line in lines[1:]:
            try:
                found = json.loads(line)
                self.answers[Key(**{name: found[name] for name in Key._fields})] = found
            except (ValueError, KeyError, TypeError):
                self.unreadable += 1
        self._check_ways()
        if kept < len(whole):
            self.unreadable += bool(lines)
            os.truncate(self.path, kept)

    def _check(self, line: bytes) -> None:
        try:
            known = json.loads(line)
        except ValueError:
            known = {}
        made = known.get("format") if isinstance(known, dict) else None
        if not isinstance(made, str) or made.rpartition(" ")[0] != NAME:
            raise ValueError(f"{self.path} is no record of answers to RULER; remove it, or name another folder with --out")
        if made != FORMAT:
            raise ValueError(
                f"{self.path} has answers of another version of nearfield ({made[:40]}, not {FORMAT}), which may attend "
                "otherwise; name another folder with --out, or remove it"
            )
        other = [name for name in {**self.about, **known} if known.get(name) != self.about.get(name)]
        if other:
            told = ", ".join(f"{name} {str(known.get(name))[:40]}, not {str(self.about.get(name))[:40]}" for name in other)
            raise ValueError(f"{self.path} has answers of another run ({told}); name another folder with --out, or remove it")

    def _check_ways(self) -> None:
        other = {key.way for key, found in self.answers.items() if found.get("way_sha256") != self.ways.get(key.way)}
        changed = sorted(other & set(self.ways))
        if changed:
            raise ValueError(
                f"{self.path} has answers of other ways with the names {', '.join(changed)}; name another folder with --out, or "
                "remove it"
            )

    def add(self, key: Key, found: dict[str, Any]) -> None:
        """Write an answer. It is on disk when this returns."""
        entry = {**key._asdict(), **found}
        self._append(entry)
        self.answers[key] = entry

    def _append(self, entry: dict[str, Any]) -> None:
        line, before = json.dumps(entry).encode() + b"\n", 0
        try:
            with self.path.open("ab", buffering=0) as file:
                before = file.tell()
                if file.write(line) != len(line):
                    raise OSError(28, "No space left on device")
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.exists() and self.path.stat().st_size > before:
                os.truncate(self.path, before)
            raise OSError(
                f"{self.path} cannot be written ({error.strerror}); the {len(self.answers):,} answers in it are kept: free some "
                "space, and the same command goes on from there"
            ) from error
