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
    ca = _authority("test CA")
    other = _authority("somebody else's CA")
    return Certificates(
        _write_cert(folder / "ca.pem", ca[0]),
        _issue(folder, "server", ca, ExtendedKeyUsageOID.SERVER_AUTH),
        _issue(folder, "client", ca, ExtendedKeyUsageOID.CLIENT_AUTH),
        _write_cert(folder / "other.pem", other[0]),
    )


Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _authority(name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _issue(folder: Path, name: str, ca: Authority, use: x509.ObjectIdentifier) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    # etcd dials itself with the server's certificate as a client
    uses = [use, *([ExtendedKeyUsageOID.CLIENT_AUTH] if name == "server" else [])]
    certificate = (
        _builder(name, "test CA", key)
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
    return Pair(_write_cert(folder / f"{name}.pem", certificate), path)


def _write_cert(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
