"""The runtime folder that launcher, sidecar and ranks of a worker share. Each of its files is replaced atomically."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.requests import WorkerRequests
from pacekeeper_rank.files import replace_file

DEFAULT_RUNTIME_ROOT = "/run/pacekeeper"
UNTRUSTED_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How to open a file that a process of others has written: it may be a link, or a pipe that blocks."""


@dataclass(frozen=True)
class RuntimeFolder:
    """Paths in the runtime folder (docs/architecture/runtime-folder.md)."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RuntimeFolder:
        return cls(Path(environment.get("PACEKEEPER_RUNTIME") or DEFAULT_RUNTIME_ROOT))

    def create(self, *, shared: bool = False) -> RuntimeFolder:
        """Create the folder and its missing parts.

        `shared`: whether all users may write. In a pod, launcher and sidecar may run as different users, and nothing
        else mounts the folder.
        """
        subfolders = (self.faults, self.links, self.patterns, self.stacks, self.errors)
        for folder in (self.root, *subfolders, self.rings, self.communicators, self.paths, self.snapshots):
            folder.mkdir(parents=True, exist_ok=True)
            if shared:
                with contextlib.suppress(PermissionError):  # the launcher has created it before
                    folder.chmod(0o777)
        return self

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def requests(self) -> Path:
        """Written by the sidecar: the operator's open requests to this worker, next to the plan."""
        return self.root / "requests.json"

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
    def saves(self) -> Path:
        """A folder for each name of `PeerStorageWriter`, with saves of torch.distributed.checkpoint."""
        return self.root / "saves"

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

    @property
    def terminating(self) -> Path:
        """File that exists once the container is to end: a shell passes no signal on (`pods.manifests`)."""
        return self.root / "terminating"

    def ring(self, local_rank: int) -> Path:
        return self.rings / str(local_rank)

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


class RequestsFile:
    """Reads the open requests again when their file has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._requests = WorkerRequests()

    def read(self) -> WorkerRequests:
        """Return the open requests. A missing or malformed file, or one of another version, holds none."""
        try:
            status = self._path.stat()
            identity = (status.st_ino, status.st_mtime_ns)
            if identity != self._identity:
                self._identity, self._requests = identity, WorkerRequests()
                self._requests = WorkerRequests.from_json(parse_json(self._path.read_bytes()))
        except (OSError, InputError):
            pass
        return self._requests


def read_boot_clock() -> float:
    """Return the seconds of CLOCK_BOOTTIME: it continues while the machine is suspended, and cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace `path` atomically."""
    write_text(path, _encode_json(data))


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically: a reader sees the old content or the new one, never a part."""
    replace_file(path, text)


def _encode_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Return the first `max_bytes` + 1 bytes of a regular file; None: there is none that can be read."""
    try:
        file = os.open(path, UNTRUSTED_OPEN_FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        return os.read(file, max_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(file)


def read_zero_padded(file: int, nbytes: int, offset: int) -> NDArray[np.uint8]:
    """Return `nbytes` bytes from `offset` of an open file; what the file does not have is 0."""
    content = np.zeros(nbytes, np.uint8)
    os.preadv(file, [content.data], offset)
    return content


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of `path`; None if it was not written yet."""
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    return content
