"""When to try again what was refused."""

from __future__ import annotations

_MAX_SKIPPED_SNAPSHOTS = 64


class SnapshotBackoff:
    """How many snapshots are left out after one that came to nothing: one, then twice as many each time."""

    def __init__(self) -> None:
        self._remaining = 0
        self._next = 1

    def record_failure(self) -> int:
        """Returns how many are left out now."""
        self._remaining, self._next = self._next, min(2 * self._next, _MAX_SKIPPED_SNAPSHOTS)
        return self._remaining

    def reset(self) -> None:
        """There is memory again, or somebody else counts."""
        self._remaining, self._next = 0, 1

    def should_skip(self) -> bool:
        """Whether this one is left out, of those that are taken one after another."""
        if self._remaining == 0:
            return False
        self._remaining -= 1
        return True
