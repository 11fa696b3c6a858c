"""What training says about the paper's claims on language models."""

from __future__ import annotations

import math

from experiments.experiment import Finding, Row, Rows, Section, Table, Verdict, judged
from experiments.shakespeare.methods import KNN, NAMES, PAPER
from experiments.shakespeare.select import beside_exact, best, contexts, curve, end, gap, gap_of_best, methods
from experiments.words import (
    ALIKE,
    NOT_FINITE,
    as_it_is,
    change,
    faster,
    finite,
    listed,
    middle,
    number,
    percent,
    seconds,
    sentence,
    signed,
    times,
)

SMALL = 0.05
"""A perplexity within 5% of that of exact attention, above or below, counts as a small gap."""
OVERFITTED = 0.01
"""A validation perplexity 1% above its minimum counts as overfitting."""
MARGIN = 0.01
"""A gap that changes by a percentage point counts as changed, as does an error that changes by 1%."""


def tell(rows: Rows) -> Section:
    findings = [
        small_gap(rows),
        widening(rows),
        growing_error(rows),
        cost(rows),
        *(more_keys(rows, context) for context in contexts(rows)),
        used_with_exact(rows),
        exact_used_with(rows),
    ]
    short = contexts(rows)[0]
    return Section(
        paper="A character-level model, after nanoGPT, trained on Shakespeare with kNN attention in place of attention, against "
        "exact attention: training and validation perplexity, mean and maximal error over training. Found there: a small gap in "
        "perplexity, which widens as the model overfits, possibly because the maximal error grows; larger k are left to future "
        f"work. The authors' code takes k = {PAPER} keys, searches without a mask (a character can attend to those after it) and "
        "passes no gradient to queries and keys.",
        here=setting(rows),
        findings=findings,
        captions={
            "shakespeare": f"Perplexity over training; below, the gap to exact attention. {findings[0].evidence}",
            "shakespeare-errors": f"Attention on queries, keys and values of the model in training, next to exact attention in "
            f"float32. {findings[2].evidence}",
        },
        tables=[table(rows, context) for context in contexts(rows)] + [samples(rows, context) for context in contexts(rows)],
        notes=[
            *(stops(rows)),
            "Learned positions are nanoGPT's. A long context has rotary ones: with few windows in a batch, each place of a "
            "window is seen too rarely for a model to learn where it is.",
            "No method drops single attention weights in training: a mask over weights needs the weights, and not every method "
            "has them. Dropout acts on embeddings and on what each layer adds, for all methods alike. nanoGPT drops weights too, "
            "which holds overfitting back: what is said about it here is about models without.",
            "Weights at the start, batches and the rate of learning are the same for all methods. There is one seed: small "
            "differences in perplexity say little.",
            f"Keys are counted one by one: with cells, the unopened ones count as nothing, and every key of the row's own "
            f"segment counts. At context {short:,} exact attention looks at {number(end(rows, short, 'exact')['keys'])} on "
            "average.",
        ],
    )


def setting(rows: Rows) -> str:
    ends = [end(rows, context, "exact") for context in contexts(rows)]
    first = ends[0]
    lengths = listed(
        [
            f"{row['context']:,} (batches of {row['batch']}, {row['asked']:,} iterations, "
            f"{'rotary' if row['rotary'] else 'learned'} positions)"
            for row in ends
        ]
    )
    return (
        f"A GPT of {first['layers']} layers, {first['heads']} heads, {first['width']} wide ({first['parameters']:,} weights), "
        f"dropout {first['dropout']:g}, on {first['corpus']} ({first['characters']:,} characters, the last tenth for "
        f"validation), context {lengths}. Attention is causal, and trains with the exact gradient of each estimator. Methods: "
        f"`TopK({PAPER})`, `TopK` with √n keys, half of them near and half drawn, and `Cells` that look at about as many."
    )


def of_paper(rows: Rows) -> tuple[int, list[tuple[Row, Row]]]:
    """The context that was trained with the paper's k, and its evaluations beside those of exact attention."""
    context = next(context for context in contexts(rows) if "topk-5" in methods(rows, context))
    return context, beside_exact(rows, context, "topk-5")


def diverged(row: Row, name: str) -> str:
    """Nothing, where a perplexity is a number."""
    if math.isfinite(row["validation"]):
        return ""
    return f"Training with {name} attention diverged: at iteration {row['iteration']:,} its perplexity is {NOT_FINITE}. "


def small_gap(rows: Rows) -> Finding:
    claim = "kNN attention maintains a small perplexity gap."
    context, pairs = of_paper(rows)
    lost = diverged(pairs[-1][1], "exact")
    if lost:
        return Finding(claim, "untested", lost + "There is nothing to compare with.")
    last, of_best = gap(pairs[-1]), gap_of_best(pairs)
    small = (abs(last) <= SMALL, abs(of_best) <= SMALL)
    why = "The gap at the end is in favour of kNN attention, which overfits less." if last < -SMALL else ""
    mine, exact = pairs[-1]
    text = (
        f"k = {PAPER}, context {context:,}: after {mine['iteration']:,} iterations the validation perplexity is "
        f"{perplexity(mine)} against {perplexity(exact)} ({signed(last)}); the best on the way {signed(of_best)}."
    )
    return Finding(claim, judged(small), diverged(mine, "kNN") + text, why)


def overfitting(pairs: list[tuple[Row, Row]]) -> tuple[int, bool]:
    """Where in the list exact attention is at its best, and whether it has overfitted since."""
    exact = [row for _, row in pairs]
    at = exact.index(best(exact))
    return at, exact[-1]["validation"] > (1 + OVERFITTED) * exact[at]["validation"]


def widening(rows: Rows) -> Finding:
    claim = "As overfitting occurs, the perplexity difference widens."
    context, pairs = of_paper(rows)
    last = pairs[-1]
    lost = diverged(last[1], "exact") + diverged(last[0], "kNN")
    if lost:
        return Finding(claim, "untested", lost + "A gap that is not finite says nothing about overfitting.")
    at, overfitted = overfitting(pairs)
    turn = pairs[at]
    if not overfitted:
        text = (
            f"Not seen: after {last[1]['iteration']:,} iterations exact attention is at {perplexity(last[1])}, within "
            f"{percent(OVERFITTED)} of its best, so that there is no overfitting to speak of."
        )
        return Finding(claim, "untested", text)
    before, after = gap(turn), gap(last)
    text = (
        f"Context {context:,}, k = {PAPER}: exact attention is best at iteration {turn[1]['iteration']:,}, with a validation "
        f"perplexity of {perplexity(turn[1])}, where the gap is {signed(before)}. At {last[1]['iteration']:,} it has overfitted "
        f"to {perplexity(last[1])} ({number(last[1]['train'])} on the training text), and the gap is {signed(after)}."
    )
    if after > before + MARGIN:
        return Finding(claim, "confirmed", text)
    if abs(after) > abs(before) + MARGIN:
        return Finding(claim, "partly", text, "It widens in favour of kNN attention, which overfits less.")
    return Finding(claim, "refuted", text, "The gap closes." if abs(after) < abs(before) - MARGIN else "The gap hardly changes.")


def growing_error(rows: Rows) -> Finding:
    claim = "Its widening may be due to a growing maximal error."
    _, pairs = of_paper(rows)
    lost = diverged(pairs[-1][1], "exact") + diverged(pairs[-1][0], "kNN")
    if lost:
        return Finding(claim, "untested", lost + "There is no widening to explain.")
    at, overfitted = overfitting(pairs)
    # Before the first steps attention is flat and its output nearly zero, which makes every relative error large.
    since = [mine for mine, _ in pairs[at if overfitted else min(1, len(pairs) - 1) :]]
    early, late = since[: max(1, len(since) // 2)], since[len(since) // 2 :]
    (max_then, mean_then), (max_now, mean_now) = (
        [middle(row[name] for row in half) for name in ("max", "mean")] for half in (early, late)
    )
    grows = max_now > (1 + MARGIN) * max_then
    widens = overfitted and gap(pairs[-1]) > gap(pairs[at]) + MARGIN
    verdict: Verdict = "untested" if not overfitted else "refuted" if not grows else "confirmed" if widens else "untested"
    text = (
        f"From the first half of iterations {since[0]['iteration']:,} to {since[-1]['iteration']:,} to the second, the largest "
        f"error of a row of `TopK({PAPER})` goes from {percent(max_then)} to {percent(max_now)}, the mean from "
        f"{percent(mean_then)} to {percent(mean_now)} (medians of evaluations)."
    )
    if not overfitted:
        why = "There is no overfitting, and no widening to explain."
    elif not grows:
        why = "The largest error does not grow."
    elif widens:
        why = "Both grow; that the one is the cause of the other is not shown."
    else:
        why = "It grows without kNN attention falling behind: there is no widening to explain."
    return Finding(claim, verdict, text, why)


def cost(rows: Rows) -> Finding:
    """Steps that are started kernel by kernel, which every method's can be. Cells are told, and do not decide."""
    parts, wins = [], []
    for context in contexts(rows):
        exact = end(rows, context, "exact")["seconds"]
        spent = {name: end(rows, context, name)["seconds"] for name in methods(rows, context) if name != "exact"}
        wins += [faster(x, exact) for name, x in spent.items() if name in KNN]
        found = listed([f"{times(x / exact)} as long ({NAMES[name]})" for name, x in spent.items()])
        parts.append(f"context {context:,}: a step with exact attention takes {seconds(exact)}, one with another method {found}")
    claim = "kNN attention significantly reduces the cost of training (conclusion of the paper)."
    text = f"{sentence('; '.join(parts))}. Less than {percent(ALIKE)} does not count.{graphs(rows)}"
    return Finding(claim, judged(wins), text)


def graphs(rows: Rows) -> str:
    """What a step takes as a graph, where there is one."""
    ends = [end(rows, context, name) for context in contexts(rows) for name in methods(rows, context)]
    said = [
        f"{seconds(row['graph_seconds'])} with {NAMES[row['method']]} at context {row['context']:,}"
        for row in ends
        if row["graph_seconds"] is not None
    ]
    if not said:
        return ""
    return f" Captured as a CUDA graph, which only methods that never wait for the GPU can be, a step takes {listed(said)}."


def more_keys(rows: Rows, context: int) -> Finding:
    """Every method of a context: its gap at the last iteration that exact attention has reached too, with the error there, and at
    the best of each."""
    gaps, of_best, errors = [], [], []
    for name in methods(rows, context):
        if name == "exact":
            continue
        pairs = beside_exact(rows, context, name)
        mine = pairs[-1][0]
        early = f" (iteration {mine['iteration']:,})" if end(rows, context, name)["stopped"] else ""
        gaps.append(f"{NAMES[name]} {signed(gap(pairs[-1]))}{early}")
        of_best.append(f"{NAMES[name]} {signed(gap_of_best(pairs))}")
        errors.append(f"{NAMES[name]} {percent(mine['mean'])}")
    exact = list(curve(rows, context, "exact").values())
    text = (
        f"The best model of exact attention has a validation perplexity of {perplexity(best(exact))}; the gap of the best of the "
        f"others to it: {listed(of_best)}. After {exact[-1]['iteration']:,} iterations it has {perplexity(exact[-1])}; the gap: "
        f"{listed(gaps)}. Mean error of attention at that time: {listed(errors)}."
    )
    return Finding(f"Context {context:,}: more keys, drawn keys, and cells.", "beyond", text)


def used_with_exact(rows: Rows) -> Finding:
    parts = []
    for context in contexts(rows):
        found = []
        for name in methods(rows, context):
            if name != "exact":
                own = list(curve(rows, context, name).values())[-1]["validation"]
                found.append(f"{NAMES[name]} {signed(change(finite(end(rows, context, name)['swapped']['exact']), own))}")
        parts.append(f"context {context:,}: {listed(found)}")
    text = f"The change in validation perplexity when exact attention takes over after training; {'; '.join(parts)}."
    return Finding("A model trained with kNN attention, used with exact attention.", "beyond", text)


def exact_used_with(rows: Rows) -> Finding:
    parts = []
    for context in contexts(rows):
        own = list(curve(rows, context, "exact").values())[-1]["validation"]
        others = end(rows, context, "exact")["swapped"]
        found = [
            f"{NAMES[name]} {signed(change(finite(others[name]), own))}" for name in methods(rows, context) if name in others
        ]
        parts.append(f"context {context:,}: {listed(found)}")
    text = f"The change in validation perplexity when another method takes over after training; {'; '.join(parts)}."
    return Finding("A model trained with exact attention, used with kNN attention.", "beyond", text)


def stops(rows: Rows) -> list[str]:
    """Which units ran out of time."""
    ends = [row for row in rows if row["kind"] == "end" and row["stopped"]]
    if not ends:
        return []
    said = listed(
        [f"{NAMES[row['method']]} at context {row['context']:,} ({row['iterations']:,} of {row['asked']:,})" for row in ends]
    )
    return [f"Stopped after {ends[0]['limit']:g} s, with so many iterations: {said}."]


def table(rows: Rows, context: int) -> Table:
    body = []
    for name in methods(rows, context):
        found, last = list(curve(rows, context, name).values()), end(rows, context, name)
        least = best(found)
        body.append(
            [
                NAMES[name] + (f", stopped at {last['iterations']:,}" if last["stopped"] else ""),
                number(last["keys"]),
                number(found[-1]["train"]),
                number(found[-1]["validation"]),
                f"{number(least['validation'])} ({least['iteration']:,})",
                number(finite(last["swapped"]["exact"])) if name != "exact" else "–",
                percent(found[-1]["mean"]),
                percent(found[-1]["max"]),
                seconds(last["seconds"]),
                seconds(last["graph_seconds"]) if last["graph_seconds"] is not None else "–",
            ]
        )
    head = [
        "",
        "keys",
        "training",
        "validation",
        "best (iteration)",
        "with exact",
        "mean error",
        "largest",
        "a step",
        "as a graph",
    ]
    asked = max(end(rows, context, name)["asked"] for name in methods(rows, context))
    return Table(f"Context {context:,}: perplexities and errors of attention after {asked:,} iterations, and time", head, body)


def samples(rows: Rows, context: int) -> Table:
    prompt = end(rows, context, "exact")["prompt"]
    body = []
    for name in methods(rows, context):
        body.append([NAMES[name], as_it_is(end(rows, context, name)["sample"])])
    said = " ".join(prompt.split())
    return Table(f"What the models write, context {context:,}, after a prompt that ends in “{said}”", ["", "sample"], body)


def perplexity(row: Row) -> str:
    return number(row["validation"])
