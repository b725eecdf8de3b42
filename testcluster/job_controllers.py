"""The controllers of JobSet, Kueue, and Kubeflow Trainer, for tests with the owners of pods that users have.

They are not part of a cluster. Each runs as a process of the machine, with the objects of its own Helm chart: resource
definitions, webhooks, and configuration. A kubelet's part is played here: a Secret becomes files, and a Service leads
to the process.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from testcluster import api, programs
from testcluster.daemons import Daemon
from testcluster.settings import HOST_ADDRESS, KUBECONFIG, STATE
from testcluster.shell import is_answering, run_command, wait_for, write_if_changed

Object = dict[str, Any]
_TLS_FOLDER = Path("k8s-webhook-server/serving-certs")  # below /tmp: where the programs read their certificate
_CONFIGURATION = "controller_manager_config.yaml"  # of the chart's ConfigMap
_WEBHOOK_CONFIGURATIONS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_START_TIMEOUT_SECONDS = 90
_REMOVAL_TIMEOUT_SECONDS = 90
# A file system of its own at /tmp: the path of the certificate is fixed, and there may be several clusters.
_IN_OWN_FOLDER = ("unshare", "--mount", "--propagation=private", "sh", "-c", 'mount --bind "$0" /tmp && exec "$@"')


@dataclass(frozen=True)
class JobController:
    """A controller of jobs: its name is that of the program, the chart, and the release."""

    name: str
    namespace: str  # the one that the program takes for its own, outside a pod
    find: Callable[[], Path]  # returns the folder with program and chart
    webhook_port: int
    health_port: int
    groups: frozenset[str]  # API groups whose webhooks are installed; those of other groups are not needed
    settings: Mapping[str, Any] = field(default_factory=dict)  # in addition to the chart's configuration

    def install(self) -> None:
        """Install or repair it, and wait until it is ready. Raises ClusterError."""
        objects = self._render_chart()
        self._wait_for_removal()
        self._apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        self._apply(*self._select_objects(objects))
        daemon, secret = self._build_daemon(objects), _get_secret_name(objects)

        def start() -> bool:
            # A program ends if its own kinds are not served yet. A kubelet would start it again, too.
            daemon.ensure_running()
            ready_url = f"http://127.0.0.1:{self.health_port}/readyz"
            return self._mount_certificate(secret) and is_answering(ready_url)

        wait_for(start, _START_TIMEOUT_SECONDS, f"{self.name} ready", daemon.log)

    def uninstall(self) -> None:
        """Delete its objects, and all objects of its kinds. It ends last, since it removes their finalizers."""
        definitions = [f"crd/{item['metadata']['name']}" for item in self._render_chart() if _is_definition(item)]
        options = ("--ignore-not-found", f"--timeout={_REMOVAL_TIMEOUT_SECONDS}s")
        _run_kubectl("delete", *definitions, *options, timeout=_REMOVAL_TIMEOUT_SECONDS + 10)
        for kind in _WEBHOOK_CONFIGURATIONS:
            _run_kubectl("delete", kind, f"--selector=app.kubernetes.io/instance={self.name}")
        _run_kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        Daemon(self.name, ()).stop()

    @property
    def _folder(self) -> Path:
        return STATE / "job-controllers" / self.name

    def _wait_for_removal(self) -> None:
        """Wait for the end of a removal, which `uninstall` does not wait for: until then nothing can be created."""
        try:
            metadata = api.get_path(f"/api/v1/namespaces/{self.namespace}")["metadata"]
        except api.ObjectMissing:
            return
        if "deletionTimestamp" in metadata:
            options = ("--for=delete", f"--timeout={_REMOVAL_TIMEOUT_SECONDS}s")
            _run_kubectl("wait", f"namespace/{self.namespace}", *options, timeout=_REMOVAL_TIMEOUT_SECONDS + 10)

    def _render_chart(self) -> list[Object]:
        chart = self.find() / "chart"
        options = ("--namespace", self.namespace, "--include-crds")
        text = run_command(programs.find_helm(), "template", self.name, chart, *options)
        return [item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item]

    def _select_objects(self, objects: list[Object]) -> list[Object]:
        """Return what the process needs. It has the administrator's rights, and no Deployment."""
        selected = [item for item in objects if _is_definition(item) or item["kind"] == "Secret"]
        service = _get_service_name(objects)
        for item in objects:
            if item["kind"] in _WEBHOOK_CONFIGURATIONS:
                webhooks = [webhook for webhook in item["webhooks"] if self._is_needed(webhook)]
                selected.append(item | {"webhooks": webhooks})
        metadata = {"name": service, "namespace": self.namespace}
        port = {"name": "webhook", "port": 443, "targetPort": self.webhook_port}
        selected.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [port]}})
        selected.append(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": metadata | {"labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4",
                "ports": [{"name": "webhook", "port": self.webhook_port}],
                "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
            }
        )
        return selected

    def _is_needed(self, webhook: Object) -> bool:
        return all(group in self.groups for rule in webhook["rules"] for group in rule["apiGroups"])

    def _apply(self, *objects: Object) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        options = ("--server-side", "--force-conflicts", "--filename=-")
        _run_kubectl("apply", *options, stdin=text, timeout=_START_TIMEOUT_SECONDS)

    def _build_daemon(self, objects: list[Object]) -> Daemon:
        maps = (item["data"] for item in objects if item["kind"] == "ConfigMap")
        (text,) = (data[_CONFIGURATION] for data in maps if _CONFIGURATION in data)
        configuration = yaml.safe_load(text) | dict(self.settings)
        configuration |= {
            "leaderElection": {"leaderElect": False},
            "health": {"healthProbeBindAddress": f":{self.health_port}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": self.webhook_port},
        }
        file = write_if_changed(self._folder / "configuration.yaml", yaml.safe_dump(configuration))
        (self._folder / "tmp").mkdir(exist_ok=True)
        command = (
            *("env", f"KUBECONFIG={KUBECONFIG}", *_IN_OWN_FOLDER, str(self._folder / "tmp")),
            *(str(self.find() / self.name), f"--config={file}"),
        )
        return Daemon(self.name, command, configuration=file.read_text())

    def _mount_certificate(self, secret: str) -> bool:
        """Write the Secret's content as files, and return whether there is any: the program creates its certificate.

        The program waits for `tls.crt`, and then reads all files.
        """
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{secret}"
        data: Mapping[str, str] = api.get_path(path).get("data") or {}
        if not data or not all(data.values()):
            return False
        for name, value in sorted(data.items(), key=lambda item: item[0] == "tls.crt"):
            content = base64.b64decode(value).decode()
            write_if_changed(self._folder / "tmp" / _TLS_FOLDER / name, content).chmod(0o600)
        return True


JOBSET = JobController(
    "jobset",
    "jobset-system",
    programs.find_jobset,
    webhook_port=19443,
    health_port=19081,
    groups=frozenset({"jobset.x-k8s.io"}),
)
KUEUE = JobController(
    "kueue",
    "kueue-system",
    programs.find_kueue,
    webhook_port=19444,
    health_port=19082,
    groups=frozenset({"batch", "jobset.x-k8s.io", "kueue.x-k8s.io", "trainer.kubeflow.org"}),
    settings={
        "integrations": {
            "frameworks": ["batch/job", "jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob"],
            "externalFrameworks": ["TrainingJob.v1alpha1.pacekeeper.dev"],
        },
        "featureGates": {"VisibilityOnDemand": False},  # an API server of its own, which these tests do not use
    },
)
TRAINER = JobController(
    "kubeflow-trainer",
    "kubeflow-system",
    programs.find_trainer,
    webhook_port=19445,
    health_port=19083,
    groups=frozenset({"trainer.kubeflow.org"}),
)


def _get_secret_name(objects: list[Object]) -> str:
    """Return the name of the Secret with the certificate of the webhooks."""
    (name,) = (item["metadata"]["name"] for item in objects if item["kind"] == "Secret")
    return str(name)


def _get_service_name(objects: list[Object]) -> str:
    """Return the name of the Service that the webhooks are called by."""
    webhooks = [webhook for item in objects if item["kind"] in _WEBHOOK_CONFIGURATIONS for webhook in item["webhooks"]]
    (name,) = {webhook["clientConfig"]["service"]["name"] for webhook in webhooks}
    return str(name)


def _is_definition(item: Object) -> bool:
    return bool(item["kind"] == "CustomResourceDefinition")


def _run_kubectl(*arguments: str, stdin: str | None = None, timeout: float = 60) -> None:
    run_command(programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}", *arguments, stdin=stdin, timeout=timeout)
