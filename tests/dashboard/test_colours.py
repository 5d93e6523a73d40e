"""Text can be read on its background, by day and by night."""

from __future__ import annotations

import re

import pytest

from lockstep.dashboard.page_server import read_files

READABLE = 4.5
"""The contrast that WCAG asks of text (level AA)."""


def tones(theme: str) -> dict[str, str]:
    style = read_files()["/board.css"][1].decode()
    blocks = re.findall(r":root(\[data-theme=\"dark\"\])? \{(.*?)\}", style, re.DOTALL)
    (block,) = [body for dark, body in blocks if bool(dark) is (theme == "dark")]
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


def brightness(tone: str) -> float:
    parts = [int(tone[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    known = tones(theme)
    pairs = [("ink", "bg"), ("ink", "card"), ("ink", "inset"), ("soft", "bg"), ("soft", "card"), ("soft", "inset")]
    pairs += [("bad", "card"), ("bad", "bad-soft"), ("ink", "bad-soft"), ("warn", "warn-soft"), ("good", "good-soft")]
    low = {pair: round(contrast(*(known[name] for name in pair)), 2) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < READABLE} == {}


def test_both_themes_have_every_tone() -> None:
    assert tones("light").keys() == tones("dark").keys()
