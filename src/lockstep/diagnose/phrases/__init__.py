"""What an analysis says to people, one function a sentence. Nothing reads these back.

Everybody calls them as ``phrases.name(...)``: here, and nowhere else, each can be replaced.
"""

from __future__ import annotations

from lockstep.diagnose.phrases.reading import *  # noqa: F403 - all of them, each by one name
from lockstep.diagnose.phrases.remedies import *  # noqa: F403
from lockstep.diagnose.phrases.report import *  # noqa: F403
from lockstep.diagnose.phrases.task import *  # noqa: F403
from lockstep.diagnose.phrases.tensor import *  # noqa: F403
from lockstep.diagnose.phrases.work import *  # noqa: F403
