"""etcd, API server, controllers, and scheduler on the machine itself, and the initial objects of every cluster."""

from __future__ import annotations

from functools import partial

from testcluster import api, credentials, volumes
from testcluster.daemons import Daemon
from testcluster.programs import Programs
from testcluster.settings import (
    API_PORT,
    DNS_SERVICE,
    ETCD_PORT,
    ETCD_URL,
    HOST_ADDRESS,
    KUBECONFIG,
    SERVICE_SUBNET,
    STATE,
)
from testcluster.shell import is_answering, run_command, write_if_changed

_GANGS_FILE = STATE / "gangs"
_GANG_GATES = ("--feature-gates=GenericWorkload=true,GangScheduling=true",)


def choose_gangs(enabled: bool) -> None:
    """Set whether the scheduler places pods of a PodGroup together (alpha features of Kubernetes 1.36)."""
    if enabled:
        write_if_changed(_GANGS_FILE, "")
    else:
        _GANGS_FILE.unlink(missing_ok=True)


def build_etcd(programs: Programs) -> Daemon:
    peer = f"http://127.0.0.1:{ETCD_PORT + 1}"
    command = (
        str(programs.etcd),
        "--name=pacekeeper",
        f"--data-dir={STATE / 'etcd'}",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=pacekeeper={peer}",
        "--unsafe-no-fsync",  # the data of a test cluster need not survive a power failure
        "--log-level=warn",
    )
    return Daemon("etcd", command)


def build_api_server(programs: Programs) -> Daemon:
    command = (
        programs["kube-apiserver"],
        f"--etcd-servers={ETCD_URL}",
        f"--bind-address={HOST_ADDRESS}",
        f"--advertise-address={HOST_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={SERVICE_SUBNET}",
        f"--tls-cert-file={credentials.API_SERVER}.crt",
        f"--tls-private-key-file={credentials.API_SERVER}.key",
        f"--client-ca-file={credentials.CA}",
        f"--token-auth-file={credentials.TOKENS}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={credentials.SERVICE_ACCOUNTS}.key",
        f"--service-account-key-file={credentials.SERVICE_ACCOUNTS}.pub",
        f"--kubelet-client-certificate={credentials.KUBELET_CLIENT}.crt",
        f"--kubelet-client-key={credentials.KUBELET_CLIENT}.key",
        "--kubelet-preferred-address-types=InternalIP",  # node names do not resolve
        *_list_feature_gates(),
        *(["--runtime-config=scheduling.k8s.io/v1alpha2=true"] if _GANGS_FILE.exists() else []),
    )
    return Daemon("kube-apiserver", command)


def build_controller_manager(programs: Programs) -> Daemon:
    kubeconfig = credentials.CONTROLLER_MANAGER.kubeconfig
    command = (
        programs["kube-controller-manager"],
        f"--bind-address={HOST_ADDRESS}",
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={credentials.SERVICE_ACCOUNTS}.key",
        f"--root-ca-file={credentials.CA}",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        *_list_feature_gates(),
    )
    return Daemon("kube-controller-manager", command)


def build_scheduler(programs: Programs) -> Daemon:
    kubeconfig = credentials.SCHEDULER.kubeconfig
    command = (
        programs["kube-scheduler"],
        f"--bind-address={HOST_ADDRESS}",
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        *_list_feature_gates(),
    )
    return Daemon("kube-scheduler", command)


def _list_feature_gates() -> tuple[str, ...]:
    return _GANG_GATES if _GANGS_FILE.exists() else ()


def ensure_api_server(programs: Programs) -> None:
    """Start etcd and the API server, and wait until the API server is ready."""
    etcd = build_etcd(programs)
    etcd.ensure_running()
    etcd.wait_for(partial(is_answering, f"{ETCD_URL}/health"), timeout=30, what="etcd ready")
    server = build_api_server(programs)
    server.ensure_running()
    server.wait_for(api.is_ready, timeout=60, what="API server ready")


def ensure_controllers(programs: Programs) -> None:
    build_controller_manager(programs).ensure_running()
    build_scheduler(programs).ensure_running()


def apply_objects(programs: Programs) -> None:
    """Apply the volumes, Prometheus's permissions, and the DNS service."""
    objects = "\n---\n".join([_PROMETHEUS_RBAC, _DNS, _STORAGE_CLASS, volumes.create_volumes()])
    kubectl = (programs.kubectl, f"--kubeconfig={KUBECONFIG}")
    run_command(*kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=objects)


_PROMETHEUS_RBAC = f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: prometheus}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {credentials.PROMETHEUS.name}}}]
"""

# There is no DNS server (Pacekeeper's plans contain addresses). A service without backends refuses lookups at once.
# Without the service, they would time out.
_DNS = f"""
apiVersion: v1
kind: Service
metadata: {{name: kube-dns, namespace: kube-system}}
spec:
  clusterIP: {DNS_SERVICE}
  ports: [{{name: dns, port: 53, protocol: UDP}}, {{name: dns-tcp, port: 53, protocol: TCP}}]
"""

_STORAGE_CLASS = """
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: shared}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: Immediate
"""
