"""The certificate authority that sidecars trust, and the endpoint's serving certificate; both are renewed in time.

The authority is stored in a Secret in the operator's namespace. A restarted or upgraded operator presents a new serving
certificate under the same authority, so that running workers need no change. Serving keys never leave the process.

*A new authority* is created after two thirds of the old one's lifetime. Running workers trust only the old one, so the
old one cross-signs the new one's key (the *bridge*). The endpoint presents the bridge next to its certificate. Clients
that trust the old authority follow the bridge; clients that trust the new one need none. New workers get both.

If the platform provides a Secret (`tls_secret`; cert-manager's have the same form), the operator has no authority. It
reads that Secret periodically, and presents it as it is.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

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

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..async_runtime import OperatorRuntime
from ..kube.client import SECRETS, Cluster, Object
from ..settings import Settings

AUTHORITY_SECRET_NAME = "pacekeeper-ca"
AUTHORITY_DAYS = 3650
SERVING_DAYS = 365
CERTIFICATE_RENEW_SHARE = 2 / 3
"""Share of a certificate's lifetime after which the next one is created."""
CERTIFICATE_CHECK_INTERVAL_SECONDS = 30.0
CERTIFICATE_STARTUP_RETRY_SECONDS = 2.0
_CLOCK_SKEW = timedelta(minutes=5)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingCertificate:
    """What the endpoint presents, and what sidecars trust. All fields are PEM."""

    chain: str  # its certificate first
    key: str
    trusted: str

    def to_ssl_context(self) -> ssl.SSLContext:
        """Return a server context. Raises ssl.SSLError if key and certificate do not match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.TemporaryDirectory() as folder:  # the ssl module reads keys from files only
            path = Path(folder) / "serving.pem"
            path.touch(mode=0o600)
            path.write_text(self.key.rstrip() + "\n" + self.chain)
            context.load_cert_chain(path)
        return context

    def is_due(self, now: datetime) -> bool:
        return _is_due(x509.load_pem_x509_certificate(self.chain.encode()), now)


@dataclass(frozen=True)
class CertificateAuthority:
    """A certificate authority. All fields are PEM."""

    certificate: str
    key: str
    trusted: str  # its certificate, then that of the previous authority, if any
    bridge: str = ""  # its key, signed by the previous authority

    @classmethod
    def from_secret(cls, secret: Object) -> CertificateAuthority:
        """Parse the Secret. Raises InputError."""
        certificate, key = _read_secret_text(secret, "tls.crt"), _read_secret_text(secret, "tls.key")
        authority = cls(
            certificate,
            key,
            _read_secret_text(secret, "ca.crt", certificate),
            _read_secret_text(secret, "bridge.crt", ""),
        )
        if authority._load_signing_key().public_key() != authority._parse_certificate().public_key():
            raise InputError("tls.key does not belong to tls.crt")
        return authority

    def to_secret(self, namespace: str, version: str = "") -> Object:
        """Build the Secret. `version`: the resourceVersion of the Secret that it replaces."""
        data = {"tls.crt": self.certificate, "tls.key": self.key, "ca.crt": self.trusted, "bridge.crt": self.bridge}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": AUTHORITY_SECRET_NAME, "namespace": namespace}
            | ({"resourceVersion": version} if version else {}),
            "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
        }

    def is_due(self, now: datetime) -> bool:
        return _is_due(self._parse_certificate(), now)

    def renew(self, now: datetime) -> CertificateAuthority:
        """Create the next authority, cross-signed by this one unless this one has expired."""
        old = self._parse_certificate()
        if now >= old.not_valid_after_utc:
            return create_authority(now)
        key = ec.generate_private_key(ec.SECP256R1())
        new = _create_root_certificate(key, old.subject, now)
        # The bridge is self-issued (same name), so the old authority's path length constraint does not count it.
        builder = _create_builder(
            old.subject, key.public_key(), now, min(_compute_expiry(now, AUTHORITY_DAYS), old.not_valid_after_utc)
        )
        bridge = _sign_certificate(
            _add_authority_extensions(builder), old.subject, self._load_signing_key(), key.public_key()
        )
        return CertificateAuthority(new, _encode_private_key(key), new + self.certificate, bridge)

    def issue_serving_certificate(self, hosts: Sequence[str], now: datetime) -> ServingCertificate:
        """Issue a new certificate for `hosts` (names or addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._parse_certificate()
        builder = (
            _create_builder(_build_name("pacekeeper"), key.public_key(), now, _compute_expiry(now, SERVING_DAYS))
            .add_extension(
                x509.SubjectAlternativeName([_build_alternative_name(host) for host in hosts]), critical=False
            )
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        )
        certificate = _sign_certificate(builder, issuer.subject, self._load_signing_key(), key.public_key())
        return ServingCertificate(certificate + self.bridge, _encode_private_key(key), self.trusted)

    def _parse_certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate(self.certificate.encode())
        except ValueError as error:
            raise InputError(f"tls.crt is not a certificate: {error}") from error

    def _load_signing_key(self) -> ec.EllipticCurvePrivateKey:
        try:
            key = load_pem_private_key(self.key.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise InputError(f"tls.key is not a private key: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError("tls.key is not a key on an elliptic curve")
        return key


def create_authority(now: datetime) -> CertificateAuthority:
    """Create an authority that no worker trusts yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _create_root_certificate(key, _build_name("pacekeeper-ca"), now)
    return CertificateAuthority(certificate, _encode_private_key(key), certificate)


class CertificateSource(Protocol):
    """Where the serving certificate comes from."""

    async def fetch(self, now: datetime) -> ServingCertificate:
        """Return the certificate to present now. Raises InputError, kopf.TemporaryError or kopf.PermanentError."""


class OwnAuthority:
    """Signs with the installation's own authority, which it creates, renews, and writes again if it was deleted."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._authority: CertificateAuthority | None = None
        self._serving: ServingCertificate | None = None

    async def fetch(self, now: datetime) -> ServingCertificate:
        authority = await self._load_or_create(now)
        if authority != self._authority or self._serving is None or self._serving.is_due(now):
            self._serving = authority.issue_serving_certificate(self._settings.hosts, now)
        self._authority = authority
        return self._serving

    async def _load_or_create(self, now: datetime) -> CertificateAuthority:
        """Return the stored authority.

        Raises Conflict if another operator writes at the same time, and NotLeading if none is stored and another
        operator has to create it.
        """
        namespace = self._settings.namespace
        stored = await self._cluster.find(SECRETS, AUTHORITY_SECRET_NAME, namespace)
        if stored is None:
            authority = self._authority or create_authority(now)
            log.warning("Secret %s/%s does not exist; writing it", namespace, AUTHORITY_SECRET_NAME)
            await self._cluster.create(SECRETS, authority.to_secret(namespace))
            return authority
        try:
            authority = CertificateAuthority.from_secret(stored)
        except InputError as error:
            raise InputError(
                f"Secret {namespace}/{AUTHORITY_SECRET_NAME}: {error}; restore it from a backup, or delete it: "
                "a running operator writes its authority again; a restarted one creates a new authority, and running "
                "workers must then be replaced"
            ) from error
        return await self._renew(authority, stored, now) if authority.is_due(now) else authority

    async def _renew(self, authority: CertificateAuthority, stored: Object, now: datetime) -> CertificateAuthority:
        """Return the next authority, or the current one if the next cannot be written (a standby may not write)."""
        namespace = self._settings.namespace
        renewed = authority.renew(now)
        try:
            secret = renewed.to_secret(namespace, stored["metadata"]["resourceVersion"])
            await self._cluster.replace(SECRETS, secret)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning(
                "Secret %s/%s is due for a new authority, but cannot be written: %s",
                namespace,
                AUTHORITY_SECRET_NAME,
                error,
            )
            return authority
        log.info("Secret %s/%s has a new authority, cross-signed by the old one", namespace, AUTHORITY_SECRET_NAME)
        return renewed


class ProvidedSecret:
    """Presents the contents of a Secret that the platform maintains."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._name = settings.tls_secret
        self._namespace = settings.namespace

    async def fetch(self, now: datetime) -> ServingCertificate:  # noqa: ARG002  # the platform renews it
        secret = await self._cluster.find(SECRETS, self._name, self._namespace)
        if secret is None:
            raise kopf.TemporaryError(f"Secret {self._namespace}/{self._name} (tls_secret) does not exist")
        try:
            return ServingCertificate(
                _read_secret_text(secret, "tls.crt"),
                _read_secret_text(secret, "tls.key"),
                _read_secret_text(secret, "ca.crt"),
            )
        except InputError as error:
            raise InputError(
                f"Secret {self._namespace}/{self._name} (tls_secret): {error}; it must hold tls.crt, tls.key and ca.crt"
            ) from error


TrustCallback = Callable[[str], None]
"""Receives the certificates that workers trust from now on (PEM)."""


class CertificateManager:
    """Keeps the certificate that the endpoint presents.

    `context` is the server's. It follows renewals without a restart of the server.
    """

    def __init__(self, cluster: Cluster, settings: Settings, runtime: OperatorRuntime) -> None:
        self.on_trust_changed: TrustCallback = lambda _: None
        """Called when the certificates that workers trust have changed."""
        source: CertificateSource = (
            ProvidedSecret(cluster, settings) if settings.tls_secret else OwnAuthority(cluster, settings)
        )
        self._source = source
        self._host = urlsplit(settings.endpoint).hostname or ""
        self._runtime = runtime
        self._serving: ServingCertificate | None = None
        self._current = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.num_tickets = 0  # sidecars reconnect only to other operators, which do not share tickets
        self.context.sni_callback = self._select_context

    @property
    def trusted(self) -> str:
        """Return the certificates that workers trust (PEM)."""
        return "" if self._serving is None else self._serving.trusted

    async def start(self) -> None:
        """Return once there is a certificate to present. Raises InputError."""
        while self._serving is None:
            try:
                await self._refresh()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("the endpoint has no certificate yet; retrying: %s", error)
                await self._runtime.sleep(CERTIFICATE_STARTUP_RETRY_SECONDS)

    async def renew_periodically(self) -> None:
        """Renew what is due and follow changes, until cancelled. If that fails, the current certificate stays."""
        while True:
            await self._runtime.sleep(CERTIFICATE_CHECK_INTERVAL_SECONDS)
            try:
                await self._refresh()
            except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
                log.error("renewing the endpoint's certificate failed, the current one stays: %s", error)

    async def _refresh(self) -> None:
        serving = await self._source.fetch(datetime.fromtimestamp(self._runtime.now(), UTC))
        if serving == self._serving:
            return
        current = _verify_serving_certificate(serving, self._host)
        self._current, previous, self._serving = current, self._serving, serving
        metrics.CERTIFICATE_EXPIRY.labels("serving").set(_parse_expiry(serving.chain))
        metrics.CERTIFICATE_EXPIRY.labels("authority").set(_parse_expiry(serving.trusted))
        if previous is None or previous.trusted != serving.trusted:
            self.on_trust_changed(serving.trusted)

    def _select_context(self, connection: ssl.SSLObject, _host: str | None, _context: ssl.SSLContext) -> None:
        """Select the current context in each handshake, with or without a server name."""
        connection.context = self._current


def _verify_serving_certificate(serving: ServingCertificate, host: str) -> ssl.SSLContext:
    """Return a context with which a client that trusts `serving.trusted` can connect. Raises InputError."""
    try:
        context, client_context = serving.to_ssl_context(), ssl.create_default_context(cadata=serving.trusted)
        _run_handshake(context, client_context, host)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(f"no worker would trust the certificate for {host}: {error}") from error
    return context


def _run_handshake(server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str) -> None:
    """Run a handshake in memory, as a client that calls `host` does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    client.do_handshake()  # raises if it is not complete


def _read_secret_text(secret: Object, key: str, default: str | None = None) -> str:
    """Decode one key of the Secret. Raises InputError if it is missing or is not text."""
    encoded = (secret.get("data") or {}).get(key)
    if not encoded:
        if default is None:
            raise InputError(f"{key} is missing")
        return default
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{key} is not text: {error}") from error


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= begins + (ends - begins) * CERTIFICATE_RENEW_SHARE


def _parse_expiry(pem: str) -> float:
    """Return when the first certificate expires, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()


def _create_root_certificate(key: ec.EllipticCurvePrivateKey, name: x509.Name, now: datetime) -> str:
    builder = _add_authority_extensions(
        _create_builder(name, key.public_key(), now, _compute_expiry(now, AUTHORITY_DAYS))
    )
    return _sign_certificate(builder, name, key, key.public_key())


def _add_authority_extensions(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
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
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
        usage, critical=True
    )


def _create_builder(
    name: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(end)
    )


def _sign_certificate(
    builder: x509.CertificateBuilder,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
) -> str:
    """Sign and return PEM. The two key identifiers distinguish authorities of the same name."""
    certificate = (
        builder.issuer_name(issuer)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM).decode()


def _compute_expiry(now: datetime, days: int) -> datetime:
    return now + timedelta(days=days)


def _build_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _build_alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
