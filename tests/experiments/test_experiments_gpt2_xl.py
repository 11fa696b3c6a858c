"""Fine-tuning a GPT-2: the quick form runs, a model adds units, memory that runs out is reported, verdicts follow the numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import transformers

import nearfield as nf
from experiments import look
from experiments.command import main
from experiments.experiment import Row, Rows
from experiments.gpt2_xl import cost as costs
from experiments.gpt2_xl import train
from experiments.gpt2_xl.draw import draw
from experiments.gpt2_xl.methods import OURS, attend
from experiments.gpt2_xl.model import extend_positions, random_model, real_model
from experiments.gpt2_xl.plan import plan
from experiments.gpt2_xl.sample import PROMPTS, clean
from experiments.gpt2_xl.select import tuned
from experiments.gpt2_xl.sizes import TINY, XL, size_of
from experiments.gpt2_xl.tables import sample_tables
from experiments.gpt2_xl.tell import cells, cheaper, fits, quality, tell
from experiments.gpt2_xl.tokens import BYTES, split, windows_of
from experiments.isolate import Measured
from experiments.settings import HERE, Settings
from experiments.store import Store, read
from experiments.words import as_it_is

MADE_FOR = 40
"""Positions of the small model with real weights."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small GPT-2 with dropout and few positions."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "small"
    words = {word: i for i, word in enumerate(("?", "import", "def", "return", "self", "the", "of", "(", ")", ":"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": MADE_FOR, "vocab_size": len(words)}
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("gpt2-xl")
    main(["gpt2-xl", "--quick", "--out", str(where)])
    return where


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return [row for unit in read(folder / "gpt2-xl.json")["units"].values() for row in unit["rows"]]


def test_every_method_is_measured(rows: Rows) -> None:
    found = {(row["method"], row["n"], row["recomputed"]) for row in rows if row["kind"] == "cost"}
    short, long = TINY.contexts
    assert found == {
        *((method, short, recomputed) for method in ("naive", "exact", "topk", "cells") for recomputed in (False, True)),
        *((method, long, True) for method in ("exact", "cells")),
    }
    for row in rows:
        if row["kind"] == "cost":
            assert row["status"] == "ok"
            assert row["tokens_per_second"] == pytest.approx(row["n"] / row["seconds"], rel=1e-4)
            assert row["held"] > 0
            assert torch.cuda.is_initialized() or row["megabytes"] is None
        if row["kind"] == "curve":
            assert len(row["losses"]) == row["steps"]


def test_a_model_adds_units_and_repeats_none(
    folder: Path, real: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read(folder / "gpt2-xl.json")["units"]
    saved: list[str] = []
    save = Store.save
    monkeypatch.setattr(Store, "save", lambda store, key, *rest: (saved.append(key), save(store, key, *rest))[1])
    main(["gpt2-xl", "--quick", "--out", str(folder), "--model", str(real)])
    assert saved == ["small, exact", "small, cells", "small, exact, other order", "small, topk"]
    after = read(folder / "gpt2-xl.json")["units"]
    assert {key: after[key] for key in before} == before
    tuned = [row for key in saved for row in after[key]["rows"] if row["kind"] == "tuned"]
    for row in tuned:
        assert row["n"] == TINY.tuning.n > MADE_FOR
        assert row["after"] != row["before"]
    assert tuned[0]["before"] == pytest.approx(tuned[1]["before"], rel=0.01)
    samples = [row for key in saved for row in after[key]["rows"] if row["kind"] == "sample"]
    assert {(row["method"], row["when"], row["prompt"]) for row in samples} == {
        (method, when, prompt) for method in ("exact", "cells", "topk") for when in ("before", "after") for prompt in PROMPTS
    }
    assert (folder / "figures" / "gpt2-xl-tuned.svg").exists()
    main(["report", "--quick", "--out", str(folder)])
    page = (folder / "report.html").read_text()
    assert page.count("<figure") == 3
    assert "What small goes on with" in page
    assert "48 GB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_stays_when_it_is_not_named_again(folder: Path, real: Path, tmp_path: Path) -> None:
    main(["gpt2-xl", "--quick", "--out", str(folder), "--model", str(real)])
    with_model = read(folder / "gpt2-xl.json")
    main(["gpt2-xl", "--quick", "--out", str(folder)])
    without = read(folder / "gpt2-xl.json")
    assert without["complete"]
    assert without["units"] == with_model["units"]
    assert without["findings"] == with_model["findings"]
    assert any("severely" in finding["claim"] for finding in without["findings"])
    main(["report", "--quick", "--out", str(folder)])
    assert "gpt2-xl-tuned" in (folder / "report.html").read_text()
    other = tmp_path / "other"
    shutil.copytree(real, other)
    main(["gpt2-xl", "--quick", "--out", str(folder), "--model", str(other)])
    told = [finding for finding in read(folder / "gpt2-xl.json")["findings"] if "severely" in finding["claim"]]
    assert [finding["evidence"].split(",")[0] for finding in told] == ["other", "small"]


def test_a_model_that_was_stopped_on_the_way_is_not_told() -> None:
    runs = rows_of_tuning(20.2, 20.0)
    assert len(tuned(runs)) == 1
    assert not tuned(runs[:2])
    assert not tuned([*runs[:2], {**runs[2], "rate": 1e-6}])
    assert [pair["exact", 0]["model"] for pair in tuned([*runs, *({**row, "model": "b"} for row in runs)])] == ["m", "b"]


def test_another_text_is_refused(folder: Path, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("to be or not to be " * 400)
    before = (folder / "gpt2-xl.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["gpt2-xl", "--quick", "--out", str(folder), "--text", str(other)])
    said = capsys.readouterr().err
    assert "the standard library of Python" in said
    assert "this run reads other.txt" in said
    assert (folder / "gpt2-xl.json").read_bytes() == before


def test_other_sizes_have_another_digest(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> dict[str, str]:
        return {unit.key: unit.digest for unit in plan(Settings(quick=True, model=real))}

    def changed() -> set[str]:
        return {key.split(",")[0] for key, value in digests().items() if value != before[key]}

    before = digests()
    assert not changed()
    for other, kinds in (
        (replace(TINY, rate=1e-4), {"losses"}),
        (replace(TINY, tuning=replace(TINY.tuning, steps=3)), {"small"}),
        (replace(TINY, shape=replace(TINY.shape, width=64)), {"losses", "cost"}),
    ):
        monkeypatch.setattr(import_module("experiments.gpt2_xl.plan"), "size_of", lambda _, other=other: other)
        assert changed() == kinds
    monkeypatch.setattr(import_module("experiments.gpt2_xl.plan"), "size_of", lambda _: TINY)
    monkeypatch.setitem(OURS, "cells", nf.Cells(probes=1))
    assert changed() == {"losses", "cost", "small"}


def test_the_longest_contexts_come_last() -> None:
    units = [unit.key for unit in plan(Settings(device="cuda"))]
    assert units[0] == "cost, n=1024, all kept"
    assert units[-3:] == ["cost, n=16384", "cost, n=32768", "cost, n=65536"]


def test_a_slow_method_has_fewer_turns() -> None:
    def turns(*seconds: float) -> list[Measured]:
        return [Measured("ok", [x]) for x in seconds]

    assert costs.goes_on([])
    assert costs.goes_on(turns(100.0))  # kernels were compiled
    assert costs.goes_on(turns(1.0, 1.0))
    assert not costs.goes_on(turns(14.0, 14.0))
    assert not costs.goes_on([Measured("memory")])


def test_masks_in_every_layer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_masks(shape: Any, positions: int, device: str, seed: int) -> Any:
        assert device == "meta"
        found = torch.nn.Module()
        found.register_buffer("mask", torch.empty(48, positions, positions, dtype=torch.bool, device="meta"))
        return found

    monkeypatch.setattr("experiments.gpt2_xl.model.random_model", with_masks)
    with pytest.raises(ValueError, match=r"65,536 positions has 192 GB of buffers.*pip install -U"):
        plan(Settings(device="cuda"))


def test_sizes_go_with_the_device() -> None:
    assert size_of(Settings(quick=True, device="cuda")) is TINY
    assert size_of(Settings(device="cuda")) is XL
    assert size_of(Settings()).shape.width < XL.shape.width
    with torch.device("meta"):
        shape = XL.shape
        sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "vocab_size": shape.words}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_557_611_200


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_is_that_of_the_model(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits some at a time, layers computed again or not: the same loss and the same gradients."""
    monkeypatch.setattr(train, "ROWS", 7)
    model = random_model(TINY.shape, 32, "cpu", 0)
    window = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    want = model(window, labels=window, use_cache=False).loss
    want.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    train.ready_to_train(model, recompute, 1e-3)
    loss = train.mean_loss(model, window)
    loss.backward()
    torch.testing.assert_close(loss, want)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_methods_are_what_layers_attend_by() -> None:
    model = random_model(TINY.shape, 128, "cpu", 0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6.0 if weight.dim() > 1 else 1.0)  # attention of the usual weights is nearly flat
    window = torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(0))
    found = {}
    for method in ("exact", "naive", "cells", "topk"):
        attend(model, method)
        found[method] = train.mean_loss(model, window).detach()
    torch.testing.assert_close(found["naive"], found["exact"])
    torch.testing.assert_close(found["cells"], found["exact"], rtol=1e-2, atol=0)
    assert (found["topk"] - found["exact"]).abs() > 1e-4


def test_training_is_the_same_for_the_same_seed() -> None:
    def losses(seed: int) -> list[float]:
        model = random_model(TINY.shape, 16, "cpu", seed)
        optimizer = train.ready_to_train(model, False, 1e-3)
        return train.train(model, optimizer, windows_of(torch.arange(200), 16, seed, "cpu"), 3)

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_positions_are_repeated(real: Path) -> None:
    model, _, n = real_model(real, 100, "cpu")
    plain = transformers.GPT2LMHeadModel.from_pretrained(real).eval()
    assert n == 100
    table = model.base_model.wpe.weight
    torch.testing.assert_close(table[MADE_FOR : 2 * MADE_FOR], plain.base_model.wpe.weight)
    ids = torch.arange(10)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert torch.isfinite(model(ids.repeat(1, 10)).logits).all()
    assert table.requires_grad
    assert not any(part.p for part in model.modules() if isinstance(part, torch.nn.Dropout))
    extend_positions(model, 50)
    assert model.base_model.wpe.weight is table


def test_a_method_without_memory_is_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step = train.step

    def short_of_memory(model: Any, *rest: Any) -> Any:
        if model.config._attn_implementation == "eager":
            raise torch.OutOfMemoryError("out of memory")
        return step(model, *rest)

    monkeypatch.setattr(costs, "step", short_of_memory)
    found = {row["method"]: row for row in costs.cost(TINY, 128, True, "to be or not " * 100, "cpu", 0)}
    assert found["naive"]["status"] == "memory"
    assert "seconds" not in found["naive"]
    assert all(found[method]["status"] == "ok" for method in ("exact", "topk", "cells"))


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="has 19 tokens, and windows of 64 are wanted"):
        split("to be or not to be ", BYTES, 64, 1)
    training, held_out = split("x" * 100, BYTES, 4, 2)
    assert (len(training), len(held_out)) == (90, 8)


def test_bytes_come_back() -> None:
    assert BYTES.decode(BYTES.encode("Bürger, to be\n")) == "Bürger, to be\n"
    assert BYTES.decode([65, 50_000]) == "A\N{REPLACEMENT CHARACTER}"
    assert clean("a\x00b\n") == "a\N{MIDDLE DOT}b\n"


def test_samples_keep_their_lines() -> None:
    assert as_it_is("one") == "one\n"
    assert as_it_is("\nROMEO:\n\nword\n") == "ROMEO:\n\nword\n"
    rows = [
        {"kind": "sample", "model": "m", "n": 4, "method": method, "when": when, "prompt": "p", "sample": f"{when} {method}"}
        for method in ("exact", "cells")
        for when in ("before", "after")
    ]
    (table,) = sample_tables(rows)
    assert [cell.strip() for cell in table.body[0]] == ["p", "before exact", "after exact", "after cells"]


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2-xl", "--quick", "--out", str(tmp_path), "--model", str(tmp_path / "none")])
    assert "none is not there; give the folder" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'nearfield\[transformers\]'"):
        plan(Settings(quick=True))


def test_the_catalogue_needs_no_transformers() -> None:
    code = "import sys; import experiments.catalogue; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=True)


def test_a_device_on_which_nothing_fits(rows: Rows) -> None:
    """Then that is what the report says."""
    bare = ("seconds", "runs", "tokens_per_second", "megabytes")
    none = [{name: x for name, x in row.items() if name not in bare} for row in rows]
    none = [{**row, "status": "memory"} if row["kind"] == "cost" else row for row in none]
    section = tell(none)
    assert section.findings[1].verdict == "refuted"
    assert "no context" in section.findings[2].evidence
    assert draw(none).keys() == section.captions.keys()


# Verdicts.


def step_row(method: str, n: int, recomputed: bool = True, **numbers: Any) -> Row:
    about = {"kind": "cost", "model": "GPT-2 XL", "parameters": 1_557_611_200, "n": n, "held": 17_826.0, "status": "ok"}
    numbers = {"seconds": 1.0, "megabytes": 30_000.0, **numbers}
    found = {**about, "method": method, "recomputed": recomputed, **numbers}
    return {**found, "tokens_per_second": n / found["seconds"]}


@pytest.mark.parametrize(
    ("naive", "exact", "topk", "verdict"),
    [(40, 30, 30, "refuted"), (60, 40, 30, "partly"), (60, 55, 30, "confirmed"), (60, 55, 55, "refuted")],
)
def test_the_verdict_on_memory_follows_the_numbers(naive: int, exact: int, topk: int, verdict: str) -> None:
    needed = {"naive": naive, "exact": exact, "topk": topk, "cells": topk}
    rows = [
        step_row(method, 1024, recomputed, megabytes=1024.0 * gigabytes)
        for method, gigabytes in needed.items()
        for recomputed in (False, True)
    ]
    finding = fits(rows)
    assert finding.verdict == verdict
    assert f"naive {naive}.0 GB" in finding.evidence
    small = [{**row, "parameters": 10**6} for row in rows]
    assert fits(small).verdict == "beyond"


def test_a_step_that_did_not_fit_is_told() -> None:
    rows = [step_row(method, 1024, kept) for method in ("exact", "topk", "cells") for kept in (False, True)]
    rows += [{**step_row("naive", 1024, kept), "status": "memory"} for kept in (False, True)]
    finding = fits(rows)
    assert finding.verdict == "partly"
    assert "naive does not fit" in finding.evidence
    assert "Out of memory: naive at 1,024" in cells(rows).evidence


@pytest.mark.parametrize(
    ("short", "long", "verdict"), [(0.5, 0.5, "confirmed"), (2.0, 0.5, "partly"), (0.999, 0.97, "refuted"), (2.0, 3.0, "refuted")]
)
def test_the_verdict_on_cost_follows_the_numbers(short: float, long: float, verdict: str) -> None:
    rows = [step_row("exact", n) for n in (1024, 4096)]
    rows += [step_row(method, n, seconds=x) for method in ("topk", "cells") for n, x in ((1024, short), (4096, long))]
    assert cheaper(rows).verdict == verdict
    assert ("Cells pay from 4,096" in cells(rows).why) == (verdict == "partly")
    assert ("do not pay" in cells(rows).why) == (verdict == "refuted")


@pytest.mark.parametrize(
    ("ours", "other", "verdict"),
    [
        (20.2, 20.0, "confirmed"),
        (21.9, 20.0, "confirmed"),
        (22.1, 20.0, "refuted"),
        (30.0, 20.0, "refuted"),
        (24.0, 26.0, "refuted"),  # a severe loss is one, whatever chance does
        (None, 20.0, "refuted"),
        (20.2, None, "confirmed"),
    ],
)
def test_the_verdict_on_quality_follows_the_numbers(ours: float | None, other: float | None, verdict: str) -> None:
    (runs,) = tuned(rows_of_tuning(ours, other))
    assert quality(runs, "topk").verdict == verdict
    assert ("not finite" in quality(runs, "topk").evidence) == (None in (ours, other))
    assert quality(runs, "cells").verdict == "beyond"


def rows_of_tuning(ours: float | None, other: float | None, exact: float | None = 20.0, before: float = 25.0) -> Rows:
    about = {"kind": "tuned", "model": "m", "steps": 3, "n": 64, "before": before, "after_exact": 20.0}
    about |= {"rate": 1e-5, "held_out": 64, "sha256": "none", "losses": [3.0, None, 2.0]}
    found = (("exact", 0, exact), ("cells", 0, 21.0), ("exact", 1, other), ("topk", 0, ours))
    return [{**about, "method": method, "order": order, "after": after} for method, order, after in found]


def test_a_model_that_has_not_learnt_confirms_nothing() -> None:
    (runs,) = tuned(rows_of_tuning(20.2, 20.0, before=19.0))
    assert quality(runs, "topk").verdict == "partly"
    assert "learnt" in quality(runs, "topk").why
    (runs,) = tuned(rows_of_tuning(20.2, 20.0, exact=None))
    assert quality(runs, "topk").verdict == "untested"


def test_training_that_diverges_is_told_and_drawn(rows: Rows, tmp_path: Path) -> None:
    lost = [{**row, "losses": [row["losses"][0], None, None]} if row["kind"] == "curve" else row for row in rows]
    lost += [{**row, "corpus": "a text", "parameters": 1} for row in rows_of_tuning(None, 20.0)]
    assert "not finite" in tell(lost).findings[-1].evidence
    look.save(draw(lost), tmp_path)


def test_every_caption_has_a_figure(rows: Rows, folder: Path) -> None:
    for name in tell(rows).captions:
        assert (folder / "figures" / f"{name}.png").stat().st_size > 10_000
