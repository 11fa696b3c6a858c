"""Arguments of the command line, checked before any work: names, numbers, devices, files to read and files to write."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from nearfield.crossover import dtype_name
from nearfield.problem import DTYPES

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
"""What matplotlib writes."""


def words(listed: str) -> list[str]:
    """`a, b,` is a and b."""
    return [word.strip() for word in listed.split(",") if word.strip()]


def known(option: str, listed: str, names: Collection[str]) -> list[str]:
    """Several names out of a list, at least one."""
    found = words(listed)
    unknown = [name for name in found if name not in names]
    if unknown or not found:
        raise ValueError(f"{option} must be among {', '.join(names)}; got {', '.join(unknown) or repr(listed)}")
    return list(dict.fromkeys(found))


def counts(option: str, listed: str) -> list[int]:
    """Positive integers in ascending order, each once: `4096,1024` or `4_096`."""
    found = []
    for word in words(listed):
        if not re.fullmatch(r"\d+(_\d+)*", word, re.ASCII) or int(word) < 1:
            raise ValueError(f"{option} must be positive integers, such as 64 or 64,128; got {word!r}")
        found.append(int(word))
    if not found:
        raise ValueError(f"{option} must be positive integers, such as 64 or 64,128; got {listed!r}")
    return sorted(set(found))


def percent(option: str, word: str) -> float:
    """0.004 for `0.4` or `0.4%`."""
    try:
        share = float(word.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{option} must be between 0 and 100 per cent, got {word!r}")
    return share


def percents(option: str, listed: str) -> list[float]:
    """Shares above zero, in per cent: `4,7,10`."""
    found = [percent(option, word) for word in words(listed)]
    if not found or min(found) == 0.0:
        raise ValueError(f"{option} must be shares above 0 in per cent, such as 4,7,10; got {listed!r}")
    return found


def dtype(name: str) -> torch.dtype:
    """A floating-point dtype by its name."""
    by_name = {dtype_name(x): x for x in DTYPES}
    if name not in by_name:
        raise ValueError(f"--dtype must be one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]


def device(name: str) -> torch.device:
    """A device that is there."""
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"--device must be a device of this machine, such as cpu or cuda; got {name!r} ({said})") from error
    if place.type == "meta":
        raise ValueError("--device must be a device that computes, such as cpu or cuda; got 'meta'")
    return place


def check_seed(seed: int, bits: int = 63) -> None:
    """What torch takes as a seed; NumPy takes fewer bits."""
    if not 0 <= seed < 2**bits:
        raise ValueError(f"--seed must be at least 0 and less than 2**{bits}, got {seed}")


def check_memory(
    place: torch.device, of_one: torch.dtype, lengths: Sequence[int], heads: Sequence[int], dims: Sequence[int]
) -> None:
    """Raises unless a device can hold queries, keys, values, their gradients and two outputs of the largest size."""
    needed = 8 * max(lengths) * max(heads) * max(dims) * of_one.itemsize
    there = _memory(place)
    if needed > there:
        raise ValueError(
            f"--length {max(lengths):,}, --heads {max(heads):,} and --dim {max(dims):,} take {needed / 2**30:,.0f} GiB or more, "
            f"but {place} has {there / 2**30:,.0f} GiB; give less"
        )


def _memory(place: torch.device) -> float:
    """Bytes of a device; infinity if it does not say."""
    if place.type == "cuda":
        return torch.cuda.get_device_properties(place).total_memory
    names = getattr(os, "sysconf_names", {})
    if place.type == "cpu" and "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf


def check_picture(option: str, path: Path) -> None:
    """Raises unless a picture can be written to `path`."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option} must end in {', '.join(PICTURES[:3])} or another kind of picture, got {path}")
    check_file(option, path)


def check_file(option: str, path: Path) -> None:
    """Raises unless a file can be written to `path`. One that is there stays as it is."""
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option} must be a file in an existing folder, got {path}")
        if path.exists():
            path.open("ab").close()
        else:
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}); give another place") from error


def check_folder(option: str, path: Path) -> None:
    """Raises unless files can be written to a folder, which need not be there yet. Nothing stays behind."""
    try:
        # Nothing is made: of two commands that start together, one would remove what the other has found.
        nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(f"{option} must be a folder that can be written, got {path} ({error.strerror})") from error


def check_model(name: str) -> None:
    """Raises if `name` can only be a path, and nothing is there. Transformers looks for other names itself."""
    path = Path(name)
    if not name.strip():
        raise ValueError("MODEL must be the folder of a causal language model or a .gguf file, got nothing")
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf"):
        raise FileNotFoundError(f"there is no model at {name}; give the folder of one or a .gguf file")


def check_question(question: str) -> None:
    """A question has words."""
    if not question.strip():
        raise ValueError(f"QUESTION must have at least one token, got {question!r}")


def check_cosines(near: float, far: float) -> None:
    """Those of `nearfield plan`."""
    for option, cosine in (("--near", near), ("--far", far)):
        if not -1 < cosine < 1:
            raise ValueError(f"{option} must be a cosine between -1 and 1, got {cosine:g}")
    if far >= near:
        raise ValueError(f"--far must be less than --near, got --near {near:g} and --far {far:g}")
