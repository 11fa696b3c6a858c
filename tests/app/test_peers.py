"""Rules of others: which keys they read, what they make of those, alone and in a batch, in prompts and in answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import model as tiny_model
from hf_models import tokenizer_of_letters

from nearfield.app.peers import answering
from nearfield.app.peers.answering import joined_notes
from nearfield.app.peers.cache import PeerCache, by_peer, prompt_by_rule
from nearfield.app.peers.rules import (
    RULES,
    Choice,
    MoBA,
    Notes,
    Quest,
    RetroInfer,
    Rows,
    SnapKV,
    Streaming,
    VAttention,
    _clustered,
    _dice,
    budget_of,
)
from nearfield.app.ruler import run, ways
from nearfield.app.ruler.answers import answer, read
from nearfield.app.ruler.ways import RECORDED, WAYS, BudgetWay, PeerWay, WeightWay, cells_of_budget
from nearfield.cells import sizes
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition.by_queries import LATEST

HEADS, KV_HEADS, LENGTH, DIM, BUDGET = 4, 2, 230, 16, 48
SCALE = DIM**-0.5
SMALL = {
    **RULES,
    "moba": MoBA("moba", size=8),
    "quest": Quest("quest", size=8),
    "retroinfer": RetroInfer("retroinfer", size=8, window=8),
    "vattention": VAttention("vattention", sinks=2, window=4),
}
"""The same rules with sizes for few keys."""


def inputs(length: int = LENGTH, rows: int = 1, seed: int = 0, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(batch, HEADS, rows, DIM, generator=generator)
    key, value = torch.randn(2, batch, KV_HEADS, length, DIM, generator=generator)
    return query, key, value


def given(length: int = LENGTH, rows: int = 1, seed: int = 0) -> Rows:
    return Rows(*inputs(length, rows, seed), SCALE)


def noted(rule: Any, rows: Rows, budget: int = BUDGET) -> Notes:
    """Of a prompt without the last ten keys, which are tokens of an answer."""
    queries = torch.randn(1, HEADS, 32, DIM, generator=torch.Generator().manual_seed(9))
    return rule.notes(queries, rows.key[:, :, :-10], rows.value[:, :, :-10], SCALE, budget)


def exact(rows: Rows) -> Tensor:
    mask = rows.visible.expand(-1, HEADS, -1, -1)
    return F.scaled_dot_product_attention(rows.query, rows.key, rows.value, mask, scale=SCALE, enable_gqa=True)


def by_hand(rows: Rows, choice: Choice, entry: int, head: int, row: int) -> Tensor:
    """The sums of a choice, key by key."""
    top, below = torch.zeros(DIM, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    kv = head // (HEADS // KV_HEADS)
    for j in range(rows.length):
        if choice.read[entry, head, row, j]:
            logit = float(rows.query[entry, head, row] @ rows.key[entry, kv, j]) * SCALE
            extra = 0.0 if choice.log_weight is None else float(choice.log_weight[entry, head, row, j])
            weight = torch.tensor(logit + extra, dtype=torch.float64).exp()
            top, below = top + weight * rows.value[entry, kv, j], below + weight
    if choice.far_logits is not None and choice.far_values is not None:
        for cluster, logit in enumerate(choice.far_logits[entry, head, row]):
            weight = logit.double().exp()
            top, below = top + weight * choice.far_values[entry, kv, cluster], below + weight
    return (top / below).float()


@pytest.mark.parametrize("name", list(RULES))
def test_with_room_for_all_keys_a_rule_is_exact_attention(name: str) -> None:
    rows = given(rows=5)
    torch.testing.assert_close(RULES[name].attend(rows, LENGTH, {}), exact(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(SMALL))
def test_the_output_is_the_softmax_over_what_is_read(name: str) -> None:
    rule = SMALL[name]
    rows = given(rows=3 if rule.reads_prompts else 1)
    notes = noted(rule, rows)
    choice = rule.choose(rows, BUDGET, notes)
    found = rule.attend(rows, BUDGET, notes)
    for head in range(HEADS):
        for row in range(rows.query.shape[2]):
            torch.testing.assert_close(found[0, head, row], by_hand(rows, choice, 0, head, row), atol=1e-4, rtol=1e-4)
    assert not bool((choice.read & ~rows.visible).any())


@pytest.mark.parametrize("name", list(SMALL))
def test_no_rule_reads_more_than_its_budget(name: str) -> None:
    """Blocks, clusters and SnapKV read the tokens of the answer besides."""
    rule = SMALL[name]
    for seed in range(5):
        rows = given(rows=9 if rule.reads_prompts else 1, seed=seed)
        notes = noted(rule, rows)
        read = rule.choose(rows, BUDGET, notes).read.sum(-1)
        assert int(read.max()) <= BUDGET + (10 if notes else 0)
        if rule.reads_prompts:
            assert int(rule.choose(rows, BUDGET, {}).read.sum(-1).max()) <= BUDGET
        # A row's own block may have a single key.
        assert int(read.min()) >= BUDGET - (8 if name in ("quest", "moba", "retroinfer") else 0)


def test_the_heaviest_keys_are_read() -> None:
    rows = given(rows=4)
    read = RULES["topk"].choose(rows, BUDGET, {}).read
    for head in range(HEADS):
        for row in range(4):
            best = set(rows.logits[0, head, row].argsort(descending=True)[:BUDGET].tolist())
            assert set(read[0, head, row].nonzero()[:, 0].tolist()) == best


def test_streaming_reads_the_first_and_the_latest() -> None:
    read = Streaming("s", sinks=4).choose(given(rows=2), 20, {}).read
    for row in range(2):
        own = LENGTH - 2 + row
        assert read[0, 0, row].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(own - 15, own + 1)]


def test_a_page_is_bounded_from_above_and_the_best_bounds_are_read() -> None:
    rows, rule = given(), Quest("q", size=8)
    whole = LENGTH // 8
    pages = rows.key[:, :, : whole * 8].unflatten(2, (whole, 8))
    bounds = rule.scores(rows, rule.tables(pages))
    products = rows.times(rows.key)[..., : whole * 8].unflatten(3, (whole, 8))
    assert bool((bounds + 1e-4 >= products.amax(-1)).all())
    single = rule.scores(rows, rule.tables(rows.key[:, :, :, None]))
    torch.testing.assert_close(single, rows.times(rows.key), atol=1e-4, rtol=1e-4)
    # Of an answer, pages that were whole in the prompt are candidates, and what came after them is read.
    for notes, last in (({}, whole), (noted(rule, rows), (LENGTH - 10) // 8)):
        read = rule.choose(rows, BUDGET, notes).read
        for head in range(HEADS):
            best = bounds[0, head, 0, :last].argsort(descending=True)[: BUDGET // 8 - 1]
            expected = {8 * int(page) + i for page in best for i in range(8)} | set(range(last * 8, LENGTH))
            assert set(read[0, head, 0].nonzero()[:, 0].tolist()) == expected


def test_blocks_are_judged_by_their_mean_key() -> None:
    rows, rule = given(), MoBA("m", size=8)
    blocks = rows.key[:, :, :224].unflatten(2, (28, 8))
    found = rule.scores(rows, rule.tables(blocks))
    torch.testing.assert_close(found, rows.times(rows.key)[..., :224].unflatten(3, (28, 8)).mean(-1), atol=1e-4, rtol=1e-4)


def test_no_whole_block_ahead_of_a_row_is_read() -> None:
    """Also the block that a row is in counts only up to the row, and is no candidate."""
    rows = Rows(*inputs(rows=LENGTH), SCALE)
    for name in ("quest", "moba"):
        read = SMALL[name].choose(rows, BUDGET, {}).read[0, 0]
        for row in (0, 7, 8, 100, LENGTH - 1):
            own = set(range(row // 8 * 8, row + 1))
            there = set(read[row].nonzero()[:, 0].tolist())
            assert own <= there
            assert max(there) == row


def test_snapkv_keeps_what_the_last_queries_looked_at() -> None:
    query, key, value = inputs(rows=32)
    key[:, :, 57] = 5 * query[:, ::2, -8:].mean(2)  # what the heads of a group look at
    rule = SnapKV("s")
    kept = rule.notes(query, key, value, SCALE, BUDGET)["key_kept"]
    assert kept.shape == (1, HEADS, LENGTH)
    assert bool((kept.sum(-1) == BUDGET).all())
    assert bool(kept[:, ::2, 57].all())
    assert bool(kept[:, :, -32:].all())
    rows = Rows(*inputs(LENGTH + 3, seed=2), SCALE)
    read = rule.choose(rows, BUDGET, {"key_kept": kept}).read[:, :, 0]
    assert torch.equal(read[..., :LENGTH], kept)
    assert bool(read[..., LENGTH:].all())


def test_clusters_of_equal_keys_stand_for_them_exactly() -> None:
    """Where all keys of a cluster are the same, its centroid says all there is to say: no cluster need be read."""
    query, key, value = inputs()
    kinds = torch.randn(1, KV_HEADS, 5, DIM, generator=torch.Generator().manual_seed(3))
    key[:, :, 4:] = kinds[:, :, torch.arange(LENGTH - 4) % 5]
    rule = RetroInfer("r", size=8, window=8)
    rows = Rows(query, key, value, SCALE)
    notes = rule.notes(query, key, value, SCALE, 12)
    assert int(rule.choose(rows, 12, notes).read.sum()) == HEADS * 12  # the first four and the latest eight
    torch.testing.assert_close(rule.attend(rows, 12, notes), exact(rows), atol=1e-4, rtol=1e-4)
    rows = given()  # and where they are not the same, it does not
    off = rule.attend(rows, 12, rule.notes(query, rows.key, rows.value, SCALE, 12)) - exact(rows)
    assert float(off.norm()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clusters_that_lie_apart_are_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order their points come, and however many of them are looked at at a time."""
    generator = torch.Generator().manual_seed(3)
    label = torch.arange(12).repeat_interleave(9).repeat(2, 1)
    label[1] = label[1].flip(0)
    centre = 20 * torch.randn(2, 12, DIM, generator=generator)
    points = centre.gather(1, label[..., None].expand(-1, -1, DIM)) + 0.1 * torch.randn(2, 108, DIM, generator=generator)
    found = _clustered(points.to(dtype), 12)
    same = found[:, :, None] == found[:, None]
    assert torch.equal(same, label[:, :, None] == label[:, None])
    monkeypatch.setattr("nearfield.app.peers.rules.LLOYD_LOGITS", 12 * 2 * 7)
    assert torch.equal(_clustered(points.to(dtype), 12), found)
    # What all of them have in common changes nothing, however coarse it makes half precision.
    far = torch.zeros(DIM)
    far[3], far[7] = 150.0, -90.0
    loose = torch.randn(1, 600, DIM, generator=generator)
    near, moved = (torch.bincount(_clustered((loose + shift).to(dtype), 40)[0], minlength=40) for shift in (0 * far, far))
    assert int((moved > 0).sum()) >= 38
    assert int(moved.max()) <= 2 * int(near.max())
    # Both begin in the first of two.
    line = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 9.0, 9.1, 9.2, 9.3], dtype=dtype)[None, :, None]
    assert _clustered(line, 2).tolist() == [[0] * 6 + [1] * 4]


def test_dice_are_fair_and_every_layer_head_row_and_key_has_its_own() -> None:
    rows = given(rows=8)
    dice = _dice(rows, 0)
    assert dice.shape == (1, HEADS, 8, LENGTH)
    assert float(dice.min()) >= 0.0
    assert float(dice.max()) < 1.0
    ordered = dice.flatten().sort().values
    off = (ordered - torch.arange(ordered.numel()) / ordered.numel()).abs().max()
    assert float(off) * ordered.numel() ** 0.5 < 2.7  # Kolmogorov and Smirnov at 1e-6
    others = [_dice(replace(rows, layer=1), 0), _dice(rows, 1)]
    for one, other in ((dice[:, 0], dice[:, 1]), (dice[:, :, 0], dice[:, :, 1]), *((dice, x) for x in others)):
        close = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(close)) * one.numel() ** 0.5 < 5.0  # normal at 1e-6


def test_a_random_sample_counts_for_all_that_it_was_drawn_from() -> None:
    """The sum of the weights is unbiased: over 400 seeds its mean is within five standard errors, and a sample that counted once
    is far from it."""
    rows = given()
    logits = rows.logits[0, 0, 0].double()
    sums, plain = [], []
    for seed in range(400):
        choice = VAttention("v", sinks=2, window=4, seed=seed).choose(rows, BUDGET, {})
        assert choice.log_weight is not None
        read, extra = choice.read[0, 0, 0], choice.log_weight[0, 0, 0].double()
        sums.append((logits + extra).exp()[read].sum())
        plain.append(logits.exp()[read].sum())
    found, wanted = torch.stack(sums), logits.exp().sum()
    error = found.std() / len(sums) ** 0.5
    assert abs(found.mean() - wanted) < 5 * error
    assert abs(torch.stack(plain).mean() - wanted) > 20 * error


@pytest.mark.parametrize("name", SMALL)
def test_padding_changes_nothing(name: str) -> None:
    """A batch that is padded on the left: every entry reads what it reads alone."""
    rule, lengths = SMALL[name], (LENGTH, LENGTH - 48, LENGTH - 7)
    alone, notes, padded = [], [], []
    for seed, length in enumerate(lengths):
        rows = given(length, seed=seed)
        notes.append(noted(rule, rows))
        alone.append(rule.attend(rows, BUDGET, notes[-1]))
        missing = LENGTH - length
        padded.append((rows.query, *(F.pad(x, (0, 0, missing, 0), value=100.0) for x in (rows.key, rows.value))))
    query, key, value = (torch.cat(parts) for parts in zip(*padded, strict=True))
    missing = [LENGTH - length for length in lengths]
    counts = torch.arange(LENGTH) >= torch.tensor(missing)[:, None]
    found = rule.attend(Rows(query, key, value, SCALE, counts), BUDGET, joined_notes(notes, missing))
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, rule in SMALL.items() if rule.reads_prompts])
def test_rows_of_a_prompt_see_nothing_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.app.peers.cache.LOGITS", HEADS * LENGTH * 50)  # several parts
    query, key, value = inputs(rows=LENGTH)
    whole = prompt_by_rule(SMALL[name], query, key, value, SCALE, BUDGET)
    later = [x.clone() for x in (query, key, value)]
    for x in later:
        x[:, :, 150:] = 7.0
    changed = prompt_by_rule(SMALL[name], *later, SCALE, BUDGET)
    torch.testing.assert_close(changed[:, :, :150], whole[:, :, :150], atol=1e-5, rtol=1e-5)
    first = Rows(query[:, :, :BUDGET], key[:, :, :BUDGET], value[:, :, :BUDGET], SCALE)
    torch.testing.assert_close(whole[:, :, :BUDGET], exact(first), atol=1e-4, rtol=1e-4)
    assert float((whole - exact(Rows(query, key, value, SCALE)))[:, :, 150:].abs().max()) > 1e-3


# Models.


PROMPTS = [[5 * i % 97 + 3 for i in range(length)] for length in (420, 404, 388)]


def net(**changes: Any) -> Any:
    return tiny_model("llama", vocab_size=128, max_position_embeddings=2048, **changes)


@pytest.mark.parametrize(
    "name", ["topk-6", "quest-6", "moba-6", "snapkv-6", "streaming-6", "retroinfer-6", "vattention-6", "cells-6", "weight-1"]
)
def test_answers_by_a_rule_are_the_same_in_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SEGMENT", 64)
    model, talks, way = net(), tokenizer_of_letters(), WAYS[name]
    alone = [answer(model, talks, way, [ids], 5)[0] for ids in PROMPTS]
    together = answer(model, talks, way, PROMPTS, 5)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for one in together:
        if name == "weight-1":
            assert 16 <= one.keys_read <= 230
        else:
            assert 150 < one.keys_read <= 230 if name == "cells-6" else one.keys_read == 192
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_a_step_that_cannot_be_captured_is_served_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the state that it had before the attempt."""

    class Fake:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def refused(graph: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted")

    for name, found in {"CUDAGraph": Fake, "Stream": lambda device: Fake(), "current_stream": lambda device: Fake()}.items():
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", refused)
    model, talks, way = net(), tokenizer_of_letters(), WAYS["snapkv-6"]
    expected = [one.tokens for one in answer(model, talks, way, PROMPTS, 20)]
    monkeypatch.setattr(answering, "_is_capturable", lambda model, cache: True)
    assert [one.tokens for one in answer(model, talks, way, PROMPTS, 20)] == expected
    assert "could not be captured in a CUDA graph, and goes on without: operation not permitted" in caplog.text


@torch.no_grad()
def test_rows_of_keys_are_aligned_whatever_room_they_have() -> None:
    model = net()
    caches = [read(model, WAYS["exact"], torch.tensor(ids)).cache for ids in PROMPTS]
    made, longest = answering.AnswerCache(caches), max(map(len, PROMPTS)) - 1
    for more in (1, 100, answering.ROOM + 1, 700):
        made.reserve(more)
        for layer in made.layers:
            assert layer.keys.shape[2] % answering.ALIGNED == 0
            assert layer.keys.shape == layer.values.shape
            assert longest + more <= layer.keys.shape[2] < longest + max(more, answering.ROOM) + answering.ALIGNED


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["exact", *(f"{rule}-6" for rule in RULES)])
def test_captured_steps_write_what_plain_steps_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, talks, way = net().cuda(), tokenizer_of_letters(), WAYS[name]
    model.generation_config.eos_token_id = None
    captured, plain = [], []
    made = answering._captured
    monkeypatch.setattr(answering, "_captured", lambda step, state: captured.append(made(step, state)) or captured[-1])
    found = [one.tokens for one in answer(model, talks, way, PROMPTS, [3, 30, 30])]
    assert captured
    assert all(getattr(one, "__name__", "") == "replay" for one in captured)
    monkeypatch.setattr(answering, "_is_capturable", lambda model, cache: plain.append(1) and False)
    assert [one.tokens for one in answer(model, talks, way, PROMPTS, [3, 30, 30])] == found
    assert plain
    on_cpu = [one.tokens for one in answer(model.cpu(), talks, way, PROMPTS, [3, 30, 30])]
    assert [one[:3] for one in on_cpu] == [one[:3] for one in found]


@pytest.mark.parametrize("name", ["quest-6", "snapkv-6", "retroinfer-6"])
def test_answers_go_on_as_they_were_when_others_leave(name: str) -> None:
    """With what the rule has noted about their own prompts."""
    model, talks = net(), tokenizer_of_letters()
    model.generation_config.eos_token_id = None
    alone = [answer(model, talks, WAYS[name], [ids], 30)[0].tokens for ids in PROMPTS]
    together = [one.tokens for one in answer(model, talks, WAYS[name], PROMPTS, [3, 30, 30])]
    assert together == [alone[0][:3], *alone[1:]]


@pytest.mark.parametrize(
    "name", ["topk-6-both", "quest-6-both", "moba-6-both", "streaming-6-both", "vattention-6-both", "cells-6-both"]
)
def test_prompts_by_a_rule(name: str) -> None:
    model, talks = net(), tokenizer_of_letters()
    way = WAYS[name]
    (found,) = answer(model, talks, way, PROMPTS[:1], 3)
    assert len(found.tokens) == 3
    with way.reading(model, 420), torch.no_grad():
        by_rule = model(torch.tensor(PROMPTS[:1]), past_key_values=way.cache(model.config)).logits
    with torch.no_grad():
        exactly = model(torch.tensor(PROMPTS[:1])).logits
    assert float((by_rule - exactly)[:, 300:].abs().max()) > 1e-4
    torch.testing.assert_close(by_rule[:, :30], exactly[:, :30], atol=1e-4, rtol=1e-4)
    short = answer(model, talks, way, [PROMPTS[0][:100]], 3)
    assert short[0].tokens == answer(model, talks, WAYS["exact"], [PROMPTS[0][:100]], 3)[0].tokens


def test_a_budget_that_holds_everything_gives_exact_answers() -> None:
    model, talks = net(), tokenizer_of_letters()
    expected = [one.tokens for one in answer(model, talks, WAYS["exact"], PROMPTS, 6)]
    for rule in RULES.values():
        way = PeerWay("all", "", rule=rule, share=2.0, both=rule.reads_prompts)
        assert [one.tokens for one in answer(model, talks, way, PROMPTS, 6)] == expected
    assert [one.tokens for one in answer(model, talks, BudgetWay("all", "", share=2.0), PROMPTS, 6)] == expected


@torch.no_grad()
def test_a_prompt_is_read_once_for_all_that_answer_it_by_a_rule() -> None:
    model = net()
    ids = torch.tensor(PROMPTS[0])
    one = read(model, WAYS["quest-6"], ids)
    assert isinstance(one.cache, PeerCache)
    before = [layer.keys.clone() for layer in one.cache.layers]
    expected = {}
    for name in ("quest-6", "snapkv-6", "cells-6", "topk-1.5"):
        expected[name] = answer(model, tokenizer_of_letters(), WAYS[name], PROMPTS[:1], 5)[0].tokens
    for name, tokens in expected.items():
        assert WAYS[name].source is RECORDED
        assert answer(model, tokenizer_of_letters(), WAYS[name], PROMPTS[:1], 5, [one])[0].tokens == tokens
    for layer, keys in zip(one.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "read", lambda *given: reads.append(given[1].name) or read(*given))  # type: ignore[func-returns-value]
        kept: Any = {}
        prompts: Any = [type("P", (), {"task": "vt", "index": i}) for i in range(2)]
        encoded = {("vt", i): ids for i, ids in enumerate(PROMPTS)}
        for name in expected:
            found = run._readings(model, WAYS[name], prompts, encoded, kept, lambda: None)
            assert found is not None
            assert len(found) == 2
        assert run._readings(model, WAYS["quest-6-both"], prompts, encoded, kept, lambda: None) is None
        assert reads == ["quest-6"] * 2
        # The default reads prompts exactly where that is faster.
        patched.setattr(ways, "is_exact_faster", lambda query, key, is_causal: key.shape[2] < 410)
        assert WAYS["default"].source_for(model, 409) is RECORDED
        assert WAYS["default"].source_for(model, 410) is None
        assert WAYS["cells"].source_for(model, 100) is None
        assert run._readings(model, WAYS["default"], prompts[1:], encoded, kept, lambda: None) == [kept["recorded", ("vt", 1)]]
        assert run._readings(model, WAYS["default"], prompts, encoded, kept, lambda: None) is None
        for name in ("default", "default+exact"):
            found = answer(model, tokenizer_of_letters(), WAYS[name], PROMPTS[1:2], 5)
            assert found[0].tokens == answer(model, tokenizer_of_letters(), WAYS["exact"], PROMPTS[1:2], 5)[0].tokens


def test_keys_are_grouped_once_for_all_budgets() -> None:
    """The stores of a way share no keys with those of the next one that are written to, and other cells are made anew."""
    model, talks = net(), tokenizer_of_letters()
    model.generation_config.eos_token_id = None
    names = ("cells-1.5", "exact+cache", "cells-6", "cells-12", "cells-1.5")
    alone = [[one.tokens for one in answer(model, talks, WAYS[name], PROMPTS, 30)] for name in names]
    readings = [read(model, WAYS["cells-6"], torch.tensor(ids)) for ids in PROMPTS]
    closed: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        close = CellStore.close

        def counted(store: CellStore, query: Any) -> None:
            closed.append(1)
            # The last queries of the prompt say how its keys are grouped, as many as in a cache that has read it itself.
            assert query.shape[2] == LATEST
            close(store, query=query)

        patched.setattr(CellStore, "close", counted)
        counts = []
        for name, tokens in zip(names, alone, strict=True):
            assert [one.tokens for one in answer(model, talks, WAYS[name], PROMPTS, 30, readings)] == tokens
            counts.append(len(closed))
    layers = len(PROMPTS) * len(readings[0].cache.layers)
    assert counts[0] == layers
    assert [b - a for a, b in pairwise(counts)] == [layers, layers, 0, 0]


@torch.no_grad()
def test_keys_are_counted_that_the_last_rows_of_a_prompt_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SEGMENT", 64)
    model, ids = net(), torch.tensor(PROMPTS[0])
    reading = read(model, WAYS["weight-1"], ids)
    counts = {}
    for weight in (1e-9, 0.01, 0.9):
        way = WeightWay("some", "", share=0.5, min_weight=weight)
        cache = way.adopt(reading.cache, model.config)
        stores: list[Any] = [layer.store for layer in cache.layers]
        assert all(store.min_weight == weight for store in stores)
        counts[weight] = way.keys_read(cache)
        alone = sum(store.length - store.closed + 16 for store in stores) / len(stores)
        assert counts[weight] >= alone
        if weight == 0.9:
            assert counts[weight] == alone
    assert counts[1e-9] > counts[0.01] > counts[0.9]
    # Half of the keys, of which the most are in cells of the mean size.
    assert counts[1e-9] == pytest.approx(BudgetWay("all", "", share=0.5).keys_read(cache), rel=0.1)


@torch.no_grad()
def test_layers_with_a_window_are_read_exactly() -> None:
    model = tiny_model("gemma3", vocab_size=128, max_position_embeddings=2048)
    ids = torch.tensor(PROMPTS[:1])
    exactly = model(ids).logits
    for share, is_exact in ((4.0, True), (0.06, False)):
        with by_peer(model, RULES["topk"], share):
            cache = PeerCache(model.config)
            found = model(ids[:, :-1], past_key_values=cache).logits
            step = model(ids[:, -1:], past_key_values=cache.by_rule(RULES["topk"], share)).logits
        assert torch.allclose(torch.cat([found, step], 1), exactly, atol=1e-4) == is_exact
    assert {type(layer).__name__ for layer in cache.layers} > {"PeerLayer"}


def test_answers_that_grow_past_the_budget() -> None:
    """Prompts within it, alone and beside one that is not; some so short that a rule has nothing to leave out."""
    model, talks = net(), tokenizer_of_letters()
    model.generation_config.eos_token_id = None
    for name in RULES:
        for prompts in (
            [PROMPTS[0][:190]],
            [PROMPTS[0][:190], PROMPTS[1]],
            [PROMPTS[0][:3]],
            [PROMPTS[0][:40], PROMPTS[1][:191]],
        ):
            found = answer(model, talks, WAYS[f"{name}-6"], prompts, 8)
            assert all(len(one.tokens) == 8 for one in found)


@pytest.mark.parametrize("name", [name for name, rule in SMALL.items() if rule.reads_prompts])
def test_half_precision_costs_no_more_than_in_sdpa(name: str) -> None:
    """And ties between rounded logits are not read beyond the budget."""
    query, key, value = (x.bfloat16() for x in inputs(rows=3))
    key[:, :, 50:100] = key[:, :, 50:51]  # ties
    rows = Rows(query, key, value, SCALE)
    assert int(SMALL[name].choose(rows, BUDGET, {}).read.sum(-1).max()) <= BUDGET
    wide = exact(Rows(query.float(), key.float(), value.float(), SCALE))
    found = SMALL[name].attend(rows, LENGTH, {})
    assert found.dtype == torch.bfloat16
    assert (found.float() - wide).norm() <= 1.1 * (exact(rows).float() - wide).norm()


def test_budgets() -> None:
    assert budget_of(0.06, 32768) == 1967
    assert budget_of(0.015, 4096) == 192
    for share in (0.015, 0.03, 0.06, 0.12):
        cells = cells_of_budget(share, 32768)
        assert cells.segment is not None
        assert cells.probes is not None
        read = cells.segment / 2 + 16 + 32 * cells.probes
        assert 0.8 < read / (share / 2 * 32768) <= 1.0
