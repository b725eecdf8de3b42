"""TrainingJobs under an operator in the cluster: how to write, read, and change one.

Reads go to the API server directly: a poll by kubectl costs a tenth of a second of processor time.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pacekeeper_operator.api.names import API_VERSION, find_trainer_name
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import DesiredState
from testcluster import api, faults, release
from testcluster.images import TRAINER_IMAGE, UNPRIVILEGED_USER_ID
from testcluster.settings import VOLUMES
from testing.kubernetes.cluster import KubectlCluster, wait_for

Value = TypeVar("Value")

PACED_COMMAND = ["pacekeeper", "run", "testing/scripts/train.py"]
"""A steered script that sleeps in each step: its pace, and so a test's length, hardly depends on the machine."""
STEP_SECONDS = 0.05
SAMPLES = 2400
STEPS_PER_EPOCH = SAMPLES // 24
"""By PACED's global batch."""
_GROUP = "/apis/pacekeeper.dev/v1alpha1"


def build_job_manifest(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    trainer: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    cpu: str = "",
    **spec: Any,
) -> dict[str, Any]:
    """A TrainingJob for restricted namespaces. `cpu`: requested, where the place on a node matters."""
    requests = {"cpu": cpu or "20m", "memory": "256Mi"}
    limits = {"memory": "2Gi"} if cpu else {"cpu": "400m", "memory": "2Gi"}
    container = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in (environment or {}).items()],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **(trainer or {}),
    }
    context = {
        "runAsNonRoot": True,
        "runAsUser": UNPRIVILEGED_USER_ID,
        "runAsGroup": UNPRIVILEGED_USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    template = {"terminationGracePeriodSeconds": 10, "securityContext": context, "containers": [container]}
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"replicas": 2, **spec, "template": {"spec": {**template, **(pod or {})}}},
    }


def build_paced_job(
    name: str, steps: int, *, environment: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """A job of PACED that keeps its checkpoints, and what its ranks saw, on the claim of its own name."""
    variables = {
        "FOLDER": "/checkpoints",
        "UNTIL": str(steps),
        "SLEEP": str(STEP_SECONDS),
        "SAMPLES": str(SAMPLES),
        **(environment or {}),
    }
    spec.setdefault("checkpoint", {"everySteps": 50, "volumeClaimName": name})
    spec.setdefault("detection", {"stragglerSlowdown": 10})  # on two cores any rank is slow for a moment
    return build_job_manifest(name, PACED_COMMAND, environment=variables, **spec)


def build_volume_claim(name: str, access_mode: str = "ReadWriteMany") -> dict[str, Any]:
    """A volume that all workers share, or that one node mounts."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "shared",
            "accessModes": [access_mode],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


@dataclass(frozen=True)
class ClusterJob:
    """A TrainingJob in the cluster."""

    cluster: KubectlCluster
    namespace: str
    name: str

    @classmethod
    def apply(cls, cluster: KubectlCluster, namespace: str, body: dict[str, Any]) -> ClusterJob:
        """With its claim, where it names one."""
        checkpoint = body["spec"].get("checkpoint", {})
        if name := checkpoint.get("volumeClaimName"):
            cluster.apply(build_volume_claim(name, checkpoint.get("accessMode", "ReadWriteMany")), namespace)
        cluster.apply(body, namespace)
        return cls(cluster, namespace, body["metadata"]["name"])

    # State

    def read(self) -> dict[str, Any]:
        return dict(api.get_path(f"{_GROUP}/namespaces/{self.namespace}/trainingjobs/{self.name}"))

    def exists(self) -> bool:
        return any(body["metadata"]["name"] == self.name for body in self._list_objects(_GROUP, "trainingjobs"))

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.read().get("status", {})
        return status

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    def get_condition(self, kind: str) -> dict[str, str]:
        """{} where it has not been written yet."""
        return next((condition for condition in self.status.get("conditions", ()) if condition["type"] == kind), {})

    def list_pods(self) -> list[dict[str, Any]]:
        return self._list_objects("/api/v1", "pods", f"?labelSelector=pacekeeper.dev/job={self.name}")

    def list_incident_names(self) -> frozenset[str]:
        return frozenset(incident["metadata"]["name"] for incident in self.list_incidents())

    def list_incidents(self) -> list[dict[str, Any]]:
        """In the order in which they were detected."""
        incidents = self._list_objects(_GROUP, "incidents")
        job_incidents = [incident for incident in incidents if incident["spec"]["jobRef"]["name"] == self.name]
        return sorted(job_incidents, key=lambda incident: str(incident.get("status", {}).get("detected", "")))

    def find_ended_incident(self, cause: str, known: Collection[str]) -> dict[str, Any] | None:
        """The first incident of `cause` whose name is not among `known` and that has an outcome, or None."""
        new_incidents = [
            i for i in self.list_incidents() if i["metadata"]["name"] not in known and i["spec"]["cause"] == cause
        ]
        return next((incident for incident in new_incidents if incident.get("status", {}).get("outcome")), None)

    def read_plan(self) -> dict[str, Any]:
        """{} where there is none yet."""
        desired = self.read_desired()
        return {} if desired is None else desired.plan.to_json()

    def read_desired(self) -> DesiredState | None:
        """Plan and bookkeeping as the operator has written them; None: not yet."""
        states = self._list_objects(
            f"/apis/{API_VERSION}", "trainingjobstates", f"?fieldSelector=metadata.name={self.name}"
        )
        return state_codec.decode_state(states[0], self.name).desired if states else None

    def find_worker(self, rank: int) -> str:
        """The pod that holds `rank`."""
        return str(next(member["worker"] for member in self.read_plan()["members"] if rank in member["ranks"]))

    def find_node(self, rank: int) -> str:
        """Where the pod that holds `rank` runs."""
        pod = api.get_path(f"/api/v1/namespaces/{self.namespace}/pods/{self.find_worker(rank)}")
        return str(pod["spec"]["nodeName"])

    def list_nodes(self) -> dict[str, str]:
        """Where each of its pods runs, by their names."""
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in self.list_pods()}

    def read_step(self) -> int:
        """The newest step that all members have completed, straight from their sidecars; -1: not all answer."""
        return _read_min_step([member["address"] for member in self.read_plan().get("members", ())])

    def find_checkpoint_folder(self) -> Path:
        """Its folder on the claim of its name, on this machine. A job from an older version has the claim itself."""
        claim = self.find_claim_folder()
        return claim / self.name if (claim / self.name).is_dir() else claim

    def find_claim_folder(self) -> Path:
        """What the claim of its name holds, on this machine."""
        claim = api.get_path(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{self.name}")
        return VOLUMES / str(claim["spec"]["volumeName"])

    def read_diary(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank of PACED has written: one entry a round begun ("restored") and one a step."""
        return [
            json.loads(line) for line in (self.find_checkpoint_folder() / f"seen-{rank}.jsonl").read_text().splitlines()
        ]

    def list_start_steps(self) -> list[int]:
        """The steps behind which PACED began its rounds, one a round; a claim that was empty: 0."""
        return [max(entry["restored"], 0) for entry in self.read_diary() if "restored" in entry]

    def read_samples_by_epoch(self) -> list[list[int]]:
        """What all ranks of PACED have trained with in each whole epoch, by what came of each step: its last try."""
        tries: dict[int, dict[int, list[int]]] = {}
        for path in self.find_checkpoint_folder().glob("seen-*.jsonl"):
            for entry in map(json.loads, path.read_text().splitlines()):
                if "step" in entry:
                    tries.setdefault(entry["step"], {}).setdefault(entry["round"], []).extend(entry["seen"])
        used = {step: by_round[max(by_round)] for step, by_round in tries.items()}
        epochs = max(max(used, default=0) - 1, 0) // STEPS_PER_EPOCH  # not all ranks may have reported the last step
        steps = [range(1 + n * STEPS_PER_EPOCH, 1 + (n + 1) * STEPS_PER_EPOCH) for n in range(epochs)]
        return [[sample for step in epoch for sample in used.get(step, ())] for epoch in steps]

    # What can be done

    def patch(self, **spec: Any) -> None:
        self.cluster.kubectl(
            "patch", "tj", self.name, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def run_cli(self, *arguments: str, timeout: float = 120) -> str:
        """The output of `kubectl pacekeeper`; the namespace is the job's."""
        return self.cluster.run_cli(*arguments, f"--namespace={self.namespace}", timeout=timeout)

    def crash_rank(self, rank: int) -> None:
        """SIGKILL, as soon as the rank runs."""
        self._signal_rank(rank, signal.SIGKILL)

    def hang_rank(self, rank: int) -> None:
        """SIGSTOP, as soon as the rank runs."""
        self._signal_rank(rank, signal.SIGSTOP)

    def stop_trainer(self, rank: int) -> None:
        """SIGSTOP to all processes of the trainer's container, launcher included; the sidecar goes on."""
        worker = self.find_worker(rank)
        for pid in faults.list_container_pids(self.namespace, worker, self._find_trainer(worker)):
            faults.signal_process(pid, signal.SIGSTOP)

    def _find_trainer(self, worker: str) -> str:
        """The container of the pod with the ranks."""
        return find_trainer_name(api.get_path(f"/api/v1/namespaces/{self.namespace}/pods/{worker}")["metadata"])

    def _signal_rank(self, rank: int, signum: signal.Signals) -> None:
        worker = self.find_worker(rank)
        trainer = self._find_trainer(worker)

        def rank_process() -> int | None:
            pids = faults.list_rank_pids(self.namespace, worker, trainer)
            return pids[-1] if pids else None

        faults.signal_process(self.wait_until(rank_process, 120, f"a rank on {worker}"), signum)

    def delete_worker(self, rank: int) -> str:
        """`kubectl delete pod`; its name."""
        worker = self.find_worker(rank)
        self.cluster.kubectl("delete", "pod", worker, "-n", self.namespace, "--wait=false")
        return worker

    def delete(self) -> None:
        """Returns when nothing of it is left but its incidents; the test fails if something is."""
        self.cluster.kubectl("delete", "tj", self.name, "-n", self.namespace, "--timeout=120s")
        self.wait_until_deleted(timeout=120)

    # Waiting

    def wait_until(self, condition: Callable[[], Value | None], timeout: float, what: str) -> Value:
        """The first answer that counts as true; the test fails if there is none within `timeout` seconds."""
        return wait_for(condition, timeout, what, situation=self._describe, pause=0.2)

    def wait_for_phase(self, *phases: str, timeout: float = 120) -> None:
        """It fails at once where the job has ended otherwise."""

        def reached() -> bool:
            phase = self.phase
            if phase in ("Complete", "Failed") and phase not in phases:
                pytest.fail(f"{self.name} is {phase}, not {' or '.join(phases)}; {self._describe()}")
            return phase in phases

        self.wait_until(reached, timeout, f"{self.name} is {' or '.join(phases)}")

    def wait_until_observed(self) -> None:
        """The operator goes by the spec as it is now."""

        def seen() -> bool:
            body = self.read()
            return bool(body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"])

        self.wait_until(seen, 120, f"the operator has seen what {self.name} wants")

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        self.wait_until(lambda: self.read_step() >= step, timeout, f"{self.name} has completed step {step}")

    def wait_for_more_steps(self, steps: int = 5) -> None:
        """All members have completed some more steps."""
        before = self.wait_until(lambda: self.read_step() + 1, 120, f"all members of {self.name} answer") - 1
        self.wait_for_step(before + steps, timeout=120)

    def wait_until_calm(self, spares: int = 0) -> None:
        """It trains with its spares in place, no incident is open, and its ranks have come on since."""

        def calm() -> bool:
            status = self.status
            closed = all(incident.get("status", {}).get("outcome") for incident in self.list_incidents())
            return status.get("phase") == "Running" and closed and status["workers"].get("spare", 0) >= spares

        self.wait_for_phase("Running", timeout=120)
        self.wait_until(calm, 120, f"{self.name} trains undisturbed")
        self.wait_for_more_steps()

    def wait_until_incident_ended(self, cause: str, known: Collection[str], timeout: float = 120) -> dict[str, Any]:
        """The first incident of `cause` whose name is not among `known`, once it has an outcome."""
        what = f"an incident {cause} of {self.name} that is over"
        return self.wait_until(lambda: self.find_ended_incident(cause, known), timeout, what)

    def wait_until_healed(self, *causes: str, timeout: float = 120) -> list[dict[str, Any]]:
        """The job's incidents have these causes, in this order, and all are over."""

        def healed() -> list[dict[str, Any]] | None:
            incidents = self.list_incidents()
            all_ended = all(incident.get("status", {}).get("outcome") for incident in incidents)
            return incidents if all_ended and len(incidents) >= len(causes) else None

        incidents = self.wait_until(healed, timeout, f"{self.name} is healed of {', '.join(causes)}")
        assert [incident["spec"]["cause"] for incident in incidents] == list(causes), _format_incidents(incidents)
        return incidents

    def wait_until_deleted(self, timeout: float) -> None:
        """No object, no pod, no plan."""
        self.wait_until(lambda: not self.exists(), timeout, f"{self.name} is deleted")
        remaining_pods = self.list_pods()
        deletion_times = {
            pod["metadata"]["name"]: pod["metadata"].get("deletionTimestamp", "not deleted") for pod in remaining_pods
        }
        assert not remaining_pods, f"the job went before its pods: {deletion_times}"
        self.wait_until(lambda: not self.read_plan(), 120, "the plan is collected as garbage")

    def _list_objects(self, group: str, plural: str, query: str = "") -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = api.get_path(f"{group}/namespaces/{self.namespace}/{plural}{query}")["items"]
        return items

    def _describe(self) -> str:
        if not self.exists():
            return f"there is no job {self.name}"
        pods = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in self.list_pods()}
        return f"status: {json.dumps(self.status)}; pods: {pods}; incidents: {_format_incidents(self.list_incidents())}"


@contextmanager
def unplug_node(job: ClusterJob) -> Iterator[tuple[str, str]]:
    """A worker and its node, out of reach; not that of the operator that leads, which has to be followed first."""
    operator_pod = wait_for(release.find_leading_pod, 120, "an operator leads")
    placements = [(job.find_worker(rank), job.find_node(rank)) for rank in (0, 1)]
    worker, node = next(placement for placement in placements if placement[1] != operator_pod["spec"]["nodeName"])
    faults.disconnect_node(node)
    try:
        yield worker, node
    finally:
        faults.reconnect_node(node)


def _format_incidents(incidents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{incident['metadata']['name']} ({incident['spec'].get('message', '')})" for incident in incidents]


def _read_min_step(addresses: Sequence[str]) -> int:
    steps: list[int] = []
    for address in addresses:
        try:
            with urllib.request.urlopen(f"http://{address}:9464/metrics", timeout=60) as response:
                page = response.read().decode()
        except OSError:
            return -1
        matches = re.findall(r"^pacekeeper_rank_step\{.*\} (\S+)$", page, re.MULTILINE)
        steps += [int(float(value)) for value in matches] or [-1]
    return min(steps, default=-1)
