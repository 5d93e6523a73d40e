"""``python -m lockstep`` is the command ``lockstep``."""

from __future__ import annotations

import sys

from lockstep.cli.main import main

sys.exit(main())
