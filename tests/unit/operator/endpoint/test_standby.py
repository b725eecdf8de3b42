"""What an operator answers that does not lead, and that it lives; over real HTTP."""

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

WORLD = build_training(replicas=2)
LEADER = "192.0.2.1:8443"


@dataclass
class Leadership:
    """As somebody else's."""

    leader_address: str = LEADER
    leads: bool = False

    is_candidate: bool = False
    turned: asyncio.Event = field(default_factory=asyncio.Event)

    def can_serve(self) -> bool:
        return self.leads

    async def wait_for_change(self) -> None:
        await self.turned.wait()


class Nobody:
    """An API server that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is called by an operator that does not lead")


@pytest.fixture
def sidecars() -> SidecarService:
    return SidecarService(cast(Cluster, Nobody()), JobRegistry(0.0), OperatorRuntime())


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/faults", "/v1/evidence/why", "/v1/patterns/window/0", "/else"])
@pytest.mark.parametrize("leader", [LEADER, ""])
async def test_it_sends_on_whoever_calls_unseen(
    sidecars: SidecarService, path: str, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "STANDBY_HOLD_SECONDS", 0.01)
    app = create_application(sidecars, OperatorRuntime(), leadership=Leadership(leader))
    async with TestClient(TestServer(app)) as client:
        answer = await client.post(path, data=b"{" * 100)
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert answer.headers["Connection"] == "close", "the Service chooses anew"
        assert (await answer.json())["leader"] == leader


async def test_it_serves_once_it_leads(sidecars: SidecarService) -> None:
    leadership = Leadership()
    async with TestClient(TestServer(create_application(sidecars, OperatorRuntime(), leadership=leadership))) as client:
        leadership.leads = True
        assert (await client.post("/v1/plan")).status == 401


async def test_who_calls_while_nobody_leads_is_held_until_it_leads(sidecars: SidecarService) -> None:
    leadership = Leadership("", is_candidate=True)
    async with TestClient(TestServer(create_application(sidecars, OperatorRuntime(), leadership=leadership))) as client:
        call = asyncio.create_task(client.post("/v1/plan"))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
        leadership.leads = True
        leadership.turned.set()
        assert (await call).status == 401


async def test_who_has_been_held_for_nothing_may_stay_connected(
    sidecars: SidecarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again, and the next handshake would be this operator's, too."""
    monkeypatch.setattr(standby, "STANDBY_HOLD_SECONDS", 0.01)
    async with TestClient(
        TestServer(create_application(sidecars, OperatorRuntime(), leadership=Leadership("", is_candidate=True)))
    ) as client:
        answer = await client.post("/v1/plan")
        assert (answer.status, answer.headers.get("Connection")) == (503, None)


async def test_one_that_is_cut_off_holds_nobody(sidecars: SidecarService) -> None:
    leadership = Leadership("", is_candidate=False)
    async with TestClient(TestServer(create_application(sidecars, OperatorRuntime(), leadership=leadership))) as client:
        assert (await asyncio.wait_for(client.post("/v1/plan"), standby.STANDBY_HOLD_SECONDS / 2)).status == 503


async def test_polls_that_are_held_end_when_it_leads_no_more() -> None:
    memory = JobRegistry(0.0)
    job = memory.get_or_create(WORLD.job)
    job.publish(WORLD.desired, "1")
    sidecars = SidecarService(cast(Cluster, Nobody()), memory, OperatorRuntime())
    beat = Heartbeat(worker="j-w0-0", state=LauncherState.RUNNING)
    caller = Caller("ns", "j", "j-w0-0")
    poll = asyncio.create_task(sidecars.poll(caller, beat, WORLD.plan.version, 30.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sidecars._polls
    sidecars.end_polls()
    assert await asyncio.wait_for(poll, 60) is None


class TestLiveness:
    """The kubelet asks from the process's start."""

    @pytest.fixture
    def timeline(self) -> Timeline:
        return Timeline()

    @pytest.fixture
    def runtime(self, timeline: Timeline) -> VirtualRuntime:
        return VirtualRuntime(timeline)

    @pytest.fixture
    def lease(self, runtime: VirtualRuntime) -> LeaderElector:
        return LeaderElector(cast(Cluster, Nobody()), Settings(), runtime)

    @pytest.fixture
    def operator(self, runtime: VirtualRuntime) -> Operator:
        nobody, installation = cast(Cluster, Nobody()), Installation("", "", "", "")
        return Operator(Settings(), nobody, JobRegistry(0.0), installation, PrometheusClient("", "", ""), runtime)

    async def test_one_that_stands_by_hears_no_watch_and_lives(
        self, operator: Operator, lease: LeaderElector, runtime: VirtualRuntime, timeline: Timeline
    ) -> None:
        for _ in range(5):
            await timeline.run(FIRST_WATCH_EVENT_SECONDS / 2)
            lease.last_attempt_at = runtime.monotonic()
        assert health.find_liveness_failure(operator, lease) == ""

    async def test_one_that_does_not_look_at_its_lease_is_stuck(
        self, operator: Operator, lease: LeaderElector, timeline: Timeline
    ) -> None:
        await timeline.run(health.LIVENESS_TIMEOUT_SECONDS - 1)
        assert health.find_liveness_failure(operator, lease) == ""
        await timeline.run(2)
        assert "its Lease" in health.find_liveness_failure(operator, lease)

    async def test_one_that_leads_must_look_around_and_hear(
        self, operator: Operator, lease: LeaderElector, runtime: VirtualRuntime, timeline: Timeline
    ) -> None:
        lease.elected.set()
        operator.start_leading()
        assert health.find_liveness_failure(operator, lease) == ""
        await timeline.run(FIRST_WATCH_EVENT_SECONDS + health.LIVENESS_TIMEOUT_SECONDS)
        lease.last_attempt_at = runtime.monotonic()
        assert "no watch" in health.find_liveness_failure(operator, lease)
        operator.stores.nodes.has_watch_events = True
        operator.last_tick_at = runtime.monotonic() - health.LIVENESS_TIMEOUT_SECONDS - 1
        assert "periodic tasks have not run" in health.find_liveness_failure(operator, lease)

    @pytest.mark.parametrize(("trouble", "status"), [("", 200), ("it is stuck", 500)])
    async def test_it_is_told_over_http(self, trouble: str, status: int) -> None:
        async with (
            health.serve_liveness(lambda: trouble, port := find_free_port()),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/healthz") as answer,
        ):
            assert answer.status == status
            assert trouble in await answer.text()
