"""Files in a worker's runtime folder, as launcher, sidecar and people's commands read what ranks have written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacekeeper.launcher.log_files import read_recorded_error
from pacekeeper.observe.ring import RingReader
from pacekeeper.runtime import RuntimeFolder
from pacekeeper.sidecar.client import _parse_answer
from pacekeeper.sidecar.launcher import LauncherMonitor
from pacekeeper.sidecar.sidecar import _read_fault
from pacekeeper_operator.oncall.whatif import _select_newest_round

from ..border import Border, Enter, by
from ..mutations import content, text, written
from .reports import faults, heartbeat
from .traces import rings


@contextmanager
def file(name: str, read: Callable[[Path], object]) -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)

        def enter(data: Any) -> object:
            path.write_bytes(written(data))
            return read(path)

        yield enter


def seen(path: Path) -> object:
    """The sidecar's: what is none leaves the heartbeat before in force."""
    launcher = LauncherMonitor(RuntimeFolder(path.parent), "j-w0-0")
    launcher.check(1.0)
    return launcher.heartbeat


def recorded(path: Path) -> object:
    reader = RingReader(path)
    return int(reader.state()["rank"]), len(reader.records())


def heads(ring: bytes) -> object:
    return _select_newest_round([ring, rings()["1"]])


def answer(data: Any) -> object:
    """The operator's, as its sidecars take it; what becomes of it is a border of plans."""
    return _parse_answer(written(data).decode(errors="replace"))


def record() -> dict[str, Any]:
    """What torch's @record writes."""
    stack = "Traceback (most recent call last):\nValueError: no data\n"
    return {"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}


BORDERS = [
    Border("heartbeats in files", lambda: [heartbeat().to_json()], text, lambda: file("heartbeat.json", seen), ()),
    Border("faults in files", lambda: [faults()[1].to_json()], text, lambda: file("f.json", _read_fault), ()),
    Border("error files of ranks", lambda: [record()], text, lambda: file("e.json", read_recorded_error), ()),
    Border("rings", lambda: [rings()["0"]], content, lambda: file("0", recorded), cases=300),
    Border("rings copied out of workers", lambda: [rings()["0"]], content, by(heads), ()),
    Border("the operator's answers", lambda: [{"error": "why"}], text, by(answer), ()),
]
