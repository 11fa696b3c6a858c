"""Ask questions about a book: a model reads it once, keeps it in cells, and answers from there.

make smollm2 && python examples/long_document.py               # tiny Shakespeare; SmolLM2 is small, and its answers are too
make qwen && python examples/long_document.py
python examples/long_document.py MODEL --text BOOK --ask "Who is the captain?" --ask "How does it end?" --memory book.memory

With --memory, what was read is kept in a file, and the next run begins with the questions.
"""

from __future__ import annotations

import time
from pathlib import Path

from example_options import ROOT, Parser, count, device_name, model_name, new_file, shakespeare, text_file, usual_device
from rich.console import Console
from rich.progress import Progress

from nearfield.app import arguments
from nearfield.app.evaluate.models import load_model, placement, read_text
from nearfield.app.remember import in_template

MODELS = ("qwen2.5-coder-1.5b", "smollm2-135m")
"""What `make qwen` and `make smollm2` fetch."""

QUESTIONS = ("Who is Romeo in love with?", "Which city do the people in the first scene live in?")


def fetched() -> Path | None:
    """The folder of a model that was fetched before."""
    return next((folder for name in MODELS if (folder := ROOT / "models" / name).is_dir()), None)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("model", nargs="?", type=model_name, help="default: what `make qwen` or `make smollm2` has fetched")
    parser.add_argument("--text", type=text_file, help="default: tiny Shakespeare")
    parser.add_argument("--ask", action="append", default=[], help="a question; may be repeated")
    parser.add_argument("--tokens", type=count, default=16_384, help="to read of the text, at most")
    parser.add_argument("--answer", type=count, default=48, help="tokens of an answer, at most")
    parser.add_argument("--memory", type=new_file, help="a file that keeps what was read")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    name = options.model or fetched()
    if name is None:
        parser.exit(1, "there is no model here: run `make smollm2` (135M parameters) or `make qwen` (1.5B), or name a folder\n")
    if not all(question.strip() for question in options.ask):
        parser.error("--ask must have words")
    if options.text:
        title, words = options.text.name, read_text(options.text)
    else:
        title, words = shakespeare()

    console = Console()
    with console.status(f"loading {name}"):
        from transformers import TextStreamer

        from nearfield import hf

        net, tokenizer = load_model(name, *placement(arguments.device(options.device), None))
        hf.register()
        net.set_attn_implementation("nearfield")
    ids = tokenizer(words[: 8 * options.tokens], return_tensors="pt", verbose=False)["input_ids"][:, : options.tokens]
    if options.memory and options.memory.exists() and options.memory.stat().st_size:
        memory = hf.Memory.load(options.memory, net)
        console.print(f"{memory.tokens.shape[1]:,} tokens from {options.memory}, read before", highlight=False)
        seconds = None
    else:
        start = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(f"reading {title}", total=ids.shape[1])
            memory = hf.Memory.read(net, ids, progress=lambda done: progress.update(bar, completed=done))
        seconds = time.perf_counter() - start
        console.print(f"{ids.shape[1]:,} tokens of {title}, read in {seconds:.1f} s", highlight=False)
        if options.memory:
            memory.save(options.memory)
            console.print(f"kept in {options.memory}", highlight=False)
    for question in options.ask or QUESTIONS:
        console.print(f"\n[bold]{question}[/]")
        start = time.perf_counter()
        stream = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        memory.ask(net, tokenizer, in_template(tokenizer, question), max_new_tokens=options.answer, streamer=stream)
        took = time.perf_counter() - start
        said = "" if seconds is None else f"; reading the text again for it would add {seconds:.1f} s"
        console.print(f"answered in {took:.1f} s{said}", style="dim", highlight=False)
    console.print(
        "\nA model this size often answers wrongly, with exact attention too: the memory saves time, it adds no knowledge."
    )


if __name__ == "__main__":
    main()
