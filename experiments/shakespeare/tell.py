"""What training says about the paper's claims on language models."""

from __future__ import annotations

import math
from statistics import mean

from experiments.experiment import Finding, Rows, Section, Verdict, judged
from experiments.shakespeare.methods import KNN, NAMES, PAPER
from experiments.shakespeare.seeds import (
    changes,
    direction,
    larger,
    numbers,
    percents,
    span,
    too_close,
    verdict,
)
from experiments.shakespeare.select import (
    Pair,
    beside_exact,
    best,
    contexts,
    curves,
    ends,
    gap,
    gap_of_best,
    methods,
    seed_of,
    shared,
)
from experiments.shakespeare.setting import bands, basis, left, rule_of, setting, stops
from experiments.shakespeare.tables import graph_seconds, samples, step_seconds, table
from experiments.words import ALIKE, NOT_FINITE, change, faster, finite, listed, middle, percent, seconds, sentence, times

SMALL = 0.05
"""A perplexity within 5% of that of exact attention, above or below, counts as a small gap."""
OVERFITTED = 0.01
"""A validation perplexity 1% above its minimum counts as overfitting."""
NOT_YET = "No two models to compare have been trained."
THE_PAPER = (
    "A character-level model, after nanoGPT, trained on Shakespeare with kNN attention in place of attention, against "
    "exact attention: training and validation perplexity, mean and maximal error over training. Found there: a small gap in "
    "perplexity, which widens as the model overfits, possibly because the maximal error grows; larger k are left to future "
    f"work. The authors' code takes k = {PAPER} keys, searches without a mask (a character can attend to those after it) and "
    "passes no gradient to queries and keys."
)


def tell(rows: Rows) -> Section:
    claims = [small_gap(rows), widening(rows), growing_error(rows), cost(rows)]
    if not contexts(rows):
        return Section(THE_PAPER, f"No model was trained to its end. {left(rows)}", claims, {})
    short = contexts(rows)[0]
    keys = numbers([row["keys"] for row in ends(rows, short, "exact")])
    band = bands(rows)
    return Section(
        paper=THE_PAPER,
        here=setting(rows),
        findings=[
            *claims,
            *(more_keys(rows, context) for context in contexts(rows)),
            used_with_exact(rows),
            exact_used_with(rows),
        ],
        captions={
            "shakespeare": f"Perplexity over training; below, the gap to exact attention. {band} {claims[0].evidence}",
            "shakespeare-errors": f"Attention on queries, keys and values of the model in training, next to exact attention in "
            f"float32. {band} {claims[2].evidence}",
        },
        tables=[table(rows, context) for context in contexts(rows)] + [samples(rows, context) for context in contexts(rows)],
        notes=[
            *(stops(rows)),
            "Learned positions are nanoGPT's. A long context has rotary ones: with few windows in a batch, each place of a "
            "window is seen too rarely for a model to learn where it is.",
            "No method drops single attention weights in training: a mask over weights needs the weights, and not every method "
            "has them. Dropout acts on embeddings and on what each layer adds, for all methods alike. nanoGPT drops weights too, "
            "which holds overfitting back: what is said about it here is about models without.",
            "For one seed, weights at the start, batches and the rate of learning are the same for all methods; a gap is that "
            f"between models of one seed. {rule_of(rows)}",
            f"Keys are counted one by one: with cells, the unopened ones count as nothing, and every key of the row's own "
            f"segment counts. At context {short:,} exact attention looks at {keys} on average.",
        ],
    )


def of_paper(rows: Rows) -> tuple[int, list[list[Pair]]] | None:
    """The context that was trained with the paper's k, and its evaluations beside those of exact attention, seed by seed."""
    for context in contexts(rows):
        if "topk-5" in methods(rows, context):
            return context, beside_exact(rows, context, "topk-5")
    return None


def diverged(found: Rows, name: str) -> str:
    """Nothing, where perplexities are numbers."""
    lost = [row for row in found if not math.isfinite(row["validation"])]
    if not lost:
        return ""
    seeds = "" if len(found) == 1 else f" with seed {listed([str(seed_of(row)) for row in lost])}"
    at = span([row["iteration"] for row in lost])
    return f"Training with {name} attention diverged{seeds}: at iteration {at} its perplexity is {NOT_FINITE}. "


def small_gap(rows: Rows) -> Finding:
    claim = "kNN attention maintains a small perplexity gap."
    found = of_paper(rows)
    if found is None:
        return Finding(claim, "untested", NOT_YET)
    context, each = found
    mine, exact = [pairs[-1][0] for pairs in each], [pairs[-1][1] for pairs in each]
    lost = diverged(exact, "exact")
    if lost:
        return Finding(claim, "untested", lost + "There is nothing to compare with.")
    last, of_best = [gap(pairs[-1]) for pairs in each], [gap_of_best(pairs) for pairs in each]
    large = [larger(last, SMALL), larger(of_best, SMALL)]
    small = [None if answer is None else not answer for answer in large]
    why = []
    if large[0] and mean(last) < 0:
        why.append("The gap at the end is in favour of kNN attention, which overfits less.")
    if None in small:
        near = [name for name, answer in zip(("at the end", "of the best"), small, strict=True) if answer is None]
        why.append(f"The gap {listed(near)} is too close to {percent(SMALL)} to say. {too_close(len(each))}")
    text = (
        f"k = {PAPER}, context {context:,}: after {span([row['iteration'] for row in mine])} iterations the validation "
        f"perplexity is {perplexities(mine)} against {perplexities(exact)} ({changes(last)}); the best on the way "
        f"{changes(of_best)}. {basis(rows, [context], [len(each)])}"
    )
    return Finding(claim, verdict(small), diverged(mine, "kNN") + text, " ".join(why))


def overfitting(pairs: list[Pair]) -> tuple[int, bool]:
    """Where in the list exact attention is at its best, and whether it has overfitted since."""
    exact = [row for _, row in pairs]
    at = exact.index(best(exact))
    return at, exact[-1]["validation"] > (1 + OVERFITTED) * exact[at]["validation"]


def turns(each: list[list[Pair]]) -> tuple[list[Pair], bool]:
    """Where exact attention is at its best, seed by seed, and whether all have overfitted since."""
    found = [overfitting(pairs) for pairs in each]
    return [pairs[at] for pairs, (at, _) in zip(each, found, strict=True)], all(overfitted for _, overfitted in found)


def widened(each: list[list[Pair]]) -> list[float]:
    """By how much the gap has grown since exact attention was at its best, seed by seed."""
    return [gap(pairs[-1]) - gap(turn) for pairs, turn in zip(each, turns(each)[0], strict=True)]


def widening(rows: Rows) -> Finding:
    claim = "As overfitting occurs, the perplexity difference widens."
    found = of_paper(rows)
    if found is None:
        return Finding(claim, "untested", NOT_YET)
    context, each = found
    mine, exact = [pairs[-1][0] for pairs in each], [pairs[-1][1] for pairs in each]
    lost = diverged(exact, "exact") + diverged(mine, "kNN")
    if lost:
        return Finding(claim, "untested", lost + "A gap that is not finite says nothing about overfitting.")
    turn, overfitted = turns(each)
    rest = basis(rows, [context], [len(each)])
    if not overfitted:
        spared = "" if len(each) == 1 else " with one seed at least"
        text = (
            f"Not seen: after {span([row['iteration'] for row in exact])} iterations exact attention is at "
            f"{perplexities(exact)}, within {percent(OVERFITTED)} of its best{spared}, so that there is no overfitting to "
            f"speak of. {rest}"
        )
        return Finding(claim, "untested", text)
    before, after = [gap(pair) for pair in turn], [gap(pairs[-1]) for pairs in each]
    text = (
        f"Context {context:,}, k = {PAPER}: exact attention is best at iteration {span([row['iteration'] for _, row in turn])}, "
        f"with a validation perplexity of {perplexities([row for _, row in turn])}, where the gap is {changes(before)}. At "
        f"{span([row['iteration'] for row in exact])} it has overfitted to {perplexities(exact)} "
        f"({numbers([row['train'] for row in exact])} on the training text), and the gap is {changes(after)}. {rest}"
    )
    up = direction(widened(each))
    wider = direction([abs(now) - abs(then) for now, then in zip(after, before, strict=True)])
    if up == 1:
        return Finding(claim, "confirmed", text)
    if wider == 1:
        return Finding(claim, "partly", text, "It widens in favour of kNN attention, which overfits less.")
    if wider == -1:
        return Finding(claim, "refuted", text, "The gap closes.")
    if up == 0:
        return Finding(claim, "refuted", text, "The gap hardly changes.")
    return Finding(claim, "untested", text, f"The gap changes too little to say. {too_close(len(each))}")


def growing_error(rows: Rows) -> Finding:
    claim = "Its widening may be due to a growing maximal error."
    found = of_paper(rows)
    if found is None:
        return Finding(claim, "untested", NOT_YET)
    context, each = found
    lost = diverged([pairs[-1][1] for pairs in each], "exact") + diverged([pairs[-1][0] for pairs in each], "kNN")
    if lost:
        return Finding(claim, "untested", lost + "There is no widening to explain.")
    overfitted = turns(each)[1]
    halves = [halved(pairs, overfitted) for pairs in each]
    most, usual = ([[middle(row[what] for row in half) for half in both] for both in halves] for what in ("max", "mean"))
    growth = direction([now / then - 1 for then, now in most])
    widens = overfitted and direction(widened(each)) == 1
    text = (
        f"Since iteration {span([early[0]['iteration'] for early, _ in halves])}, from the first half of the iterations to the "
        f"second, the largest error of a row of `TopK({PAPER})` goes from {percents([then for then, _ in most])} to "
        f"{percents([now for _, now in most])}, the mean from {percents([then for then, _ in usual])} to "
        f"{percents([now for _, now in usual])} (medians of evaluations). "
        f"{basis(rows, [context], [len(each)])}"
    )
    judgement: Verdict = "untested"
    if not overfitted:
        why = "There is no overfitting, and no widening to explain."
    elif growth is None:
        why = f"The largest error changes too little to say. {too_close(len(each))}"
    elif growth != 1:
        judgement, why = "refuted", "The largest error does not grow."
    elif widens:
        judgement, why = "confirmed", "Both grow; that the one is the cause of the other is not shown."
    else:
        why = "It grows without kNN attention falling behind: there is no widening to explain."
    return Finding(claim, judgement, text, why)


def halved(pairs: list[Pair], overfitted: bool) -> tuple[Rows, Rows]:
    """Evaluations of kNN attention since exact attention was at its best, or since the first steps, in two halves."""
    # Before the first steps attention is flat and its output nearly zero, which makes every relative error large.
    since = [mine for mine, _ in pairs[overfitting(pairs)[0] if overfitted else min(1, len(pairs) - 1) :]]
    return since[: max(1, len(since) // 2)], since[len(since) // 2 :]


def cost(rows: Rows) -> Finding:
    """Steps that are started kernel by kernel, which every method's can be. Cells are told, and do not decide."""
    claim = "kNN attention significantly reduces the cost of training (conclusion of the paper)."
    parts, wins, seeds = [], list[bool](), list[int]()
    for context in contexts(rows):
        taken = {name: step_seconds(ends(rows, context, name)) for name in methods(rows, context)}
        spent = {name: took for name, took in taken.items() if took is not None}
        exact = spent.pop("exact", None)
        if exact is None or not spent:
            continue
        seeds += [len(shared(rows, context, name)) for name in spent]
        wins += [faster(x, exact) for name, x in spent.items() if name in KNN]
        found = listed([f"{times(x / exact)} as long ({NAMES[name]})" for name, x in spent.items()])
        parts.append(f"context {context:,}: a step with exact attention takes {seconds(exact)}, one with another method {found}")
    if not parts:
        return Finding(claim, "untested", NOT_YET)
    least = "" if max(seeds) == 1 else " The least time of all seeds counts."
    text = f"{sentence('; '.join(parts))}. Less than {percent(ALIKE)} does not count.{least}{graphs(rows)}"
    return Finding(claim, judged(wins), f"{text} {basis(rows, contexts(rows), seeds)}")


def graphs(rows: Rows) -> str:
    """What a step takes as a graph, where there is one."""
    said = []
    for context in contexts(rows):
        for name in methods(rows, context):
            took = graph_seconds(ends(rows, context, name))
            said += [f"{seconds(took)} with {NAMES[name]} at context {context:,}"] if took is not None else []
    if not said:
        return ""
    return f" Captured as a CUDA graph, which only methods that never wait for the GPU can be, a step takes {listed(said)}."


def more_keys(rows: Rows, context: int) -> Finding:
    """Every method of a context: its gap at the last iteration that exact attention has reached too, with the error there, and at
    the best of each."""
    claim = f"Context {context:,}: more keys, drawn keys, and cells."
    others = [name for name in methods(rows, context) if name != "exact"]
    if not others:
        return Finding(claim, "beyond", NOT_YET)
    gaps, of_best, errors, count = [], [], [], []
    for name in others:
        each = beside_exact(rows, context, name)
        last = [pairs[-1][0] for pairs in each]
        late = [gap(pairs[-1]) for pairs in each]
        stopped = any(row["stopped"] for row in ends(rows, context, name))
        early = f" (iteration {span([row['iteration'] for row in last])})" if stopped else ""
        gaps.append(f"{NAMES[name]} {changes(late)}{early}")
        of_best.append(f"{NAMES[name]} {changes([gap_of_best(pairs) for pairs in each])}")
        errors.append(f"{NAMES[name]} {percents([row['mean'] for row in last])}")
        count += [NAMES[name]] if larger(late, 0.0) else []
    exact = curves(rows, context, "exact")
    text = (
        f"The best model of exact attention has a validation perplexity of {perplexities([best(found) for found in exact])}; the "
        f"gap of the best of the others to it: {listed(of_best)}. After {span([found[-1]['iteration'] for found in exact])} "
        f"iterations it has {perplexities([found[-1] for found in exact])}; the gap: {listed(gaps)}. Of these gaps "
        f"count: {listed(count)}. Mean error of attention at that time: {listed(errors)}. "
        f"{basis(rows, [context], [len(shared(rows, context, name)) for name in others])}"
    )
    return Finding(claim, "beyond", text)


def used_with_exact(rows: Rows) -> Finding:
    claim = "A model trained with kNN attention, used with exact attention."
    parts, seeds = [], list[int]()
    for context in contexts(rows):
        names = [name for name in methods(rows, context) if name != "exact"]
        found = [f"{NAMES[name]} {changes(swapped(rows, context, name, 'exact'))}" for name in names]
        seeds += [len(shared(rows, context, name)) for name in names]
        parts += [f"context {context:,}: {listed(found)}"] if found else []
    if not parts:
        return Finding(claim, "beyond", NOT_YET)
    text = f"The change in validation perplexity when exact attention takes over after training; {'; '.join(parts)}."
    return Finding(claim, "beyond", f"{text} {basis(rows, contexts(rows), seeds)}")


def exact_used_with(rows: Rows) -> Finding:
    parts, seeds = [], list[int]()
    for context in contexts(rows):
        last = ends(rows, context, "exact")
        names = [name for name in NAMES if all(name in row["swapped"] for row in last)]
        found = [f"{NAMES[name]} {changes(swapped(rows, context, 'exact', name))}" for name in names]
        seeds.append(len(last))
        parts.append(f"context {context:,}: {listed(found)}")
    text = f"The change in validation perplexity when another method takes over after training; {'; '.join(parts)}."
    claim = "A model trained with exact attention, used with kNN attention."
    return Finding(claim, "beyond", f"{text} {basis(rows, contexts(rows), seeds)}")


def swapped(rows: Rows, context: int, name: str, other: str) -> list[float]:
    """How perplexity changes, seed by seed, when another method takes over after training."""
    both = zip(curves(rows, context, name), ends(rows, context, name), strict=True)
    return [change(finite(last["swapped"][other]), found[-1]["validation"]) for found, last in both]


def perplexities(found: Rows) -> str:
    return numbers([row["validation"] for row in found])
