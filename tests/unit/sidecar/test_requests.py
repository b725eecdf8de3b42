"""What a sidecar makes of the requests in the operator's answers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.runtime_folder import RequestsFile, RuntimeFolder
from pacekeeper.sidecar.connection_sampler import ConnectionSampler
from pacekeeper.sidecar.operator_client import OperatorClient
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import Sidecar
from pacekeeper.sidecar.worker_monitor import WorkerMonitor
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Heartbeat
from pacekeeper_analysis.protocol.requests import EvidenceRequest, WorkerRequests

FIRST = WorkerRequests("why-1", EvidenceRequest("why-1"))
SECOND = WorkerRequests("why-2", EvidenceRequest("why-2"))
PLAN = WorkerPlan(version=3, role=WorkerRole.MEMBER)


class ScriptedOperator:
    """Gives these answers, in turn, and records what each poll had received."""

    def __init__(self, *answers: PollAnswer | None) -> None:
        self._answers = list(answers)
        self.received: list[str] = []

    async def poll(
        self, _heartbeat: Heartbeat, _after: int | None, received: str, _wait: float, _hold: float = 0.0
    ) -> PollAnswer | None:
        self.received.append(received)
        return self._answers.pop(0)


def start_sidecar(folder: Path, operator: ScriptedOperator) -> Sidecar:
    runtime = RuntimeFolder(folder).create()
    settings = SidecarSettings(runtime, "j", "j-w0-0", "https://operator", "", folder / "token")
    client = cast(OperatorClient, operator)
    return Sidecar(settings, client, WorkerMonitor(settings, RankRings(runtime, 32), ConnectionSampler(runtime)))


def read_requests(folder: Path) -> WorkerRequests:
    return RequestsFile(RuntimeFolder(folder).requests).read()


async def test_each_poll_returns_the_identity_of_the_last_requests(tmp_path: Path) -> None:
    operator = ScriptedOperator(PollAnswer(PLAN, FIRST), None, PollAnswer(requests=SECOND), PollAnswer(PLAN), None)
    sidecar = start_sidecar(tmp_path, operator)
    for _ in range(5):
        await sidecar._poll(wait=0)
    assert operator.received == ["", "why-1", "why-1", "why-2", "why-2"]
    assert read_requests(tmp_path) == SECOND


async def test_a_restarted_sidecar_continues_with_the_stored_requests(tmp_path: Path) -> None:
    await start_sidecar(tmp_path, ScriptedOperator(PollAnswer(PLAN, FIRST)))._poll(wait=0)
    operator = ScriptedOperator(PollAnswer(requests=WorkerRequests()))
    restarted = start_sidecar(tmp_path, operator)
    await restarted._poll(wait=0)
    assert operator.received == ["why-1"]
    assert read_requests(tmp_path) == WorkerRequests(), "withdrawn, by a new leader for example"


@pytest.mark.parametrize(("known", "kept"), [("", SECOND), ("why-2", FIRST)], ids=["late", "in order"])
def test_an_answer_to_an_earlier_poll_does_not_replace_newer_requests(
    tmp_path: Path, known: str, kept: WorkerRequests
) -> None:
    """Two polls run at the same time. The answer to the one that began first may arrive last."""
    sidecar = start_sidecar(tmp_path, ScriptedOperator())
    sidecar._receive(PollAnswer(PLAN, SECOND), known_requests="")
    sidecar._receive(PollAnswer(requests=FIRST), known_requests=known)
    assert read_requests(tmp_path) == kept


async def test_an_operator_without_requests_is_followed_for_its_plan(tmp_path: Path) -> None:
    await start_sidecar(tmp_path, ScriptedOperator(PollAnswer(PLAN)))._poll(wait=0)
    assert RuntimeFolder(tmp_path).plan.exists()
    assert read_requests(tmp_path) == WorkerRequests()
