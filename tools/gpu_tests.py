"""The GPU tests, several processes side by side: nearly all of their time is Triton compiling, one core per process.

make test-gpu                          # or, without the virtual environment:
python tools/gpu_tests.py --jobs 8     # options after -- go to pytest: ... -- -k decode
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5
"""pytest's exit status when a part has no tests"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes")
    parser.add_argument("options", nargs="*", help="for pytest")
    arguments = parser.parse_args()
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = []
    for number in range(1, arguments.jobs + 1):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=5",
            "-o",
            "faulthandler_timeout=240",
        ]
        command += [f"--shard={number}/{arguments.jobs}", *arguments.options]
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    passed = failed = 0
    for number, process in enumerate(running, 1):
        output, _ = process.communicate()
        last = output.strip().splitlines()[-1] if output.strip() else ""
        count = {word: int(amount) for amount, word in re.findall(r"(\d+) (passed|failed|error)", last)}
        passed += count.get("passed", 0)
        failed += count.get("failed", 0) + count.get("error", 0)
        print(f"part {number}: {last}", flush=True)
        if process.returncode not in (0, NO_TESTS):
            failed += not count  # a part that did not get as far as its tests
            print(output, flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
