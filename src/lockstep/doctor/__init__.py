"""Finds out why a cluster does not start: before it is started, while it starts, and while it runs.

``facts`` is plain data; ``machine``, ``visiting`` and ``listening`` collect it; the ``rules_*`` modules and
``analysis`` are pure: facts in, findings out. ``examination`` puts them together. Nothing here imports torch.
"""
