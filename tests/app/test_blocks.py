"""Block sizes for a card: what is compiled and timed, in which passes, and what becomes of the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton")

from nearfield import _compat, crossover
from nearfield.app import calibrate
from nearfield.app.blocks import compilers, passes, report
from nearfield.app.blocks.compilers import Compilers, Job
from nearfield.app.blocks.find import DIMS, find
from nearfield.app.blocks.passes import Pass, Setting, launches_of, other_passes, setting_of
from nearfield.app.blocks.search import Found, Place
from nearfield.app.blocks.times import Timer
from nearfield.app.cli import app
from nearfield.app.deadline import Deadline
from nearfield.cells.triton import candidates, measured, tuning
from nearfield.cells.triton.candidates import KERNELS
from nearfield.cells.triton.tiles import TileSizes
from nearfield.kernels import backends, cards, launch

HALF = torch.bfloat16
CARD = torch.device("cuda", 0)
NAME = "NVIDIA H200"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path))
    monkeypatch.delenv(cards.SWITCH, raising=False)
    tuning.forget()
    crossover.forget()
    yield tmp_path
    monkeypatch.undo()
    tuning.forget()
    crossover.forget()
    cards.class_of.cache_clear()


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, as far as names go."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    cards.class_of.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_launched_where_it_is_compiled_and_timed(kernel: str) -> None:
    """With the sizes that are tried, in the passes of its setting and in others; with and without a mask, with many probes."""
    tried = candidates.by_promise(kernel, "half", 64, tuning.blocks_for(kernel, 64, HALF, torch.device("cpu"), 128))[0]
    tried = tried._replace(warps=8, stages=4)
    own, others = setting_of(kernel, HALF, 64, 128).passes(4096), other_passes(kernel, "half", 64)
    with tuning.trying(kernel, tried):
        for one in (*own, *others):
            found = [x for x in launches_of(one) if x.kernel.__name__ == f"_{kernel}"]
            assert found
            assert {x.options["num_warps"] for x in found} == {8}
            assert {x.options["num_stages"] for x in found} == {4}
            assert one.backward == (kernel in candidates.BACKWARD)
            assert (one.sizes.share > 1) == (kernel in candidates.TOGETHER)
    assert {one.dtype for one in others} == {torch.bfloat16, torch.float16}
    assert {one.dtype for one in other_passes(kernel, "float32", 64)} == {torch.float32}
    assert {one.sizes.segment > 0 for one in others} == {True, False}
    assert {one.sizes.probes > 16 for one in others} == {True, False}
    assert {one.sizes.segment > 0 for one in own} == ({True} if kernel in candidates.BACKWARD else {True, False})
    assert all((one.dim, one.length, one.dtype) == (64, 4096, HALF) for one in own)


@pytest.mark.parametrize("kernel", ["near_fwd", "attend", "local_dkv"])
def test_what_is_launched_follows_from_shapes_alone(kernel: str) -> None:
    """Tensors without memory launch what others do, with the same numbers: what is compiled so is what will be run."""
    for one in setting_of(kernel, HALF, 64, 64).passes(4096):
        notes = passes._Notes()
        with launch.recording(notes):
            passes.ready(one, torch.device("cpu"))()
        assert {x.key() for x in launches_of(one)} == {x.key() for x in notes.launched}


class Warm:
    """Takes the place of a compiler: notes what it is asked for, and fails as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error = error
        warm = self

        def warmup(jitted: Any, *arguments: Any, grid: Any, **options: Any) -> None:
            assert not any(isinstance(x, torch.Tensor) for x in arguments)
            warm.asked.append((jitted.fn.__name__, options))
            if warm.error is not None:
                raise warm.error

        monkeypatch.setattr(type(launch.Kernel(_nothing).jitted), "warmup", warmup, raising=False)


def _nothing(x: Any) -> None:
    pass


def job(tried: TileSizes | None = None, **changes: Any) -> Job:
    """To compile `near_dq`, or all kernels of its passes."""
    blocks = tuning.all_blocks(64, HALF, torch.device("cpu"), 128) | ({} if tried is None else {"near_dq": tried})
    return Job(tuple((one, blocks) for one in setting_of("near_dq", HALF, 64, 128).passes(4096)))._replace(**changes)


def test_one_kernel_is_compiled_with_the_sizes_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm(monkeypatch)
    assert compilers.compile_kernels(job(TileSizes(32, 8, 4, 128), kernel="near_dq"))
    assert {name for name, _ in warm.asked} == {"_near_dq"}
    assert all((options["num_warps"], options["num_stages"]) == (8, 4) for _, options in warm.asked)
    assert not tuning._TRIED


def test_processes_share_out_all_kernels_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm(monkeypatch)
    everything: list[str] = []
    for part in range(3):
        warm.asked.clear()
        assert compilers.compile_kernels(job(part=part, parts=3))
        mine = {name for name, _ in warm.asked}
        assert len(mine) > 3
        assert not mine & set(everything)
        everything += mine
    launched = {x.kernel.__name__ for one, _ in job().work for x in launches_of(one)}
    assert set(everything) == launched


def failures() -> dict[str, Exception]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return {
        "does not fit": OutOfResources(1, 2, "shared memory"),
        "does not compile": CompilationError("x = 1\n", None, "no"),
        "is not assembled": PTXASError("no"),
        "a pass fails": RuntimeError("PassManager::run failed"),
    }


@pytest.mark.parametrize("case", failures())
def test_what_does_not_compile_is_left_out(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Warm(monkeypatch, failures()[case])
    assert not compilers.compile_kernels(job(kernel="near_dq"))


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: no"), ValueError("no"), TypeError("PassManager"), MemoryError()])
def test_any_other_error_is_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _compat.is_kernel_failure(error)
    Warm(monkeypatch, error)
    with pytest.raises(type(error)):
        compilers.compile_kernels(job(kernel="near_dq"))


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would be compiled")
def test_processes_answer_and_end() -> None:
    """In Triton's interpreter there is nothing to compile."""
    with Compilers(torch.device("cuda", 0), 2) as found:
        assert found.finished(60.0) is None, "nothing was asked for"
        found.start("one", job(kernel="near_dq"))
        assert found.finished(120.0) == ("one", True)
        found.start("of no interest", job(kernel="near_dq"))
        found.forget()
        assert found.compile_all(job().work, Deadline.after(120.0))
        begun = time.monotonic()
        assert not found.compile_all(job().work, Deadline.after(0.0))
        found.start("wrong", job(work=((None, {}),)))
        with pytest.raises(AttributeError):
            found.finished(120.0)
        processes = list(found._pool._pool)
    assert time.monotonic() - begun < 60
    assert not any(process.is_alive() for process in processes)


SAME_KEYS = """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nearfield.app.blocks import compilers, passes
    from nearfield.cells.triton import tuning
    from nearfield.cells.triton.tiles import TileSizes
    from nearfield.kernels import launch

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 80, 32)

    driver.set_active(Driver())
    ahead, launched = [], []
    run = JITFunction.run

    def compile_only(kernel, *arguments, grid, warmup, **options):
        (ahead if warmup else launched).append(run(kernel, *arguments, grid=grid, warmup=True, **options).hash)

    JITFunction.run = compile_only

    class Only:
        def start(self, kernel, grid, arguments):
            if kernel.__name__ == "_near_dq":
                kernel.jitted[grid](**arguments)

    cpu = torch.device("cpu")
    own = passes.setting_of("near_dq", torch.bfloat16, 64, 128).passes(4096)
    blocks = tuning.all_blocks(64, torch.bfloat16, cpu, 128) | {"near_dq": TileSizes(32, 4, 1, 32)}
    assert compilers.compile_kernels(compilers.Job(tuple((one, blocks) for one in own), "near_dq"))
    with tuning.trying_all(blocks), launch.recording(Only()):
        for one in own:
            passes.ready(one, cpu)()
    assert ahead and set(ahead) == set(launched), (ahead, launched)
"""


@pytest.mark.long
def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    """By the names under which Triton keeps it on disk, for a card that is not there."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(passes.__file__).parents[3])}
    environment.pop("TRITON_INTERPRET", None)
    code = textwrap.dedent(SAME_KEYS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class FakeTimer:
    """The more rows the faster; what has more than 64 does not fit, and 64 do not fit elsewhere."""

    device, length = CARD, 4096

    def __init__(self) -> None:
        self.settings: list[Setting] = []

    def milliseconds(self, setting: Setting, tried: Mapping[str, TileSizes]) -> dict[str, float] | None:
        self.settings.append(setting)
        if any(blocks.rows > 64 for blocks in tried.values()):
            return None
        now = {kernel: tuning.blocks_for(kernel, setting.dim, setting.dtype, CARD, setting.cell_size) for kernel in KERNELS}
        return {kernel: 10.0 / blocks.rows for kernel, blocks in (now | dict(tried)).items() if kernel != "means"}

    def runs(self, passes: list[Pass], tried: Mapping[str, TileSizes]) -> bool:
        return all(blocks.rows < 64 for blocks in tried.values())


class FakeCompilers:
    workers = 2

    def __init__(self, in_time: bool = True) -> None:
        self.in_time = in_time
        self.jobs: list[Job] = []
        self.compiled: list[tuple[Pass, dict[str, TileSizes]]] = []
        self._done: list[Any] = []

    def start(self, label: Any, job: Job) -> None:
        self.jobs.append(job)
        self._done.append(label)

    def finished(self, seconds: float) -> Any:
        return (self._done.pop(0), True) if self._done else None

    def forget(self) -> None:
        self._done.clear()

    def compile_all(self, work: list[Any], deadline: Deadline) -> bool:
        self.compiled += work
        return self.in_time


@pytest.mark.usefixtures("a_card")
def test_what_is_found_is_kept_and_used(own_cache: Path) -> None:
    """On a card where rows make all the difference: 32 of them are the most that fit everywhere."""
    timer, said = FakeTimer(), []
    before = tuning.blocks_for("route", 64, torch.float32, CARD), tuning.blocks_for("near_dkv", 64, torch.float32, CARD)
    small = {"route": TileSizes(16, 8, 1, 64), "near_dkv": TileSizes(16, 8, 1, 32)}
    shipped = tuning.shipped_for(CARD)["blocks"]
    started = {kernel: {**shipped[kernel], "float32, 64": {"128": list(blocks)}} for kernel, blocks in small.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "shipped_for", lambda *x: {"blocks": {**shipped, **started}, "decode": {}})
        tuning.forget()
        found = find([torch.float32], timer, FakeCompilers(), Deadline.after(1e6), said.append)
        changed = {(x.place.kernel, x.place.dim): x.after for x in found if x.changed}
        assert {kernel for kernel, dim in changed if dim == 64} == {"route", "near_dkv"}
        assert all(blocks.rows == 32 for blocks in changed.values())
        assert tuning.blocks_for("near_dkv", 64, torch.float32, CARD) == changed["near_dkv", 64]
    assert before[0] != changed["route", 64]
    saved = json.loads((own_cache / "blocks.json").read_text())["cards"][NAME]
    (version,) = saved.values()
    assert set(version["blocks"]) == {"float32"}
    assert version["blocks"]["float32"]["route"]["64"]["128"] == list(changed["route", 64])
    assert {x.place.kernel for x in found} == set(KERNELS) - {"means"}, "what cannot be timed is left as it is"
    assert {x.place.dim for x in found} == set(DIMS) == {64, 128}
    assert any("route, float32, 64" in x for x in said)


@pytest.mark.usefixtures("a_card")
@pytest.mark.parametrize(
    ("asked", "timed"),
    [
        ((torch.float32, torch.bfloat16, torch.float16), {torch.bfloat16, torch.float32}),
        ((torch.float16, torch.bfloat16), {torch.float16}),
        ((torch.float64, torch.float32), {torch.float32}),
        ((torch.float64,), set()),
    ],
)
def test_dtypes_of_one_kind_are_timed_once(asked: tuple[torch.dtype, ...], timed: set[torch.dtype]) -> None:
    timer = FakeTimer()
    found = find(asked, timer, FakeCompilers(), Deadline.after(1e6), lambda said: None)
    assert {setting.dtype for setting in timer.settings} == timed
    assert {x.place.kind for x in found} == {measured.kind_of(dtype) for dtype in timed}


@pytest.mark.usefixtures("a_card")
def test_cells_of_another_size_are_searched_where_they_have_sizes_of_their_own() -> None:
    found = find([HALF], FakeTimer(), FakeCompilers(), Deadline.after(1e6), lambda said: None)
    shipped = tuning.shipped_for(CARD)["blocks"]
    expected = {Place(kernel, "half", dim, int(x)) for kernel in KERNELS for dim in DIMS for x in shipped[kernel][f"half, {dim}"]}
    assert {x.place for x in found} == {place for place in expected if place.kernel != "means"}
    assert any(place.cell_size == 64 for place in expected)


@pytest.mark.usefixtures("a_card")
def test_without_time_nothing_is_found_and_nothing_kept(own_cache: Path) -> None:
    for compiling, seconds in ((FakeCompilers(in_time=False), 1e6), (FakeCompilers(), 0.0)):
        found = find([HALF], FakeTimer(), compiling, Deadline.after(seconds), lambda said: None)
        assert not any(x.changed for x in found)
        assert not compiling.jobs
    assert not list(own_cache.iterdir())


@pytest.mark.usefixtures("a_card")
def test_kernels_around_the_one_that_is_tried_have_the_sizes_of_the_card() -> None:
    compiling = FakeCompilers()
    find([HALF], FakeTimer(), compiling, Deadline.after(1e6), lambda said: None)
    assert compiling.jobs
    for one, blocks in (*compiling.compiled, *(x for asked in compiling.jobs for x in asked.work)):
        assert set(blocks) == set(tuning.shipped_for(CARD)["blocks"])
        assert one.dtype in measured.KINDS["half"]
    for asked in compiling.jobs:
        assert asked.kernel in KERNELS


def test_the_table_says_what_has_changed() -> None:
    before, after = TileSizes(64, 4, 2, 32), TileSizes(128, 8, 1, 64)
    found = [
        Found(Place("near_dq", "half", 64, 128), before, after, 2.0, 1.0),
        Found(Place("route", "half", 128, 128), before, before, 0.5, 0.5),
    ]
    console = Console(width=200)
    with console.capture() as printed:
        console.print(report.table_of(found, "a card"))
    lines = [re.sub(r"\s+", " ", line).strip() for line in printed.get().splitlines()]
    first = "near_dq half 64 128 64 rows, 32 keys, 4 warps, 2 stages -> 128 rows, 64 keys, 8 warps, 1 stages 2.000 1.000 2.00"
    assert first in lines
    assert "route half 128 128 64 rows, 4 warps, 2 stages as before 0.500 0.500 1.00" in lines


@pytest.mark.usefixtures("a_card")
@pytest.mark.parametrize(
    ("rows", "said"),
    [((128, 64), "saved to {folder}/blocks.json"), ((64,), "no block sizes are faster"), ((), "no time for block sizes")],
)
def test_the_user_hears_what_became_of_it(
    rows: tuple[int, ...], said: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TileSizes(64, 4, 2, 32)
    found = [Found(Place("near_dq", "half", 64, 128), before, before._replace(rows=x), 2.0, 1.0) for x in rows]

    def find(dtypes: Any, timer: Timer, processes: Any, deadline: Deadline, say: Any) -> list[Found]:
        assert (timer.device, dtypes) == (CARD, [HALF])
        say("near_dq, half, 64")
        return found

    monkeypatch.setattr(report, "find", find)
    console = Console(width=300, force_terminal=True, color_system=None)
    with console.capture() as printed:
        assert report.find_blocks(console, CARD, [HALF], FakeCompilers(), Deadline.after(50.0)) == found  # type: ignore[arg-type]
    assert said.format(folder=own_cache) in printed.get()
    assert "near_dq, half, 64" in printed.get()
    assert re.search(r"(49|50) s left", printed.get())
    assert ("speed-up" in printed.get()) == bool(rows)


class Sequence:
    """What calibrating a card does, in order, with fakes for whatever needs one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.left: list[float] = []

        class Processes(FakeCompilers):
            def __init__(self, device: torch.device, workers: int) -> None:
                super().__init__()
                assert workers >= 1

            def __enter__(self) -> Processes:
                return self

            def __exit__(self, *error: object) -> None:
                pass

        def find_blocks(
            console: Console, device: torch.device, dtypes: list[torch.dtype], processes: Any, deadline: Deadline
        ) -> None:
            assert device == CARD
            self.done.append("blocks")
            self.left.append(deadline.left)

        def lengths(device: torch.device, dtype: torch.dtype, alike: Any, deadline: Deadline, prepare: Any) -> None:
            self.done.append((dtype, *alike, prepare is not None))
            self.left.append(deadline.left)

        monkeypatch.setattr(compilers, "Compilers", Processes)
        monkeypatch.setattr(report, "find_blocks", find_blocks)
        monkeypatch.setattr(calibrate, "calibrate", lengths)


@pytest.mark.usefixtures("a_card")
def test_block_sizes_come_first_and_leave_time_for_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Sequence(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    calibrate.calibrate_all(torch.device("cuda"), [torch.float64, torch.float32, torch.bfloat16], minutes=2.0)
    assert seen.done == ["blocks", (torch.bfloat16, True), (torch.float32, True), (torch.float64, False)]
    assert 40 < seen.left[0] < 60
    assert [round(left) for left in seen.left[1:]] == [40, 60, 120], "what one leaves is for the others"


@pytest.mark.usefixtures("a_card")
@pytest.mark.parametrize("blocks", [False, True])
def test_a_card_whose_block_sizes_are_shipped_has_lengths_only(
    blocks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless they are asked for. Of the short dtypes one is measured, for both."""
    seen = Sequence(monkeypatch)
    calibrate.calibrate_all(CARD, [torch.float32, torch.float16, torch.bfloat16], minutes=1.0, blocks=blocks)
    assert seen.done[blocks:] == [(torch.float16, torch.bfloat16, True), (torch.float32, True)]
    assert ("blocks" in seen.done) == blocks
    assert ("--blocks" in capsys.readouterr().out) != blocks
    assert [round(left) for left in seen.left[blocks:]] == [30, 60]


@pytest.mark.usefixtures("a_card")
def test_an_imposed_class_has_no_block_sizes_to_find(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Sequence(monkeypatch)
    monkeypatch.setenv(cards.SWITCH, "8.6")
    calibrate.calibrate_all(CARD, [torch.float32])
    assert seen.done == [(torch.float32, True)]
    assert "NEARFIELD_TILES" in capsys.readouterr().out


def test_a_card_without_triton_has_lengths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Sequence(monkeypatch)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    calibrate.calibrate_all(CARD, [torch.float32], minutes=1.0)
    assert seen.done == [(torch.float32, False)]
    assert 50 < seen.left[0] <= 60


def test_the_command_says_how_long_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(calibrate, "calibrate_all", lambda *x: seen.append(x))
    for options, minutes in (((), calibrate.MINUTES), (("--minutes", "0.5"), 0.5)):
        result = CliRunner().invoke(app, ["bench", "--calibrate", "--dtype", "float32", *options])
        assert result.exit_code == 0, result.output
        assert seen.pop() == (torch.device("cpu"), [torch.float32], minutes, False)
    assert CliRunner().invoke(app, ["bench", "--calibrate", "--minutes", "0"]).exit_code == 2
    assert calibrate.MINUTES == 3.0


@pytest.mark.usefixtures("a_card")
@pytest.mark.parametrize("kind", crossover.KINDS)
def test_what_cells_launch_is_compiled_before_they_are_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *x, device=None, **more: empty(*x, **more))
    compiling = FakeCompilers()
    assert calibrate._compile_cells(compiling, CARD, HALF, 16384, kind, Deadline.after(10.0))  # type: ignore[arg-type]
    ((one, blocks),) = compiling.compiled
    assert (one.dtype, one.dim, one.heads, one.length) == (HALF, 64, 8, 16384)
    assert one.backward == kind.startswith("training")
    assert (one.sizes.segment > 0) == kind.endswith("causal")
    assert (one.sizes.cell_size, one.sizes.segment) == (64, 512 * kind.endswith("causal")), "the sizes of a GPU"
    assert blocks == tuning.all_blocks(64, HALF, CARD, 64)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.long
def test_a_card_is_calibrated_in_time(own_cache: Path) -> None:
    begun = time.monotonic()
    result = CliRunner().invoke(
        app, ["bench", "--calibrate", "--device", "cuda", "--dtype", "bfloat16", "--minutes", "0.5", "--blocks"]
    )
    assert result.exit_code == 0, result.output
    assert time.monotonic() - begun < 45
    assert (own_cache / "crossover.json").exists()
    assert re.search(r"blocks.json|no block sizes are faster|no time for block sizes", result.output)


@pytest.mark.alone
@pytest.mark.gpu
def test_kernels_are_timed_on_a_card() -> None:
    """Every kernel in its setting; sizes that do not fit are told from others, and what is timed is what was asked for."""
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device, length=8192)
    for rows, kernels in (("apart", candidates.FORWARD), ("together", candidates.TOGETHER), ("backward", candidates.BACKWARD)):
        took = timer.milliseconds(Setting(HALF, 64, 128, rows), {})
        assert took is not None
        assert set(took) >= set(kernels)
        assert min(took.values()) > 0
    setting = Setting(torch.float32, 128, 128, "backward")
    huge = TileSizes(128, 4, 4, 128)
    assert timer.milliseconds(setting, {"near_dkv": huge}) is None
    assert not timer.runs(other_passes("near_dkv", "float32", 128), {"near_dkv": huge})
    small, usual = TileSizes(16, 4, 1, 16), timer.milliseconds(setting, {})
    slow = timer.milliseconds(setting, {"near_dkv": small})
    assert usual is not None
    assert slow is not None
    assert slow["near_dkv"] > usual["near_dkv"]
    assert timer.runs(other_passes("near_dkv", "float32", 128), {"near_dkv": small})


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.long
def test_the_search_on_a_card_keeps_what_is_faster(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From poor sizes of one kernel on, which anything beats."""
    device = torch.device("cuda", torch.cuda.current_device())
    measured.keep(torch.cuda.get_device_name(device), "half", {("near_dkv", 64, 128): TileSizes(16, 8, 1, 16)})
    tuning.forget()
    monkeypatch.setattr("nearfield.app.blocks.find.DIMS", (64,))
    with Compilers(device, compilers.workers_here()) as processes:
        found = find([HALF], Timer(device, length=8192), processes, Deadline.after(60.0), lambda said: None)
    (one,) = [x for x in found if (x.place.kernel, x.place.cell_size) == ("near_dkv", 128)]
    assert one.changed
    assert one.milliseconds < one.milliseconds_before
    assert tuning.blocks_for("near_dkv", 64, HALF, device, 128) == one.after
