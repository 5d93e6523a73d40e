"""The site: every page has its place, links lead to pages, nothing is loaded from elsewhere. `make docs` builds it."""

from __future__ import annotations

import re
import tomllib

import pytest

from docs.fences import ROOT
from tools.site_check import loaded_from_elsewhere
from tools.site_pages import OF_THE_ROOT, for_the_site, page_of

PAGES = {path.name for path in (ROOT / "docs").glob("*.md")}


def test_every_page_has_one_place_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    places = re.findall(r"[\w-]+\.md", navigation)
    assert sorted(places) == sorted(set(places))
    assert set(places) == PAGES | set(OF_THE_ROOT.values())


@pytest.mark.parametrize(
    ("path", "text", "becomes"),
    [
        ("README.md", "[a](docs/gpu.md#measured)", "[a](gpu.md#measured)"),
        ("docs/gpu.md", "[a](library.md)", "[a](library.md)"),
        ("docs/gpu.md", "[a](../SECURITY.md#x)", "[a](security-policy.md#x)"),
        ("CONTRIBUTING.md", "[a](ARCHITECTURE.md)", "[a](architecture.md)"),
        ("docs/gpu.md", "[a](../examples/digits.py)", "a (`examples/digits.py`)"),
        ("docs/gpu.md", "[a](#here), [b](https://example.org)", "[a](#here), [b](https://example.org)"),
        ("docs/gpu.md", "![a](pictures/a.svg)", "![a](pictures/a.svg)"),
        ("docs/gpu.md", "see `docs/library.md`", "see [`docs/library.md`](library.md)"),
        ("docs/gpu.md", "see `library.md`", "see [`library.md`](library.md)"),
        ("docs/gpu.md", "see `gone.md`", "see `gone.md`"),
        ("docs/gpu.md", "> [!CAUTION]\n> One.\n>\n> Two.\n\nMore", '!!! danger ""\n\n    One.\n\n    Two.\n\nMore'),
        ("docs/gpu.md", "```\n[a](../LICENSE)\n```", "```\n[a](../LICENSE)\n```"),
    ],
)
def test_links_lead_to_pages(path: str, text: str, becomes: str) -> None:
    pages = {"gpu.md", "library.md", *OF_THE_ROOT.values()}
    assert for_the_site(text, path, pages) == becomes


def test_a_page_is_found_by_its_file() -> None:
    assert page_of("docs/gpu.md") == "gpu.md"
    assert page_of("SECURITY.md") == "security-policy.md"
    assert page_of("examples/digits.py") is None


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    page = (
        '<link rel="canonical" href="https://a.org/"><script src="https://cdn.org/x.js"></script><img src="a.png">'
        '<a href="https://b.org">b</a><link rel="stylesheet" href="//fonts.org/f.css">'
    )
    assert loaded_from_elsewhere(page) == ["https://cdn.org/x.js", "//fonts.org/f.css"]


def test_the_workflow_has_every_python_that_we_name_with_the_oldest_and_the_newest_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    (oldest,) = [one.removeprefix("torch>=") for one in project["dependencies"] if one.startswith("torch")]
    rows = re.findall(r'\{python: "(.*?)", torch: "(.*?)"\}', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    for python in named:
        assert {f"torch=={oldest}.*", "torch"} <= {torch for at, torch in rows if at == python}
    assert {at for at, _ in rows} == named


def test_the_workflow_runs_what_ci_runs() -> None:
    ours = set(re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    theirs = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "bash .ci/run" in theirs
    assert {"test-slow", "test-drills"} <= ours
    assert all(f"make {target}" in theirs for target in ours - {"test", "test-rdma-short"})
