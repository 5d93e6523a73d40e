"""Signs and reads certificates with ``cryptography``, which is slow to import: imported only where it is needed."""

from __future__ import annotations

import datetime
import warnings
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lockstep.security.key import Key, Purpose
from lockstep.version import __version__

_ORGANIZATION: Final = "Lockstep"
_WANTS: Final = "wants a key"
_VALID_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""Long ago, because the clocks of two hosts may differ by any amount."""
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def sign(key: Key, name: str, expires: float) -> tuple[bytes, bytes, bytes]:
    """The authority's certificate, a new one signed by it, and the private key of that one; all PEM."""
    # 48 bytes make every number about equally likely; 32 would not.
    authority = ec.derive_private_key(
        int.from_bytes(key.sub(Purpose.LINKS, 48)) % (_P256_ORDER - 1) + 1, ec.SECP256R1()
    )
    leaf = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(_ORGANIZATION, "authority of a job")
    root = (
        _unsigned(issuer, issuer, authority.public_key(), expires)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, SHA256())
    )
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    signed = (
        _unsigned(_name(_ORGANIZATION, _WANTS, __version__), issuer, leaf.public_key(), expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(authority, SHA256())
    )
    private = leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return root.public_bytes(Encoding.PEM), signed.public_bytes(Encoding.PEM), private


def lockstep_version(certificate: bytes) -> str | None:
    """The version of Lockstep that presents this certificate (DER), which nobody has verified; None if it is not."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about what is odd in it; nobody here can mend that
            subject = x509.load_der_x509_certificate(certificate).subject
        found = {one.oid: str(one.value) for one in subject}
    except (ValueError, TypeError, x509.InvalidVersion):
        return None
    if found.get(NameOID.ORGANIZATION_NAME) != _ORGANIZATION or found.get(NameOID.COMMON_NAME) != _WANTS:
        return None
    version = found.get(NameOID.ORGANIZATIONAL_UNIT_NAME, "")
    return version if version.isprintable() and version.isascii() and len(version) <= 32 else ""


def _name(organization: str, common: str, unit: str = "") -> x509.Name:
    parts = [(NameOID.ORGANIZATION_NAME, organization), (NameOID.ORGANIZATIONAL_UNIT_NAME, unit)]
    parts.append((NameOID.COMMON_NAME, common))
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts if value])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, expires: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(datetime.datetime.fromtimestamp(expires, datetime.UTC))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
