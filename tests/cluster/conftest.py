"""What runs with losses are compared with."""

from __future__ import annotations

import pytest

from cluster.tasks import THE_RUN, final_of
from helpers.once import made_once


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final parameters of ``THE_RUN`` on two servers and two workers that nothing happens to."""
    return made_once(
        tmp_path_factory, "undisturbed", lambda: final_of(tmp_path_factory.mktemp("undisturbed"), *THE_RUN)
    )
