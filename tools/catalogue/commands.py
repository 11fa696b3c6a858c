"""The command line: what is checked before any work, and what is said at the end."""

from __future__ import annotations

from catalogue.mutant import Mutant

BEFORE = "test_what_is_wrong_is_said_in_one_line_before_any_work"

MUTANTS = (
    Mutant(
        "commands: help lines are cut",
        "Commands.format_commands",
        '"\\n\\n")[0].split())',
        '"\\n\\n")[0].split()[:6])',
        ("test_help_lines_are_not_cut",),
    ),
    Mutant(
        "commands: the trial of a file stays",
        "check_file",
        "path.unlink()",
        "pass",
        ("test_what_can_be_written_stays_as_it_is",),
    ),
    Mutant(
        "commands: the trial of a folder stays",
        "check_folder",
        "tempfile.TemporaryFile(dir=nearest).close()",
        "path.mkdir(parents=True, exist_ok=True)",
        ("test_what_can_be_written_stays_as_it_is",),
    ),
    Mutant("commands: a size that no memory holds", "check_memory", "if needed > there:", "if False:", (BEFORE,)),
    Mutant(
        "commands: a model that is not there is looked for",
        "arguments:check_model",
        "if not path.exists() and",
        "if False and",
        (BEFORE,),
    ),
    Mutant(
        "commands: a damaged model is one that is not there",
        "models:_reading",
        'if (Path(name) / "config.json").exists():',
        "if False:",
        ("test_a_model_that_is_damaged_or_not_whole_is_no_model_that_is_not_there",),
    ),
    Mutant(
        "commands: no chat template",
        "remember:ask",
        "question if plain else",
        "question if True else",
        ("test_a_question_is_asked_by_the_chat_template_and_answered_word_by_word",),
    ),
    Mutant(
        "commands: the sentence hides losing cases",
        "sweep:sentence",
        "if len(wins) < len(found):",
        "if False:",
        ("test_the_sentence_tells_of_the_best_and_of_the_worst",),
    ),
)
