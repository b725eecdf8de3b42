"""Files in the runtime folder of a watched container, as its sidecar and `pacekeeper watch` read them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.sidecar.kubeflow_progress import read_progress
from pacekeeper_analysis.protocol.watched_container import (
    AgentExits,
    ProcessSamples,
    ProfileRecording,
    RankDescription,
    RankFailure,
    RankProcess,
    StackAnswer,
    StackFrame,
    decode_file,
    decode_sockets,
)
from pacekeeper_analysis.protocol.watched_report import ReportedProgress

from ..border import Border, call_directly
from ..mutations import mutate_text, to_bytes
from .runtime import open_file

FILES = (
    RankDescription(
        1, 2, 1, 100, 0, 1_800_000_000.0, "Native", "3.12.1", "2.9.0", "localhost:29500", "none", 60, "Adam"
    ),
    AgentExits(1_800_000_000.0, {"1": RankFailure(100, -9, 1_800_000_000.0, "Signal 9")}),
    ProcessSamples(1_800_000_000.0, 99, 1, {"1": RankProcess(100, "R", 12)}),
    ProfileRecording(
        *("profile-1", 100, 1_000, 9_000, ("./train.py:main", "./train.py:load"), ((0, 1), (0,))),
        *((2_000, 3_000), (0, 500), (0, 1), (2_500,), (2_600,)),
    ),
    StackAnswer("ask-1", (StackFrame("/train.py", 12, "main"), StackFrame("<string>", None, "run"))),
)


def build_border(content: Any) -> Border:
    def decode(data: Any) -> object:
        return decode_file(type(content), to_bytes(data), "file.json")

    name = f"{type(content).__name__} of watched containers"
    return Border(name, lambda: [asdict(content)], mutate_text, call_directly(decode))


BORDERS = [
    *map(build_border, FILES),
    Border(
        "reports of progress",
        lambda: [{"trainerStatus": {"progressPercentage": 7, "metrics": [{"name": "total_steps", "value": "60"}]}}],
        mutate_text,
        call_directly(lambda data: read_progress(to_bytes(data), ReportedProgress())),
    ),
    Border(
        "sockets of watched containers",
        lambda: [{"12345": 0, "12346": 1}],
        mutate_text,
        call_directly(lambda data: decode_sockets(to_bytes(data), "sockets.json")),
    ),
    Border(
        "communicators in files",
        lambda: [{"communicators": [{"identity": 7, "members": "0-3", "name": "world"}]}],
        mutate_text,
        lambda: open_file("0.json", read_communicators),
        (),
    ),
]
