"""The monitor of a task: ``monitor.py`` runs it, ``reporter.py`` is the task's side of it.

Nothing is imported here: the reaper (``reaper.py``) runs without site-packages, so importing this package must be free.
"""
