"""Fails if a page of the built site loads something from elsewhere: ``python -m tools.site_check build/site``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href",
}  # fmt: skip
_NOT_LOADED = {"canonical", "next", "prev", "edit"}
"""Kinds of ``link`` that a browser does not fetch."""


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(_LOADS.get(tag, ""))
        if address and "//" in address and not _NOT_LOADED & set((given.get("rel") or "").split()):
            self.found.append(address)


def loaded_from_elsewhere(page: str) -> list[str]:
    """Addresses of other hosts that a browser would ask to show this page."""
    parser = _Loaded()
    parser.feed(page)
    return parser.found


def problems(site: Path) -> Iterator[str]:
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site} has no pages; build them first: make docs"
    for page in pages:
        for address in loaded_from_elsewhere(page.read_text()):
            yield f"{page.relative_to(site)} loads {address}; the site must work without a network"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    sys.exit("\n".join(found) if found else 0)
