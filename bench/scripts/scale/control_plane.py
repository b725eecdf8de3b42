"""A Kubernetes of its own for a measurement: API server and etcd as in the test cluster, and nodes that kwok simulates.

No kubelet runs and no container starts; kwok (sigs.k8s.io/kwok) reports each pod as running. Everything listens on
this machine's loopback, at ports that are free, in a folder that goes with it. A scheduler places pods until
`stop_placing`. kwok renews no leases of nodes: nothing here reads them.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from testcluster import programs

START_TIMEOUT_SECONDS = 60.0
END_TIMEOUT_SECONDS = 10.0


@dataclass
class ControlPlane:
    """Use `run_control_plane()`."""

    folder: Path
    api_port: int
    admin_token: str
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"

    @property
    def authority(self) -> Path:
        """The certificate that the API server has made itself."""
        return self.folder / "certificates" / "apiserver.crt"

    def build_ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority))

    def write_kubeconfig(self, name: str, token: str) -> Path:
        """For a program that calls the API server by this token."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "scale", "cluster": {"server": self.url, "certificate-authority": str(self.authority)}}
            ],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "scale", "context": {"cluster": "scale", "user": name}}],
            "current-context": "scale",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self, name: str, *command: str | Path, environment: dict[str, str] | None = None) -> int:
        """Its process id. It ends with this control plane, if not before."""
        with self.get_log_path(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self._running[name].pid

    def stop(self, name: str) -> None:
        """By SIGTERM, then SIGKILL. One that does not run is fine."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop_placing(self) -> None:
        """No pod is placed from now on, and the scheduler takes nothing from the two cores."""
        self.stop("kube-scheduler")

    def check(self) -> None:
        """Raises RuntimeError, with its last output, where one has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                log_tail = self.get_log_path(name).read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} has ended ({process.returncode}): {log_tail}")

    def get_log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str, url: str, context: ssl.SSLContext | None = None) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            self.check()
            with suppress(OSError), urllib.request.urlopen(url, timeout=2, context=context) as response:
                if response.status == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not answer within {START_TIMEOUT_SECONDS:.0f} s; see {self.folder}")
            time.sleep(0.1)


@contextmanager
def run_control_plane() -> Iterator[ControlPlane]:
    """API server, etcd, scheduler and kwok, until left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pacekeeper-scale-")))
        plane = ControlPlane(folder, find_free_port(), secrets.token_hex(16))
        stack.callback(_stop_control_plane, plane)
        _start_control_plane(plane)
        yield plane


def find_free_port() -> int:
    """Below those that the kernel gives to connections, so that none of them takes it in between."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def _start_control_plane(plane: ControlPlane) -> None:
    etcd, peer = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
    plane.start(
        "etcd", programs.find_etcd(), "--name=scale", f"--data-dir={plane.folder / 'etcd'}",
        f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=scale={peer}",
        "--unsafe-no-fsync", "--quota-backend-bytes=8589934592", "--log-level=warn",
    )  # fmt: skip
    plane.wait_for("etcd", f"{etcd}/health")
    key, tokens = plane.folder / "service-accounts.key", plane.folder / "tokens.csv"
    _write_key(key)
    tokens.write_text(f'{plane.admin_token},admin,admin,"system:masters"\n')
    plane.start(
        "kube-apiserver", programs.find_kubernetes_server("kube-apiserver"), f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1", f"--secure-port={plane.api_port}", "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.96.0.0/16", f"--cert-dir={plane.folder / 'certificates'}",
        f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
        "--disable-admission-plugins=TaintNodesByCondition",  # no controller would take the taint away
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={key}", f"--service-account-key-file={key.with_suffix('.pub')}",
    )  # fmt: skip
    while not plane.authority.exists():
        plane.check()
        time.sleep(0.05)
    plane.wait_for("the API server", f"{plane.url}/readyz", plane.build_ssl_context())
    admin = plane.write_kubeconfig("admin", plane.admin_token)
    plane.start(
        "kube-scheduler", programs.find_kubernetes_server("kube-scheduler"), f"--kubeconfig={admin}",
        f"--authentication-kubeconfig={admin}", f"--authorization-kubeconfig={admin}",
        "--leader-elect=false", "--secure-port=0", "--kube-api-qps=400", "--kube-api-burst=800",
    )  # fmt: skip
    plane.start(
        "kwok", programs.find_kwok(), f"--kubeconfig={admin}", f"--config={_STAGES_PATH}",
        "--manage-all-nodes=true", "--node-lease-duration-seconds=0", "-v=WARN",
        environment=os.environ | {"HOME": str(plane.folder)},
    )  # fmt: skip


_STAGES_PATH = Path(__file__).with_name("stages.yaml")


def _write_key(path: Path) -> None:
    path.touch(mode=0o600)
    key = ec.generate_private_key(ec.SECP256R1())
    key_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(*key_format))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)


def _stop_control_plane(plane: ControlPlane) -> None:
    for name in list(plane._running)[::-1]:
        plane.stop(name)
    print("the control plane is gone", file=sys.stderr, flush=True)
