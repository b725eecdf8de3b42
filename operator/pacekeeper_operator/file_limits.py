"""How many files this process may hold open, and their shares: each connection takes one.

Probes of workers have their own share. Otherwise a probe that finds no free file descriptor would look like a lost
worker.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

RESERVED_FILES = 256
"""Files for everything else: watches and calls of the API server, Prometheus, certificates, the log."""
PROBE_FILES_DIVISOR = 8
"""One in this many of the remaining files is for the operator's own probes, up to `MAX_CONCURRENT_REACH_PROBES`."""
MAX_CONCURRENT_REACH_PROBES = 1_024
"""Maximum number of concurrent probes. This many answers still arrive well within a probe's timeout."""


@dataclass(frozen=True)
class FileLimits:
    """The shares of a file limit."""

    limit: int

    @property
    def probes(self) -> int:
        """Return how many probes of workers and nodes may run at the same time."""
        return min(MAX_CONCURRENT_REACH_PROBES, max(1, (self.limit - RESERVED_FILES) // PROBE_FILES_DIVISOR))

    @property
    def connections(self) -> int:
        """Return how many connections of sidecars may be open."""
        return max(1, self.limit - RESERVED_FILES - self.probes)


def read_file_limits() -> FileLimits:
    """Return the shares of the current limit."""
    return FileLimits(_read_soft_and_hard_limits()[0])


def raise_file_limit() -> FileLimits:
    """Raise the soft limit to the hard limit: container runtimes start the process with less."""
    soft, hard = _read_soft_and_hard_limits()
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return read_file_limits()


def _read_soft_and_hard_limits() -> tuple[int, int]:
    """Return the soft and the hard limit.

    Python reports `RLIM_INFINITY` as a negative number. Linux gives no process more than 2^30 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(2**30 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]
