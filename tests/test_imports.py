"""Data flows one way, importing the package is cheap, and the command line starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nearfield

PACKAGE = Path(nearfield.__file__).parent

# From the user's call down to plain arithmetic. A module imports only what stands on a later line, or its own part.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("app",),
    ("",),  # the package itself: the public names
    ("nn", "hf", "varlen", "vllm"),
    ("attention", "plans"),
    ("auto", "paper"),
    ("distributed", "knn", "pilot", "windows"),
    ("cells", "exact", "audit"),
    ("problem", "kernels", "crossover"),
    (
        "results",
        "sampling",
        "checks",
        "chunks",
        "causal",
        "bands",
        "merge",
        "packed",
        "synthetic",
        "tensor_file",
        "user_cache",
        "_compat",
        "_moved",
    ),
)
MOST_LAYERS = 9
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

OPTIONAL = ("faiss", "matplotlib", "transformers", "triton", "numba", "scipy", "vllm")


def module_name(path: Path) -> str:
    """`knn.topk` for nearfield/knn/topk.py; the empty string for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part(module: str) -> str:
    """The module or subpackage of nearfield that `module` belongs to; `python -m nearfield` is the app."""
    return "app" if module == "__main__" else module.split(".")[0]


def imports(module: str) -> set[str]:
    """The modules of this package that `module` imports anywhere, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module or 'nearfield'} has a relative import; write the full name"
            # `from nearfield.kernels import reference` names a module, `from nearfield.problem import Problem` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "nearfield":
                inside = name.removeprefix("nearfield").removeprefix(".")
                found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return found - {module}


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name or "nearfield")
def test_imports_point_one_way(module: str) -> None:
    assert part(module) in RANK, f"nearfield.{part(module)} has no place in LAYERS yet"
    for target in imports(module):
        allowed = part(target) == part(module) or RANK[part(target)] > RANK[part(module)]
        assert allowed, f"nearfield.{module} imports nearfield.{target}, which lies before it"


def test_a_newcomer_can_hold_the_layers_in_the_head() -> None:
    assert len(LAYERS) <= MOST_LAYERS
    assert {part(module) for module in MODULES} == {name for layer in LAYERS for name in layer}


def test_no_cycles() -> None:
    # A subpackage's __init__ may gather the names of its modules, which do not import it back.
    order = list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())  # raises on a cycle
    assert set(order) >= set(MODULES)


def run(*arguments: str) -> str:
    """What a fresh interpreter prints."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_is_cheap() -> None:
    # Whatever torch itself loads is not ours to judge.
    code = "import sys, torch; before = set(sys.modules); import nearfield; print(*(set(sys.modules) - before))"
    loaded = {name.split(".")[0] for name in run("-c", code).split()}
    assert "nearfield" in loaded
    assert not loaded & {*OPTIONAL, "rich", "typer"}


def test_command_line_starts_without_optional_parts() -> None:
    modules = "nearfield.app.cli, nearfield.app.evaluate.command"
    code = f"import sys, torch; before = set(sys.modules); import {modules}; print(*(set(sys.modules) - before))"
    loaded = {name.split(".")[0] for name in run("-c", code).split()}
    assert "typer" in loaded
    assert not loaded & {*OPTIONAL}


def test_plan_runs_as_a_module() -> None:
    assert "thm:simpler_expectation" in run(
        "-m", "nearfield.app.cli", "plan", "--n", "131072", "--eps", "0.05", "--delta", "0.01"
    )


PRIVATE = r"torch\._[a-zA-Z]|aten\._|_dynamo|triton\.runtime|\._attn_implementation|keys\._version|\._make_wrapper"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "_compat"], ids=lambda name: name or "nearfield")
def test_private_parts_of_other_libraries_are_touched_in_one_file(module: str) -> None:
    found = re.findall(PRIVATE, MODULES[module].read_text())
    assert not found, f"nearfield.{module} uses {found}; a hook belongs into nearfield/_compat.py, with its versions"


def test_the_one_file_names_a_version_for_every_hook() -> None:
    tree = ast.parse(MODULES["_compat"].read_text())
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(hooks) > 8
    seen = re.compile(r"[Ss]een in (torch|Triton|Transformers)")
    assert [node.name for node in hooks if not seen.search(ast.get_docstring(node) or "")] == ["triton_version"]
