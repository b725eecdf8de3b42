"""The roles in which a worker's processes use each other."""

from __future__ import annotations

from typing import Protocol


class ObservingLauncher(Protocol):
    """A launcher, for the ranks that it has started, and their peers."""

    def wake(self) -> None:
        """Run a tick soon: there may be something to observe."""


class ReportingSidecar(Protocol):
    """A sidecar, for the launcher that writes what it reports."""

    def check_heartbeat(self) -> None:
        """Wake the sender if the heartbeat has urgent changes."""

    def check_faults(self) -> None:
        """Start the delivery of new faults."""
