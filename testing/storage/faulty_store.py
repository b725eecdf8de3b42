"""fsspec's file system in memory as an object store, with faults between its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from pacekeeper.checkpointing.storage.object_store import ObjectStore

FaultHook = Callable[[str, str], None]
"""Called with the request (put, get, list, size, delete, open) and its path; raises what the request is to raise."""


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Objects of its own; `before` and `after` are called around each request."""

    cachable = False  # codespell:ignore

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.before: FaultHook = lambda *_: None
        self.after: FaultHook = lambda *_: None
        self.hidden: set[str] = set()
        """Objects and folders that listings lack."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._request("put", path, lambda: MemoryFileSystem.pipe_file(self, path, value, mode=mode))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        return self._request("get", path, lambda: MemoryFileSystem.cat_file(self, path, start=start, end=end))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        entries = self._request("list", path, lambda: MemoryFileSystem.ls(self, path, detail=True))
        shown = [entry for entry in entries if not any(entry["name"].endswith(name) for name in self.hidden)]
        return shown if detail else [entry["name"] for entry in shown]

    def info(self, path: str, **_: Any) -> Any:
        return self._request("size", path, lambda: MemoryFileSystem.info(self, path))

    def rm_file(self, path: str) -> None:
        self._request("delete", path, lambda: MemoryFileSystem._rm(self, path))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" not in mode:
            self.before("open", path)
        return MemoryFileSystem.open(self, path, mode, **options)

    def _request(self, kind: str, path: str, call: Callable[[], Any]) -> Any:
        self.before(kind, path)
        answer = call()
        self.after(kind, path)
        return answer


def create_store() -> tuple[FaultyFileSystem, ObjectStore]:
    """Return an empty store that does not pause between attempts, and its file system."""
    filesystem = FaultyFileSystem()
    return filesystem, ObjectStore(filesystem, "/bucket/folder", "s3://bucket/folder", sleep=lambda _: None)


def read_objects(filesystem: FaultyFileSystem) -> dict[str, bytes]:
    """Return all objects."""
    return {path: bytes(file.getvalue()) for path, file in filesystem.store.items()}
