"""Ways to break a cache whose keys are shared out over ranks."""

from __future__ import annotations

from catalogue.mutant import Mutant

SAME = "test_ranks_are_one_process_with_the_same_cells"
CELLS = "test_the_cells_that_one_process_opens_are_opened"
SAVED = "test_a_cache_goes_on_after_it_was_saved"
SPOILT = "test_files_that_are_not_what_was_saved"
KILLED = "test_a_rank_that_is_killed_while_it_saves"

MUTANTS = (
    Mutant(
        "shards: each opens its own best cells, as many as all together",
        "distributed.decode:choose",
        'return opened, among_best(ranks.gather("scores", offered), probes)[ranks.rank, :, : best.shape[1]]',
        "return opened, best > -torch.inf",
        (SAME,),
    ),
    Mutant(
        "shards: outputs averaged whatever their normalisers are",
        "distributed.decode:merged",
        "share = lse.clamp(",
        "share = torch.zeros_like(lse).clamp(",
        (SAME,),
    ),
    Mutant(
        "shards: each has first keys of its own",
        "Share.close_next",
        "before: int | Tensor = segment.start",
        "before: int | Tensor = own.closed",
        (SAME,),
    ),
    Mutant(
        "shards: padding counted among the first keys",
        "Share.close_next",
        "before = self.key_padding[:, : segment.start].sum(1)",
        "before = self.key_padding[:, : segment.start].sum(1) * 0 + segment.start",
        (SAME,),
    ),
    Mutant(
        "shards: the owner of a segment is off by one",
        "Deal._turn",
        "(segments[-1].owner + 1) % self.ranks",
        "(segments[-1].owner + 2) % self.ranks",
        ("test_segments_take_turns",),
    ),
    Mutant(
        "shards: a rank takes the keys of the next one",
        "Share.append",
        "parts = deal.own(self.rank, slice(self.length, deal.length))",
        "parts = deal.own((self.rank + 1) % deal.ranks, slice(self.length, deal.length))",
        (SAME,),
    ),
    Mutant(
        "shards: of cells as good as the last one all are opened",
        "among_best",
        "return taken.view(rows, count, each).transpose(0, 1) & (offered > -torch.inf)",
        "return (offered >= offered.masked_fill(~taken.view(rows, count, each).transpose(0, 1), torch.inf).amin((0, 2))"
        "[None, :, None]) & (offered > -torch.inf)",
        ("test_the_best_of_all_and_of_equal_ones_the_first",),
    ),
    Mutant(
        "shards: each has the covariance of its own cells",
        "attend_together",
        "share.covariance = shared_covariance(ranks, share)",
        "share.covariance = share.own.tables.flat.covariance",
        (SAME,),
    ),
    Mutant(
        "shards: a covariance that a closed segment does not change",
        "Share.close_next",
        "cells=self.cells + cells, covariance=None",
        "cells=self.cells + cells",
        (SAME,),
    ),
    Mutant(
        "shards: shares of a group by the normaliser of one rank",
        "distributed.decode:choose",
        'normaliser = ranks.gather("normalisers", normaliser).logsumexp(0)',
        "pass",
        (SAME,),
    ),
    Mutant(
        "shards: in a step, shares of a group by the normaliser of one rank",
        "choose_at_once",
        "found[..., :1].logsumexp(0)",
        "found[0, ..., :1]",
        (CELLS,),
    ),
    Mutant(
        "shards: a cell that two queries offer counts twice",
        "choose_at_once",
        "own[..., 1:].masked_fill_((opened[:, 1:] == opened[:, :-1])[:, None], -torch.inf)",
        "pass",
        (CELLS,),
    ),
    Mutant(
        "shards: a cell that is offered twice and opened counts as closed",
        "attend_to_own",
        "is_open.scatter_add_(1, opened, taken.to(torch.uint8)).bool()",
        "is_open.scatter_(1, opened, taken.to(torch.uint8)).bool()",
        (SAME,),
    ),
    Mutant(
        "shards: one rank exchanges messages with itself",
        "attend_together",
        "if ranks.size == 1:",
        "if False:",
        ("test_one_rank_exchanges_nothing",),
    ),
    Mutant(
        "shards: a step looks at no key before the others have answered",
        "ShardedStore.attend",
        "if wrong is not None or numbers:",
        "if True:",
        ("test_a_step_waits_for_two_messages_and_its_check_comes_with_the_first",),
    ),
    Mutant(
        "shards: what a row without a key has found counts",
        "distributed.decode:merged",
        "output.masked_fill(lse == -torch.inf, 0.0)",
        "output",
        ("test_rows_that_see_no_key_are_zero",),
    ),
    Mutant(
        "shards: all of the open end counts where cells are chosen",
        "Share.open_end",
        "max(seen.start, seen.stop - RECENT)",
        "seen.start",
        ("test_a_long_open_end",),
    ),
    Mutant(
        "shards: rows see later keys",
        "Share.open_end",
        "self.own.hidden_mask(places, first, rows, group, positions), positions, 0)",
        "self.own.hidden_mask(places, first, rows, group), positions, 0)",
        (SAME,),
    ),
    Mutant(
        "shards: after a crop the next segment is too long",
        "Deal.cropped",
        "min(last.stop, max(length, last.start + self.sizes.length(last.start)))",
        "last.stop",
        ("test_a_segment_that_was_cropped_gets_no_larger_than_it_would_have_been",),
    ),
    Mutant(
        "shards: one that has left a step goes on",
        "Ranks.together",
        "if self._calls > calls:",
        "if self._calls < calls:",
        ("test_survivors_name_the_rank_that_has_left",),
    ),
    Mutant(
        "ranks: a query that one rank cannot take is its own affair",
        "ShardedStore.attend",
        ", error=told(wrong))",
        ")",
        ("test_ranks_that_make_another_call_are_named",),
    ),
    Mutant(
        "shards: which keys are where is not compared",
        "ShardedStore._start_agree",
        "moving = {} if share is None else share.facts",
        "moving: dict[str, Any] = {}",
        ("test_ranks_that_make_another_call_are_named",),
    ),
    Mutant(
        "shards: files of another save are taken",
        "_read_shard",
        "if about != expected:",
        "if about.keys() != expected.keys():",
        (SPOILT,),
    ),
    Mutant(
        "shards: damage to files goes unnoticed",
        "_read_shard",
        "if verify:",
        "if False:",
        (SPOILT,),
    ),
    Mutant(
        "shards: files of the save before are removed before the index is there",
        "save_shares",
        'digests = _all_succeed(ranks, "save", write_own)',
        'digests = _all_succeed(ranks, "save", write_own)\n            _remove_others(folder, name)',
        (KILLED,),
    ),
    Mutant(
        "shards: cells that have moved start where they were",
        "distributed.files:_moved",
        'x - piece.places.start + place if name == "start" else x',
        "x",
        (SAVED,),
    ),
    Mutant(
        "shards: a loaded cache adds up its covariance anew",
        "distributed.files:_restored",
        'for name in ("cross", "pooled")',
        "for name in ()",
        ("test_what_was_added_up_is_loaded_as_it_was",),
    ),
    Mutant(
        "shards: each cuts off spreads as its own cells say",
        "distributed.share:_marked",
        "return own if own.tables.by_queries == by_queries else own.but",
        "return own if True else own.but",
        (SAME,),
    ),
    Mutant(
        "shards: what a save has left unfinished stays",
        "_remove_others",
        "remove_unfinished(folder)",
        "pass",
        (KILLED,),
    ),
    Mutant(
        "shards: keys are put in order before all files are read",
        "load_shares",
        'files.append(_read_shard(folder, index, number, number % ranks.size == ranks.rank))\n        return ""',
        "files.append(_read_shard(folder, index, number, number % ranks.size == ranks.rank))\n        return restore()",
        (SPOILT,),
    ),
    Mutant(
        "shards: nobody looks whether the folder is the same one",
        "save_shares",
        "is_file():",
        "is_file() and False:",
        ("test_folders_that_ranks_do_not_have_in_common",),
    ),
    Mutant(
        "shards: each looks at its own values alone",
        "ShardedStore.attend",
        "self._all_finite = all(row[0] for row in found)",
        "self._all_finite = bool(numbers and numbers[0])",
        ("test_a_value_that_is_not_finite_spoils_the_rows_that_see_it",),
    ),
)
