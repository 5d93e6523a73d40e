"""Why a cluster does not start, found out before, while and after it does.

``facts`` is plain data; ``machine``, ``visiting`` and ``listening`` collect it; the ``rules_*`` modules and
``analysis`` are pure: facts in, findings out. ``examination`` puts them together. No torch anywhere.
"""
