"""What vLLM is told, and what a person may choose. vLLM itself is not needed."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, entry_points
from types import SimpleNamespace
from typing import Any

import pytest

import nearfield.vllm as plugin
from nearfield.vllm.attend import Reach
from nearfield.vllm.settings import Settings


def test_settings() -> None:
    assert Settings.of({}) == Settings.of(None) == Settings() == Settings.of({"other": 1})
    given = {"probes": 7, "window": 32, "exact_below": 0, "prefill": "cells"}
    assert Settings.of({"nearfield": given}) == Settings(7, 32, 0, "cells")
    assert Settings(exact_below=0).reach(on_card=True) == Settings(exact_below=0).reach(on_card=False) == Reach(64, 0, None)


def test_all_is_exact_on_a_cpu_until_somebody_says_otherwise() -> None:
    on_card, on_cpu = (Settings().reach(on_card=where) for where in (True, False))
    assert [on_card.first_near(position, 256) for position in (8190, 8191)] == [1, 31]
    assert on_cpu.first_near(1 << 30, 256) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"probe": 7}, r"additional_config\[\"nearfield\"\] must have some of \['probes', 'window', 'exact_below', 'prefill'\]"),
        (7, "must have some of"),
        ({"probes": 0}, "probes must be"),
        ({"window": 0}, "window must be"),
        ({"exact_below": -1}, "exact_below must be"),
        ({"prefill": "fast"}, r"prefill must be one of \('exact', 'cells'\), got 'fast'"),
    ],
)
def test_settings_that_cannot_be(given: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        Settings.of({"nearfield": given})


@pytest.mark.parametrize("name", ["nearfeld", "nearfields", "near_field", "Nearfield", "neafrield"])
def test_a_name_that_is_misspelt_is_no_other_plugin(name: str) -> None:
    with pytest.raises(ValueError, match=f'additional_config has "{name}", which nobody reads; write "nearfield"'):
        Settings.of({name: {"probes": 3}, "other": {}})
    assert Settings.of({"nearest": {}, "field": {}, "farfield": {}, 3: {}}) == Settings()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7+cpu"])
def test_the_version_that_this_was_written_for(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    plugin.check_version()


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "1.32.0", "0.3"])
def test_another_version_is_named(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    with pytest.raises(ImportError, match=rf"needs vLLM 0\.32\.\*, and vLLM {found} is installed; pip install"):
        plugin.check_version()
    monkeypatch.delitem(sys.modules, "nearfield.vllm.cpu_platform", raising=False)
    with pytest.raises(ImportError, match=f"vLLM {found} is installed"):
        importlib.import_module("nearfield.vllm.cpu_platform")


def test_either_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            raise PackageNotFoundError
        return "0.32.1"

    monkeypatch.setattr(plugin, "version", version)
    assert plugin.installed() == "0.32.1"


def test_the_platform_is_ours_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    assert plugin.platform() is None
    monkeypatch.setenv(plugin.SWITCH, "0")
    assert plugin.platform() is None
    monkeypatch.setenv(plugin.SWITCH, "1")
    assert plugin.platform() == "nearfield.vllm.cpu_platform.CpuPlatformWithCells"


def with_registry(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a vLLM were installed that has this one."""
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


def test_the_backend_is_registered_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing but the name: in every process of vLLM this has to be quick, and harmless with any version."""
    told: list[tuple[Any, str]] = []
    registry = SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(CUSTOM="custom"), register_backend=lambda *given: told.append(given)
    )
    with_registry(registry, monkeypatch)
    plugin.register()
    assert told == [("custom", "nearfield.vllm.backend.CellsBackend")]


def test_a_version_without_such_a_registry_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    before = dict(sys.modules)
    plugin.register()
    assert sys.modules == before


def test_a_registry_without_our_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    registry = SimpleNamespace(AttentionBackendEnum=SimpleNamespace(), register_backend=lambda *given: told.append(given))
    with_registry(registry, monkeypatch)
    plugin.register()
    assert not told


def test_vllm_finds_the_entry_points() -> None:
    for group, name, value in (
        ("vllm.general_plugins", "nearfield", "nearfield.vllm:register"),
        ("vllm.platform_plugins", "nearfield_cpu", "nearfield.vllm:platform"),
    ):
        assert [one.value for one in entry_points(group=group) if one.name == name] == [value]
    for value in ("nearfield.vllm:register", "nearfield.vllm:platform"):
        assert callable(getattr(plugin, value.split(":")[1]))
