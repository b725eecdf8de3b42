"""The certificate authority that sidecars trust, and the endpoint's serving certificate under it.

The authority is made once and kept in a Secret of the operator's namespace: a restarted or upgraded operator presents a
new serving certificate under the same authority, so that no worker needs to be told. Serving keys never leave the
process.
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import kopf
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .cluster import SECRETS, Cluster, Conflict

SECRET = "pacekeeper-ca"
AUTHORITY_DAYS = 3650
SERVING_DAYS = 365
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Authority:
    """A certificate authority."""

    certificate: str  # PEM; what sidecars trust
    key: str  # PEM

    def serving_context(self, hosts: Sequence[str], now: datetime) -> ssl.SSLContext:
        """A server's TLS context with a fresh certificate for `hosts` (names or addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.load_pem_x509_certificate(self.certificate.encode())
        issuer_key = load_pem_private_key(self.key.encode(), password=None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        certificate = (
            _builder("pacekeeper", key.public_key(), now, SERVING_DAYS)
            .issuer_name(issuer.subject)
            .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .sign(issuer_key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.TemporaryDirectory() as folder:  # the ssl module reads keys from files only
            path = Path(folder) / "serving.pem"
            path.touch(mode=0o600)
            path.write_bytes(_private_pem(key) + certificate.public_bytes(Encoding.PEM))
            context.load_cert_chain(path)
        return context


async def ensure(cluster: Cluster, namespace: str) -> Authority:
    """The authority of this installation; made by whoever comes first."""
    for _ in range(3):
        secret = await cluster.find(SECRETS, SECRET, namespace)
        if secret is not None:
            data = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
            return Authority(data["tls.crt"], data["tls.key"])
        authority = create(datetime.now(UTC))
        try:
            await cluster.create(
                SECRETS,
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "type": "kubernetes.io/tls",
                    "metadata": {"name": SECRET, "namespace": namespace},
                    "stringData": {"tls.crt": authority.certificate, "tls.key": authority.key},
                },
            )
        except Conflict:
            continue
        return authority
    raise kopf.TemporaryError(f"Secret {namespace}/{SECRET} appears and vanishes", delay=5)


def create(now: datetime) -> Authority:
    """A new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("pacekeeper-ca", key.public_key(), now, AUTHORITY_DAYS)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        builder.issuer_name(_name("pacekeeper-ca"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate.public_bytes(Encoding.PEM).decode(), _private_pem(key).decode())


def _builder(name: str, key: ec.EllipticCurvePublicKey, now: datetime, days: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
