"""What an analysis tells people, one function per sentence. Nothing reads these back.

Callers use ``phrases.name(...)``, so that each can be replaced here and nowhere else.
"""

from __future__ import annotations

from lockstep.diagnose.phrases.reading import *  # noqa: F403 - all of them, each by one name
from lockstep.diagnose.phrases.remedies import *  # noqa: F403
from lockstep.diagnose.phrases.report import *  # noqa: F403
from lockstep.diagnose.phrases.task import *  # noqa: F403
from lockstep.diagnose.phrases.tensor import *  # noqa: F403
from lockstep.diagnose.phrases.work import *  # noqa: F403
