"""The JobSets that the operator runs as TrainingJobs, and which of them need a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...api.jobset import ManagedJobSet
from ...async_runtime import OperatorRuntime
from ...kube.client import JOBSETS, Cluster
from ...kube.reflector import Reflector
from ...kube.store import Key, ResourceStore
from ...settings import Settings


@dataclass
class ManagedJobSets:
    """All JobSets, and the times at which passes are due. Times are in seconds of the monotonic clock."""

    settings: Settings
    cluster: Cluster
    runtime: OperatorRuntime
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a pass has become due."""
    store: ResourceStore[ManagedJobSet | None] = field(init=False)
    reflector: Reflector = field(init=False)
    _due: dict[Key, float] = field(default_factory=dict)
    _jobs: dict[Key, object] = field(default_factory=dict)  # what a JobSet's status reports of its TrainingJob

    def __post_init__(self) -> None:
        self.store = ResourceStore(JOBSETS, ManagedJobSet.parse, on_change=self._on_jobset_changed)
        self.reflector = Reflector(self.cluster, self.runtime, (self.store,), self.settings.watch_namespaces)

    def request_pass(self, key: Key, delay: float = 0.0) -> None:
        """Have a pass over the JobSet run after `delay` seconds, unless one is due earlier."""
        at = self.runtime.monotonic() + delay
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            self.changed.set()

    def take_due(self) -> list[Key]:
        """Return the JobSets whose passes are due, and forget them."""
        now = self.runtime.monotonic()
        due = [key for key, at in self._due.items() if at <= now]
        for key in due:
            del self._due[key]
        return due

    def get_delay(self, longest: float) -> float:
        """Return the seconds until the next pass is due, at most `longest`."""
        now = self.runtime.monotonic()
        return min([longest, *(max(0.0, at - now) for at in self._due.values())])

    def wake_all(self) -> None:
        """Request a pass over each JobSet that the operator runs and whose end is not reported."""
        for key, jobset in self.store.items():
            if jobset is not None and not jobset.ended:
                self.request_pass(key)

    def wake_for_job(self, key: Key, job: Mapping[str, Any]) -> None:
        """Request a pass if the TrainingJob of that name has changed in what its JobSet reports.

        Most of its changes are steps and metrics. `job` is its present or last state, of which fields may be missing.
        """
        if self.store.get(key) is None:
            self._jobs.pop(key, None)
            return
        seen = _select_reported_fields(job)
        if self._jobs.get(key) != seen:
            self._jobs[key] = seen
            self.request_pass(key)

    def _on_jobset_changed(self, key: Key, jobset: ManagedJobSet | None) -> None:
        if jobset is not None:
            self.request_pass(key)
        if key not in self.store:
            self._jobs.pop(key, None)


def _select_reported_fields(job: Mapping[str, Any]) -> object:
    metadata, status = job["metadata"], job.get("status") or {}
    identity = tuple(metadata.get(name) for name in ("uid", "generation", "deletionTimestamp", "finalizers"))
    reported = tuple(status.get(name) for name in ("phase", "reason", "observedGeneration", "restarts"))
    suspended = [item.get("status") for item in status.get("conditions") or () if item.get("type") == "Suspended"]
    return identity, reported, suspended, status.get("workers")
