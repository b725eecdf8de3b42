"""The demo's view of the job: where its ranks are, its status, and the incidents that the operator has opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo import kube
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_operator.state import state_codec

NAMESPACE = "demo"
NAME = "gpt"
STEP_SECONDS_METRIC = "pacekeeper_rank_step_seconds"
STOP_FILE = "/checkpoints/enough"
"""The script's --stop-file in examples/gpt.yaml."""


@dataclass(frozen=True)
class DemoJobStatus:
    """A TrainingJob's status at one time."""

    phase: str
    step: int
    round: int
    slowdown: float | None
    ready: int
    spares: int
    mode: str

    @classmethod
    def read(cls, name: str = NAME) -> DemoJobStatus | None:
        body = kube.get_object("trainingjobs", name, NAMESPACE)
        if body is None:
            return None
        status = body.get("status", {})
        workers = status.get("workers", {})
        return cls(
            phase=status.get("phase", ""),
            step=int(status.get("step", 0)),
            round=int(status.get("round", 0)),
            slowdown=float(status["slowdown"]) if status.get("slowdown") else None,
            ready=int(workers.get("ready", 0)),
            spares=int(workers.get("spare", 0)),
            mode=status.get("syncMode", ""),
        )

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Complete", "Failed")


def build_series_selector(metric: str, name: str = NAME) -> str:
    """Build the PromQL selector of a metric of the job's ranks."""
    return f'{metric}{{namespace="{NAMESPACE}",trainingjob="{name}"}}'


def find_worker_of_rank(rank: int, name: str = NAME) -> str:
    """Return the pod that holds `rank` in the present plan. Raises DemoError if there is none."""
    for member in read_plan(name).members:
        if rank in member.ranks:
            return member.worker
    raise kube.DemoError(f"no worker holds rank {rank}")


def list_spares(name: str = NAME) -> list[str]:
    """Return the pods without ranks."""
    members = {member.worker for member in read_plan(name).members}
    pods = kube.get_object("pods", namespace=NAMESPACE)
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in members]


def find_node(pod: str) -> str:
    return str(kube.get_object("pods", pod, NAMESPACE)["spec"]["nodeName"])


def list_incidents() -> list[dict[str, Any]]:
    incidents: list[dict[str, Any]] = kube.get_object("incidents", namespace=NAMESPACE)
    return incidents


def get_current_mode() -> str:
    """Return the ranks' sync mode in the status."""
    status = DemoJobStatus.read()
    return status.mode if status is not None else ""


def is_training_with(workers: int) -> bool:
    """Return whether this number of workers hold ranks, and their ranks have completed a step."""
    return len(read_plan().members) == workers and read_live_step() >= 0


def find_last_event(reason: str) -> dict[str, Any] | None:
    """Return the job's newest event with this reason."""
    events = kube.get_object("events", namespace=NAMESPACE)
    job_events = [event for event in events if event["reason"] == reason and event["regarding"]["name"] == NAME]
    return max(job_events, key=lambda event: str(event["eventTime"]), default=None)


def read_live_step(name: str = NAME) -> int:
    """Return the newest step that all ranks have completed, which is seconds more recent than the status."""
    newest = _query_metric("min", "pacekeeper_rank_step", name)
    return -1 if newest is None else int(newest)


def read_step_seconds(name: str = NAME) -> float | None:
    """Return the mean over the ranks; None before the first step."""
    return _query_metric("avg", STEP_SECONDS_METRIC, name)


def read_loss() -> float | None:
    """Return the mean over the ranks; None before the first step."""
    return _query_metric("avg", "pacekeeper_rank_loss")


def stop_script(name: str = NAME) -> str:
    """Make the script end by itself, and return a description."""
    worker = find_worker_of_rank(0, name)
    kube.run_kubectl("exec", worker, "-c", "trainer", "-n", NAMESPACE, "--", "touch", STOP_FILE)
    return f"touch {STOP_FILE} in {worker}"


def read_plan(name: str = NAME) -> Plan:
    """Return the present plan."""
    return state_codec.decode_state(kube.get_object("trainingjobstates", name, NAMESPACE), name).desired.plan


def _query_metric(over_ranks: str, metric: str, name: str = NAME) -> float | None:
    series = kube.query_prometheus(f"{over_ranks}({build_series_selector(metric, name)})")
    return float(series[0]["value"][1]) if series else None
