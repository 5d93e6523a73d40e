"""Who answers a TLS handshake at an address: a task with our key, one with another key, or some other program."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from enum import Enum, auto

from lockstep.security.certificates import NAME


class Greeting(Enum):
    """What a TLS handshake showed."""

    OUR_KEY = auto()
    OTHER_KEY = auto()
    NOT_LOCKSTEP = auto()
    """It speaks TLS, and its certificate is not Lockstep's."""
    NOT_TLS = auto()


@dataclass(frozen=True, slots=True)
class Greeted:
    greeting: Greeting
    version: str = ""
    """The version of Lockstep that it claims."""


def greet(host: str, port: int, seconds: float, authority: bytes | None) -> Greeted:
    """Shake hands with ``host:port``; ``authority`` (PEM) is ours, if we have a key.

    Takes ``seconds`` for each of two connections at most; ``TimeoutError`` if the other side says nothing. No client
    certificate is presented, so whoever is there learns nothing about us.
    """
    if authority is not None:
        with contextlib.suppress(ssl.SSLCertVerificationError):
            return Greeted(
                Greeting.NOT_TLS if _shake_hands(host, port, seconds, authority) is None else Greeting.OUR_KEY
            )
    certificate = _shake_hands(host, port, seconds, None)
    if certificate is None:
        return Greeted(Greeting.NOT_TLS)
    from lockstep.security.signing import lockstep_version  # slow to import, and rarely needed

    version = lockstep_version(certificate)
    return Greeted(Greeting.NOT_LOCKSTEP) if version is None else Greeted(Greeting.OTHER_KEY, version)


def _shake_hands(host: str, port: int, seconds: float, authority: bytes | None) -> bytes | None:
    """The certificate (DER) of what is there; None if it does not speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=authority.decode())
    try:
        with (
            socket.create_connection((host, port), timeout=seconds) as line,
            context.wrap_socket(line, server_hostname=NAME) as shaken,
        ):
            return shaken.getpeercert(binary_form=True)
    except (ssl.SSLCertVerificationError, TimeoutError):
        raise
    except OSError:  # ssl.SSLError is one
        return None
