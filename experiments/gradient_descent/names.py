"""What the estimators are called, and the colour that each has in every picture."""

from __future__ import annotations

from experiments.gradient_descent.estimators import EPS, FEW_WALKS, WALKS
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE

LABELS = {
    "exact-qv": "exact, Q and V",
    "printed-qv": "as printed, Q and V",
    "exact": "exact",
    "printed": "as printed",
    "walks": f"{WALKS} shared walks per row",
    "topk": "gradient of TopK + tail",
    "shifted": "D^{V} by EstimateProduct, lifted as printed",
    "signed": "D^{V} by EstimateProduct, with signs",
}
LARGE_LABELS = {
    "sdpa": "exact, by SDPA",
    "exact": "exact",
    "exact-kv": "exact, Q stays",
    "walks": f"{FEW_WALKS} shared walks per row",
    "topk": "TopK + tail",
    "cells": "Cells",
}
ON_FIGURES = {
    "exact": "exact",
    "printed": f"as printed, ε = {EPS:g}",
    "signed": "signs instead of lift",
    "walks": f"{WALKS} walks per row",
    "topk": "TopK + tail",
}
LARGE_ON_FIGURES = {
    "sdpa": "exact, SDPA",
    "exact": "exact",
    "exact-kv": "exact, Q stays",
    "walks": f"{FEW_WALKS} walks per row",
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
