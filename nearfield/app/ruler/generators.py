"""The official generators of RULER, asked for prompts: they run in a process of their own (see `worker`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from nearfield.app.ruler.official import Task, check_packages

PATIENCE = 180.0
"""Seconds without a word that a generator may take to load its data, which takes a few."""

SAMPLE_PATIENCE = 20.0
"""Seconds without a word that it may take for a sample, which is a matter of milliseconds; else it is trying for ever."""


class NeverFits(ValueError):
    """A generator made prompt after prompt, all of them too long."""


class Generators:
    """For one tokenizer. A context: the process ends with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._work: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._told: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        if self._work is not None:
            self._work.cleanup()

    def make(
        self, task: Task, length: int, samples: int, seed: int, told: Callable[[int], None] | None = None
    ) -> list[dict[str, Any]]:
        """The first samples of a task whose prompts and answers have up to `length` tokens: `input` and `outputs` of each.

        `told` hears the number of each sample that is begun. Raises ValueError if no prompt can be so short.
        """
        process = self._started()
        assert self._work is not None
        assert process.stdin is not None
        name = f"{task.name}-{length}"
        options = {
            "save_dir": self._work.name,
            "save_name": name,
            "tokenizer_path": "none",
            "tokenizer_type": "hf",
            "max_seq_length": length,
            "tokens_to_generate": task.tokens,
            "num_samples": samples,
            "random_seed": seed,
            "template": task.template + task.answer_prefix,
            **dict(task.arguments),
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        try:
            process.stdin.write(json.dumps({"script": str(task.script), "arguments": arguments}) + "\n")
            process.stdin.flush()
            self._wait(task, length, told)
        except BaseException:
            self._stop()
            raise
        written = Path(self._work.name) / name / "validation.jsonl"
        lines = written.read_text(encoding="utf-8").splitlines()
        written.unlink()
        return [json.loads(line) for line in lines]

    def _wait(self, task: Task, length: int, told: Callable[[int], None] | None) -> None:
        too_short = f"no prompt of {task.name} fits into {length:,} tokens; give larger --lengths, or --tasks without it"
        patience = PATIENCE
        while True:
            try:
                found = self._told.get(timeout=patience)
            except Empty:
                raise ValueError(too_short) from None
            if found is None:
                raise ValueError(f"the generator of {task.name} has ended without a word; is there enough memory?")
            if "too_short" in found:
                raise NeverFits(too_short)
            if "error" in found:
                kind = OSError if found["full"] else ValueError
                raise kind(f"the generator of {task.name} failed at {length:,} tokens ({found['error']})")
            if "sample" in found:
                patience = SAMPLE_PATIENCE
                if told is not None:
                    told(found["sample"])
            if "done" in found:
                return

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        check_packages("scipy")
        if self._work is None:
            self._work = tempfile.TemporaryDirectory()
            self._tokenizer.save_pretrained(Path(self._work.name) / "tokenizer")
        command = [sys.executable, "-m", "nearfield.app.ruler.worker", str(Path(self._work.name) / "tokenizer")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self._told = SimpleQueue()
        threading.Thread(target=_hear, args=(self._process, self._told), daemon=True).start()
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def _hear(process: subprocess.Popen[str], told: SimpleQueue[dict[str, Any] | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            told.put(json.loads(line))
    except ValueError:
        pass  # killed in the middle of a line, or the pipe was closed
    told.put(None)
