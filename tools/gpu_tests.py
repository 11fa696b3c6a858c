"""The GPU tests, several processes side by side: nearly all of their time is Triton compiling, one core per process.

make test-gpu                          # or, without the virtual environment:
python tools/gpu_tests.py --jobs 8     # options after -- go to pytest: ... -- -k decode
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5
"""pytest's exit status when a part has no tests"""


def run_parts(marked: str, parts: int, options: list[str], until: float) -> tuple[int, int]:
    """Runs the tests with such marks, each part in a process of its own. Returns how many passed, and how many failed.

    Parts that still run at the time `until` are stopped, tell what they have done, and count as failed.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pytest = [sys.executable, "-m", "pytest", "-m", marked, "-q", "-p", "no:cacheprovider", "--durations=5"]
    pytest += ["-o", "faulthandler_timeout=240"]
    running = [
        subprocess.Popen(
            [*pytest, f"--shard={number}/{parts}", *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(1, parts + 1)
    ]
    passed = failed = 0
    for number, process in enumerate(running, 1):
        try:
            output, _ = process.communicate(timeout=max(0.0, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output = _rest_of(process)
        last = output.strip().splitlines()[-1] if output.strip() else ""
        count = {word: int(amount) for amount, word in re.findall(r"(\d+) (passed|failed|error)", last)}
        passed += count.get("passed", 0)
        failed += count.get("failed", 0) + count.get("error", 0)
        print(f"{marked}, part {number}: {last}", flush=True)
        if process.returncode not in (0, NO_TESTS):
            failed += not (count.get("failed") or count.get("error"))  # stopped, or it did not get as far as its tests
            print(output, flush=True)
    return passed, failed


def _rest_of(process: subprocess.Popen[str]) -> str:
    """What a process that was told to stop still says; one that hangs in a driver is killed."""
    try:
        return process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which tests that still run are stopped")
    parser.add_argument("options", nargs="*", help="for pytest")
    arguments = parser.parse_args()
    start = time.perf_counter()
    passed, failed = run_parts("gpu and not alone", arguments.jobs, arguments.options, start + arguments.limit)
    # What is timed wants the card and all cores for itself.
    more = run_parts("gpu and alone", 1, arguments.options, start + arguments.limit)
    passed, failed = passed + more[0], failed + more[1]
    print(f"{time.perf_counter() - start:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
