"""Certificates for tests, made on the spot: a CA, a server on loopback, a client, and a stranger's CA."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """What `make` has written."""

    ca: Path
    server: Pair
    client: Pair
    other_ca: Path


def make(folder: Path) -> Certificates:
    """Write them all into `folder`."""
    ca = authority("test CA")
    other = authority("somebody else's CA")
    return Certificates(
        write_cert(folder / "ca.pem", ca[0]),
        issue(folder, "server", ca),
        issue(folder, "client", ca),
        write_cert(folder / "other.pem", other[0]),
    )


Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _named(text: str, kind: x509.ObjectIdentifier = NameOID.COMMON_NAME) -> x509.Name:
    return x509.Name([x509.NameAttribute(kind, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def authority(name: str) -> Authority:
    """Make a CA of this name."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(_named(name), _named(name), key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def issue(folder: Path, name: str, ca: Authority, common_name: bool = True) -> Pair:
    """Write a certificate for "server" or for a client.

    Args:
        folder: where `<name>.pem` and `<name>-key.pem` are written.
        name: subject of the certificate.
        ca: signs it.
        common_name: False: the subject has an organization only, as etcd's gateway wants it of clients while
            users are enabled.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if name == "server":  # etcd connects to itself with the server's certificate as a client
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    subject = _named(name, NameOID.COMMON_NAME if common_name else NameOID.ORGANIZATION_NAME)
    certificate = (
        _builder(subject, ca[0].subject, key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca[1].public_key()), critical=False)
        .sign(ca[1], hashes.SHA256())
    )
    path = folder / f"{name}-key.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    return Pair(write_cert(folder / f"{name}.pem", certificate), path)


def write_cert(path: Path, certificate: x509.Certificate) -> Path:
    """Write a certificate as PEM."""
    path.write_bytes(pem(certificate))
    return path


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
