"""Files in a worker's runtime folder, as launcher, sidecar and people's commands read what ranks have written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacekeeper.launcher.ranks.log_files import read_recorded_error
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.launcher_monitor import LauncherMonitor
from pacekeeper.sidecar.operator_client import _parse_answer
from pacekeeper.sidecar.worker_monitor import read_fault_file
from pacekeeper_operator.cli.whatif import _select_newest_round

from ..border import Border, Enter, call_directly
from ..mutations import mutate_bytes, mutate_text, to_bytes
from .reports import build_faults, build_heartbeat
from .traces import build_rings


@contextmanager
def open_file(name: str, read: Callable[[Path], object]) -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)

        def enter(data: Any) -> object:
            path.write_bytes(to_bytes(data))
            return read(path)

        yield enter


def read_heartbeat(path: Path) -> object:
    """The sidecar's: what is none leaves the heartbeat before in force."""
    launcher = LauncherMonitor(RuntimeFolder(path.parent), "j-w0-0")
    launcher.check(1.0)
    return launcher.heartbeat


def read_ring(path: Path) -> object:
    reader = RingReader(path)
    return int(reader.state()["rank"]), len(reader.records())


def select_newest_round(ring: bytes) -> object:
    return _select_newest_round([ring, build_rings()["1"]])


def parse_answer(data: Any) -> object:
    """The operator's, as its sidecars take it; what becomes of it is a border of plans."""
    return _parse_answer(to_bytes(data).decode(errors="replace"))


def build_error_record() -> dict[str, Any]:
    """What torch's @record writes."""
    stack = "Traceback (most recent call last):\nValueError: no data\n"
    return {"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}


BORDERS = [
    Border(
        "heartbeats in files",
        lambda: [build_heartbeat().to_json()],
        mutate_text,
        lambda: open_file("heartbeat.json", read_heartbeat),
        (),
    ),
    Border(
        "faults in files",
        lambda: [build_faults()[1].to_json()],
        mutate_text,
        lambda: open_file("f.json", read_fault_file),
        (),
    ),
    Border(
        "error files of ranks",
        lambda: [build_error_record()],
        mutate_text,
        lambda: open_file("e.json", read_recorded_error),
        (),
    ),
    Border("rings", lambda: [build_rings()["0"]], mutate_bytes, lambda: open_file("0", read_ring), cases=300),
    Border(
        "rings copied out of workers",
        lambda: [build_rings()["0"]],
        mutate_bytes,
        call_directly(select_newest_round),
        (),
    ),
    Border("the operator's answers", lambda: [{"error": "why"}], mutate_text, call_directly(parse_answer), ()),
]
