"""See recording.c."""

from collections.abc import Callable, Iterable, Mapping
from mmap import mmap
from typing import Any

NUMBERS: dict[str, int]
RECORD: dict[str, tuple[int, int]]
STATE: dict[str, int]

class Ring:
    def connect(
        self, map: mmap, header_bytes: int, capacity: int, written: int, places: tuple[int, ...], /
    ) -> None: ...

class Recorder:
    on_host: bool
    start_ns: int
    def connect(
        self,
        ring: Ring,
        reference: type,
        host_mark: type,
        step_of: Callable[[int, int], Any],
        nothing_waits: Callable[..., None],
        graph_task: Callable[[], int],
        loading: int,
        clock: Callable[[], int] | None,
        /,
    ) -> None: ...
    def go_on(self, start_ns: int, clock: Callable[[], int] | None, /) -> None: ...

class Watcher:
    report_failure: Callable[[str, Exception], None]
    inactive: bool
    def connect(
        self,
        recorder: Recorder,
        timed: Iterable[Any],
        queue_callback: Callable[..., None],
        collectives: Mapping[str | int, int],
        /,
    ) -> None: ...

class Hooks:
    def connect(
        self, watcher: Watcher, introduce: Callable[[], Any], channel: Callable[[int, int], Any], /
    ) -> None: ...
    def enter(self, call: Any, /) -> None: ...
    def issued(self, call: Any, /) -> None: ...
