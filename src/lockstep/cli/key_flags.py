"""``--key_file`` and ``--insecure``, which every command has: read before its own flags, and passed on by variables."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import BadInput
from lockstep.security.chosen import TOKEN_REFUSAL, choose

KEY_FLAGS_HELP = """\
  --key_file=FILE            the key of the job (default: your own, ~/.config/lockstep/key)
  --insecure                 for jobs that were started with it: no key, no encryption
"""


def take_key_flags(words: Sequence[str]) -> list[str]:
    """Note which key is meant, for this process and its children; returns the other words."""
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":  # what follows is the command line of another program
            return [*rest, word, *left]
        name, equals, value = word.partition("=")
        if name == "--job_token":
            raise BadInput(f"--job_token is refused: {TOKEN_REFUSAL}")
        if name == "--key_file":
            if not equals and left and not left[0].startswith("--"):
                value = left.pop(0)
            if not value:
                raise BadInput("--key_file needs a value; write --key_file=FILE.")
            choose(key_file=value)
        elif word in ("--insecure", "--insecure=true", "--insecure=True", "--insecure=1"):
            choose(insecure=True)
        else:
            rest.append(word)
    return rest
