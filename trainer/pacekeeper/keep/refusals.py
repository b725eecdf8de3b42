"""When to try again what was refused."""

from __future__ import annotations

_MOST_LEFT_OUT = 64


class Refusals:
    """How many snapshots are left out after one that came to nothing: one, then twice as many each time."""

    def __init__(self) -> None:
        self._left = 0
        self._next = 1

    def refused(self) -> int:
        """Returns how many are left out now."""
        self._left, self._next = self._next, min(2 * self._next, _MOST_LEFT_OUT)
        return self._left

    def end(self) -> None:
        """There is memory again, or somebody else counts."""
        self._left, self._next = 0, 1

    def leaves_out(self) -> bool:
        """Whether this one is left out, of those that are taken one after another."""
        if self._left == 0:
            return False
        self._left -= 1
        return True
