"""Breaks of indices that are built once, grow and shrink."""

from __future__ import annotations

from catalogue.mutant import Mutant

MUTANTS = (
    Mutant(
        "built index: other keys go unnoticed",
        "BuiltIndex.build",
        "if not same_memory and not torch.equal(given.to(has.dtype), has):",
        "if False:",
        ("test_other_keys_are_refused",),
    ),
    Mutant(
        "built index: any keys in the same place are taken for its own",
        "BuiltIndex.build",
        "self._check_unchanged()",
        "pass",
        ("test_keys_that_were_changed_in_place_are_refused",),
    ),
    Mutant(
        "built index: keys without a version are not copied",
        "BuiltIndex._hold",
        "if keys.is_inference():",
        "if False:",
        ("test_changes_that_nobody_counts",),
    ),
    Mutant(
        "built index: a call that needs no index does not check it",
        "check_built",
        "if isinstance(index, BuiltIndex):",
        "if False:",
        ("test_other_keys_are_refused",),
    ),
    Mutant(
        "growth: space is written twice",
        "Room.has_space",
        "self.used == length and self.table.shape[1] >= length + more",
        "self.table.shape[1] >= length + more",
        ("test_two_that_grow_from_one",),
    ),
    Mutant(
        "growth: adding counts as a change of the keys before",
        "Room._write",
        "self.table.data[",
        "self.table[",
        ("test_added_keys", "test_two_that_grow_from_one"),
    ),
    Mutant(
        "growth: keys are copied for every key that is added",
        "Room.append",
        "room = Room(self.table[:, :length], 2 * count)",
        "room = Room(self.table[:, :length], count)",
        ("test_growth_costs_a_root_a_key",),
    ),
    Mutant(
        "growth: the keys behind the base are not searched",
        "PrefixBuilt._parts",
        "if first < self.length and bool(rest.any()):",
        "if False:",
        ("test_added_keys",),
    ),
    Mutant(
        "growth: keys are never taken in",
        "PrefixBuilt._with_added",
        "if count - base.length <= max(LEAST_REST, math.isqrt(base.length)):",
        "if True:",
        ("test_growth_costs_a_root_a_key",),
    ),
    Mutant(
        "growth: an index learns anew with every key",
        "PrefixBuilt._with_added",
        "if 2 * changes >= self._learned:",
        "if True:",
        ("test_growth_costs_a_root_a_key",),
    ),
    Mutant(
        "growth: balls stay as they were",
        "BuiltKMeans._take_in",
        "self._measure(more, joined)",
        "pass",
        ("test_bounds_hold_whatever_happens",),
    ),
    Mutant(
        "growth: balls of the old index are widened too",
        "BuiltKMeans._measure",
        "self.radii, self.longest = self.radii.clone(), self.longest.clone()",
        "pass",
        ("test_an_old_index_keeps_its_balls",),
    ),
    Mutant(
        "growth: new keys hash as others do",
        "BuiltConcentricLSH._take_in",
        "joined[place] = code",
        "joined[place] = code ^ 1",
        ("test_recall_of_a_grown_index",),
    ),
    Mutant(
        "growth: old keys are kept alive by blocks",
        "PrefixBuilt._blocks_over",
        "block._over(keys[:, slice(*name)])",
        "block",
        ("test_old_keys_are_let_go",),
    ),
    Mutant(
        "removal: blocks that held a removed key stay",
        "PrefixBuilt._blocks_over",
        " if name[1] <= same",
        "",
        ("test_removed_keys",),
    ),
    Mutant(
        "removal: lists keep their old ids",
        "BuiltConcentricLSH._leave_out",
        "number[kept] = torch.arange(len(kept), dtype=torch.int32, device=kept.device)",
        "number[kept] = kept.int()",
        ("test_removed_keys",),
    ),
    Mutant(
        "rows between batch entries are read as keys",
        "row_table",
        "(dim, 1)), step // dim",
        "(dim, 1)), length",
        ("test_added_keys",),
    ),
)
