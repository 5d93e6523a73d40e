"""Where verdicts go besides the terminal and the run folder, and what can be wrong with that."""

from __future__ import annotations

import shlex
import shutil
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Pages:
    """Where verdicts go besides the terminal and the run folder."""

    command: str = ""
    webhook: str = ""

    def __bool__(self) -> bool:
        return bool(self.command or self.webhook)


NO_PAGES: Final = Pages()


def page_problems(pages: Pages) -> Iterator[str]:
    """What is wrong with these, one sentence each."""
    if pages.command:
        yield from _command_problems(pages.command)
    if pages.webhook:
        parts = urllib.parse.urlsplit(pages.webhook)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"--verdict_webhook={pages.webhook} is not an address; give one like https://HOST/PATH."


def _command_problems(command: str) -> Iterator[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        yield f"--on_verdict={command} has an open quotation mark; close it."
        return
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else command
        yield f"--on_verdict: there is no program {name!r} here; give its path, or install it on every host."
