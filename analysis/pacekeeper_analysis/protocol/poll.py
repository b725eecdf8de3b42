"""The operator's answer to a sidecar's poll: the worker's part of the plan, of the requests, or of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .decoding import read_dataclass
from .plan import WorkerPlan
from .requests import WorkerRequests


@dataclass(frozen=True)
class PollAnswer:
    """What has changed since the worker's last poll. None means unchanged."""

    plan: WorkerPlan | None = None
    requests: WorkerRequests | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the plan, and the requests next to them: sidecars without requests read the plan."""
        plan = {} if self.plan is None else self.plan.to_json()
        return plan if self.requests is None else {**plan, "requests": self.requests.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read an answer. Raises InputError, which names the field. An older operator sends no requests."""
        if not isinstance(data, Mapping):
            return read_dataclass(cls, data, "poll")
        requests = data.get("requests")
        has_plan = requests is None or "version" in data
        return cls(
            WorkerPlan.from_json(data) if has_plan else None,
            None if requests is None else WorkerRequests.from_json(requests),
        )
