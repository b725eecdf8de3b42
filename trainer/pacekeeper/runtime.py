"""The runtime folder that launcher, sidecar and ranks of one worker share, and its files, each written in one step."""

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

from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.records import RING_STATE

DEFAULT_RUNTIME_ROOT = "/run/pacekeeper"
FIRST_PROCESS_OWNER = -1
"""Owner of a ring that belongs to the first process that takes it: of a rank that is any program."""


@dataclass(frozen=True)
class RuntimeFolder:
    """Where things lie in the runtime folder (docs/architecture/runtime-folder.md)."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RuntimeFolder:
        return cls(Path(environment.get("PACEKEEPER_RUNTIME") or DEFAULT_RUNTIME_ROOT))

    def create(self) -> RuntimeFolder:
        """Makes the folder and its parts where they are missing."""
        told = (self.faults, self.links, self.patterns, self.stacks, self.errors)
        for folder in (self.root, *told, self.rings, self.communicators, self.paths, self.snapshots):
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
        """Touched by the launcher while it follows the plan; it is not there before that, and after an orderly end."""
        return self.root / "alive"

    @property
    def operator_contact(self) -> Path:
        """Touched by the sidecar at each answer of the operator: its age is the age of the last contact."""
        return self.root / "contact"

    @property
    def partitioned(self) -> Path:
        """Touched by the launcher while its ranks train and it hears no peer: its sidecar then has the operator answer
        every few seconds, however long a poll is held."""
        return self.root / "alone"

    @property
    def refusal(self) -> Path:
        """Written by rank 0: why it does not follow the newest plan, in words for people; missing or empty: it does."""
        return self.root / "refused"

    @property
    def checkpoints(self) -> Path:
        """Written by rank 0: what has come of the job's checkpoints."""
        return self.root / "checkpoints.json"

    @property
    def sockets(self) -> Path:
        """Written by the launcher: which rank holds which socket, by inode. Its sidecar sees the sockets alone."""
        return self.root / "sockets.json"

    @property
    def probes(self) -> Path:
        """Written by the launcher: what it measured of its links, on the operator's request."""
        return self.root / "probes.json"

    @property
    def links(self) -> Path:
        """Who makes an empty file here finds in it a second later what the sidecar knows of the ranks' connections."""
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
        """Where torch's @record writes a rank's exception, by local rank, unless there are log files."""
        return self.root / "errors"

    @property
    def patterns(self) -> Path:
        return self.root / "patterns"

    def ring(self, local_rank: int) -> Path:
        return self.rings / str(local_rank)

    def is_rank_process(self, local_rank: int) -> bool:
        """Whether this process may act as the rank: it is the one that the launcher forked, whose process id is in the
        rank's ring. What that process starts inherits its environment, but not its place.

        True as well where there is no ring, or one that names no owner.
        """
        try:
            with self.ring(local_rank).open("rb") as file:
                header = file.read(RING_STATE.itemsize)
        except OSError:
            return True
        if len(header) != RING_STATE.itemsize:
            return True
        state = np.frombuffer(header, RING_STATE)[0]
        taken_by = int(state["pid"] if state["owner"] == FIRST_PROCESS_OWNER else state["owner"])
        return taken_by in (0, os.getpid())

    def transport(self, local_rank: int) -> Path:
        """Written by NCCL's profiler plugin in the rank, where it runs."""
        return self.rings / f"{local_rank}.transport"

    def communicators_file(self, local_rank: int) -> Path:
        """Written by the rank: which ranks are in its groups."""
        return self.communicators / f"{local_rank}.json"

    def paths_file(self, local_rank: int) -> Path:
        """Written by the launcher for the shim in the rank: which ports lead by the planned paths."""
        return self.paths / str(local_rank)

    def stack(self, local_rank: int) -> Path:
        return self.stacks / str(local_rank)

    def pattern(self, name: str, rank: int) -> Path:
        """Of the behaviour window of this name: what the rank sends of it (`behaviour.pattern.Answer`)."""
        return self.patterns / f"{name}.{rank}.json"

    def early_pattern(self, rank: int) -> Path:
        """Of the rank's early steps; it outlives the rank."""
        return self.patterns / f"early.{rank}"

    def fault(self, name: str) -> Path:
        return self.faults / f"{name}.json"


class TouchedFile:
    """How long ago another process has touched a file, by the time that has passed here.

    The file has the time of the node's clock, and that may be set at any moment: it only shows that it was touched
    again. What lay there before is as old as that clock says, or infinitely old where it lies in that clock's future.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._modified_ns: int | None = None
        self._touched_at = -math.inf

    def age(self, now: float, wall: float) -> float:
        """Seconds; infinity: there is no such file. Call it often.

        now: seconds of `elapsed`. wall: seconds since the epoch, by the node's clock.
        """
        try:
            sign = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            self._modified_ns = None
            return math.inf
        if self._modified_ns is None:
            before = wall - sign * 1e-9
            self._touched_at = now - before if before >= 0.0 else -math.inf
        elif sign != self._modified_ns:
            self._touched_at = now
        self._modified_ns = sign
        return now - self._touched_at


def read_boot_clock() -> float:
    """Seconds of CLOCK_BOOTTIME: it goes on while the machine is suspended, and cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_plan(path: Path, plan: WorkerPlan) -> None:
    """Replaces `path` in one step. Only this user may read it: the plan has the membership's secret."""
    _replace_file(path, _encode_json(plan.to_json()), mode=0o600)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces `path` in one step."""
    write_text(path, _encode_json(data))


def write_text(path: Path, text: str) -> None:
    """Replaces `path` in one step: a reader sees the old content or the new one, never half of it."""
    _replace_file(path, text, mode=0o666)


def _replace_file(path: Path, text: str, mode: int) -> None:
    """`mode`: of the file, less what the process' mask takes away."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process that was killed, with another mode perhaps
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
    """The content of `path`; None where nothing has been written yet."""
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    return content
