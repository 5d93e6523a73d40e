"""What the documents show in blocks and in backticks, with the comment above each block that says what makes it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[^>]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Fence:
    """One block. ``mark``: ``run`` (then ``: how``), or ``made by: what``."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def fences() -> tuple[Fence, ...]:
    return tuple(fence for page in PAGES for fence in fences_of(page.name, page.read_text()))


def fences_of(page: str, text: str) -> list[Fence]:
    return [
        Fence(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            found["mark"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def of_language(language: str) -> list[Fence]:
    return [fence for fence in fences() if fence.language == language]


@cache
def inline() -> tuple[tuple[str, str], ...]:
    """Page and text of everything in single backticks, on one line."""
    return tuple(
        (page.name, " ".join(code.split()))
        for page in PAGES
        for code in _CODE.findall(_FENCE.sub("", page.read_text()))
    )


def sample(page: str, begins: str) -> str:
    """The text of the one block of this page that begins so."""
    (found,) = [fence.text for fence in fences() if fence.page == page and fence.text.startswith(begins)]
    return found
