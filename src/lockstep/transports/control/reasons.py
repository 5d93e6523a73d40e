"""Why a peer could not be reached, in one plain phrase.

gRPC reports most failures as UNAVAILABLE with a long text. People read these phrases in the line about a missing task,
so each names the address and what was found there.
"""

from __future__ import annotations

from lockstep.protocol.core.reach import UNPROVEN, Reach, Silence
from lockstep.protocol.core.timing import PROBE_SECONDS
from lockstep.transports import phrases
from lockstep.transports.control.tcp_probe import REFUSED, Probe, probe, probe_program
from lockstep.transports.quiet_grpc import grpc


def explain(error: grpc.RpcError, address: str, seconds: float | None = None) -> str:
    """Turn an error of a call to ``address`` into a phrase; ``seconds`` is the deadline that the call had.

    Blocks for up to a second if gRPC's own text is not enough and a plain connection attempt is needed.
    """
    return why_no_answer(error, address, seconds).text


def why_no_answer(
    error: grpc.RpcError, address: str, seconds: float | None, probe_seconds: float = PROBE_SECONDS
) -> Silence:
    """``explain`` as a value. ``probe_seconds``: how long a connection attempt may take; 0 leaves it out."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # A port hidden by a firewall must not look like a task that is stuck.
        found = _probe(address, probe_seconds)
        return Silence(Reach.MUTE, phrases.mute(address, seconds)) if found.is_open else found.silence(address)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _explain_unavailable(details, address, probe_seconds)
    return Silence(Reach.BROKEN, _explain_status(code, details, address))


def _probe(address: str, seconds: float) -> Probe:
    return probe(address, seconds) if seconds else Probe(Reach.OPEN)


def _explain_status(code: grpc.StatusCode, details: str, address: str) -> str:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} does not speak this protocol ({details})"
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
        return f"refused by {address}: {details}"
    if code is grpc.StatusCode.CANCELLED:
        return f"the call to {address} was cancelled"
    return f"the call to {address} failed: {details or 'no details'} ({code.name})"


def _explain_unavailable(details: str, address: str, probe_seconds: float) -> Silence:
    if "failed to connect" not in details and "resolving" not in details and "resolution" not in details:
        # The call was running when the connection ended.
        if "reset" in details.lower():
            return _broken(f"the connection to {address} was reset by the other side ({details})")
        return _broken(f"the connection to {address} ended without a goodbye ({details})")
    if "Connection refused" in details:
        return _broken(REFUSED.silence(address).text)
    found = _probe(address, probe_seconds)
    if not found.is_open:
        return _broken(found.silence(address).text)
    if probe_seconds and (program := probe_program(address, probe_seconds)).reach in UNPROVEN:
        return program.silence(address)
    if "SETTINGS" in details and "timed out" in details:
        return _broken(phrases.mute(address, None))
    if "HTTP/2" in details or "http1" in details or "Tls handshake failed" in details:
        return _broken(f"what answers at {address} is not a Lockstep task")
    return _broken(phrases.cannot_connect(address, details.rpartition("last error: ")[2]))


def _broken(text: str) -> Silence:
    return Silence(Reach.BROKEN, text)
