"""How many files this process may hold open, and who gets how many: each connection takes one.

Without a share of its own, a probe of a worker would fail for want of a file, and look like a worker that is gone.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

RESERVED_FILES = 256
"""For what is neither: the API server's watches and calls, Prometheus, certificates, the log."""
PROBE_FILES_DIVISOR = 8
"""One in so many of the rest is for the operator's own probes,"""
MAX_CONCURRENT_REACH_PROBES = 1_024
"""but no more: so many answers at once still come in well within a probe's time-out."""


@dataclass(frozen=True)
class FileLimits:
    """The shares of a limit."""

    limit: int

    @property
    def probes(self) -> int:
        """Of workers and nodes, that may be under way at a time."""
        return min(MAX_CONCURRENT_REACH_PROBES, max(1, (self.limit - RESERVED_FILES) // PROBE_FILES_DIVISOR))

    @property
    def connections(self) -> int:
        """Of sidecars."""
        return max(1, self.limit - RESERVED_FILES - self.probes)


def read_file_limits() -> FileLimits:
    """By the limit as it is."""
    return FileLimits(_read_soft_and_hard_limits()[0])


def raise_file_limit() -> FileLimits:
    """To what this process is allowed at most: container runtimes start it with less."""
    soft, hard = _read_soft_and_hard_limits()
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return read_file_limits()


def _read_soft_and_hard_limits() -> tuple[int, int]:
    """`RLIM_INFINITY` is a negative number to Python; Linux gives no process more than 2^30 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(2**30 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]
