"""The figures of explained.md, computed and drawn: `python -m docs.paper.draw`, from the root of the repository.

Each function runs an algorithm of the paper on a small input with a fixed seed, draws what happened, and returns the figure and
the numbers that the page quotes. A test compares these with the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

import nearfield as nf
from experiments.look import CORAL, INK, OCHRE, QUIET, SAGE, STYLE, panels, say
from nearfield.sampling import categorical, conditional_gumbel, gumbel, skip, uniform, without_replacement

FIGURES = Path(__file__).parents[1] / "figures"
WASH = "#fbe9e3"
Drawn = tuple[Figure, Mapping[str, str]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lazy_gumbel() -> Drawn:
    """One draw of Algorithm 1, step by step; and the frequencies of many draws next to the softmax."""
    n, k, dim, draws = 64, 8, 16, 20_000
    random = seeded(31)
    query, keys = 1.2 * torch.randn(dim, generator=random), torch.randn(n, dim, generator=random)
    score = (keys @ query / math.sqrt(dim)).double().sort(descending=True).values
    near, rank = score[:k], torch.arange(1, n + 1)

    # Algorithm 1, as it is printed; the near set is the true top k, so its cutoff is right.
    perturbed = near + gumbel((k,), random)
    peak, bound = perturbed.max(), near.min()
    cutoff = peak - bound
    large = torch.binomial(torch.tensor(float(n - k)), -torch.expm1(-torch.exp(-cutoff.float())), generator=random)
    far = skip(without_replacement(torch.tensor([n - k]), int(large), random), torch.arange(k)[None])[0].sort().values
    far_noise = conditional_gumbel(cutoff.expand(len(far)), random)
    far_perturbed = score[far] + far_noise
    far_wins = len(far) > 0 and bool(far_perturbed.max() > peak)
    winner = int(far[far_perturbed.argmax()]) if far_wins else int(perturbed.argmax())
    best = max(float(peak), float(far_perturbed.max()) if len(far) else -math.inf)

    # Many draws by the library: with the identity matrix as values, the mean of the drawn values is their frequency.
    lazy = nf.LazyGumbel(draws=draws, k=k, estimator="mean", always_lazy=True)
    order = (keys @ query).argsort(descending=True)
    found = nf.estimate(query[None, None], keys[order][None], torch.eye(n)[None], method=lazy, generator=seeded(0))
    frequency, softmax = found.output[0, 0].double(), score.softmax(0)
    looked_at = float(found.info["evaluated_per_draw"])

    figure, ((left, right),) = panels(1, 2, 11.5, 4.6, width_ratios=[1.65, 1])
    left.axvspan(0, k + 0.5, color=WASH, zorder=0, linewidth=0)
    left.fill_between(rank[k:], score[k:], score[k:] + cutoff, color=QUIET, alpha=0.13, linewidth=0)
    left.plot(rank[k:], score[k:] + cutoff, color=QUIET, linewidth=1, linestyle=(0, (2, 2)))
    left.plot(rank, score, "o", color=INK, markersize=3.4)
    left.vlines(rank[:k], near, perturbed, color=CORAL, linewidth=1.3)
    left.plot(rank[:k], perturbed, "^", color=CORAL, markersize=6)
    left.vlines(rank[far], score[far], far_perturbed, color=SAGE, linewidth=1.3)
    left.plot(rank[far], far_perturbed, "^", color=SAGE, markersize=6)
    left.axhline(float(peak), color=CORAL, linewidth=1.2)
    left.plot(rank[winner], best, "*", color=OCHRE, markersize=17, markeredgecolor="white", zorder=5)
    say(left, float(n), float(peak), "M, the best near key", CORAL, (0, 8), ha="right")
    say(left, float(rank[winner]), best, "the winner", OCHRE, (11, 2))
    say(left, k + 2, -1.3, "dots: scores", INK)
    say(left, k + 2, -1.8, "grey: score + noise of at most B = M - min S,", QUIET)
    say(left, k + 2, -2.15, "which never gets above M. These keys are not looked at.", QUIET)
    say(left, k + 2, -2.65, f"{len(far)} far keys have noise above B: these are looked at", SAGE)
    where = left.get_xaxis_transform()
    left.text(
        k / 2 + 0.25, 0.02, f"near\nset S:\n{k} keys", transform=where, color=CORAL, ha="center", fontsize=8.5, weight="bold"
    )
    left.set(xlim=(0, n + 1), ylim=(-3.1, 5.4), xlabel=f"{n} keys, by falling score", ylabel="score, and score + Gumbel noise")
    left.set_title("One draw: who can still win?")
    left.grid(False)

    shown = 24
    error = (softmax * (1 - softmax) / draws).sqrt()
    right.bar(rank[:shown], softmax[:shown], color=[CORAL] * k + [QUIET] * (shown - k), alpha=0.45, width=0.8)
    right.errorbar(rank[:shown], frequency[:shown], 2 * error[:shown], fmt="o", color=INK, markersize=3, elinewidth=1)
    say(right, 5.2, float(softmax[2]), "bars: softmax", CORAL, (0, 96))
    say(right, 5.2, float(softmax[2]), f"dots: {draws:,} lazy draws\n(± 2 standard errors)", INK, (0, 74))
    right.set(xlabel="key, by falling score (the first 24)", ylabel="probability")
    right.set_title("Many draws: the softmax, exactly")
    say(right, 5.2, float(softmax[2]), f"{looked_at:.1f} far keys looked at per draw", SAGE, (0, 48))
    facts = {
        "far keys of the draw": f"{len(far)} of the {n - k} far keys",
        "cutoff": f"B = {float(cutoff):.2f}",
        "far keys per draw": f"{looked_at:.1f} of {n - k} far keys",
        "bound": f"(n - k)/(k + 1) = {(n - k) / (k + 1):.1f}",
    }
    return figure, facts


def random_walk() -> Drawn:
    """P^T x by walks of one step: where walks start, where they step, where they end; and what signs cost."""
    n, dim, walks = 7, 4, 200
    random = seeded(31)
    query, key = 2.2 * torch.randn(1, n, dim, generator=random), torch.randn(1, n, dim, generator=random)
    x = torch.rand(1, n, 1, generator=random) + 0.1
    softmax = (query @ key.mT / math.sqrt(dim)).softmax(-1)
    product = (softmax.mT @ x)[0, :, 0]
    landed = nf.gradients.approx_pos_prod(query, key, x, walks, generator=random)[0, :, 0]
    start = int(categorical(x[..., 0], 1, random))
    end = int(categorical(softmax[0, start][None], 1, random))

    figure = plt.figure(figsize=(11.5, 4.9), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=[0.5, 1.25, 1.5], height_ratios=[2.1, 1])
    rows, matrix, columns, errors = (figure.add_subplot(grid[where]) for where in ((0, 0), (0, 1), (1, 1), (slice(None), 2)))
    places = torch.arange(n)
    rows.barh(places, -x[0, :, 0], color=[CORAL if i == start else QUIET for i in range(n)], alpha=0.75)
    rows.set(ylim=(n - 0.5, -0.5), yticks=places, yticklabels=[f"row {i + 1}" for i in range(n)], xticks=[])
    rows.yaxis.tick_right()
    rows.tick_params(axis="y", length=0)
    rows.spines[["left", "bottom"]].set_visible(False)
    rows.set_title("1. start in row i\n    with weight $x_i$")
    rows.grid(False)
    matrix.imshow(softmax[0], cmap="Greys", vmin=0, vmax=1.25, aspect="auto")
    for i in range(n):
        for j in range(n):
            weight = float(softmax[0, i, j])
            matrix.text(
                j,
                i,
                f"{weight:.2f}"[1:] if weight < 0.995 else "1",
                ha="center",
                va="center",
                fontsize=7.5,
                color=INK if weight < 0.6 else "white",
            )
    matrix.add_patch(Rectangle((-0.48, start - 0.48), n - 0.04, 0.96, fill=False, edgecolor=CORAL, linewidth=2))
    matrix.add_patch(Rectangle((end - 0.44, start - 0.42), 0.88, 0.84, fill=False, edgecolor=OCHRE, linewidth=2.4))
    matrix.annotate(
        "",
        (end + 0.36, n - 0.45),
        (end + 0.36, start + 0.42),
        arrowprops={"arrowstyle": "-|>", "color": OCHRE, "linewidth": 2},
        annotation_clip=False,
    )
    matrix.set(xticks=[], yticks=[])
    matrix.set_title("2. step to key j with probability $P_{ij}$,\n    the softmax of row i")
    matrix.grid(False)
    columns.bar(places, product, color=QUIET, alpha=0.45, width=0.8)
    columns.plot(places, landed, "o", color=INK)
    columns.plot(end, float(landed[end]), "o", color=OCHRE, markersize=7)
    columns.set(xlim=(-0.5, n - 0.5), xticks=places, yticks=[], xlabel=f"bars: $P^T x$; dots: {walks} walks")
    columns.set_xticklabels([f"key {j + 1}" for j in range(n)], fontsize=8)
    columns.spines[["left"]].set_visible(False)
    columns.set_title("3. count where walks end")
    figure.text(0.005, 0.13, f"N = {walks} walks.\nEach adds $\\|x\\|_1 / N$\nto the key it ends in.", fontsize=9)

    # On a larger input: x >= 0, and x of both signs by the printed lift and by walks that carry a sign.
    size, repeats, counts = 256, 4, [4**power for power in range(3, 8)]
    query, key = (torch.randn(repeats, size, 16, generator=random) for _ in range(2))
    mixed = torch.randn(repeats, size, 1, generator=random)
    softmax = (query @ key.mT / 4).softmax(-1)

    def relative(form: str, walks: int) -> float:
        estimate = nf.gradients.estimate_product(query, key, mixed, walks, form=form, generator=random)
        exact = softmax.mT @ mixed
        return float((estimate - exact).square().sum().sqrt() / exact.square().sum().sqrt())

    lines = {form: [relative(form, count) for count in counts] for form in ("shifted", "signed")}
    for form, color, label in (
        ("shifted", CORAL, "as printed:\nlift x by M, subtract $M\\,\\hat{s}$"),
        ("signed", SAGE, "each walk\ncarries the sign of $x_i$"),
    ):
        errors.plot(counts, lines[form], "o-", color=color)
        say(
            errors,
            counts[2],
            lines[form][2],
            label,
            color,
            (6, 20) if form == "shifted" else (-8, -20),
            ha="left" if form == "shifted" else "right",
        )
    errors.axhline(1, color=QUIET, linewidth=1, linestyle=(0, (2, 2)))
    say(errors, counts[0], 1, "error of the zero vector", QUIET, (0, -8))
    errors.set(xscale="log", yscale="log", xlabel="walks, N", ylabel=r"$\|\hat{x} - P^T x\| \;/\; \|P^T x\|$")
    errors.set_title(f"x of both signs, {size} rows: error of $P^T x$")
    ratio = math.exp(sum(math.log(a / b) for a, b in zip(lines["shifted"], lines["signed"], strict=True)) / len(counts))
    facts = {
        "step": f"from row {start + 1} to key {end + 1}",
        "ratio": f"{ratio:.1f} times the error",
        "last": f"{lines['signed'][-1]:.2f} with {counts[-1]:,} walks",
    }
    return figure, facts


def concentric_lsh() -> Drawn:
    """A query climbs a ladder of radii; on each rung it looks into its buckets of three tables of two hashes."""
    n, tables, hashes, width = 256, 3, 2, 2.0
    k = math.isqrt(n)
    random = seeded(223)
    centres = 1.5 * torch.randn(9, 2, generator=random)
    keys = centres[torch.randint(9, (n,), generator=random)] + 0.45 * torch.randn(n, 2, generator=random)
    query = torch.tensor([0.35, -0.1])
    distance = (keys - query).norm(dim=-1)
    nearest = distance.argsort()[:k]
    # E2LSH, as in ConcentricLSH: floor((a.x + b) / w), with a ~ N(0, I), b ~ U[0, w) and w = width * radius.
    directions = torch.randn(2, tables, hashes, generator=random)
    shifts = uniform((tables, hashes), random).float()
    radii = [0.25, 0.5, 1.0]
    side = torch.linspace(-2.6, 2.6, 420)
    plane = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)

    def codes(points: torch.Tensor, radius: float) -> torch.Tensor:
        return torch.floor(torch.einsum("...d,dth->...th", points, directions) / (width * radius) + shifts)

    figure, (axes,) = panels(1, 3, 11.5, 4.5)
    facts, stopped = {}, False
    for rung, (axis, radius) in enumerate(zip(axes, radii, strict=True)):
        home = codes(query, radius)
        share = (codes(plane, radius) == home).all(-1).float().mean(-1)
        found = (codes(keys, radius) == home).all(-1).any(-1)
        candidates, hits = int(found.sum()), int(found[nearest].sum())
        axis.contourf(side, side, share, levels=[0.2, 0.5, 0.9, 1.1], colors=["#f6efe0", "#eeddb8", "#e3c382"])
        axis.contour(side, side, share, levels=[0.2, 0.5, 0.9], colors=OCHRE, linewidths=0.7)
        axis.plot(*keys[~found].T, "o", color=QUIET, markersize=3, alpha=0.6)
        axis.plot(*keys[found].T, "o", color=CORAL, markersize=4)
        axis.plot(*keys[nearest].T, "o", color="none", markeredgecolor=INK, markersize=6.5, markeredgewidth=0.8)
        for other in radii:
            thick = other == radius
            axis.add_patch(
                Circle(
                    query.tolist(),
                    other,
                    fill=False,
                    color=SAGE,
                    linewidth=2.2 if thick else 0.8,
                    linestyle="-" if thick else (0, (3, 3)),
                )
            )
        axis.plot(*query, "*", color=INK, markersize=13, markeredgecolor="white")
        axis.set(xlim=(-1.5, 2.6), ylim=(-1.75, 1.75), xticks=[], yticks=[], aspect="equal")
        enough = candidates > k
        axis.set_title(f"Rung {rung + 1}, radius {radius:g}: {candidates} candidates")
        verdict = f"more than {k}: stop, score them,\nkeep the best {k}" if enough else f"not more than {k}: climb on"
        axis.set_xlabel(verdict, color=CORAL if enough else INK, weight="bold")
        axis.grid(False)
        facts[f"rung {rung + 1}"] = f"{candidates} candidates"
        if enough and not stopped:
            stopped = True
            facts["found"] = f"{hits} of the {k} nearest keys"
    handles = [
        plt.Line2D([], [], marker="*", color="none", markerfacecolor=INK, markeredgecolor="white", markersize=13, label="query"),
        plt.Line2D(
            [],
            [],
            marker="o",
            color="none",
            markerfacecolor=CORAL,
            markeredgecolor="none",
            markersize=5,
            label="candidate: shares a bucket with the query",
        ),
        plt.Line2D(
            [],
            [],
            marker="o",
            color="none",
            markerfacecolor="none",
            markeredgecolor=INK,
            markersize=6.5,
            label=f"the true {k} nearest",
        ),
        Rectangle(
            (0, 0),
            1,
            1,
            facecolor="#eeddb8",
            edgecolor=OCHRE,
            label="the query's buckets in three tables (darker: in more tables)",
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure, facts


def inverse_cdf() -> Drawn:
    """A uniform number picks a key by its cumulative sum; the same way it picks a Gumbel number above a cutoff."""
    n = 10
    random = seeded(6)
    weight = (1.1 * torch.randn(n, generator=random)).exp().double()
    sums = weight.cumsum(0) / weight.sum()
    point = float(uniform((1,), seeded(5)))
    low, high, asked = 0, n - 1, []
    while low < high:
        middle = (low + high) // 2
        asked.append(middle)
        low, high = (low, middle) if float(sums[middle]) >= point else (middle + 1, high)
    chosen = low

    figure, ((left, right),) = panels(1, 2, 11.5, 4.4)
    for i in range(n):
        below = float(sums[i - 1]) if i else 0.0
        color = CORAL if i == chosen else QUIET
        left.add_patch(
            Rectangle((i + 0.5, below), 1, float(sums[i]) - below, color=color, alpha=0.75 if i == chosen else 0.3, linewidth=0)
        )
        left.plot([i + 0.5, i + 1.5], [float(sums[i])] * 2, color=INK, linewidth=1.6)
    left.plot([0.5, chosen + 1], [point, point], color=OCHRE, linewidth=1.6)
    left.annotate("", (chosen + 1, 0.0), (chosen + 1, point), arrowprops={"arrowstyle": "-|>", "color": OCHRE, "linewidth": 1.8})
    say(left, 0.5, point, f"x = {point:.3f}, drawn from (0, 1)", OCHRE, (6, 8))
    for turn, middle in enumerate(asked):
        left.plot(middle + 1.5, float(sums[middle]), "o", color="white", markeredgecolor=INK, markersize=13)
        left.text(middle + 1.5, float(sums[middle]), str(turn + 1), ha="center", va="center", fontsize=8.5, weight="bold")
    left.text(0.75, 0.92, f"circles: the {len(asked)} sums that\nbisection asks for, in turn", fontsize=8.5, va="center")
    left.set(
        xlim=(0.5, n + 0.7),
        ylim=(0, 1.04),
        xticks=range(1, n + 1),
        xlabel="index i; a step is as high as $p_i$",
        ylabel="cumulative sum $s_i$",
    )
    left.set_title(f"One of {n}: x falls into the step of index {chosen + 1}")
    left.grid(False)

    cutoff, draws, shown = 1.5, 20_000, 4
    noise = torch.linspace(-2.5, 6, 400).double()
    cdf = torch.exp(-torch.exp(-noise))
    floor = math.exp(-math.exp(-cutoff))
    some = conditional_gumbel(torch.full((shown,), cutoff).double(), seeded(0))
    drawn = conditional_gumbel(torch.full((draws,), cutoff).double(), random)
    right.axhspan(floor, 1, color=WASH, linewidth=0, zorder=0)
    right.plot(noise, cdf, color=INK, linewidth=2)
    right.plot(noise, torch.exp(-noise - torch.exp(-noise)), color=SAGE, linewidth=1.4)
    # A histogram whose area is that of the tail: 1 - F(B).
    bars = torch.linspace(cutoff, 6, 37)
    right.hist(drawn, bars.tolist(), weights=[(1 - floor) / draws / float(bars[1] - bars[0])] * draws, color=SAGE, alpha=0.5)
    for value in some.tolist():
        height = math.exp(-math.exp(-value))
        right.plot([-2.5, value, value], [height, height, 0], color=OCHRE, linewidth=1)
        right.plot(value, height, "o", color=OCHRE, markersize=4)
    right.axvline(cutoff, color=CORAL, linewidth=1.6)
    say(right, cutoff, 0.62, "cutoff B", CORAL, (6, 0))
    say(right, -2.4, floor, f"u, uniform between F(B) and 1:\nthat is {1 - floor:.0%} of all noise", OCHRE, (0, -17))
    say(right, 2.9, 0.3, f"bars: {draws:,} draws above B", SAGE, (0, 0))
    say(right, -1.0, 0.25, "density", SAGE, (-4, 0), ha="right")
    say(right, 0.2, 0.5, "F(x) = $e^{-e^{-x}}$", INK, (-8, 6), ha="right")
    right.set(xlim=(-2.5, 6), ylim=(0, 1.04), xlabel="Gumbel noise", ylabel="distribution function F")
    right.set_title("Noise that exceeds a cutoff, without trying in vain")
    right.grid(False)
    facts = {
        "index": f"index {chosen + 1}",
        "sums": f"{len(asked)} of the {n} sums",
        "share": f"{1 - floor:.0%} of all noise",
        "smallest": f"smallest of {draws:,} is {float(drawn.min()):.4f}",
    }
    return figure, facts


DRAWINGS = {
    "paper-lazy-gumbel": lazy_gumbel,
    "paper-random-walk": random_walk,
    "paper-concentric-lsh": concentric_lsh,
    "paper-inverse-cdf": inverse_cdf,
}


def draw(folder: Path) -> dict[str, Any]:
    """All figures as PNG into `folder`; returns the numbers that explained.md quotes, by figure."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {}
    with plt.rc_context(STYLE):
        for name, function in DRAWINGS.items():
            figure, facts[name] = function()
            figure.savefig(folder / f"{name}.png", dpi=160)
            plt.close(figure)
    return facts


if __name__ == "__main__":
    for name, numbers in draw(FIGURES).items():
        print(name, *(f"  {what}: {number}" for what, number in numbers.items()), sep="\n")
