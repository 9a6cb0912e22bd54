"""Certificates and keys for a federation.

    folder/ca.crt, ca.key              the certificate authority: every site gets ca.crt; keep
                                       ca.key offline
    folder/server.crt, server.key      the coordinator's, for its host names and addresses
    folder/NAME.key, NAME.key.pub      a site's: the private key never leaves the site, the public
                                       key is registered at the coordinator

All keys are on the curve P-384, which Flower requires. Only their owner can read private files.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Make a certificate authority, unless the folder has one, and a certificate for the
    coordinator.

    Args:
        folder: Where to write them.
        hosts: Names or addresses under which sites reach the coordinator.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = [_alternative_name(host) for host in hosts]
    if not names:
        raise InputError(
            "a certificate needs a name or an address under which sites reach the"
            " coordinator: give --host, such as fl.example.org"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / "ca.crt").exists() and (folder / "ca.key").exists():
        authority: Any = _load_key(folder / "ca.key")
        issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject
    else:
        authority, issuer = _new_key(), _x509_name("Remanence federation authority")
        # may sign certificates and revocation lists only
        usage = x509.KeyUsage(*(position in (5, 6) for position in range(9)))
        builder = _certificate(issuer, issuer, authority.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ).add_extension(usage, critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
        )
        write_private(folder / "ca.key", _pem(authority))
        (folder / "ca.crt").write_bytes(_encode(builder.sign(authority, hashes.SHA384())))
    server = _new_key()
    builder = _certificate(_x509_name(hosts[0][:64]), issuer, server.public_key(), SERVER_DAYS)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    write_private(folder / "server.key", _pem(server))
    (folder / "server.crt").write_bytes(_encode(builder.sign(authority, hashes.SHA384())))


def make_site_key(folder: Path, name: str) -> Path:
    """Make a site's key pair.

    Returns:
        The path of the private key; the public key is next to it, with .pub.
    """
    from cryptography.hazmat.primitives import serialization

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise InputError(
            f"{name!r} cannot be the name of a key: use letters, digits, dots and dashes"
        )
    private, public = folder / f"{name}.key", folder / f"{name}.key.pub"
    if private.exists():
        raise InputError(
            f"{private} exists: a key is not overwritten; remove it first, or choose another name"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = _new_key()
    form = serialization.PrivateFormat.OpenSSH
    write_private(
        private, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + b"\n"
    )
    return private


def write_private(path: Path, content: bytes) -> None:
    """Write a file that others cannot read at any moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _load_key(path: Path) -> Any:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(path.read_bytes(), None)


def _alternative_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", host):
        raise InputError(
            f"{host!r} is neither a name nor an address: write it without port, such as"
            " fl.example.org or 10.0.0.5"
        )
    return x509.DNSName(host)


def _x509_name(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(subject: Any, issuer: Any, key: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
    )
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(
        now + datetime.timedelta(days=days)
    )


def _encode(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    content: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return content


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.PKCS8
    content: bytes = key.private_bytes(
        serialization.Encoding.PEM, form, serialization.NoEncryption()
    )
    return content
