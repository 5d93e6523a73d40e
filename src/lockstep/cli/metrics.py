"""``lockstep metrics``: what a monitoring system needs to follow jobs: alert rules, a board, the token of scrapers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Final

from lockstep.errors import BadInput, HelpAsked
from lockstep.runtime.startup.metrics_options import metrics_token
from lockstep.security.chosen import chosen_key

FILES: Final = {"rules": "lockstep.rules.yml", "board": "lockstep-board.json"}

_HELP = """\
lockstep metrics: what a monitoring system needs to follow jobs (docs/metrics.md).

  lockstep metrics rules > lockstep.rules.yml    alert rules for Prometheus
  lockstep metrics board > lockstep-board.json   a board for Grafana to import
  lockstep metrics token > token                 what a scraper on another host sends

Jobs show metrics if they are started with --metrics_port or --metrics_file.

{keys}"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(help_text())
    if len(argv) != 1 or argv[0] not in (*FILES, "token"):
        raise BadInput("say what to print: 'lockstep metrics rules', 'board' or 'token'.")
    print(_token() if argv[0] == "token" else shipped(FILES[argv[0]]), end="")
    return 0


def shipped(name: str) -> str:
    """The text of a file that comes with the package."""
    return resources.files("lockstep.cli").joinpath("monitoring", name).read_text()


def _token() -> str:
    key = chosen_key()
    if key is None:
        raise BadInput("with --insecure there is no key, and scrapers need no token.")
    return f"{metrics_token(key)}\n"


def help_text() -> str:
    from lockstep.cli.key_flags import KEY_FLAGS_HELP

    return _HELP.format(keys=KEY_FLAGS_HELP)
