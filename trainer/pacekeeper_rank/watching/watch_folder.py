"""The runtime folder of a watched container: the paths of its files, and how they are written.

Each file is replaced atomically, so that a reader never sees a part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_WATCH_RUNTIME = "/pacekeeper/runtime"
FOLDERS = ("rings", "communicators", "locks", "ranks", "ends", "exits", "stacks", "profiles", "broken")
SHARED_FOLDER_MODE = 0o1777
"""Ranks and sidecar may have different user IDs."""
MAX_START_BYTES = 4096
MAX_REQUEST_CHARACTERS = 200


class WatchFolder:
    """Paths in the runtime folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stack_request, self._profile_request = f"{root}/stack_request", f"{root}/profile_request"

    @classmethod
    def from_environment(cls) -> WatchFolder | None:
        """Return the folder of this container; None: there is none that this process may write."""
        root = Path(os.environ.get("PACEKEEPER_WATCH_RUNTIME") or DEFAULT_WATCH_RUNTIME)
        return cls(root) if os.access(root, os.W_OK | os.X_OK) else None

    def create(self) -> WatchFolder:
        """Create the missing parts of the folder."""
        for name in FOLDERS:
            folder = self.root / name
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(SHARED_FOLDER_MODE)
        return self

    @property
    def processes(self) -> Path:
        return self.root / "processes.json"

    @property
    def sockets(self) -> Path:
        return self.root / "sockets.json"

    def get_file(self, kind: str, slot: object) -> Path:
        """Return the JSON file of a slot in one of FOLDERS."""
        return self.root / kind / f"{slot}.json"

    def ring(self, slot: int) -> Path:
        return self.root / "rings" / str(slot)

    def lock(self, name: object) -> Path:
        return self.root / "locks" / str(name)

    def stack_dump(self, slot: int) -> Path:
        """Return the file for stacks by faulthandler."""
        return self.root / "stacks" / str(slot)

    def read_stack_request(self) -> str:
        """Return the name of the newest request for stacks; "": none."""
        return _read_request(self._stack_request)

    def read_profile_request(self) -> str:
        """Return the newest request for a profile window; "": none."""
        return _read_request(self._profile_request)


def _read_request(path: str) -> str:
    try:
        return read_start(path).decode()[:MAX_REQUEST_CHARACTERS]
    except (OSError, ValueError):
        return ""


def read_start(path: str) -> bytes:
    """Return the start of a file, up to MAX_START_BYTES. Raises OSError.

    Ranks call it several times a second. `open` would cost them twice as much.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return os.read(file, MAX_START_BYTES)
    finally:
        os.close(file)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` atomically. Raises OSError, for example on a full volume."""
    folder, name = os.path.split(path)
    temporary = f"{folder}/.{name}.{os.getpid()}.{threading.get_ident()}"
    try:
        _write_file(temporary, json.dumps(content).encode())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_file(path: str, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        while content:
            content = content[os.write(file, content) :]
    finally:
        os.close(file)
