"""The monitor of a task: ``run.py`` runs it, ``reporter.py`` is the task's side of it.

Nothing is imported here: the keeper (``keeper.py``) runs without site-packages and must find this package empty.
"""
