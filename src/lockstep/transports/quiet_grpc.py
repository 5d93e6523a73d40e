"""gRPC, imported so that it prints nothing and does nothing when the process forks. No other module imports it.

Its log lines name sockets instead of tasks; we report the same events with task and peer. Its fork handlers are for
children that keep using gRPC. A program's children (usually those of a ``DataLoader``) do not, and the handlers would
stop our threads at every fork and print warnings. gRPC reads both variables when it is imported; then they are
removed, because processes that the program starts must not inherit them. Values set by the user take precedence. Where
the program has imported gRPC before, only its lines at forks can be kept back.
"""

from __future__ import annotations

import os
import sys

from lockstep.transports.quiet_forks import QuietForks

if "grpc" in sys.modules and "GRPC_VERBOSITY" not in os.environ:
    QuietForks().install()  # it has read its variables

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


def tls_session() -> object:
    """A place for one session of TLS, the value of ``grpc.ssl_session_cache``."""
    from grpc.experimental import session_cache  # here: most processes never dial

    return session_cache.ssl_session_cache_lru(1)
