"""Files in a folder that an actor and the program below it share."""

from __future__ import annotations

from typing import Final

TRAIN: Final = "train"
RESULT: Final = "result"
ERROR: Final = "error"
HOSTS: Final = "hosts"
MOST_ERROR: Final = 500
