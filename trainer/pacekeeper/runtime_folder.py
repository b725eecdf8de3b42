"""The runtime folder that launcher, sidecar and ranks of a worker share. Each of its files is replaced atomically."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_analysis.protocol.records import RING_STATE

DEFAULT_RUNTIME_ROOT = "/run/pacekeeper"
FIRST_PROCESS_OWNER = -1
"""Owner of a ring that belongs to the first process that takes it, if a rank is an arbitrary program."""


@dataclass(frozen=True)
class RuntimeFolder:
    """Paths in the runtime folder (docs/architecture/runtime-folder.md)."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RuntimeFolder:
        return cls(Path(environment.get("PACEKEEPER_RUNTIME") or DEFAULT_RUNTIME_ROOT))

    def create(self) -> RuntimeFolder:
        """Create the folder and its missing parts."""
        subfolders = (self.faults, self.links, self.patterns, self.stacks, self.errors)
        for folder in (self.root, *subfolders, self.rings, self.communicators, self.paths, self.snapshots):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat.json"

    @property
    def liveness(self) -> Path:
        """Touched by the launcher while it follows the plan. It is absent before that, and after an orderly end."""
        return self.root / "alive"

    @property
    def operator_contact(self) -> Path:
        """Touched by the sidecar at each response of the operator: its age is the age of the last contact."""
        return self.root / "contact"

    @property
    def partitioned(self) -> Path:
        """Touched by the launcher while its ranks train and it receives nothing from a peer.

        The sidecar then has the operator respond every few seconds, regardless of the long poll's duration.
        """
        return self.root / "partitioned"

    @property
    def refusal(self) -> Path:
        """Written by rank 0: why it does not follow the newest plan, for people.

        Missing or empty: it follows the plan.
        """
        return self.root / "refusal"

    @property
    def checkpoints(self) -> Path:
        """Written by rank 0: outcomes of the job's checkpoints."""
        return self.root / "checkpoints.json"

    @property
    def sockets(self) -> Path:
        """Written by the launcher: which rank holds which socket, by inode. The sidecar can list only the sockets."""
        return self.root / "sockets.json"

    @property
    def probes(self) -> Path:
        """Written by the launcher: measurements of its links, on the operator's request."""
        return self.root / "probes.json"

    @property
    def links(self) -> Path:
        """A file that is created empty here contains, a second later, the sidecar's view of the ranks' connections."""
        return self.root / "links"

    @property
    def faults(self) -> Path:
        return self.root / "faults"

    @property
    def rings(self) -> Path:
        return self.root / "rings"

    @property
    def communicators(self) -> Path:
        return self.root / "communicators"

    @property
    def paths(self) -> Path:
        return self.root / "paths"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks"

    @property
    def errors(self) -> Path:
        """Where torch's @record writes a rank's exception, by local rank, if there are no log files."""
        return self.root / "errors"

    @property
    def patterns(self) -> Path:
        return self.root / "patterns"

    def ring(self, local_rank: int) -> Path:
        return self.rings / str(local_rank)

    def is_rank_process(self, local_rank: int) -> bool:
        """Return whether this process may act as the rank.

        The launcher forked it, and the rank's ring holds its process ID.

        A child of that process inherits its environment, but does not act as the rank. Also True without a ring, or
        with a ring that names no owner.
        """
        try:
            with self.ring(local_rank).open("rb") as file:
                header = file.read(RING_STATE.itemsize)
        except OSError:
            return True
        if len(header) != RING_STATE.itemsize:
            return True
        state = np.frombuffer(header, RING_STATE)[0]
        owner_pid = int(state["pid"] if state["owner"] == FIRST_PROCESS_OWNER else state["owner"])
        return owner_pid in (0, os.getpid())

    def transport(self, local_rank: int) -> Path:
        """Return the file that NCCL's profiler plugin writes in the rank, if it runs."""
        return self.rings / f"{local_rank}.transport"

    def communicators_file(self, local_rank: int) -> Path:
        """Return the file in which the rank lists the ranks of each of its groups."""
        return self.communicators / f"{local_rank}.json"

    def paths_file(self, local_rank: int) -> Path:
        """Return the file in which the launcher lists, for the rank's shim, the ports of the planned paths."""
        return self.paths / str(local_rank)

    def stack(self, local_rank: int) -> Path:
        return self.stacks / str(local_rank)

    def pattern(self, name: str, rank: int) -> Path:
        """Return the file with the rank's `ProfileAnswer` to the profile of this name."""
        return self.patterns / f"{name}.{rank}.json"

    def early_pattern(self, rank: int) -> Path:
        """Return the file with the pattern of the rank's early steps, which outlives the rank."""
        return self.patterns / f"early.{rank}"

    def fault(self, name: str) -> Path:
        return self.faults / f"{name}.json"


class TouchedFile:
    """Measures how long ago another process touched a file, by the time that passes in this process.

    The file's time is that of the node's clock, which may be set at any moment: it only shows that the file was touched
    again. A file that existed before is as old as that clock shows, or infinitely old if it lies in that clock's
    future.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._modified_ns: int | None = None
        self._touched_at: float | None = None
        """None: at an unknown time, infinitely long ago."""

    def age(self, now: float, wall: float) -> float:
        """Return the age in seconds; infinity without such a file. Call it often.

        `now`: seconds of a monotonic clock, such as `read_boot_clock`. `wall`: seconds since the epoch by the node's
        clock.
        """
        try:
            modified_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            self._modified_ns = None
            return math.inf
        if self._modified_ns is None:
            initial_age = wall - modified_ns * 1e-9
            self._touched_at = now - initial_age if initial_age >= 0.0 else None
        elif modified_ns != self._modified_ns:
            self._touched_at = now
        self._modified_ns = modified_ns
        return math.inf if self._touched_at is None else now - self._touched_at


def read_boot_clock() -> float:
    """Return the seconds of CLOCK_BOOTTIME: it continues while the machine is suspended, and cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_plan(path: Path, plan: WorkerPlan) -> None:
    """Replace `path` atomically. Only this user may read it: the plan contains the membership's secret."""
    _replace_file(path, _encode_json(plan.to_json()), mode=0o600)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace `path` atomically."""
    write_text(path, _encode_json(data))


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically: a reader sees the old content or the new one, never a part."""
    _replace_file(path, text, mode=0o666)


def _replace_file(path: Path, text: str, mode: int) -> None:
    """Replace `path` atomically. `mode`: permissions of the file, less the process's umask."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by a killed process, possibly with another mode
    try:
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _encode_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of `path`; None if it was not written yet."""
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    return content
