"""What differs between sidecars: what they read, and where they store the operator's answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from pacekeeper.health.rank_metrics import CurrentRankMetrics
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidenceRequest, WorkerRequests

from .operator_client import OperatorClient

SidecarLoop = Callable[[], Coroutine[Any, Any, None]]


class Monitor(ABC):
    """The ranks of one container as its sidecar reports them. By default, nothing is stored."""

    poll_interval_seconds: float
    """Seconds between two polls of the container's files."""

    @property
    @abstractmethod
    def heartbeat(self) -> Heartbeat:
        """The heartbeat to send now, without metrics."""

    @abstractmethod
    def check(self, now: float, wall: float, *, is_over: bool = False) -> None:
        """Read the files. `now`: seconds of CLOCK_MONOTONIC; `wall`: seconds since the epoch.

        `is_over`: the container's processes have exited, so that the files are final.
        """

    @abstractmethod
    def measure_metrics(self) -> Sequence[CurrentRankMetrics]:
        """Return the ranks' present metrics."""

    @abstractmethod
    def build_evidence(self, request: EvidenceRequest, plan: WorkerPlan | None) -> Evidence | None:
        """Return the requested evidence; None: this container has none to give."""

    @abstractmethod
    def list_faults(self) -> Iterable[str]:
        """Return the names of the faults that the operator has not acknowledged, oldest first."""

    @abstractmethod
    def read_fault(self, name: str) -> FaultReport | None:
        """Return a fault as it is to be sent; None: it is malformed."""

    @abstractmethod
    def drop_fault(self, name: str) -> None:
        """Forget a fault, which the operator has acknowledged or rejected."""

    @property
    def urgent_changes(self) -> int:
        """Changes whenever steps and metrics are to be reported at once."""
        return 0

    def list_loops(self, client: OperatorClient) -> Iterable[SidecarLoop]:
        """Return what else is to run."""
        del client
        return ()

    def read_stored_answers(self) -> tuple[WorkerPlan | None, WorkerRequests]:
        """Return the plan and the requests that an earlier run of this sidecar has stored."""
        return None, WorkerRequests()

    def store_answer(self, requests: WorkerRequests | None, plan: WorkerPlan | None) -> None:
        """Store what is new in an answer of the operator; None: nothing. Raises OSError."""
        del requests, plan

    def needs_contact(self) -> bool:
        """Return whether the operator must be polled now, although nothing has changed. Called at each poll."""
        return False
