"""How a page of the repository becomes one of the site: which files, and where their links lead there. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Mapping

OF_THE_ROOT: Mapping[str, str] = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security-policy.md",
}
"""Documents that people look for in the root of a repository, and their pages. ``docs/index.md`` is the site's own."""

_BOX = re.compile(r"^> \[!(?P<kind>[A-Z]+)\]\n(?P<text>(?:^>.*\n)+)", re.MULTILINE)
"""As code hosts write it."""
_BOXES = {"CAUTION": "danger", "IMPORTANT": "info", "NOTE": "note", "TIP": "tip", "WARNING": "warning"}
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_MENTION = re.compile(r"(?<!\[)`(?P<path>(?:docs/)?[\w-]+\.md|[A-Z_]+\.md)`(?!\])")


def for_the_site(text: str, path: str, pages: Collection[str]) -> str:
    """The text of ``path`` (``docs/gpu.md``) with links that lead to ``pages``; what is not there becomes plain text.

    A page that is only named (in backticks) becomes a link, so that the site finds out if it has moved.
    """
    folder = posixpath.dirname(path)

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if found["image"] or "://" in target or not target:
            return found[0]
        page = page_of(posixpath.normpath(posixpath.join(folder, target)))
        if page is None:
            return f"{found['text']} (`{posixpath.normpath(posixpath.join(folder, target))}`)"
        return f"[{found['text']}]({page}{'#' * bool(anchor)}{anchor})"

    def mention(found: re.Match[str]) -> str:
        named = found["path"]
        page = page_of(named if "/" in named or named in OF_THE_ROOT else f"docs/{named}")
        return f"[{found[0]}]({page})" if page in pages else found[0]

    return _outside_fences(_BOX.sub(_box, text), lambda part: _MENTION.sub(mention, _LINK.sub(link, part)))


def _box(found: re.Match[str]) -> str:
    """The same box as Material writes it."""
    lines = [line.removeprefix(">").removeprefix(" ") for line in found["text"].splitlines()]
    inside = "".join(f"    {line}\n" if line else "\n" for line in lines)
    return f'!!! {_BOXES[found["kind"]]} ""\n\n{inside}'


def page_of(path: str) -> str | None:
    """The page of the site for a file of the repository; None: it has none."""
    if path in OF_THE_ROOT:
        return OF_THE_ROOT[path]
    folder, name = posixpath.split(path)
    return name if folder == "docs" and name.endswith(".md") else None


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.lstrip().startswith("```") else change(part) for part in _FENCE.split(text))
