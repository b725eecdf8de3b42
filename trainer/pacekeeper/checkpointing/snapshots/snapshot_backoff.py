"""Backoff after refused snapshots."""

from __future__ import annotations

_MAX_SKIPPED_SNAPSHOTS = 64


class SnapshotBackoff:
    """Number of snapshots to skip after a failed one: one, then twice as many each time."""

    def __init__(self) -> None:
        self._remaining = 0
        self._next = 1

    def record_failure(self) -> int:
        """Return how many snapshots are skipped now."""
        self._remaining, self._next = self._next, min(2 * self._next, _MAX_SKIPPED_SNAPSHOTS)
        return self._remaining

    def reset(self) -> None:
        """Reset the backoff after a success."""
        self._remaining, self._next = 0, 1

    def should_skip(self) -> bool:
        """Return whether this snapshot is skipped. Call it once for each snapshot."""
        if self._remaining == 0:
            return False
        self._remaining -= 1
        return True
