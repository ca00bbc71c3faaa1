"""Lets MkDocs build the pages as they lie in the repository: README.md is the first page, and files outside
of docs/ that a page links to are copied into the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages outside of docs/, and what they are called in the site."""

_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links that leave docs/ point into the site. One that leads nowhere stays, and fails the build."""
    sources = {name: source for source, name in PAGES.items()}
    folder = "" if page.file.src_uri in sources else "docs"

    def rewritten(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if path in PAGES:
            return PAGES[path]
        target = ROOT / path
        if not target.is_file():
            return link[1]
        # A page of the site would be one more page to check: it is a file to read.
        name = f"files/{path}.txt" if path.endswith(".md") else f"files/{path}"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(target)))
        return name

    return _LINK.sub(rewritten, markdown)
