"""Certificates for mutual TLS, derived from the key: whoever has the key can sign one, and nobody else can.

gRPC for Python cannot pin a certificate, but it can demand one of a given authority. The authority's private key is
therefore derived from the job's key, the same in every task; each host signs a certificate of its own with it. What
a caller without the key learns from that certificate is its subject: Lockstep, a version, and that it wants a key.

``cryptography`` takes longer to import than everything else here takes together, so what it made is stored beside the
key and used until it expires. Where nothing can be stored, every process signs its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lockstep.errors import BadInput
from lockstep.foreign import read_json
from lockstep.private_files import named_folder, read_plain, write_whole
from lockstep.security.key import Key, Purpose
from lockstep.version import __version__

NAME: Final = "lockstep.job"
"""The name in every certificate. Addresses are not in it: a host may have several, and the key is what counts."""

OWN_FOLDER_VARIABLE: Final = "LOCKSTEP_CERTIFICATES"
"""A folder with ``ca.pem``, ``task.pem`` (for ``lockstep.job``) and ``task.key``, in place of the derived ones.
The authority must sign for this job only, because every certificate of it opens every door."""

_DAY: Final = 86_400
_VALID: Final = 800 * _DAY
_RENEWED_BEFORE: Final = 400 * _DAY
"""A job that starts with a stored certificate can run for more than a year."""
_MOST_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Certificates:
    """What one end of a connection presents and demands, as PEM."""

    authority: bytes
    certificate: bytes
    private: bytes = field(repr=False)


def certificates_for(key: Key, environ: Mapping[str, str] = os.environ) -> Certificates:
    """Those of the key, stored or new, or the user's own. ``BadInput`` if the user's own cannot be used."""
    own = environ.get(OWN_FOLDER_VARIABLE)
    if own:
        return _read_own(Path(own))
    return _stored(key) or _make_and_store(key)


def _read_own(folder: Path) -> Certificates:
    try:
        if (folder / "task.key").stat().st_mode & 0o077:
            raise BadInput(f"other users have access to {folder / 'task.key'}; run chmod 600 {folder / 'task.key'}")
        return Certificates(*((folder / name).read_bytes() for name in ("ca.pem", "task.pem", "task.key")))
    except OSError as error:
        raise BadInput(
            f"cannot read {error.filename} ({error.strerror}); the folder in {OWN_FOLDER_VARIABLE} must have ca.pem, "
            "task.pem and task.key"
        ) from None


# -- stored beside the key --


def _place(key: Key) -> Path:
    return key.path.with_name(f"{key.path.name}.tls")


def _stored(key: Key) -> Certificates | None:
    """What an earlier process stored; None if it is not of this key and version, or expires before long."""
    place = _place(key)
    try:
        found = os.lstat(place)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        proof, _, text = read_plain(place, _MOST_BYTES)[0].partition(b"\n")
        if not hmac.compare_digest(proof, _proof(key, text)):
            return None
        fields = read_json(text)
        if fields["version"] != __version__ or fields["expires"] < time.time() + _RENEWED_BEFORE:
            return None
        return Certificates(*(fields[name].encode() for name in ("authority", "certificate", "private")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _make_and_store(key: Key) -> Certificates:
    from lockstep.security.signing import sign

    expires = time.time() + _VALID
    made = Certificates(*sign(key, NAME, expires))
    fields = {
        "version": __version__,
        "expires": expires,
        "authority": made.authority.decode(),
        "certificate": made.certificate.decode(),
        "private": made.private.decode(),
    }
    text = json.dumps(fields).encode()
    # Of several processes that do this at once the last one's stays; each uses its own, and all are valid.
    with contextlib.suppress(OSError), named_folder(_place(key).parent, make=False) as folder:
        write_whole(folder, _place(key).name, _proof(key, text) + b"\n" + text)
    return made


def _proof(key: Key, text: bytes) -> bytes:
    return hmac.new(key.sub(Purpose.CACHE), text, hashlib.sha256).hexdigest().encode()
