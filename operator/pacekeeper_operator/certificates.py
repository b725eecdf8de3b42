"""The certificate authority that sidecars trust, and the endpoint's serving certificate under it; both renewed in time.

The authority is kept in a Secret of the operator's namespace: a restarted or upgraded operator presents a new serving
certificate under the same authority, so that no worker needs to be told. Serving keys never leave the process.

*A new authority* is made when two thirds of the old one's life are over. Workers that run know only the old one, so it
signs the new one's key as its last act (the *bridge*), which the endpoint presents beside its certificate: whoever
trusts the old authority follows the bridge, and whoever trusts the new one needs none. New workers are given both.

A Secret that somebody made (`tls_secret`; cert-manager's have the same form) takes the place of all this: it is read
again and again, and shown as it is.
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

from . import metrics
from .cluster import SECRETS, Cluster, Object
from .runtime import OperatorRuntime
from .settings import Settings

AUTHORITY_SECRET_NAME = "pacekeeper-ca"
AUTHORITY_DAYS = 3650
SERVING_DAYS = 365
CERTIFICATE_RENEW_SHARE = 2 / 3
"""Of a certificate's life: then the next one is made."""
CERTIFICATE_CHECK_INTERVAL_SECONDS = 30.0
CERTIFICATE_STARTUP_RETRY_SECONDS = 2.0
_CLOCK_SKEW = timedelta(minutes=5)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingCertificate:
    """What the endpoint shows, and what sidecars trust. All PEM."""

    chain: str  # its certificate first
    key: str
    trusted: str

    def to_ssl_context(self) -> ssl.SSLContext:
        """A server's. Raises ssl.SSLError where key and certificate do not belong together."""
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
    """A certificate authority. All PEM."""

    certificate: str
    key: str
    trusted: str  # its own certificate first, then that of the authority before it, if there was one
    bridge: str = ""  # its key, as signed by the authority before it

    @classmethod
    def from_secret(cls, secret: Object) -> CertificateAuthority:
        """Raises InputError."""
        certificate, key = _read_secret_text(secret, "tls.crt"), _read_secret_text(secret, "tls.key")
        authority = cls(certificate, key, _read_secret_text(secret, "ca.crt", certificate), _read_secret_text(secret, "bridge.crt", ""))
        if authority._load_signing_key().public_key() != authority._parse_certificate().public_key():
            raise InputError("tls.key does not belong to tls.crt")
        return authority

    def to_secret(self, namespace: str, version: str = "") -> Object:
        """`version`: the resourceVersion of the one that it replaces."""
        data = {"tls.crt": self.certificate, "tls.key": self.key, "ca.crt": self.trusted, "bridge.crt": self.bridge}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": AUTHORITY_SECRET_NAME, "namespace": namespace} | ({"resourceVersion": version} if version else {}),
            "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
        }

    def is_due(self, now: datetime) -> bool:
        return _is_due(self._parse_certificate(), now)

    def renew(self, now: datetime) -> CertificateAuthority:
        """The next one, which whoever trusts this one can follow; nobody can once this one has ended."""
        old = self._parse_certificate()
        if now >= old.not_valid_after_utc:
            return create_authority(now)
        key = ec.generate_private_key(ec.SECP256R1())
        new = _create_root_certificate(key, old.subject, now)
        # Since it has its issuer's name, the bridge does not count where the old authority bounds its path's length.
        builder = _create_builder(old.subject, key.public_key(), now, min(_compute_expiry(now, AUTHORITY_DAYS), old.not_valid_after_utc))
        bridge = _sign_certificate(_add_authority_extensions(builder), old.subject, self._load_signing_key(), key.public_key())
        return CertificateAuthority(new, _encode_private_key(key), new + self.certificate, bridge)

    def issue_serving_certificate(self, hosts: Sequence[str], now: datetime) -> ServingCertificate:
        """A fresh certificate for `hosts` (names or addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._parse_certificate()
        builder = (
            _create_builder(_build_name("pacekeeper"), key.public_key(), now, _compute_expiry(now, SERVING_DAYS))
            .add_extension(x509.SubjectAlternativeName([_build_alternative_name(host) for host in hosts]), critical=False)
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
    """An authority that nobody trusts yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _create_root_certificate(key, _build_name("pacekeeper-ca"), now)
    return CertificateAuthority(certificate, _encode_private_key(key), certificate)


class CertificateSource(Protocol):
    """Where the serving certificate comes from."""

    async def fetch(self, now: datetime) -> ServingCertificate:
        """What is to be shown now. Raises InputError, kopf.TemporaryError or kopf.PermanentError."""


class OwnAuthority:
    """Signs with the installation's own authority, which it makes, renews, and writes anew where it was deleted."""

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
        """The authority as it is written now. Raises Conflict where another operator writes at the same time, and
        NotLeading where there is none and another operator is to make it."""
        namespace = self._settings.namespace
        found = await self._cluster.find(SECRETS, AUTHORITY_SECRET_NAME, namespace)
        if found is None:
            authority = self._authority or create_authority(now)
            log.warning("Secret %s/%s does not exist, and is written", namespace, AUTHORITY_SECRET_NAME)
            await self._cluster.create(SECRETS, authority.to_secret(namespace))
            return authority
        try:
            authority = CertificateAuthority.from_secret(found)
        except InputError as error:
            raise InputError(
                f"Secret {namespace}/{AUTHORITY_SECRET_NAME}: {error}; restore it from a backup, or delete it: an operator that still "
                "runs writes its own anew, any other makes a new authority, and running workers have to be replaced"
            ) from error
        return await self._renew(authority, found, now) if authority.is_due(now) else authority

    async def _renew(self, authority: CertificateAuthority, found: Object, now: datetime) -> CertificateAuthority:
        """The next one; still this one where that cannot be written, as by an operator that does not lead."""
        namespace = self._settings.namespace
        renewed = authority.renew(now)
        try:
            secret = renewed.to_secret(namespace, found["metadata"]["resourceVersion"])
            await self._cluster.replace(SECRETS, secret)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Secret %s/%s is due for a new authority, and cannot be written: %s", namespace, AUTHORITY_SECRET_NAME, error)
            return authority
        log.info("Secret %s/%s has a new authority, vouched for by the old one", namespace, AUTHORITY_SECRET_NAME)
        return renewed


class ProvidedSecret:
    """Shows what stands in a Secret that somebody else keeps."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._name = settings.tls_secret
        self._namespace = settings.namespace

    async def fetch(self, now: datetime) -> ServingCertificate:  # noqa: ARG002  # whoever keeps it renews it
        found = await self._cluster.find(SECRETS, self._name, self._namespace)
        if found is None:
            raise kopf.TemporaryError(f"Secret {self._namespace}/{self._name} (tls_secret) does not exist (yet)")
        try:
            return ServingCertificate(_read_secret_text(found, "tls.crt"), _read_secret_text(found, "tls.key"), _read_secret_text(found, "ca.crt"))
        except InputError as error:
            raise InputError(
                f"Secret {self._namespace}/{self._name} (tls_secret): {error}; it must hold tls.crt, tls.key and ca.crt"
            ) from error


TrustCallback = Callable[[str], None]
"""Takes what workers are to trust from now on (PEM)."""


class CertificateManager:
    """What the endpoint shows: `context` is for the server, and follows what is renewed without a new server."""

    def __init__(self, cluster: Cluster, settings: Settings, runtime: OperatorRuntime) -> None:
        self.on_trust_changed: TrustCallback = lambda _: None
        """Called when what workers are to trust has changed."""
        source: CertificateSource = ProvidedSecret(cluster, settings) if settings.tls_secret else OwnAuthority(cluster, settings)
        self._source = source
        self._host = urlsplit(settings.endpoint).hostname or ""
        self._runtime = runtime
        self._serving: ServingCertificate | None = None
        self._current = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.num_tickets = 0  # a sidecar comes back only to another operator, which would not know them
        self.context.sni_callback = self._select_context

    @property
    def trusted(self) -> str:
        """What workers are to trust: PEM."""
        return "" if self._serving is None else self._serving.trusted

    async def start(self) -> None:
        """Returns once there is something to be shown. Raises InputError."""
        while self._serving is None:
            try:
                await self._refresh()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("there is no certificate for the endpoint yet: %s", error)
                await self._runtime.sleep(CERTIFICATE_STARTUP_RETRY_SECONDS)

    async def renew_periodically(self) -> None:
        """Renew what is due and follow what has changed, until cancelled. What is shown stays where that fails."""
        while True:
            await self._runtime.sleep(CERTIFICATE_CHECK_INTERVAL_SECONDS)
            try:
                await self._refresh()
            except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
                log.error("the endpoint's certificate stays as it is: %s", error)

    async def _refresh(self) -> None:
        serving = await self._source.fetch(datetime.fromtimestamp(self._runtime.now(), UTC))
        if serving == self._serving:
            return
        current = _verify_serving_certificate(serving, self._host)
        self._current, before, self._serving = current, self._serving, serving
        metrics.CERTIFICATE_EXPIRY.labels("serving").set(_parse_expiry(serving.chain))
        metrics.CERTIFICATE_EXPIRY.labels("authority").set(_parse_expiry(serving.trusted))
        if before is None or before.trusted != serving.trusted:
            self.on_trust_changed(serving.trusted)

    def _select_context(self, connection: ssl.SSLObject, _host: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, with and without a name."""
        connection.context = self._current


def _verify_serving_certificate(serving: ServingCertificate, host: str) -> ssl.SSLContext:
    """The context with which a sidecar that trusts what it is given does connect. Raises InputError."""
    try:
        context, trusting = serving.to_ssl_context(), ssl.create_default_context(cadata=serving.trusted)
        _run_handshake(context, trusting, host)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(f"no worker would trust the certificate for {host}: {error}") from error
    return context


def _run_handshake(context: ssl.SSLContext, trusting: ssl.SSLContext, host: str) -> None:
    """In memory, as a client that calls `host` does."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(back, there, server_hostname=host)
    server = context.wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    client.do_handshake()  # raises where it is not complete


def _read_secret_text(secret: Object, key: str, default: str | None = None) -> str:
    """Raises InputError where the Secret does not have it as text."""
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
    """Of the first certificate, seconds since the epoch."""
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()


def _create_root_certificate(key: ec.EllipticCurvePrivateKey, name: x509.Name, now: datetime) -> str:
    builder = _add_authority_extensions(_create_builder(name, key.public_key(), now, _compute_expiry(now, AUTHORITY_DAYS)))
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


def _create_builder(name: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime) -> x509.CertificateBuilder:
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
    """PEM. The two identifiers tell authorities of one name apart."""
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
