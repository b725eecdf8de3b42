"""The job as the demo sees it: where its ranks are, how it does, and the incidents that the operator has opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo import kube
from pacekeeper_analysis.plan import Plan
from pacekeeper_operator import ledger

NAMESPACE = "demo"
NAME = "gpt"
STEP_SECONDS = "pacekeeper_rank_step_seconds"
STOP_FILE = "/checkpoints/enough"
"""The script's --stop-file in examples/gpt.yaml."""


@dataclass(frozen=True)
class Job:
    """A TrainingJob's status at one moment."""

    phase: str
    step: int
    round: int
    slowdown: float
    ready: int
    spares: int
    mode: str

    @classmethod
    def read(cls, name: str = NAME) -> Job | None:
        body = kube.get("trainingjobs", name, NAMESPACE)
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
    def ended(self) -> bool:
        return self.phase in ("Complete", "Failed")


def series(metric: str, name: str = NAME) -> str:
    """A metric of the job's ranks, as Prometheus has it."""
    return f'{metric}{{namespace="{NAMESPACE}",trainingjob="{name}"}}'


def worker_of_rank(rank: int, name: str = NAME) -> str:
    """The pod that holds `rank` under the plan in force."""
    for member in plan(name).members:
        if rank in member.ranks:
            return member.worker
    raise kube.DemoError(f"no worker holds rank {rank}")


def spares(name: str = NAME) -> list[str]:
    """Pods that hold no rank."""
    members = {member.worker for member in plan(name).members}
    pods = kube.get("pods", namespace=NAMESPACE)
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in members]


def node_of(pod: str) -> str:
    return str(kube.get("pods", pod, NAMESPACE)["spec"]["nodeName"])


def incidents() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kube.get("incidents", namespace=NAMESPACE)
    return found


def mode_in_force() -> str:
    """The mode that the ranks train in, as the status says."""
    found = Job.read()
    return found.mode if found is not None else ""


def trains_with(workers: int) -> bool:
    """Whether so many hold ranks, and have come to a step."""
    return len(plan().members) == workers and live_step() >= 0


def last_event(reason: str) -> dict[str, Any] | None:
    """The newest of the job's events of this reason."""
    found = kube.get("events", namespace=NAMESPACE)
    mine = [event for event in found if event["reason"] == reason and event["regarding"]["name"] == NAME]
    return max(mine, key=lambda event: str(event["eventTime"]), default=None)


def live_step(name: str = NAME) -> int:
    """The newest step that all ranks have completed, seconds fresher than the status."""
    newest = _metric("min", "pacekeeper_rank_step", name)
    return -1 if newest is None else int(newest)


def step_seconds(name: str = NAME) -> float | None:
    """Mean over the ranks; None before the first step."""
    return _metric("avg", STEP_SECONDS, name)


def loss() -> float | None:
    """Mean over the ranks; None before the first step."""
    return _metric("avg", "pacekeeper_rank_loss")


def stop(name: str = NAME) -> str:
    """Have the script end by itself, and return what was done, in words."""
    worker = worker_of_rank(0, name)
    kube.kubectl("exec", worker, "-c", "trainer", "-n", NAMESPACE, "--", "touch", STOP_FILE)
    return f"touch {STOP_FILE} in {worker}"


def plan(name: str = NAME) -> Plan:
    """In force."""
    return ledger.read(kube.get("trainingjobstates", name, NAMESPACE), name).draft.plan


def _metric(over_ranks: str, metric: str, name: str = NAME) -> float | None:
    found = kube.query(f"{over_ranks}({series(metric, name)})")
    return float(found[0]["value"][1]) if found else None
