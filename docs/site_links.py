"""For the documentation site: files outside docs/ that pages link to. Pictures come along; of other files only the name stays."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
PICTURES = "outside"
"""Folder of the site for pictures from outside docs/."""

pictures: set[str] = set()


def leaves(page: str, target: str) -> str | None:
    """The path from the root of the repository, if a link on a page leads out of docs/."""
    if "://" in target or target.startswith("#"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
    return None if path.startswith("docs/") else path


def rewritten(text: str, page: str) -> tuple[str, set[str]]:
    """A page as the site shows it, and the pictures that it needs."""
    found: set[str] = set()

    def replace(link: re.Match[str]) -> str:
        is_picture, label, target = link.groups()
        path = leaves(page, target)
        if path is None:
            return link[0]
        if is_picture:
            found.add(path)
            up = "../" * page.count("/")
            return f"![{label}]({up}{PICTURES}/{path})"
        return label

    return LINK.sub(replace, text), found


def on_files(files: Any, config: Any) -> Any:
    """Before the pages are read: the pictures that they will ask for."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        _, found = rewritten(Path(page.abs_src_path).read_text(encoding="utf-8"), page.src_uri)
        for path in sorted(found - pictures):
            pictures.add(path)
            files.append(File.generated(config, f"{PICTURES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_pre_build(config: Any) -> None:
    pictures.clear()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return rewritten(markdown, page.file.src_uri)[0]
