"""`hf.Memory`: a text is read once, and every later question gets the answer that it would get with the text before it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import model, pair, tokens
from safetensors import safe_open
from safetensors.torch import save_file

import nearfield
from nearfield import hf
from nearfield.cache import sizes
from nearfield.cache.buffers import Buffer
from nearfield.cache.tables import CellTables
from nearfield.hf.cache import CellLayer
from nearfield.hf.memory_file import fingerprint

NAME = "nearfield-memory"
SIZES = {"segment": 8, "cell_size": 4, "sinks": 3, "window": 0}
ALL = nearfield.Cells(probes=10**6, **SIZES)
FEW = nearfield.Cells(probes=2, partition=nearfield.KMeans(seed=3), **SIZES)
LENGTH, NEW = 45, 12


@pytest.fixture(scope="module")
def nets() -> tuple[Any, Any]:
    hf.register(NAME, nearfield.Exact())
    return pair("llama", NAME)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return tokens(1, LENGTH)


@pytest.fixture
def saved(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "memory.safetensors"
    hf.Memory.read(nets[1], text, FEW).save(path)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Knows the words w1, w2, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, 97)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def spoken(ids: Tensor) -> str:
    return " ".join(f"w{i}" for i in ids)


def answer(net: Any, text: Tensor, cache: Any, seed: int = 2, **options: Any) -> Tensor:
    question = torch.cat([text, tokens(1, 3, seed=seed)], 1)
    found: Tensor = net.generate(question, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **options)
    return found


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_answers_are_those_with_the_text_before_them(
    nets: tuple[Any, Any], text: Tensor, tmp_path: Path, chunk: int | None, options: dict[str, Any]
) -> None:
    plain, ours = nets
    memory = hf.Memory.read(ours, text, ALL, chunk=chunk)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert torch.equal(loaded.tokens, text)
    for seed in (2, 3):
        theirs = answer(plain, text, None, seed, **options)
        for one in (memory, loaded):
            cache = one.cache()
            if options:
                cache.batch_repeat_interleave(3)
            assert torch.equal(answer(ours, text, cache, seed, **options), theirs)


def test_few_probes_are_those_of_a_cache(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    loaded = hf.Memory.load(saved, ours, verify=False)
    assert loaded.method == FEW
    remembered, fresh = loaded.cache(audit=True), hf.CellCache(FEW, audit=True)
    with torch.no_grad():
        ours(text, past_key_values=fresh)
    assert torch.equal(answer(ours, text, remembered), answer(ours, text, fresh))
    for layer in range(2):
        for one, other in zip(remembered.errors[layer], fresh.errors[layer], strict=True):
            assert torch.allclose(one.relative, other.relative, rtol=1e-3, atol=1e-6)
        assert max(float(error.relative.max()) for error in remembered.errors[layer]) > 0.01
        assert torch.equal(remembered.layers[layer].keys, fresh.layers[layer].keys)


def test_closed_segments_stay_in_the_file(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    cache = hf.Memory.load(saved, ours).cache()
    answer(ours, text, cache)
    held = cache.layers[0].store.held
    assert held is not None
    assert held.keys.offset == 40
    for buffer in (held.keys, held.values):
        assert buffer.base is not None
        assert saved.name in mapped_at(buffer.base.data_ptr())
    assert held.keys.room.shape[2] < 30
    cache.crop(-(cache.get_seq_length() - LENGTH))
    assert torch.equal(answer(ours, text, cache), answer(ours, text, hf.Memory.load(saved, ours).cache()))
    with pytest.raises(ValueError, match="the first 40 belong to a memory"):
        cache.crop(5)


def mapped_at(address: int) -> str:
    """What is mapped into memory there."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells what is mapped")
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.mark.parametrize(("chunk", "positions"), [(None, "running"), (20, "running"), (20, "restart")])
def test_a_text_is_one_segment(
    nets: tuple[Any, Any], text: Tensor, tmp_path: Path, chunk: int | None, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its chunks attend to each other."""
    for name, size in {"SEGMENT": 8, "CONSTANT": 2, "CELL_SIZE": 4, "ROUND": 4}.items():
        monkeypatch.setattr(sizes, name, size)
    _, ours = nets
    memory = hf.Memory.read(ours, text, nearfield.Cells(probes=2, sinks=3, window=2), chunk=chunk, positions=positions)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    wanted = [0, 16, 25, 36] if (chunk, positions) == (20, "running") else [0, 40]
    caches = [one.cache() for one in (memory, loaded)]
    assert all(layer.store.held.bounds == wanted for cache in caches for layer in cache.layers)
    assert all(torch.equal(*both) for both in zip(everything(memory), everything(loaded), strict=True))
    assert torch.equal(answer(ours, text, caches[0]), answer(ours, text, caches[1]))
    assert torch.equal(caches[0].layers[1].keys, caches[1].layers[1].keys)
    assert caches[1].layers[0].store.closed > 40  # the answer is in segments of its own
    caches[1].crop(LENGTH)
    assert caches[1].layers[0].store.held.bounds == wanted
    with pytest.raises(ValueError, match=f"the first {wanted[-1]} belong to a memory"):
        caches[1].crop(wanted[-1])


class ShortTables(CellTables):
    """What is kept in bfloat16 on a GPU is so here."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__(key, value)
        self.centroid, self.variance = Buffer(key, torch.bfloat16), Buffer(key, torch.bfloat16)
        self.value = Buffer(value, torch.bfloat16)


def test_tables_in_bfloat16(text: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, torch.bfloat16)[1]
    monkeypatch.setattr("nearfield.cache.held.CellTables", ShortTables)
    memory = hf.Memory.read(ours, text, FEW)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert loaded.cache().layers[0].store.held.tables.value.room.dtype == torch.bfloat16
    assert all(torch.equal(*both) for both in zip(everything(memory), everything(loaded), strict=True))
    monkeypatch.undo()
    elsewhere = hf.Memory.load(tmp_path / "memory", ours).cache()
    assert elsewhere.layers[0].store.held.tables.value.room.dtype == torch.float32
    assert answer(ours, text, elsewhere).shape == (1, LENGTH + 3 + NEW)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["running", "restart"])
def test_a_memory_of_a_gpu(tokenizer: Any, tmp_path: Path, positions: str) -> None:
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, torch.bfloat16)[1].to("cuda")
    memory = hf.Memory.read(ours, tokens(1, 300), nearfield.Cells(probes=4, segment=32, window=0), positions=positions)
    memory.save(tmp_path / "memory")
    loaded = hf.Memory.load(tmp_path / "memory", ours)
    assert all(torch.equal(*both) for both in zip(everything(memory.to("cpu")), everything(loaded), strict=True))
    question = spoken(tokens(1, 3, seed=2)[0])
    said = [one.ask(ours, tokenizer, question, max_new_tokens=NEW) for one in (memory, loaded, loaded.to("cuda"))]
    assert len(said[0].split()) == NEW
    assert said[0] == said[1] == said[2]
    assert hf.Memory.load(tmp_path / "memory", ours.to("cpu")).ask(ours, tokenizer, question, max_new_tokens=NEW)


def test_on_another_device(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    loaded = hf.Memory.load(saved, nets[1])
    moved = loaded.to("meta")
    assert all(layer.store.held.keys.base.device.type == "meta" for layer in moved.cache().layers)
    assert torch.equal(answer(nets[1], text, loaded.to("cpu").cache()), answer(nets[1], text, loaded.cache()))
    assert str(loaded) == f"Memory(45 tokens, {FEW}, Reading(positions='running', chunk=45, gap=0, sharpness=1.0))"


@pytest.mark.parametrize("beams", [1, 3])
def test_ask(nets: tuple[Any, Any], text: Tensor, tokenizer: Any, beams: int) -> None:
    from transformers import GenerationConfig

    memory = hf.Memory.read(nets[1], text, ALL)
    question = spoken(tokens(1, 3, seed=2)[0])
    wanted = spoken(answer(nets[0], text, None, num_beams=beams)[0, -NEW:])
    for options in ({"num_beams": beams}, {"generation_config": GenerationConfig(num_beams=beams, pad_token_id=0)}):
        assert memory.ask(nets[1], tokenizer, question, max_new_tokens=NEW, **options) == wanted
    with pytest.raises(ValueError, match="at least one token, got ''"):
        memory.ask(nets[1], tokenizer, "")
    for option in ({"num_return_sequences": 2}, {"return_dict_in_generate": True}):
        for options in (option, {"generation_config": GenerationConfig(do_sample=True, **option)}):
            with pytest.raises(ValueError, match=f"one text, got {next(iter(option))}={next(iter(option.values()))}; for more"):
                memory.ask(nets[1], tokenizer, question, **options)


def test_ask_of_another_model(nets: tuple[Any, Any], text: Tensor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = hf.Memory.read(nets[1], text, ALL)
    other = pair("llama", NAME, rms_norm_eps=1e-3)[1]
    for one in (memory, memory.to("cpu"), pickle.loads(pickle.dumps(memory))):
        with pytest.raises(ValueError, match="this memory was made with another model"):
            one.ask(other, tokenizer, "w3")
        with pytest.raises(ValueError, match="in float32, and this one is in bfloat16; load it in float32"):
            one.ask(pair("llama", NAME, torch.bfloat16)[1], tokenizer, "w3")
    same = pair("llama", NAME)[1]
    said = memory.ask(same, tokenizer, "w3")

    def never(model: Any) -> str:
        raise AssertionError("a model that is known is looked at again")

    monkeypatch.setattr("nearfield.hf.memory_file.fingerprint", never)
    assert memory.ask(same, tokenizer, "w3") == said


def test_other_models_are_refused(nets: tuple[Any, Any], saved: Path) -> None:
    _, ours = nets
    for other in (model("llama", rms_norm_eps=1e-3), model("llama", torch.bfloat16, rms_norm_eps=1e-3), model("qwen2")):
        with pytest.raises(ValueError, match="another model"):
            hf.Memory.load(saved, other)
    with pytest.raises(ValueError, match=r"memory\.safetensors .* float32, and this one is in bfloat16; load it in float32"):
        hf.Memory.load(saved, model("llama", torch.bfloat16))
    changed = pair("llama", NAME)[1]
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight.mul_(1.001)
    with pytest.raises(ValueError, match="another model"):
        hf.Memory.load(saved, changed)
    assert hf.Memory.load(saved, ours).tokens.shape == (1, LENGTH)


def test_what_is_not_of_the_model() -> None:
    net = model("llama")
    net.config.inner = {"pad_token_id": 6, "layers": 2}
    before = fingerprint(net)
    for name, value in {
        "pad_token_id": 5,
        "eos_token_id": [3, 4],
        "output_hidden_states": True,
        "return_dict": False,
        "id2label": {0: "yes", 1: "no", 2: "perhaps"},
        "label2id": {"yes": 0},
        "problem_type": "regression",
        "use_cache": False,
        "architectures": ["Other"],
        "inner": {"pad_token_id": 7, "layers": 2},
    }.items():
        setattr(net.config, name, value)
        assert fingerprint(net) == before
    net.config.inner = {"layers": 3}
    assert fingerprint(net) != before


@pytest.mark.parametrize("flips", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_flipped_bytes(flips: int, text: Tensor, tmp_path: Path) -> None:
    """A flip is an error that names the file, or makes no difference. The model has one layer: nearly all bytes have a turn."""
    hf.register(NAME, nearfield.Exact())
    ours = pair("llama", NAME, num_hidden_layers=1)[1]
    path = tmp_path / "memory.safetensors"
    hf.Memory.read(ours, text, FEW).save(path)
    whole = path.read_bytes()
    wanted = everything(hf.Memory.load(path, ours))
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(len(whole), generator=generator)[:flips].tolist()
    bits = torch.randint(8, (flips,), generator=generator).tolist()
    assert len(places) == flips
    errors = []
    with path.open("r+b", buffering=0) as file:
        for place, bit in zip(places, bits, strict=True):
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << bit]))
            try:
                found = hf.Memory.load(path, ours)
            except ValueError as error:
                errors.append(str(error))
            else:
                assert all(torch.equal(found, there) for found, there in zip(everything(found), wanted, strict=True))
            file.seek(place)
            file.write(whole[place : place + 1])
    assert len(errors) > 0.99 * flips
    assert all("memory.safetensors" in error for error in errors)
    assert path.read_bytes() == whole


def everything(memory: hf.Memory) -> list[Tensor]:
    """All numbers of a memory."""
    layers = [layer for layer in memory.cache().layers if isinstance(layer, CellLayer)]
    held = [layer.store.held for layer in layers if layer.store.held is not None]
    assert len(held) == len(layers) > 0
    tables = [getattr(one.tables, name) for one in held for name in ("start", "size", "void", "centroid", "variance", "value")]
    parts = [x for one in held for x in (one.keys.filled, one.values.filled, one.order.filled, one.sinks)]
    return [memory.tokens, *parts, *(x.filled for x in tables)]


def test_files_of_another_length(nets: tuple[Any, Any], saved: Path) -> None:
    whole = saved.read_bytes()
    lengths = (0, 1, 7, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1)
    for damaged in (*(whole[:length] for length in lengths), whole + b"\0", whole + whole):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            hf.Memory.load(saved, nets[1], verify=False)


def test_foreign_files(nets: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "memory"
    for foreign in (b"{}", os.urandom(500), pickle.dumps({"tokens": 1}), b"\xff" * 64):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="memory cannot be read"):
            hf.Memory.load(path, nets[1])
    torch.save({"tokens": torch.zeros(1, 3)}, path)
    with pytest.raises(ValueError, match="memory cannot be read"):
        hf.Memory.load(path, nets[1])
    for about in (None, {"format": "pt"}, {"format": "nearfield-memory"}):
        save_file({"tokens": torch.zeros(1, 3)}, str(path), about)
        with pytest.raises(ValueError, match="must be a file of format"):
            hf.Memory.load(path, nets[1])
    with pytest.raises(FileNotFoundError, match="is not a file"):
        hf.Memory.load(tmp_path, nets[1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_save_leaves_what_was_there(
    nets: tuple[Any, Any], saved: Path, failure: BaseException, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    if not there:
        saved.unlink()

    def fail(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(before[: len(before) // 2])
        raise failure

    memory = hf.Memory.read(nets[1], tokens(1, 20), FEW)
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(type(failure)):
        memory.save(saved)
    assert [path.read_bytes() for path in saved.parent.iterdir()] == ([before] if there else [])


def test_a_full_disk(nets: tuple[Any, Any], saved: Path) -> None:
    """As good as full: files may not grow beyond a limit."""
    resource = pytest.importorskip("resource")
    before = saved.read_bytes()
    memory = hf.Memory.read(nets[1], tokens(1, 60), FEW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"cannot be written.*unchanged"):
            memory.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.read_bytes() for path in saved.parent.iterdir()] == [before]
    memory.save(saved)
    assert hf.Memory.load(saved, nets[1]).tokens.shape == (1, 60)


@pytest.mark.skipif(os.name != "posix", reason="has no such modes")
def test_who_may_read_it(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    """As any file: what the umask leaves of a new one, and what an old one had."""
    memory = hf.Memory.read(nets[1], text, FEW)
    path = tmp_path / "memory"
    before = os.umask(0o027)
    try:
        memory.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        memory.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_link_stays(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "memory"
    link.symlink_to(Path("there") / "memory")
    for length in (20, LENGTH):
        hf.Memory.read(nets[1], text[:, :length], FEW).save(link)
        assert link.is_symlink()
        assert not file.is_symlink()
        assert hf.Memory.load(file, nets[1]).tokens.shape == (1, length)
    with pytest.raises(OSError, match=r"memory .*nowhere/memory cannot be written"):
        hf.Memory.read(nets[1], text, FEW).save(tmp_path / "nowhere" / "memory")


def test_a_file_in_use_may_be_replaced(nets: tuple[Any, Any], text: Tensor, saved: Path) -> None:
    _, ours = nets
    first = hf.Memory.load(saved, ours)
    wanted = answer(ours, text, first.cache())
    hf.Memory.read(ours, tokens(1, 20), FEW).save(saved)
    assert torch.equal(answer(ours, text, first.cache()), wanted)
    first.save(saved)
    assert torch.equal(answer(ours, text, hf.Memory.load(saved, ours).cache()), wanted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.start", lambda x: x + 100, "layer 1, start"),
        ("layers.0.sinks", lambda x: x + 100, "layer 0, sinks"),
        ("layers.0.order", lambda x: x - 1, "layer 0, order"),
        ("layers.0.order", lambda x: x[:, :, :-1], "layer 0, order"),
        ("layers.0.size", lambda x: x + 1, "layer 0, start and size"),
        ("layers.0.size", lambda x: x * torch.nan, "layer 0, size"),
        ("layers.1.values", lambda x: x.double(), "layer 1, values"),
        ("layers.1.cross", lambda x: x[:, :1], "layer 1, cross"),
        ("layers.1.order", lambda x: x.clamp(max=6), "layer 1, order"),
        ("bounds", lambda x: x[1:], "damaged: bounds"),
        ("bounds", lambda x: x[:0], "damaged: bounds"),
        ("bounds", lambda x: x[None], "damaged: bounds"),
        ("bounds", lambda x: x.int(), "damaged: bounds"),
        ("bounds", lambda x: x.flip(0), "damaged: bounds"),
        ("bounds", lambda x: x.repeat_interleave(2), "damaged: bounds"),
        ("bounds", lambda x: torch.cat([x, x[-1:] + 6]), "damaged: bounds"),
        ("bounds", lambda x: torch.cat([x[:1], x[1:] - 2**63]), "damaged: bounds"),
        ("bounds", lambda x: x[:-1], "layer 0, order"),
        ("bounds", lambda x: torch.cat([x[:2], x[3:]]), "layer 0, order"),
        ("bounds", lambda x: torch.arange(41), "layer 0, start"),
        ("tokens", lambda x: x[0], r"tokens of shape \(45,\)"),
        ("tokens", lambda x: x.int(), r"tokens of shape \(1, 45\) and torch.int32, not"),
        ("other", lambda x: torch.zeros(1), r"\['other'\] are missing or unknown"),
    ],
)
def test_crafted_files(nets: tuple[Any, Any], saved: Path, name: str, change: Any, message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    tensors[name] = change(tensors.get(name)).contiguous()
    save_file(tensors, str(saved), about)
    with pytest.raises(ValueError, match=message):
        hf.Memory.load(saved, nets[1], verify=False)
    with pytest.raises(ValueError, match="digest"):
        hf.Memory.load(saved, nets[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "must be a file of format"),
        ({"version": "2"}, "version '3', got .*, version '2'"),
        ({"method": "{"}, "makes no sense"),
        ({"method": json.dumps({"method": "Exact"})}, "method must be Cells"),
        ({"method": json.dumps({"method": "Cells", "size": 3})}, r"unknown arguments \['size'\]"),
        ({"method": json.dumps({"method": "Cells", "probes": -1})}, "probes must be a positive integer"),
        ({"method": json.dumps({"method": "Cells", "partition": {"name": "os"}})}, "makes no sense"),
        ({"method": json.dumps({"method": "Cells", "samples": 4})}, "has a header that makes no sense: .* has no samples"),
        ({"method": '{"method": ' + "[" * 10**5 + "]" * 10**5 + "}"}, "makes no sense"),
        ({"reading": json.dumps({"positions": "both", "chunk": 3})}, "positions must be one of running, restart, got 'both'"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 0})}, "chunk must be a positive integer"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 9, "gap": -1})}, "gap must be an integer of at least 0"),
        ({"reading": json.dumps({"positions": "restart", "chunk": 9, "sharpness": 0.5})}, "sharpness must be a number"),
        ({"reading": json.dumps({"positions": "restart"})}, "makes no sense"),
        ({"reading": "[]"}, "makes no sense"),
        ({"layers": "-1"}, "makes no sense"),
        ({"layers": "3"}, "missing or unknown"),
    ],
)
def test_crafted_headers(nets: tuple[Any, Any], saved: Path, change: dict[str, str], message: str) -> None:
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    save_file(tensors, str(saved), {**about, **change})
    with pytest.raises(ValueError, match=rf"memory\.safetensors.*{message}"):
        hf.Memory.load(saved, nets[1], verify=False)


@pytest.mark.parametrize("window", [5, 6])
def test_a_segment_that_ends_inside_the_window(nets: tuple[Any, Any], saved: Path, window: int) -> None:
    """Of 45 tokens 40 are in closed segments."""
    with safe_open(str(saved), framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    about["method"] = json.dumps(json.loads(about["method"]) | {"window": window})
    save_file(tensors, str(saved), about)
    if window == 5:
        assert hf.Memory.load(saved, nets[1], verify=False).cache().layers[0].store.closed == 40
        return
    with pytest.raises(ValueError, match=r"memory\.safetensors is damaged: bounds"):
        hf.Memory.load(saved, nets[1], verify=False)


def test_tokens_are_a_copy(nets: tuple[Any, Any], text: Tensor, tmp_path: Path) -> None:
    for given in (text.int(), text.clone()):
        memory = hf.Memory.read(nets[1], given, FEW)
        given.zero_()
        memory.save(tmp_path / "memory")
        assert torch.equal(hf.Memory.load(tmp_path / "memory", nets[1]).tokens, text)


def test_what_cannot_be_remembered(nets: tuple[Any, Any], tmp_path: Path) -> None:
    _, ours = nets
    with pytest.raises(ValueError, match=r"tokens must be \[1, length\], got \(2, 5\)"):
        hf.Memory.read(ours, tokens(2, 5))
    with pytest.raises(TypeError, match=r"tokens must be a tensor of integers \[1, length\], got list"):
        hf.Memory.read(ours, [[1, 2]])
    for wrong in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"tokens must be integers, got {wrong}"):
            hf.Memory.read(ours, tokens(1, 5).to(wrong))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        hf.Memory.read(pair("llama", NAME)[1].train(), tokens(1, 5))
    with pytest.raises(ValueError, match="full attention in all layers, and this model has a DynamicSlidingWindowLayer"):
        hf.Memory.read(pair("gemma3", NAME)[1], tokens(1, 5))
    with pytest.raises(ValueError, match="set_attn_implementation"):
        hf.Memory.read(nets[0], tokens(1, 5))
    with pytest.raises(FileNotFoundError, match="is not a file"):
        hf.Memory.load(tmp_path / "nothing", ours)
