"""gRPC, imported so that it says nothing and does nothing in a process that forks. Nothing else imports it.

Its log lines name sockets and not tasks; whatever they tell of, we say with task and peer. Its fork handlers are for
children that go on using gRPC. A program's children (a ``DataLoader``'s, most often) do not, and the handlers would
stop our threads at every fork, and complain. Both are settled when it is imported; after that the variables are taken
back, for they are not meant for what the program starts. Who sets them has the last word.
"""

from __future__ import annotations

import os

_ADDED = {
    name: value
    for name, value in {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}.items()
    if name not in os.environ
}
os.environ.update(_ADDED)
try:
    import grpc as grpc
finally:
    for _name in _ADDED:
        del os.environ[_name]
