"""Why a peer could not be reached, in one plain phrase.

gRPC reports most troubles as UNAVAILABLE with a long text. The phrases here are what people read in the line about a
missing task, so each names the address and what was found there.
"""

from __future__ import annotations

import re
import socket

from lockstep.protocol.reach import Reach, Silence
from lockstep.protocol.timing import KNOCK_SECONDS
from lockstep.transports import phrases
from lockstep.transports.quiet_grpc import grpc


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[ipv6]:port`` in its two parts; ValueError for anything else."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{address!r} is not an address like host:port or [::1]:port")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """The two parts as one text, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def probe(address: str, seconds: float = KNOCK_SECONDS) -> Silence | None:
    """Try a plain TCP connection: None where it works, else why it does not. Blocks up to ``seconds``."""
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except ValueError as error:
        return Silence(Reach.BROKEN, str(error))
    except socket.gaierror as error:
        return Silence(Reach.UNRESOLVED, phrases.unresolved(address, error.strerror or str(error)))
    except TimeoutError:
        return Silence(Reach.SILENT, phrases.silent(address, seconds))
    except ConnectionRefusedError:
        return Silence(Reach.REFUSED, phrases.refused(address))
    except OSError as error:
        return Silence(Reach.BROKEN, phrases.cannot_connect(address, error.strerror or str(error)))
    return None


def explain(error: grpc.RpcError, address: str, seconds: float | None = None) -> str:
    """Turn an error of a call to ``address`` into a phrase; ``seconds`` is the deadline the call had.

    Blocks for up to a second where gRPC's own text does not tell and a plain connection attempt has to.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return _explain_unavailable(details, address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        found = probe(address)
        return phrases.mute(address, seconds) if found is None else found.text
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} does not speak this protocol ({details})"
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
        return f"refused by {address}: {details}"
    if code is grpc.StatusCode.CANCELLED:
        return f"the call to {address} was cancelled"
    return f"call to {address} failed: {details or 'no details'} ({code.name})"


def _explain_unavailable(details: str, address: str) -> str:
    if "failed to connect" not in details and "resolving" not in details and "resolution" not in details:
        # The call was under way when the connection ended.
        if "reset" in details.lower():
            return f"connection to {address} was reset by the other side ({details})"
        return f"connection to {address} ended without a goodbye ({details})"
    if "Connection refused" in details:
        return phrases.refused(address)
    found = probe(address)
    if found is not None:
        return found.text
    if "SETTINGS" in details and "timed out" in details:
        return phrases.mute(address, None)
    if "HTTP/2" in details or "http1" in details:
        return f"what answers at {address} is not a gRPC server"
    cause = details.rpartition("last error: ")[2]
    return phrases.cannot_connect(address, cause)
