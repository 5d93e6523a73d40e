"""Whatever is typed gives a run or a sentence, never a traceback."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.settings.config import settings as run_settings
from lockstep.benchmark.settings.rules import problems
from lockstep.cli.flags import BadInput, HelpAsked, parse_bench
from lockstep.cli.flags.flag import FlagKind
from lockstep.cli.flags.table import TABLE

FLAGS = st.sampled_from(TABLE)
NAMES = st.sampled_from([flag.name for flag in TABLE])
WORDS = st.sampled_from(
    ["True", "0", "1", "-1", "1e9", "", "'", '""', "ps", "worker", "gpu", "cpu", "h:1", "[::1]:1", "a:1,b:2", ",", "--"]
)
VALUES = WORDS | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)


LIKELY: dict[FlagKind, st.SearchStrategy[str]] = {
    FlagKind.WHOLE: st.integers(-1, 9).map(str),
    FlagKind.NUMBER: st.floats(-0.1, 2.0).map(str),
    FlagKind.SWITCH: st.booleans().map(str),
    FlagKind.HOSTS: st.lists(st.sampled_from(["h:1", "h:2", "[::1]:3"]), max_size=3).map(",".join),
}


@st.composite
def likely(draw: st.DrawFn) -> list[str]:
    """One flag with a value that it may well take."""
    flag = draw(FLAGS)
    values = st.sampled_from(flag.choices) if flag.choices else LIKELY.get(flag.kind, st.just(flag.default_text()))
    return draw(st.sampled_from([[f"--{flag.name}={draw(values)}"], [f"--{flag.name}", "1"]]))


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """Command lines that look like real ones most of the time."""
    argv: list[str] = []
    for _ in range(draw(st.integers(0, 6))):
        name = draw(NAMES)
        form = draw(st.integers(0, 5))
        if form == 0:
            argv += [f"--{name}", draw(VALUES)]
        elif form == 1:
            argv.append(f"--no{name}")
        elif form == 2:
            argv.append(draw(st.text(max_size=8)))
        elif form == 3:
            argv.append(f"--{draw(st.text(max_size=12))}={draw(VALUES)}")
        else:
            argv.append(f"--{name}={draw(VALUES)}")
    return argv


@settings(max_examples=500, deadline=None)
@given(arguments() | st.lists(likely(), max_size=4).map(lambda flags: [word for flag in flags for word in flag]))
@example(["--bucket_mb=1.8e302"])
def test_any_command_line_gives_a_run_or_sentences(argv: list[str]) -> None:
    answer = _answer(argv)
    if isinstance(answer, BenchConfig):
        assert problems(answer) == []
        assert run_settings(answer)
    else:
        assert all(sentence.endswith((".", "?")) and len(sentence) > 20 for sentence in answer)


def _answer(argv: list[str]) -> BenchConfig | tuple[str, ...]:
    try:
        return parse_bench(argv, {})
    except BadInput as bad:
        return bad.sentences
    except HelpAsked:
        return ()
