"""A separate process that accepts control links and sends every envelope back; tests kill and freeze it."""

from __future__ import annotations

import sys

from helpers.wire import hello
from lockstep.protocol.core.causes import Reason
from lockstep.protocol.core.messages import Envelope, Hello
from lockstep.transports.control.link import ControlLink, serve_links
from lockstep.transports.control.server import ControlServer


class EchoingOwner:
    def __init__(self, link: ControlLink) -> None:
        self._link = link

    def on_open(self, peer: Hello) -> None:
        pass

    def on_message(self, envelope: Envelope) -> None:
        self._link.send(envelope)

    def on_lost(self, reason: Reason) -> None:
        pass


def main() -> None:
    server = ControlServer("127.0.0.1", 0, threads=8)
    serve_links(server, lambda peer: hello("/peer", 7), lambda peer, link: EchoingOwner(link))
    server.start()
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test closes the pipe or is gone itself
    server.stop(0)


if __name__ == "__main__":
    main()
