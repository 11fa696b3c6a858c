"""Chats about documents, on a terminal and on a server."""

from __future__ import annotations

from catalogue.mutant import Mutant

LEAVES = "test_a_client_that_leaves_stops_the_model_and_gives_its_place_away"
COUNTED = "test_keys_that_heads_give_much_weight_are_counted"
KEPT = "test_a_chat_on_the_terminal_and_what_is_kept"
SESSION = "test_a_session_reads_only_what_is_new_and_changes_no_answer"

MUTANTS = (
    Mutant("chat: looks of another head", "HeavyKeys.add", "row // (len(place) // len(state.order.flat))", "row * 0", (COUNTED,)),
    Mutant(
        "chat: places taken for positions", "heavy:_positions", "state.order.flat[head, place] + ", "place * 0 + ", (COUNTED,)
    ),
    Mutant("chat: a single look is cited", "documents:LEAST", "2, 0.05", "1, 0.05", ("test_citations_name_file_line_and_words",)),
    Mutant("chat: a passage is cited twice", "Documents.cite", "= 0\n", "-= 0\n", ("test_citations_name_file_line_and_words",)),
    Mutant(
        "chat: half a character",
        "Words.add",
        ' and not now.endswith("\\ufffd")',
        "",
        ("test_words_come_whole_and_nothing_of_a_stop_string",),
    ),
    Mutant(
        "chat: the beginning of a stop string is said",
        "Words._give",
        "- self._may_begin_a_stop()",
        "",
        ("test_words_come_whole_and_nothing_of_a_stop_string",),
    ),
    Mutant("chat: the documents may change", "load_kept", "not torch.equal(memory.tokens, tokens)", "False", (KEPT,)),
    Mutant("chat: the settings may change", "load_kept", "memory.method != method or", "False and", (KEPT,)),
    Mutant("chat: any model", "load_kept", "!= fingerprint(model)", "== ''", (KEPT,)),
    Mutant(
        "chat: a file that is no memory is replaced",
        "check_place",
        "read_header(place)",
        "place",
        ("test_what_is_wrong_is_said_before_a_model_is_loaded",),
    ),
    Mutant("chat: what differs stays in the cache", "Engine._cache", "if shared < len(held):", "if False:", (SESSION,)),
    Mutant(
        "chat: a broken cache is used again",
        "Engine.answer",
        "        kept.forget()\n",
        "",
        ("test_a_failure_or_an_interrupt_leaves_no_half_read_cache",),
    ),
    Mutant("chat: no audit", "_Listener._set", "step in AUDITED", "False", ("test_the_error_of_attention_is_told",)),
    Mutant(
        "chat: the seed counts for nothing", "engine:_seeded", "torch.manual_seed(seed)", "pass", ("test_stop_strings_and_seeds",)
    ),
    Mutant(
        "chat: Ctrl-C is not heard",
        "_interrupted",
        "yield lambda: pressed",
        "yield lambda: False",
        ("test_control_c_stops_an_answer_and_keeps_the_chat",),
    ),
    Mutant("serve: who leaves is not noticed", "Completions", "{sending, leaving}", "{sending}", (LEAVES,)),
    Mutant("serve: who leaves keeps the model", "Turns", "is_left.set()\n", "pass\n", (LEAVES,)),
    Mutant("serve: who leaves keeps a place", "Turn", "self._work.cancel()", "pass", (LEAVES,)),
    Mutant(
        "serve: no end of the queue",
        "Turns.enter",
        "self.present > self",
        "False and self",
        ("test_too_many_requests_and_too_much_time",),
    ),
    Mutant("serve: no end of time", "Turns", "or time.monotonic() > end", "", ("test_too_many_requests_and_too_much_time",)),
    Mutant("serve: any host", "Guarded", "host not in self._hosts", "False", ("test_bodies_that_are_no_request",)),
    Mutant("serve: any size", "asgi:_body", "limits.body)", "10**9)", ("test_bodies_that_are_no_request",)),
    Mutant("serve: options that are not there", "body:parse", "name not in known", "False", ("test_bad_requests_get_a_reason",)),
    Mutant("serve: true is a number", "body:_number", "isinstance(value, bool) or", "", ("test_bad_requests_get_a_reason",)),
    Mutant("serve: a body may come forever", "asgi:_body", "limits.arrival)", "99.0)", ("test_a_body_that_does_not_come",)),
    Mutant(
        "serve: half a character has no bytes",
        "Said.render",
        "json.dumps(content, ",
        "json.dumps(content, ensure_ascii=False, ",
        ("test_bad_requests_get_a_reason",),
    ),
    Mutant(
        "serve: a whole number becomes a float first",
        "body:_number",
        "not least <= value",
        "not least <= float(value)",
        ("test_bad_requests_get_a_reason",),
    ),
    Mutant(
        "chat: any temperature divides logits",
        "Engine._options",
        "sampling.temperature >= COLDEST",
        "sampling.temperature > 0",
        ("test_temperatures_at_which_logits_overflow_are_zero", "test_any_temperature_in_the_range_gets_an_answer"),
    ),
    Mutant(
        "chat: temperatures that large logits overflow at",
        "engine:COLDEST",
        "1e-20",
        "1e-36",
        ("test_large_logits_overflow_at_no_temperature",),
    ),
    Mutant(
        "serve: caches of clients that have left stay",
        "CellCache.__init__",
        "self._grows = not kinds",
        "self._grows, self._held = not kinds, self._next_layer",
        ("test_the_cache_of_a_client_that_leaves_is_gone_at_once",),
    ),
)
