"""Breaks of stores whose index grows."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "index store: rows of a call teach the index before it is asked",
        "IndexStore.attend",
        "take_in=is_single",
        "take_in=True",
        ("test_rows_in_parts", "test_later_rows_have_no_say"),
    ),
    Mutant(
        "index store: keys that wait are never taken in",
        "IndexStore._settled",
        "not (take_in and state.owes)",
        "True",
        ("test_rows_in_parts",),
    ),
    Mutant(
        "index store: padding goes into the index",
        "IndexStore._settled",
        "if state.key_padding is not None:",
        "if False:",
        ("test_padding_is_never_found",),
    ),
    Mutant(
        "index store: rows count padding among the keys they see",
        "store:_visible",
        "if state.key_padding is None:",
        "if True:",
        ("test_padding_is_never_found",),
    ),
    Mutant(
        "index store: rows of a call have as many near keys as the last one",
        "IndexStore._attend_entry",
        "lambda n: default_k(self.method.k, n)",
        "lambda n: default_k(self.method.k, seen[-1])",
        ("test_rows_attend_to_their_best_keys",),
    ),
    Mutant(
        "index store: keys are shared with the caller",
        "IndexStore.append",
        "new = (key.detach().clone(), value.detach().clone())",
        "new = (key.detach(), value.detach())",
        ("test_the_caller_may_change_tensors",),
    ),
    Mutant(
        "index store: what a crop cuts off is lost room",
        "IndexStore.crop",
        "release((room, entry.length) for entry in filter(None, entries) for room in entry.rooms())",
        "pass",
        ("test_a_crop_copies_nothing_and_keeps_apart_what_entries_share", "test_growth_costs_a_root_a_token"),
    ),
    Mutant(
        "index store: a crop gives back what another entry still has",
        "release",
        "max(length, longest.get(room, 0))",
        "min(length, longest.get(room, length))",
        ("test_a_crop_copies_nothing_and_keeps_apart_what_entries_share",),
    ),
    Mutant(
        "index store: a bad key that was cropped spoils later rows",
        "Entry.first",
        "None if self.bad is None or not bool((self.bad < length).any()) else self.bad",
        "self.bad",
        ("test_what_is_not_finite_spoils_the_rows_that_see_it",),
    ),
    Mutant(
        "index store: a key that is not finite is forgotten with the next keys",
        "Entry.grown",
        "self.bad if bad is None else bad",
        "bad",
        ("test_what_is_not_finite_spoils_the_rows_that_see_it",),
    ),
    Mutant(
        "index store: copies of an index count changes of the original",
        "BuiltIndex.__deepcopy__",
        "made._version = _compat.version_of(made._source)",
        "pass",
        ("test_copies_are_apart",),
    ),
    Mutant(
        "index store: the audit compares with what padding adds",
        "IndexStore.attend",
        "*self._everything(state), state.key_padding, output, first",
        "*self._everything(state), None, output, first",
        ("test_store.py::test_audit_by_hand",),
    ),
    Mutant(
        "index store: all draws of a store are the same",
        "IndexStore._attend_entry",
        "Seeds(self.generator, query.device)",
        "Seeds(torch.Generator().manual_seed(0), query.device)",
        ("test_the_tail_has_the_law_of_a_call",),
    ),
    Mutant(
        "topk: values of entries that lie apart are taken from elsewhere",
        "_WeightedAttention.forward",
        "flat_ids(plan.ids, step)",
        "flat_ids(plan.ids, values.shape[1])",
        ("test_rows_attend_to_their_best_keys",),
    ),
    Mutant(
        "gumbel: values of entries that lie apart are taken from elsewhere",
        "LazyGumbel._estimate",
        "part.visible.shape[1] * step",
        "part.visible.shape[1] * rows.length",
        ("test_store.py::test_lazy_gumbel",),
    ),
    Mutant(
        "gumbel: keys of entries that lie apart are taken from elsewhere",
        "LazyRows._logits",
        "self.rows.queries.shape[1] * step + key",
        "self.rows.queries.shape[1] * self.rows.length + key",
        ("test_store.py::test_lazy_gumbel",),
    ),
    Mutant(
        "cell cache: exact decoding is not told",
        "_tell_if_searchable",
        "call.rows < call.keys",
        "call.rows > call.keys",
        ("test_exact_decoding_is_told_once",),
    ),
    Mutant(
        "growth: an index learns from keys that it was asked to leave",
        "BuiltIndex.add",
        "self._with_added(everything) if take_in else self._with_rest(everything)",
        "self._with_added(everything)",
        ("test_what_is_not_taken_in_teaches_nothing",),
    ),
)
