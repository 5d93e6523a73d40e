"""MkDocs calls these while it builds the site (``mkdocs.yml``); what they do is in ``site_pages.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.site_pages import OF_THE_ROOT, for_the_site  # noqa: E402 - MkDocs loads this file by its path


def on_files(files: Files, config: Any) -> Files:
    """Documents of the root become pages, and links of all pages lead to pages."""
    for name, page in OF_THE_ROOT.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    by_page = {at: name for name, at in OF_THE_ROOT.items() if at != "index.md"}
    path = by_page.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {file.src_uri for file in files.documentation_pages()}
    return for_the_site(markdown, path, pages)
