"""What the operator writes: one at a time, once, and readable by the next one."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator import certificates
from pacekeeper_operator.api import Outcome
from pacekeeper_operator.cluster import INCIDENTS, LEASES, Conflict
from pacekeeper_operator.decide.think import think
from pacekeeper_operator.observe.memory import JobMemory
from pacekeeper_operator.services import bookkeeping, incidents, leadership
from pacekeeper_operator.settings import Settings
from tests.support.fake_cluster import FakeCluster
from tests.support.worlds import NOW, policy, stalls, training

SETTINGS = Settings(namespace="system", identity="one", lease_seconds=0.3)
RIVAL = replace(SETTINGS, identity="two")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


class TestBookkeeping:
    async def test_what_is_written_is_what_is_read(self, cluster: FakeCluster) -> None:
        world = training()
        draft = think(replace(world, faults=stalls(world, culprit=2)), policy()).draft
        await bookkeeping.write(cluster, world.job, JobMemory(), draft)
        memory = JobMemory()
        assert await bookkeeping.load(cluster, world.job, memory) == draft
        assert memory.draft == draft

    async def test_of_two_writers_one_is_told_to_look_again(self, cluster: FakeCluster) -> None:
        job, draft = training().job, training().draft
        one, two = JobMemory(), JobMemory()
        await bookkeeping.write(cluster, job, one, draft)
        await bookkeeping.load(cluster, job, two)
        await bookkeeping.write(cluster, job, one, draft.with_plan(checkpoint_request=1))
        with pytest.raises(Conflict):
            await bookkeeping.write(cluster, job, two, draft.with_plan(checkpoint_request=5))
        assert (await bookkeeping.load(cluster, job, two) or draft).plan.checkpoint_request == 1

    async def test_the_plan_of_an_earlier_job_of_the_name_is_not_ours(self, cluster: FakeCluster) -> None:
        world = training()
        await bookkeeping.write(cluster, world.job, JobMemory(), world.draft)
        ((_, body),) = cluster.objects.items()
        body["metadata"]["uid"] = "of the first"
        successor = replace(world.job, uid="another")
        assert await bookkeeping.load(cluster, successor, JobMemory()) is None

    def test_a_plan_that_was_deleted_is_made_anew_above_all_that_workers_may_have_seen(self) -> None:
        world = training()
        pods = tuple(view.pod for view in world.workers if view.pod is not None)
        draft = bookkeeping.first(world.job, pods, NOW)
        assert draft.plan.version >= NOW
        assert draft.state.placement.incarnations == {str(n): 0 for n in range(5)}
        assert all(worker.leaving for worker in draft.state.placement.workers)


class TestIncident:
    async def test_twice_is_once(self, cluster: FakeCluster) -> None:
        world = training()
        draft = think(replace(world, faults=stalls(world, culprit=2)), policy()).draft
        (incident,) = draft.state.incidents.current
        await incidents.write(cluster, world.job, incident, 3600)
        await incidents.write(cluster, world.job, replace(incident, outcome=Outcome.RECOVERED), 3600)
        (body,) = (body for (plural, _, _), body in cluster.objects.items() if plural == INCIDENTS.plural)
        assert body["spec"]["cause"] == "hang"
        assert body["status"]["outcome"] == "Recovered"
        assert body["status"]["detectedSeconds"] == pytest.approx(3.1)
        assert [option["name"] for option in body["status"]["considered"]] == ["RestartRanks", "ReplaceWorker"]


class TestLease:
    async def test_only_one_acts_and_the_next_one_takes_over(self, cluster: FakeCluster) -> None:
        order = []

        async def lead(settings: Settings) -> None:
            async with leadership.hold(cluster, settings, asyncio.Event()):
                order.append(settings.identity)
                await asyncio.sleep(0.5)
                order.append(settings.identity)

        await asyncio.wait_for(asyncio.gather(lead(SETTINGS), lead(RIVAL)), 10)
        assert order[0] == order[1] != order[2] == order[3]

    async def test_who_has_lost_it_is_told(self, cluster: FakeCluster) -> None:
        lost = asyncio.Event()
        async with leadership.hold(cluster, SETTINGS, lost):
            body = await cluster.get(LEASES, leadership.LEASE, "system")
            body["spec"] |= {"holderIdentity": "two", "leaseDurationSeconds": 60}
            await cluster.replace(LEASES, body)
            await asyncio.wait_for(lost.wait(), 5)
        assert (await cluster.get(LEASES, leadership.LEASE, "system"))["spec"]["holderIdentity"] == "two"

    async def test_the_same_pod_leads_on_at_once_after_a_crash(self, cluster: FakeCluster) -> None:
        dead = leadership.hold(cluster, replace(SETTINGS, lease_seconds=60.0), asyncio.Event())
        await dead.__aenter__()  # and never left
        async with asyncio.timeout(1), leadership.hold(cluster, SETTINGS, asyncio.Event()):
            pass


async def test_the_authority_is_made_once(cluster: FakeCluster) -> None:
    async def create(kind: object, body: dict[str, dict[str, str]], **_: object) -> object:
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in body.pop("stringData").items()}
        return await FakeCluster.create(cluster, kind, body | {"data": encoded})  # type: ignore[arg-type]

    cluster.create = create  # type: ignore[method-assign,assignment]
    first = await certificates.ensure(cluster, "system")
    assert await certificates.ensure(cluster, "system") == first


class TestSettings:
    def test_from_the_environment(self) -> None:
        settings = Settings.from_environment(
            {
                "POD_NAME": "p",
                "PACEKEEPER_QUARANTINE_MODE": "Act",
                "PACEKEEPER_QUARANTINE_EXPIRES_AFTER": "90m",
                "PACEKEEPER_PAUSED": "true",
                "PACEKEEPER_BREAKER_NODES": "7",
            }
        )
        assert (settings.identity, settings.quarantine_mode, settings.quarantine_expires_after) == ("p", "Act", 5400.0)
        assert (settings.paused, settings.breaker_nodes) == (True, 7)

    @pytest.mark.parametrize(
        "variable", [("PACEKEEPER_MODE", "Perhaps"), ("PACEKEEPER_PORT", "x"), ("PACEKEEPER_QUARANTINE_MAX_SHARE", "2")]
    )
    def test_a_bad_value_is_named(self, variable: tuple[str, str]) -> None:
        with pytest.raises(InputError, match=variable[0]):
            Settings.from_environment(dict([variable]))
