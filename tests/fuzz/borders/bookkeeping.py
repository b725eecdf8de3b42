"""Plan and bookkeeping: what another operator or a person has written; and what launchers and ranks read of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import Any

from pacekeeper.launcher.rendezvous.plan_file import PlanFile
from pacekeeper.runtime_folder import RequestsFile
from pacekeeper.sidecar.worker_monitor import read_stored_plan
from pacekeeper.sync.plan_reader import parse_plan
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Hop, Paths, Plan, PlannedPath
from pacekeeper_analysis.protocol.requests import (
    EvidencePart,
    EvidenceRequest,
    ProbeRequest,
    ProbeTarget,
    ProfileRequest,
    Requests,
    WorkerRequests,
)
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.state import state_codec
from testing.operators.observations import build_policy, build_stalls, build_training

from ..border import Border, Enter, call_directly
from ..mutations import mutate_document, mutate_text, to_bytes
from .manifests import Refused, parse_admitted

W0 = "j-w0-0"


def build_plan() -> Plan:
    """With something in each field."""
    paths = Paths((PlannedPath(0, 1, "s1"), PlannedPath(1, 0)), (Hop("10.9.0.1", "s1"),))
    return replace(
        build_training().plan,
        shares=(8, 8, 8, 9),
        sequence_cost=(0.1, 1e-6, 1e-9),
        paths=paths,
        secret="ab" * 32,
    )


def build_bookkeeping() -> dict[str, Any]:
    """Of a job in which something has just been decided."""
    observation = build_training()
    decided = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()).desired
    desired = replace(decided, plan=replace(build_plan(), version=decided.plan.version))
    content: dict[str, Any] = json.loads(json.dumps(state_codec.encode_state(desired, "j")))
    return content


def check_round_trip(content: Any) -> object:
    """What is read of it, and what is written again, is the same."""
    desired = state_codec.decode_state(content, "j").desired
    assert (
        state_codec.decode_state(json.loads(json.dumps(state_codec.encode_state(desired, "j"))), "j").desired == desired
    )
    return desired


@contextmanager
def open_plan_file(read: Callable[[File], object]) -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as folder:
        path = File(folder, "plan.json")

        def enter(content: Any) -> object:
            path.write_bytes(to_bytes(content))
            return read(path)

        yield enter


def read_as_launcher(path: File) -> object:
    """The launcher's: what is no plan leaves the one before in force."""
    return PlanFile(path).read()


def read_as_rank(path: File) -> object:
    return parse_plan(path.read_text(errors="replace"))


def read_as_sidecar(path: File) -> object:
    return read_stored_plan(path)


def build_worker_plan() -> dict[str, Any]:
    return build_plan().build_worker_plan(W0).to_json()


def build_worker_requests() -> dict[str, Any]:
    """With something in each field."""
    requests = Requests(
        EvidenceRequest("why", (EvidencePart.WINDOWS, EvidencePart.LINKS)),
        ProbeRequest("p", (W0,), ((ProbeTarget("j-w1-0", "10.0.0.1:5000"),),)),
        ProfileRequest("b", 100),
    )
    return requests.build_worker_requests(W0, is_member=True).to_json()


BORDERS = [
    Border("plans", lambda: [build_plan().to_json()], mutate_document, call_directly(Plan.from_json), cases=400),
    Border(
        "bookkeeping",
        lambda: [build_bookkeeping() | {"metadata": {}}],
        mutate_document,
        call_directly(parse_admitted("trainingjobstates", check_round_trip)),
        (InputError, Refused),
        cases=300,
    ),
    Border(
        "a worker's requests",
        lambda: [build_worker_requests()],
        mutate_document,
        call_directly(WorkerRequests.from_json),
        cases=300,
    ),
    Border(
        "a worker's requests, for launcher and ranks",
        lambda: [build_worker_requests()],
        mutate_text,
        lambda: open_plan_file(lambda path: RequestsFile(path).read()),
        (),
        cases=150,
    ),
    Border(
        "a worker's plan, for its ranks",
        lambda: [build_worker_plan()],
        mutate_text,
        lambda: open_plan_file(read_as_rank),
        cases=300,
    ),
    Border(
        "a worker's plan, for its launcher",
        lambda: [build_worker_plan()],
        mutate_text,
        lambda: open_plan_file(read_as_launcher),
        (),
        cases=300,
    ),
    Border(
        "a worker's plan, kept by its sidecar",
        lambda: [build_worker_plan()],
        mutate_text,
        lambda: open_plan_file(read_as_sidecar),
        (),
        cases=150,
    ),
]
