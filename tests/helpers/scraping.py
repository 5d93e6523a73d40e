"""Reads a page of metrics as Prometheus would."""

from __future__ import annotations

import re
import urllib.request

_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample by its name and labels; AssertionError for a line that is none."""
    found: Samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        key = (match[1], frozenset((label[1], label[2]) for label in _LABEL.finditer(match[2] or "")))
        assert key not in found, line
        found[key] = float(match[3])
    return found


def value(text: str, name: str, **labels: str) -> float | None:
    """The sample of this name that has these labels, among others; None if there is none."""
    wanted = set(labels.items())
    return next((each for (known, has), each in samples(text).items() if known == name and wanted <= has), None)


def scrape(port: int, token: str = "", host: str = "127.0.0.1") -> str:
    """What is shown at this port of the host."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return bytes(answer.read()).decode()
