"""Breaks of the sizes that theorems ask for: k from theory, and hashing by theory."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "the tail asks for half of what its theorem does",
        "tail_factor",
        "return 2 * (1 + 2 * eps / 3)",
        "return (1 + 2 * eps / 3)",
        ("test_tail.py", "test_budgets.py"),
    ),
    Mutant(
        "a joint promise forgets the columns",
        "TailPromise.entry_delta",
        "rows * (columns + 1)",
        "rows",
        ("test_tail.py",),
    ),
    Mutant(
        "sizes that break the promise are accepted",
        "TailPromise.sizes",
        "if not tail_condition(n, self.eps, delta, near, drawn):",
        "if False:",
        ("test_tail.py",),
    ),
    Mutant(
        "the smallest near score as the bound of a promise",
        "RowsMet.add",
        "weight = logits.double().logsumexp(-1) - bound.double()",
        "weight = logits.double().logsumexp(-1) - logits.double().amin(-1)",
        ("test_tail.py",),
    ),
    Mutant(
        "a promise is checked again by the backward pass",
        "_Planner.plan",
        "self.met is not None and self.met.open",
        "self.met is not None",
        ("test_tail.py",),
    ),
    Mutant(
        "needed k: the last near score for the first one that is left out",
        "needed_sizes",
        "following = torch.nn.functional.pad(ordered[..., 1:], (0, 1), value=-torch.inf)",
        "following = ordered",
        ("test_tail.py",),
    ),
    Mutant(
        "needed k: one too few",
        "needed_sizes",
        "(~enough).sum(-1) + 1",
        "(~enough).sum(-1)",
        ("test_tail.py",),
    ),
    Mutant(
        "hashing: the rungs of the ladder do not share their delta",
        "_sizes",
        "math.log(rungs * every / delta)",
        "math.log(every / delta)",
        ("test_lsh_theory.py",),
    ),
    Mutant(
        "hashing: the number of hashes by theory is not used",
        "BuiltConcentricLSH.__init__",
        "self.hashes = recipe.hashes or max(",
        "self.hashes = max(",
        ("test_lsh_theory.py",),
    ),
    Mutant(
        "hashing: the radii by theory are not used",
        "BuiltConcentricLSH.__init__",
        "if recipe.nearest is None or recipe.farthest is None:",
        "if True:",
        ("test_lsh_theory.py",),
    ),
    Mutant(
        "hashing: numbers of tables in 8 bits",
        "BuiltConcentricLSH._climb",
        "torch.uint8 if recipe.tables <= 256 else torch.int16",
        "torch.uint8",
        ("test_lsh_theory.py",),
    ),
)
