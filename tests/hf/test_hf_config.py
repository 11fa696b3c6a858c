"""Methods by layer from a file: what is written can be read, errors name their place, and layers use what the file says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import model, pair, tokens

import nearfield as nf
from nearfield import hf
from nearfield.app.evaluate.settings import PastTopK
from nearfield.hf.config import LayerConfig, describe, read_config, write_config
from nearfield.hf.register import registered_methods

HEAD = {"format": "nearfield-layers", "version": 1}
EXACT = {"method": "Exact"}


def one_layer(**method: Any) -> dict[str, Any]:
    return {**HEAD, "layers": {"0": method}}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    methods: dict[int | str, Any] = {
        0: nf.Cells(16, 18, segment=1024, partition=nf.KMeans(iterations=2)),
        3: nf.TopK(64, tail=8, index=nf.KMeansIndex()),
        11: nf.Auto(eps=0.05),
        "default": nf.Exact(),
    }
    write_config(tmp_path / "config.json", LayerConfig(methods, 12, about={"model": "some", "tokens": 8192}))
    again = read_config(tmp_path / "config.json")
    assert again == LayerConfig(methods, 12)
    assert read_config(json.loads((tmp_path / "config.json").read_text())) == again
    lines = (tmp_path / "config.json").read_text().splitlines()
    assert '    "0": {"method": "Cells", "cell_size": 16, "probes": 18, "samples": 0, "sinks": 16, "partition"' in "\n".join(
        lines
    )
    assert sum(line.strip().startswith(('"0"', '"3"', '"11"')) for line in lines) == 3


WITH_FAISS = nf.TopK(8, index=nf.FaissIndex("Flat"))
BY_QUERIES = nf.Cells(partition=nf.KMeans(by_queries=True))


@pytest.mark.parametrize("method", [nf.Exact(), nf.Auto(), nf.Cells(), BY_QUERIES, nf.TopK(), nf.LazyGumbel(), WITH_FAISS])
def test_every_method_can_be_written(method: Any, tmp_path: Path) -> None:
    write_config(tmp_path / "config.json", LayerConfig({"default": method}))
    assert read_config(tmp_path / "config.json").methods == {"default": method}


def test_switches_that_are_off_are_not_written() -> None:
    """So that versions that do not know them read the file."""
    assert describe(nf.Cells(partition=nf.KMeans(seed=3)))["partition"] == {"name": "KMeans", "seed": 3}
    assert describe(BY_QUERIES)["partition"] == {"name": "KMeans", "seed": 0, "by_queries": True}


def test_what_is_no_method_of_the_library_cannot_be_written() -> None:
    with pytest.raises(TypeError, match="only Exact, TopK, LazyGumbel, Cells, Auto can be written"):
        describe(PastTopK(4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "nearfield tune MODEL TEXT"),
        ({"format": "other"}, '"format": "nearfield-layers"'),
        ({"format": "nearfield-layers"}, "version None, and this nearfield reads version 1; write it again"),
        ({**HEAD, "version": 2}, "version 2, and this nearfield reads version 1"),
        ({**HEAD, "layer": {}}, "'layer', did you mean 'layers'"),
        ({**HEAD, "layers": []}, "must be an object from layer numbers"),
        ({**HEAD, "layers": {"first": EXACT}}, "must be layer numbers, such as \"0\"; got 'first'"),
        ({**HEAD, "layers": {"-1": EXACT}}, "got '-1'"),
        ({**HEAD, "num_hidden_layers": 2, "layers": {"2": EXACT}}, "a model of 2 layers has no layer 2"),
        ({**HEAD, "prefil": "shared"}, "'prefil', did you mean 'prefill'"),
        ({**HEAD, "num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({**HEAD, "layers": {"1": EXACT, "01": EXACT}}, "layer 1 appears twice"),
        ({**HEAD, "layers": {"0": "Exact"}}, "config, layer 0 must be an object such as"),
        ({**HEAD, "default": {"probes": 4}}, 'config, default must be an object such as {"method": "Exact"}'),
        (one_layer(method="Cell"), "layer 0: method must be one of Exact, .*'Cell', did you mean 'Cells'"),
        (one_layer(method="Cells", probs=4), "layer 0, Cells takes cell_size, .*'probs', did you mean 'probes'"),
        (one_layer(method="Cells", probes=-4), "layer 0, Cells: probes must be a positive integer or None, got -4"),
        (one_layer(method="Cells", probes=4.5), "got 4.5"),
        (one_layer(method="Cells", partition={"name": "KMean"}), "partition: name must be one of KMeans, "),
        (one_layer(method="TopK", index={"name": "Blocks"}), "layer 0, index: name must be one of ExactIndex, "),
        (one_layer(method="Exact", k=3), "takes no arguments; got 'k'"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.register(config=config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read: .*line 1.*nearfield tune"),
        (b"\xff\xfe", "cannot be read: .*utf-8"),
        (b'{"format": "nearfield-layers", "version": 1, "layers": {"0": {}, "0": {}}}', "'0' appears twice"),
        (b"[]", "must be an object"),
    ],
)
def test_files_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        hf.register(config=path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file; `nearfield tune"):
        hf.register(config=str(tmp_path / "config.json"))
    with pytest.raises(TypeError, match="config must be a path or a dictionary, got 3"):
        hf.register(config=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give one of them"):
        hf.register(method=nf.Exact(), config=HEAD)


@torch.no_grad()
def test_layers_do_as_the_file_says(tmp_path: Path) -> None:
    methods: dict[int | str, Any] = {1: nf.TopK(2), "default": nf.Exact()}
    write_config(tmp_path / "config.json", LayerConfig(methods, 2))
    hf.register("nearfield-by-hand", methods)
    hf.register("nearfield-config", config=tmp_path / "config.json")
    ids = tokens(1, 40)
    plain, ours = pair("llama", "nearfield-config")
    logits = ours(ids).logits
    ours.set_attn_implementation("nearfield-by-hand")
    assert torch.equal(ours(ids).logits, logits)
    assert (logits - plain(ids).logits).abs().max() > 1e-2


def test_layers_that_are_not_named_get_the_default() -> None:
    hf.register("nearfield-nothing", config=HEAD)
    plain, ours = pair("llama", "nearfield-nothing")
    torch.testing.assert_close(ours(tokens(1, 20)).logits, plain(tokens(1, 20)).logits)


def test_a_config_is_for_one_model() -> None:
    hf.register("nearfield-three", config={**HEAD, "num_hidden_layers": 3})
    net = model("llama")
    net.set_attn_implementation("nearfield-three")
    with pytest.raises(ValueError, match="for a model of 3 layers, but this one has 2; make one for it"):
        net(tokens(1, 20))


def test_parts_of_your_own_cannot_be_written() -> None:
    class Own:
        def build(self, keys: Any, cells: int) -> Any:
            return keys

    with pytest.raises(TypeError, match="as partition only KMeans, Blocks, HashBuckets can be written"):
        describe(nf.Cells(partition=Own()))
    with pytest.raises(TypeError, match="as index only ExactIndex"):
        describe(nf.TopK(index=Own()))


def test_a_file_that_is_not_written_to_the_end_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_config(path, LayerConfig({0: nf.TopK(3)}))
    before = path.read_bytes()

    def write_half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:50])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        patch.setattr(Path, "write_text", lambda path, content, **options: write_half(path, content.encode()))
        with pytest.raises(KeyboardInterrupt):
            write_config(path, LayerConfig({0: nf.TopK(4)}))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]


def test_of_a_link_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "config.json")
    write_config(tmp_path / "link.json", LayerConfig({0: nf.TopK(3)}))
    assert (tmp_path / "link.json").is_symlink()
    assert read_config(tmp_path / "config.json").methods == {0: nf.TopK(3)}


# What it says of a cache.


def test_what_is_said_of_a_cache_is_read_again(tmp_path: Path) -> None:
    cache: dict[int | str, Any] = {0: nf.Cells(8, 30), 1: nf.LazyGumbel(), "default": nf.Exact()}
    config = LayerConfig({1: nf.TopK(3)}, 2, cache=cache, about={"tokens": 1}, cache_about={"tokens": 2})
    path = tmp_path / "config.json"
    write_config(path, config)
    again = read_config(path)
    assert again == config
    assert (again.about, again.cache_about) == ({"tokens": 1}, {"tokens": 2})
    assert sum(line.strip().startswith(('"0"', '"1"')) for line in path.read_text().splitlines()) == 3
    assert read_config({**HEAD, "layers": {}}).cache is None
    assert read_config({**HEAD, "cache": {}}).cache == {}


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ([], 'config, cache must be an object such as {"layers"'),
        ({"layer": {}}, "'layer', did you mean 'layers'"),
        ({"prefill": "shared"}, "'prefill'"),
        ({"layers": {"2": EXACT}}, "config, cache: a model of 2 layers has no layer 2"),
        ({"layers": {"0": {"method": "Auto"}}}, "cache, layer 0: method must be one of Exact, .*got 'Auto'"),
        ({"layers": {"0": {"method": "Cells", "samples": 4}}}, "cache, layer 0: .*samples"),
        ({"default": {"method": "Cells", "share": 64}}, "cache, default: .*share"),
    ],
)
def test_what_is_wrong_with_a_cache_is_named(cache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.register(config={**HEAD, "num_hidden_layers": 2, "cache": cache})


def test_a_file_about_a_cache_alone_leaves_prompts_to_auto() -> None:
    hf.register("nearfield-cache-alone", config={**HEAD, "cache": {"default": {"method": "TopK", "k": 3}}})
    net = model("llama")
    net.set_attn_implementation("nearfield-cache-alone")
    assert registered_methods("nearfield-cache-alone") == {"default": nf.Auto()}
    assert [layer.store.method for layer in hf.CellCache(config=net.config).layers] == [nf.TopK(3)] * 2
