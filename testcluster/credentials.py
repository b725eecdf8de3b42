"""Access to the API server: one certificate authority, bearer tokens, and a kubeconfig per user."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testcluster.settings import (
    API_URL,
    HOST_ADDRESS,
    KUBECONFIG,
    KUBERNETES_SERVICE,
    MAX_NODES,
    STATE,
    ClusterNode,
    list_nodes,
)
from testcluster.shell import write_if_changed

FOLDER = STATE / "credentials"
CA = FOLDER / "ca.crt"
API_SERVER = FOLDER / "apiserver"  # .crt and .key: the API server's own certificate
KUBELET_CLIENT = FOLDER / "kubelet-client"  # .crt and .key: the API server's client certificate for kubelets
SERVICE_ACCOUNTS = FOLDER / "service-accounts"  # .key and .pub: signs the tokens of pods
TOKENS = FOLDER / "tokens.csv"

_CERTIFICATE_LIFETIME = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class User:
    """A user of the API server, identified by a token."""

    name: str
    groups: tuple[str, ...] = ()

    @property
    def kubeconfig(self) -> Path:
        return KUBECONFIG if self == ADMIN else FOLDER / f"{self.name.replace(':', '-')}.kubeconfig"


ADMIN = User("admin", ("system:masters",))
CONTROLLER_MANAGER = User("system:kube-controller-manager")
SCHEDULER = User("system:kube-scheduler")
PROXY = User("system:kube-proxy")
PROMETHEUS = User("prometheus")


def build_kubelet_user(node: ClusterNode) -> User:
    return User(f"system:node:{node.name}", ("system:nodes",))


def ensure_credentials() -> None:
    """Write all files unless they exist. TOKENS is written last: an interrupted run starts again."""
    if TOKENS.exists():
        return
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _build_certificate("pacekeeper-test-cluster", authority_key, authority_key)
    CA.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    _write_pair(API_SERVER, "kube-apiserver", authority_key, authority)
    _write_pair(KUBELET_CLIENT, "kube-apiserver-kubelet-client", authority_key, authority)
    _write_service_account_keys()

    users = [ADMIN, CONTROLLER_MANAGER, SCHEDULER, PROXY, PROMETHEUS, *map(build_kubelet_user, list_nodes(MAX_NODES))]
    lines = []
    for user in users:
        token = secrets.token_hex(16)
        lines.append(f'{token},{user.name},{user.name},"{",".join(user.groups)}"\n')
        _write_kubeconfig(user, token)
    write_if_changed(TOKENS, "".join(lines))


def read_admin_token() -> str:
    """Return the administrator's bearer token."""
    return next(line.split(",")[0] for line in TOKENS.read_text().splitlines() if f",{ADMIN.name}," in line)


def _write_kubeconfig(user: User, token: str) -> None:
    cluster = {"server": API_URL, "certificate-authority-data": base64.b64encode(CA.read_bytes()).decode()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "pacekeeper-test", "cluster": cluster}],
        "users": [{"name": user.name, "user": {"token": token}}],
        "contexts": [{"name": "pacekeeper-test", "context": {"cluster": "pacekeeper-test", "user": user.name}}],
        "current-context": "pacekeeper-test",
    }
    user.kubeconfig.touch(mode=0o600)
    user.kubeconfig.write_text(yaml.safe_dump(config, sort_keys=False))


def _build_certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None = None,
) -> x509.Certificate:
    """Build a certificate for `key`. Without an issuer, it is the authority's own."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _CERTIFICATE_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.DNSName("kubernetes.default.svc")]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in (HOST_ADDRESS, KUBERNETES_SERVICE)]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _write_pair(stem: Path, name: str, authority_key: ec.EllipticCurvePrivateKey, authority: x509.Certificate) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _build_certificate(name, key, authority_key, authority)
    stem.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private_key(stem.with_suffix(".key"), key)


def _write_service_account_keys() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write_private_key(SERVICE_ACCOUNTS.with_suffix(".key"), key)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    SERVICE_ACCOUNTS.with_suffix(".pub").write_bytes(public)


def _write_private_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
