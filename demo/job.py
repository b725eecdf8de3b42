"""The job as the demo sees it: where its ranks are, how it does, and the incidents that the operator has opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo import kube
from pacekeeper_analysis.plan import Plan
from pacekeeper_operator import ledger

NAMESPACE = "demo"
NAME = "gpt"
STEP_SECONDS_METRIC = "pacekeeper_rank_step_seconds"
STOP_FILE = "/checkpoints/enough"
"""The script's --stop-file in examples/gpt.yaml."""


@dataclass(frozen=True)
class DemoJobStatus:
    """A TrainingJob's status at one moment."""

    phase: str
    step: int
    round: int
    slowdown: float
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
            slowdown=float(status.get("slowdown", 0) or 0),
            ready=int(workers.get("ready", 0)),
            spares=int(workers.get("spare", 0)),
            mode=status.get("syncMode", ""),
        )

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Complete", "Failed")


def build_series_selector(metric: str, name: str = NAME) -> str:
    """A metric of the job's ranks, as Prometheus has it."""
    return f'{metric}{{namespace="{NAMESPACE}",trainingjob="{name}"}}'


def find_worker_of_rank(rank: int, name: str = NAME) -> str:
    """The pod that holds `rank` under the plan in force."""
    for member in read_plan(name).members:
        if rank in member.ranks:
            return member.worker
    raise kube.DemoError(f"no worker holds rank {rank}")


def list_spares(name: str = NAME) -> list[str]:
    """Pods that hold no rank."""
    members = {member.worker for member in read_plan(name).members}
    pods = kube.get_object("pods", namespace=NAMESPACE)
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in members]


def find_node(pod: str) -> str:
    return str(kube.get_object("pods", pod, NAMESPACE)["spec"]["nodeName"])


def list_incidents() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kube.get_object("incidents", namespace=NAMESPACE)
    return found


def get_current_mode() -> str:
    """The mode that the ranks train in, as the status says."""
    found = DemoJobStatus.read()
    return found.mode if found is not None else ""


def is_training_with(workers: int) -> bool:
    """Whether so many hold ranks, and have come to a step."""
    return len(read_plan().members) == workers and read_live_step() >= 0


def find_last_event(reason: str) -> dict[str, Any] | None:
    """The newest of the job's events of this reason."""
    found = kube.get_object("events", namespace=NAMESPACE)
    mine = [event for event in found if event["reason"] == reason and event["regarding"]["name"] == NAME]
    return max(mine, key=lambda event: str(event["eventTime"]), default=None)


def read_live_step(name: str = NAME) -> int:
    """The newest step that all ranks have completed, seconds fresher than the status."""
    newest = _query_metric("min", "pacekeeper_rank_step", name)
    return -1 if newest is None else int(newest)


def read_step_seconds(name: str = NAME) -> float | None:
    """Mean over the ranks; None before the first step."""
    return _query_metric("avg", STEP_SECONDS_METRIC, name)


def read_loss() -> float | None:
    """Mean over the ranks; None before the first step."""
    return _query_metric("avg", "pacekeeper_rank_loss")


def stop_script(name: str = NAME) -> str:
    """Have the script end by itself, and return what was done, in words."""
    worker = find_worker_of_rank(0, name)
    kube.run_kubectl("exec", worker, "-c", "trainer", "-n", NAMESPACE, "--", "touch", STOP_FILE)
    return f"touch {STOP_FILE} in {worker}"


def read_plan(name: str = NAME) -> Plan:
    """In force."""
    return ledger.decode_state(kube.get_object("trainingjobstates", name, NAMESPACE), name).desired.plan


def _query_metric(over_ranks: str, metric: str, name: str = NAME) -> float | None:
    found = kube.query_prometheus(f"{over_ranks}({build_series_selector(metric, name)})")
    return float(found[0]["value"][1]) if found else None
