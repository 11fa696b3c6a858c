"""Ways to break calls that are remembered and replayed."""

from __future__ import annotations

from catalogue.mutant import Mutant

KINDS = "test_inputs_of_all_kinds_are_replayed"
OBSTACLES = "test_what_cannot_be_replayed_is_named_and_runs_every_time"
OVERLAP = "test_buffers_that_live_together_do_not_overlap"
UNLIKE = "test_calls_that_differ"
WATCHED = "test_nothing_is_remembered_where_others_look_on"

MUTANTS = (
    Mutant(
        "replay: copies that look like views",
        "Recorder.__torch_dispatch__",
        "func is not _FROM_HOST and all(_address(x) == _address(args[0]) for x in made)",
        "func is not _FROM_HOST",
        ("test_a_copy_in_inference_mode_is_no_view",),
    ),
    Mutant(
        "replay: tensors from the host are views",
        "Recorder.__torch_dispatch__",
        "func.is_view and func is not _FROM_HOST and",
        "func.is_view and",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: operations on lists go unnoticed",
        "_tensors_in",
        "isinstance(x, list | tuple)",
        "isinstance(x, tuple)",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: operations of torch are left out",
        "Recorder.__torch_dispatch__",
        "            self.obstacle = str(func)",
        "            pass",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: any view of a result will do",
        "Recorder.tape",
        "(x.shape, x.stride(), x.dtype) != (buffer.shape, buffer.strides, buffer.dtype)",
        "x.dtype != buffer.dtype",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: results in another dtype",
        "Recorder.tape",
        "(x.shape, x.stride(), x.dtype) != (buffer.shape, buffer.strides, buffer.dtype)",
        "(x.shape, x.stride()) != (buffer.shape, buffer.strides)",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: one result for two", "Recorder.tape", "buffer is None or buffer in made or", "buffer is None or", (OBSTACLES,)
    ),
    Mutant(
        "replay: memory of inputs taken for a table",
        "Recorder._pointer",
        "elif _address(x) in self._storages:",
        "elif False:",
        (OBSTACLES,),
    ),
    Mutant(
        "replay: a tensor given twice is one for good",
        "Recorder.__init__",
        "None if len(set(map(id, given))) == len(given) else",
        "None if True else",
        ("test_a_tensor_given_twice_may_be_two_the_next_time",),
    ),
    Mutant(
        "replay: views of inputs begin where inputs do",
        "Recorder._pointer",
        "x.data_ptr() - self.given[root].data_ptr()",
        "0",
        ("test_views_of_inputs_buffers_and_results",),
    ),
    Mutant(
        "replay: views of buffers begin where buffers do",
        "Recorder._pointer",
        "x.data_ptr() - _address(x)",
        "0",
        ("test_views_of_inputs_buffers_and_results",),
    ),
    Mutant(
        "replay: a buffer lives from its last launch on",
        "Buffer.used",
        "now if self.first < 0 else self.first",
        "now",
        ("test_buffers_share_memory_when_their_time_is_over",),
    ),
    Mutant(
        "replay: a launch reads and writes the same place",
        "placed",
        "other.last < buffer.first or",
        "other.last <= buffer.first or",
        (OVERLAP,),
    ),
    Mutant("replay: buffers begin anywhere", "placed", "-(-end // ALIGNMENT) * ALIGNMENT", "end", (OVERLAP,)),
    Mutant(
        "replay: no two buffers share a place",
        "placed",
        "if not apart and",
        "if",
        ("test_buffers_that_do_not_meet_share_their_place",),
    ),
    Mutant(
        "replay: the first recorded is the first forgotten",
        "_found",
        "            _TAPES.move_to_end(key)\n",
        "            pass\n",
        ("test_the_least_recently_used_is_forgotten",),
    ),
    Mutant(
        "replay: tapes are never forgotten",
        "replay:_keep",
        "len(_TAPES) > MOST_TAPES",
        "len(_TAPES) < 0",
        ("test_the_least_recently_used_is_forgotten",),
    ),
    Mutant(
        "replay: an interrupted recording is kept",
        "recording",
        "        _NOW.recorder = before",
        "        pass",
        ("test_an_interrupted_call_leaves_everything_as_it_was",),
    ),
    Mutant(
        "replay: all threads record together",
        "_Now",
        "threading.local",
        "object",
        ("test_threads",),
    ),
    Mutant("replay: alignment is left out", "replay:form", "x.data_ptr() & 15", "0", ("test_backward_passes_are_replayed",)),
    Mutant(
        "replay: strides are left out",
        "replay:form",
        "return x.stride(), ",
        "return ",
        ("test_hooks_may_lay_out_saved_tensors_anew",),
    ),
    Mutant("ready: strides are left out", "ready:signature", "x.shape, x.stride(), x.dtype", "x.shape, x.dtype", (UNLIKE,)),
    Mutant("ready: gradients are left out", "ready:signature", "forms, grads, backend", "forms, backend", (UNLIKE,)),
    Mutant(
        "ready: arguments are left out",
        "ready:signature",
        "cards.imposed_class(), *arguments",
        "cards.imposed_class()",
        (UNLIKE,),
    ),
    Mutant(
        "ready: the class of cards is left out",
        "ready:signature",
        "cards.imposed_class(), *arguments",
        "*arguments",
        ("test_an_imposed_class_of_cards_is_another_call",),
    ),
    Mutant(
        "ready: inputs may begin anywhere",
        "ready:signature",
        " or x.data_ptr() & 15:",
        ":",
        ("test_calls_that_are_not_remembered",),
    ),
    Mutant(
        "ready: subclasses of tensors are tensors",
        "ready:signature",
        "type(x) is not Tensor",
        "not isinstance(x, Tensor)",
        ("test_calls_that_are_not_remembered",),
    ),
    Mutant("ready: modes do not see calls", "ready:signature", "_compat.in_dispatch_mode() or", "False or", (WATCHED,)),
    Mutant("ready: tangents are dropped", "ready:signature", " or _compat.in_forward_mode()", "", (WATCHED,)),
    Mutant(
        "ready: determinism is left out", "ready:signature", "torch.are_deterministic_algorithms_enabled()", "False", (WATCHED,)
    ),
    Mutant(
        "ready: autocast is left out", "ready:signature", "torch.is_autocast_enabled(device.type) and", "False and", (WATCHED,)
    ),
    Mutant(
        "ready: the first remembered is the first forgotten",
        "ready:known",
        "                _KNOWN.move_to_end(call)",
        "                pass",
        ("test_the_least_recently_used_call_is_forgotten",),
    ),
    Mutant(
        "ready: what a method of one's own does is skipped",
        "attention:attention",
        "type(method) in (Cells, Auto)",
        "True",
        ("test_a_method_of_ones_own_may_do_more_than_its_cells",),
    ),
    Mutant(
        "ready: a crossover measured again does not count",
        "crossover:keep",
        "    _EDITIONS.append(path)\n",
        "",
        ("test_a_crossover_that_was_measured_again_counts",),
    ),
    Mutant(
        "ready: a tolerance is checked once",
        "Ahead.__post_init__",
        "replace(self.call, signature=None)",
        "self.call",
        ("test_a_tolerance_is_checked_in_every_call",),
    ),
    Mutant(
        "ready: autocast inside of a forward pass",
        "ReadyCells.forward",
        "with full_precision(query):",
        "with torch.no_grad():",
        ("test_autocast_is_off_inside",),
    ),
    Mutant(
        "ready: autocast inside of a backward pass",
        "ReadyCells.backward",
        "with full_precision(query):",
        "with torch.no_grad():",
        ("test_autocast_is_off_inside",),
    ),
    Mutant(
        "ready: determinism of the forward pass for the backward pass",
        "ReadyCells.backward",
        "torch.are_deterministic_algorithms_enabled()",
        "False",
        ("test_determinism_asked_for_after_the_forward_pass",),
    ),
    Mutant(
        "ready: second derivatives are zero",
        "ReadyCells.backward",
        "if torch.is_grad_enabled() or is_traced():",
        "if is_traced():",
        ("test_ready_cells.py::test_second_derivatives_are_refused",),
    ),
    Mutant(
        "ready: outputs are views",
        "_Trained.forward",
        "output = output.detach()",
        "output = output",
        ("test_an_output_may_be_changed_in_place_until_it_is_differentiated",),
    ),
    Mutant(
        "ready: rows see what those before them see",
        "ReadyCells.__init__",
        "problem.visible[:1]",
        "(problem.visible[:1] - 1)",
        (KINDS,),
    ),
    Mutant(
        "ready: half precision by default",
        "triton.forward:_opened_cells",
        "parts_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=queries.device)",
        "parts_lse = torch.empty(parts.shape[:3], device=queries.device)",
        ("test_other_default_dtypes_change_nothing",),
    ),
)
