"""The answers of an operator that does not lead, and its liveness, over real HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint import standby
from pacekeeper_operator.endpoint.server import create_application
from pacekeeper_operator.endpoint.sidecars import Caller, SidecarService
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.kube.leader_election import LeaderElector
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods.manifests import Installation
from pacekeeper_operator.runtime import health
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.shared.watched_stores import FIRST_WATCH_EVENT_SECONDS
from pacekeeper_operator.settings import Settings
from testing.network.ports import find_free_port
from testing.operators.observations import build_training
from testing.operators.virtual_time import Timeline, VirtualRuntime

OBSERVATION = build_training(replicas=2)
LEADER = "192.0.2.1:8443"


@dataclass
class OtherLeader:
    """The leadership while another operator leads."""

    leader_address: str = LEADER
    leads: bool = False

    is_candidate: bool = False
    turned: asyncio.Event = field(default_factory=asyncio.Event)

    def can_serve(self) -> bool:
        return self.leads

    async def wait_for_change(self) -> None:
        await self.turned.wait()


class UnreachableCluster:
    """An API server that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is called by an operator that does not lead")


@pytest.fixture
def sidecar_service() -> SidecarService:
    return SidecarService(cast(Cluster, UnreachableCluster()), JobRegistry(0.0), OperatorRuntime())


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/faults", "/v1/evidence/why", "/v1/patterns/window/0", "/else"])
@pytest.mark.parametrize("leader", [LEADER, ""])
async def test_a_standby_redirects_callers_without_reading_them(
    sidecar_service: SidecarService, path: str, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "STANDBY_HOLD_SECONDS", 0.01)
    app = create_application(sidecar_service, OperatorRuntime(), leadership=OtherLeader(leader))
    async with TestClient(TestServer(app)) as client:
        answer = await client.post(path, data=b"{" * 100)
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert answer.headers["Connection"] == "close", "the Service chooses again"
        assert (await answer.json())["leader"] == leader


async def test_an_operator_serves_once_it_leads(sidecar_service: SidecarService) -> None:
    leadership = OtherLeader()
    async with TestClient(
        TestServer(create_application(sidecar_service, OperatorRuntime(), leadership=leadership))
    ) as client:
        leadership.leads = True
        assert (await client.post("/v1/plan")).status == 401


async def test_a_candidate_holds_calls_until_it_leads(sidecar_service: SidecarService) -> None:
    leadership = OtherLeader("", is_candidate=True)
    async with TestClient(
        TestServer(create_application(sidecar_service, OperatorRuntime(), leadership=leadership))
    ) as client:
        call = asyncio.create_task(client.post("/v1/plan"))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
        leadership.leads = True
        leadership.turned.set()
        assert (await call).status == 401


async def test_a_call_that_a_candidate_held_keeps_its_connection(
    sidecar_service: SidecarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller tries again, and its next connection might reach this operator again."""
    monkeypatch.setattr(standby, "STANDBY_HOLD_SECONDS", 0.01)
    async with TestClient(
        TestServer(
            create_application(sidecar_service, OperatorRuntime(), leadership=OtherLeader("", is_candidate=True))
        )
    ) as client:
        answer = await client.post("/v1/plan")
        assert (answer.status, answer.headers.get("Connection")) == (503, None)


async def test_an_operator_that_is_cut_off_holds_no_calls(
    sidecar_service: SidecarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "STANDBY_HOLD_SECONDS", 120.0)
    leadership = OtherLeader("", is_candidate=False)
    async with TestClient(
        TestServer(create_application(sidecar_service, OperatorRuntime(), leadership=leadership))
    ) as client:
        assert (await asyncio.wait_for(client.post("/v1/plan"), 60)).status == 503


async def test_held_polls_end_with_the_leadership() -> None:
    registry = JobRegistry(0.0)
    job = registry.get_or_create(OBSERVATION.job)
    job.publish(OBSERVATION.desired, "1")
    sidecar_service = SidecarService(cast(Cluster, UnreachableCluster()), registry, OperatorRuntime())
    heartbeat = Heartbeat(worker="j-w0-0", state=LauncherState.RUNNING)
    caller = Caller("ns", "j", "j-w0-0")
    poll = asyncio.create_task(sidecar_service.poll(caller, heartbeat, OBSERVATION.plan.version, 30.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sidecar_service._polls
    sidecar_service.end_polls()
    assert await asyncio.wait_for(poll, 60) is None


class TestLiveness:
    """The kubelet probes from the start of the process."""

    @pytest.fixture
    def timeline(self) -> Timeline:
        return Timeline()

    @pytest.fixture
    def runtime(self, timeline: Timeline) -> VirtualRuntime:
        return VirtualRuntime(timeline)

    @pytest.fixture
    def elector(self, runtime: VirtualRuntime) -> LeaderElector:
        return LeaderElector(cast(Cluster, UnreachableCluster()), Settings(), runtime)

    @pytest.fixture
    def operator(self, runtime: VirtualRuntime) -> Operator:
        cluster, installation = cast(Cluster, UnreachableCluster()), Installation("", "", "", "")
        return Operator(Settings(), cluster, JobRegistry(0.0), installation, PrometheusClient("", "", ""), runtime)

    async def test_a_standby_without_watch_events_is_alive(
        self, operator: Operator, elector: LeaderElector, runtime: VirtualRuntime, timeline: Timeline
    ) -> None:
        for _ in range(5):
            await timeline.run(FIRST_WATCH_EVENT_SECONDS / 2)
            elector.last_attempt_at = runtime.monotonic()
        assert health.find_liveness_failure(operator, elector) == ""

    async def test_an_operator_that_does_not_check_its_lease_is_stuck(
        self, operator: Operator, elector: LeaderElector, timeline: Timeline
    ) -> None:
        await timeline.run(health.LIVENESS_TIMEOUT_SECONDS - 1)
        assert health.find_liveness_failure(operator, elector) == ""
        await timeline.run(2)
        assert "its Lease" in health.find_liveness_failure(operator, elector)

    async def test_a_leader_needs_watch_events_and_periodic_tasks(
        self, operator: Operator, elector: LeaderElector, runtime: VirtualRuntime, timeline: Timeline
    ) -> None:
        elector.elected.set()
        operator.start_leading()
        assert health.find_liveness_failure(operator, elector) == ""
        await timeline.run(FIRST_WATCH_EVENT_SECONDS + health.LIVENESS_TIMEOUT_SECONDS)
        elector.last_attempt_at = runtime.monotonic()
        assert "no watch" in health.find_liveness_failure(operator, elector)
        operator.stores.nodes.has_watch_events = True
        operator.last_tick_at = runtime.monotonic() - health.LIVENESS_TIMEOUT_SECONDS - 1
        assert "periodic tasks have not run" in health.find_liveness_failure(operator, elector)

    @pytest.mark.parametrize(("failure", "status"), [("", 200), ("it is stuck", 500)])
    async def test_liveness_is_served_over_http(self, failure: str, status: int) -> None:
        async with (
            health.serve_liveness(lambda: failure, port := find_free_port()),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/healthz") as answer,
        ):
            assert answer.status == status
            assert failure in await answer.text()
