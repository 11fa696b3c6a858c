"""What the estimators are called, and the colour that each has in every picture."""

from __future__ import annotations

from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE

LABELS = {
    "sdpa": "exact, by SDPA",
    "exact": "exact",
    "exact-qv": "exact, Q and V",
    "exact-kv": "exact, Q stays",
    "printed": "as printed",
    "printed-qv": "as printed, Q and V",
    "shifted": "lifted as printed",
    "signed": "signs instead of a lift",
    "walks": "shared walks",
    "topk": "TopK + tail",
    "cells": "Cells",
}
COLORS = {
    **dict.fromkeys(("exact", "exact-qv", "exact-kv", "sdpa"), INK),
    **dict.fromkeys(("printed", "printed-qv"), SAGE),
    "signed": QUIET,
    "walks": PLUM,
    "topk": OCHRE,
    "cells": CORAL,
}
INPUTS = {"query": "D^{Q}", "key": "D^{K}", "value": "D^{V}"}
