"""`bench_peers_gpu.py`: errors, blocks and lists are right; a peer that is missing, wrong or broken is told and stops nobody."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD = ("--quick", "--only", "forward", "--kinds", "strewn")


@pytest.fixture
def bench(load: Callable[[str], Any]) -> Any:
    return load("bench_peers_gpu")


@pytest.fixture
def run(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the benchmark prints with these arguments. Two budgets of ours are enough."""
    monkeypatch.setattr(bench.peers_measure, "TESTED", 256)
    methods = sys.modules["peers_methods"]
    monkeypatch.setattr(methods, "OURS", methods.OURS[:2])

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench_peers_gpu.py", *arguments])
        bench.main()
        return capsys.readouterr().out

    return run


def gaussian(device: Any, heads: int, kv_heads: int, n: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(1, count, n, dim, device=device) for count in (heads, kv_heads, kv_heads))
    return query, key, value


def test_exact_rows_and_errors_of_a_known_case(load: Callable[[str], Any]) -> None:
    inputs, device = load("peers_inputs"), load("gpu_timing").DEVICE
    qkv = gaussian(device, 4, 2, 96)
    want = F.scaled_dot_product_attention(*(x.double() for x in qkv), is_causal=True, enable_gqa=True)
    rows = inputs.some_rows(96, 40)
    exact = inputs.exact_rows(qkv, rows)
    torch.testing.assert_close(exact, want[0][:, rows])
    output = want.clone()
    output[:, 0] *= 1.5  # off by 50% in one of four heads
    output[:, 1] *= 0.8  # and by 20% in another
    found = inputs.row_errors(output, exact, rows)
    assert found["rows"] == 160
    assert found["mean"] == pytest.approx(0.7 / 4)
    assert found["large"] == pytest.approx(0.25)
    output[:, 2, rows[0]] = torch.nan
    found = inputs.row_errors(output, exact, rows)
    assert found["not_finite"] == pytest.approx(1 / 160)
    assert found["large"] == pytest.approx(41 / 160)
    assert found["mean"] == pytest.approx(0.7 * 40 / 159)


def test_runs_come_from_one_cluster_and_strewn_keys_do_not(load: Callable[[str], Any]) -> None:
    inputs = load("peers_inputs")
    for kind, alike in (("runs", True), ("strewn", False)):
        query, key, _ = inputs.made(kind, 512, 16, heads=2, group=3)
        assert (query.shape, key.shape) == ((1, 6, 512, 16), (1, 2, 512, 16))
        for x in (query, key):
            blocks = x.float().unflatten(2, (-1, 128))
            spread = float(blocks.var(3).mean() / x.float().var(2).mean())
            assert (spread < 0.5) == alike, (kind, spread)


def test_captured_layers_are_cut_to_whole_blocks(load: Callable[[str], Any], tmp_path: Path) -> None:
    for layer in (1, 7):
        query, key, value = gaussian("cpu", 4, 2, 300)
        torch.save({"q": query, "k": key, "v": value}, tmp_path / f"layer_{layer:02}.pt")
    found = list(load("peers_inputs").captured(tmp_path))
    assert [name for name, _ in found] == ["layer_01", "layer_07"]
    assert [x.shape for x in found[1][1]] == [(1, 4, 256, 16), (1, 2, 256, 16), (1, 2, 256, 16)]
    assert torch.equal(found[1][1][0].cpu(), query[:, :, :256].bfloat16())


def test_real_layers_are_measured_at_their_own_length_and_averaged(run: Callable[..., str], tmp_path: Path) -> None:
    for layer in (1, 7):
        query, key, value = gaussian("cpu", 4, 2, 300, 64)
        torch.save({"q": query, "k": key, "v": value}, tmp_path / f"layer_{layer:02}.pt")
    arguments = ("--quick", "--only", "forward", "training", "grouped", "--kinds", "real", "--methods", "nearfield", "Flex")
    assert "real inputs are left out" in run(*arguments)
    run(*arguments, "--captured", str(tmp_path), "--out", str(tmp_path))
    sections = {name: found["results"] for name, found in json.loads((tmp_path / "peers.json").read_text()).items()}
    assert set(sections) == {"self_tests", "forward/256/64", "training/256/64"}
    forward, training = (sections[f"{mode}/256/64"]["parts"]["real"] for mode in ("forward", "training"))
    assert forward["about"]["layers"] == ["layer_01", "layer_07"]
    assert training["about"]["layers"] == ["layer_01"]
    for label in ("Cells(probes=2)", "FlexAttention, pooled blocks, 20%"):
        layers = [layer[label] for layer in forward["about"]["per_layer"]]
        assert len(set(layers)) == 2
        assert forward["methods"][label]["errors"]["mean"] == pytest.approx(sum(layers) / 2)
    assert training["methods"]["Cells(probes=2)"]["ms"] > 0  # FlexAttention has no gradients on a CPU


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 1.0])
def test_pooled_blocks_keep_the_share_they_promise(load: Callable[[str], Any], share: float) -> None:
    flex, device = load("peers_flex"), load("gpu_timing").DEVICE
    query, key, _ = gaussian(device, 2, 2, 24 * flex.BLOCK)
    blocks = flex.by_pooled(query, key, share)
    kept = flex.dense(blocks)
    seen = torch.arange(1, 25, device=device)
    counts = kept.sum(-1)
    assert bool((counts >= share * seen - 1e-6).all())
    assert bool((counts <= torch.maximum(share * seen + 1, seen.clamp(max=2))).all())
    assert bool(kept[..., 0].all())
    assert bool(kept.diagonal(dim1=-2, dim2=-1).all())
    assert not bool(kept.triu(1).any())
    # None that was left out has a larger product than one that was chosen.
    means = [x.unflatten(2, (-1, flex.BLOCK)).mean(3) for x in (query, key)]
    scores = means[0] @ means[1].mT
    free = torch.ones_like(kept).tril(-1)
    free[..., 0] = False
    least = scores.masked_fill(~(kept & free), torch.inf).amin(-1)
    most = scores.masked_fill(kept | ~free, -torch.inf).amax(-1)
    assert bool((least >= most).all())
    whole = kept.repeat_interleave(flex.BLOCK, 2).repeat_interleave(flex.BLOCK, 3).tril()
    assert flex.share_read(blocks, query.shape[2]) == pytest.approx(float(whole.double().mean()) / (0.5 + 0.5 / query.shape[2]))


def test_attention_over_blocks_is_exact_over_all_of_them_and_leaves_the_others_out(load: Callable[[str], Any]) -> None:
    flex, device = load("peers_flex"), load("gpu_timing").DEVICE
    query, key, value = gaussian(device, 2, 2, 6 * flex.BLOCK)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    close = {"rtol": 1e-2, "atol": 1e-2} if device.type == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(flex.attend(query, key, value, flex.by_pooled(query, key, 1.0)), exact, **close)
    mask = torch.rand(1, 2, 6, 6, device=device) < 0.5
    blocks = flex.by_mask(mask)
    kept = mask.tril() | torch.eye(6, dtype=torch.bool, device=device)
    assert torch.equal(flex.dense(blocks), kept)
    single = kept.repeat_interleave(flex.BLOCK, 2).repeat_interleave(flex.BLOCK, 3).tril()
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=single)
    assert float((want - exact).abs().max()) > 0.1
    torch.testing.assert_close(flex.attend(query, key, value, blocks), want, **close)


def test_the_lists_that_flexattention_compiles_from_are_these_blocks(load: Callable[[str], Any]) -> None:
    flex = load("peers_flex")
    mask = torch.rand(1, 2, 6, 6) < 0.5
    kept = mask.tril() | torch.eye(6, dtype=torch.bool)
    told = flex.block_mask(flex.by_mask(mask), 6 * flex.BLOCK, backward=True)
    assert torch.equal(told.to_dense().bool(), kept)
    by_column = torch.zeros_like(kept)
    for counts, indices in ((told.q_num_blocks, told.q_indices), (told.full_q_num_blocks, told.full_q_indices)):
        for head in range(2):
            for column in range(6):
                by_column[0, head, indices[0, head, column, : counts[0, head, column]].long(), column] = True
    assert torch.equal(by_column, kept)


def test_shares_of_methods_that_read_a_number_of_blocks(load: Callable[[str], Any]) -> None:
    methods = load("peers_methods")
    seen = sum(min(row // 64, 2) * 64 + row % 64 + 1 for row in range(1000))
    assert methods.share_of_blocks(1000, 64, 3) == pytest.approx(seen / (1000 * 1001 / 2))
    assert methods.share_of_blocks(1000, 64, 16) == pytest.approx(1.0)
    count = methods.blocks_for(8192, 64)
    assert methods.share_of_blocks(8192, 64, count - 1) < methods.TARGET <= methods.share_of_blocks(8192, 64, count)


def test_lists_of_columns_and_slashes_hold_what_was_asked_for(load: Callable[[str], Any]) -> None:
    pytest.importorskip("triton")
    slash, device = load("peers_slash"), load("gpu_timing").DEVICE
    n, block = 512, 64
    columns = torch.stack([torch.randperm(n)[:40].sort().values for _ in range(2)])[None].int().to(device)
    distances = [torch.cat([1 + torch.randperm(n - 1)[:9], torch.zeros(1, dtype=torch.long)]) for _ in range(2)]
    slashes = torch.stack([x.sort(descending=True).values for x in distances])[None].int().to(device)
    count, blocks, singles, single = slash.convert_vertical_slash_indexes(torch.tensor([n]), columns, slashes, n)
    for head in range(2):
        for row in range(n // block):
            starts = blocks[0, head, row, : count[0, head, row]].tolist()
            read = {key for start in starts for key in range(start, start + block)}
            assert len(read) == block * len(starts)
            for distance in slashes[0, head].tolist():
                seen = {key for i in range(block) if (key := row * block + i - distance) >= 0}
                assert seen <= read
            want = {key for key in columns[0, head].tolist() if key < row * block and key not in read}
            assert set(single[0, head, row, : singles[0, head, row]].tolist()) == want


def test_the_share_of_columns_and_slashes_is_what_the_rows_see(load: Callable[[str], Any]) -> None:
    pytest.importorskip("triton")
    slash, device = load("peers_slash"), load("gpu_timing").DEVICE
    n, block = 512, 64
    query, key, _ = gaussian(device, 1, 1, n)
    columns, slashes = slash.chosen(query, key, 40, 110)
    assert (columns.shape, slashes.shape) == ((1, 1, 40), (1, 1, 110))
    assert set(range(slash.FIRST_KEYS)) <= set(columns.flatten().tolist())
    assert set(range(slash.LATEST_KEYS)) <= set(slashes.flatten().tolist())
    ordered = columns.int().sort(-1).values, slashes.int().sort(-1, descending=True).values
    count, blocks, singles, _ = slash.convert_vertical_slash_indexes(torch.tensor([n]), *ordered, n)
    read = 0
    for row in range(n):
        own = row // block
        starts = blocks[0, 0, own, : count[0, 0, own]].tolist()
        read += int(singles[0, 0, own]) + sum(min(block, max(0, row + 1 - start)) for start in starts)
    assert slash.share_read(query, key, 40, 110) == pytest.approx(read / (n * (n + 1) / 2))


def test_the_slashes_with_most_weight_are_chosen(load: Callable[[str], Any]) -> None:
    pytest.importorskip("triton")
    slash = load("peers_slash")
    n, distance = 512, 333
    key = torch.randn(1, 1, n, 32)
    query = 40 * key.roll(distance, 2)  # each row looks at the key 333 places before it
    assert distance in slash.chosen(query, key, 30, 101)[1].flatten().tolist()


def test_packages_are_imported_without_what_they_do_not_need(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = load("peers_find")
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "repository" / "needy_peer" / "ops"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("import a_module_that_nobody_has")
    (inner / "core.py").write_text(
        "from ..extension import fast\nTWICE = fast(2)\ndef f(tl, p):\n    return tl.dot(p, 3, trans_b=True)\n"
    )
    (inner / "old.py").write_text("def f(tl, p, q):\n    return tl.dot(p.to(1), q, trans_a=True), tl.dot(p, q, trans_b=True)\n")
    with pytest.raises(ImportError, match="needy_peer"):
        find.bare_package("needy_peer")
    find.look_in(tmp_path)
    names = ("needy_peer", "needy_peer.ops", "needy_peer.extension", "needy_peer.ops.core", "needy_peer.ops.old")
    try:
        find.bare_package("needy_peer", "ops")
        find.stand_in("needy_peer.extension", fast=lambda x: 2 * x)
        assert importlib.import_module("needy_peer.ops.core").TWICE == 4
        find.in_present_triton("needy_peer.ops.old")

        class Words:
            dot = staticmethod(lambda a, b: f"{a}.{b}")
            trans = staticmethod(lambda a: f"{a}'")

        class Part(str):
            def to(self, _: Any) -> str:
                return self

        assert sys.modules["needy_peer.ops.old"].f(Words, Part("p"), "q") == ("p'.q", "p.q'")
    finally:
        for name in names:
            sys.modules.pop(name, None)
    with pytest.raises(NotADirectoryError, match="--peers"):
        find.look_in(tmp_path / "nowhere")


def test_a_quick_run_names_missing_peers_and_writes_results_and_picture(run: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = run(*FORWARD, "--methods", "nearfield", "FlexAttention", "XAttention", "--out", str(tmp_path))
    assert "missing: XAttention (ModuleNotFoundError: No module named 'xattn')" in printed
    assert "all keys read = exact attention, forward/" in printed
    sections = json.loads((tmp_path / "peers.json").read_text())
    ((name, section),) = ((name, found["results"]) for name, found in sections.items() if name != "self_tests")
    assert name.startswith("forward/")
    assert list(section["missing"]) == ["XAttention"]
    part = section["parts"]["strewn"]
    assert [label for label in part["methods"] if label.startswith("Flex")] == [
        f"FlexAttention, pooled blocks, {share}" for share in ("5%", "10%", "20%")
    ]
    for found in part["methods"].values():
        assert found["speedup"] == pytest.approx(part["sdpa"]["ms"] / found["ms"])
        assert 0 < found["share"] <= 1
        assert 0 < found["errors"]["mean"] < 1
    assert part["sdpa"]["errors"]["mean"] < 0.01
    tests = sections["self_tests"]["results"]["parts"]
    assert all(result["passed"] for found in tests.values() for result in found.values())
    assert (tmp_path / "peers.png").stat().st_size > 10_000
    # What is there already is not measured again, and drawn again.
    (tmp_path / "peers.png").unlink()
    assert "methods," not in run(*FORWARD, "--methods", "nearfield", "Flex", "--out", str(tmp_path), "--resume")
    again = json.loads((tmp_path / "peers.json").read_text())
    assert again[name]["results"]["parts"]["strewn"] == part
    assert (tmp_path / "peers.png").exists()


def test_a_peer_that_fails_is_told_and_one_that_is_wrong_is_marked(
    bench: Any, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = sys.modules["peers_methods"].Peer

    class Wrong(base):  # type: ignore[misc, valid-type]
        name = "wrong"
        heads_first = False
        trains = True

        def settings(self, n: int) -> dict[str, dict[str, Any]]:
            return {"once": {"times": 1.0}, "twice": {"times": 2.0}, "again": {"times": 2.0}}

        def everything(self, n: int) -> dict[str, Any]:
            return {"times": 1.3}

        def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
            usual = (x.transpose(1, 2) for x in (query, key, value))
            return arguments["times"] * F.scaled_dot_product_attention(*usual, is_causal=True).transpose(1, 2)

    class Failing(Wrong):
        name = "failing"

        def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(bench, "PEERS", (Failing, Wrong))
    monkeypatch.setattr(bench.peers_plot, "plot", lambda *_: None)
    shown = run("--quick", "--only", "forward", "training", "--kinds", "runs", "--out", str(tmp_path))
    assert "forward/16: 0 of 2" in shown or "forward/64: 0 of 2" in shown
    assert "not exact when it reads all keys" in " ".join(shown.split())
    sections = {name: found["results"] for name, found in json.loads((tmp_path / "peers.json").read_text()).items()}
    for name, section in sections.items():
        if name == "self_tests":
            tests = section["parts"]
            continue
        methods = section["parts"]["runs"]["methods"]
        assert list(methods) == ["failing, once", "failing, twice", "wrong, once", "wrong, twice"]
        assert methods["failing, once"] == {"failed": "RuntimeError: out of luck"}
        assert methods["wrong, twice"]["ms"] > 0
        if name.startswith("forward"):
            assert methods["wrong, once"]["errors"]["mean"] < 0.01
            assert methods["wrong, twice"]["errors"]["mean"] == pytest.approx(1.0, abs=0.02)
            assert methods["wrong, twice"]["errors"]["large"] == 1
    (found,) = (part["wrong"] for name, part in tests.items() if name.startswith("training"))
    assert found["error"] == pytest.approx(0.3, abs=0.01)
    assert found["gradient_errors"] == pytest.approx([0.3] * 3, abs=0.01)
    assert not found["passed"]


def test_methods_that_broke_the_card_are_kept_and_the_rest_begins_anew(
    bench: Any, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise bench.BrokenCard({"Cells(probes=2)": {"failed": "illegal address"}})

    started: list[list[str]] = []

    def restart(_: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr(bench.peers_measure, "measure", breaks)
    monkeypatch.setattr(bench.os, "execv", restart)
    with pytest.raises(SystemExit):
        run(*FORWARD, "--methods", "nearfield", "--out", str(tmp_path))
    assert started[0][-3:] == ["--resume", "--restarts", "1"]
    monkeypatch.undo()
    written = json.loads((tmp_path / "peers.json").read_text())
    (section,) = (found["results"] for name, found in written.items() if name != "self_tests")
    assert section["parts"]["strewn"]["methods"] == {"Cells(probes=2)": {"failed": "illegal address"}}


def test_nothing_is_begun_that_would_end_too_late(run: Callable[..., str]) -> None:
    shown = run(*FORWARD, "--methods", "nearfield", "--minutes", "0.1")
    assert "not begun within 0.1 minutes: forward/" in shown


def test_layers_are_averaged_and_a_failure_in_one_counts(load: Callable[[str], Any]) -> None:
    averaged = load("peers_measure").averaged
    layers = [{"a": {"ms": 1.0, "label": "x", "runs": [1.0]}}, {"a": {"ms": 3.0, "label": "x", "runs": [3.0]}}]
    assert averaged(layers)["a"]["ms"] == 2.0
    assert averaged(layers)["a"]["label"] == "x"
    assert averaged([*layers, {"a": {"failed": "no memory"}}])["a"] == {"failed": "no memory"}
