"""What the operator writes: one at a time, once, and readable by the next one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_operator.api import Outcome
from pacekeeper_operator.cluster import INCIDENTS, Conflict
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.services import incidents, plans
from pacekeeper_operator.services.think import think
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state import Draft
from tests.support.fake_cluster import FakeCluster
from tests.support.worlds import NOW, policy, stalls, training


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def edit(cluster: FakeCluster, **changes: object) -> None:
    """Of the plan, as by `kubectl edit`."""
    (body,) = (body for (kind, _, name), body in cluster.objects.items() if (kind, name) == ("configmaps", "j-plan"))
    plan = json.loads(body["data"]["plan.json"]) | changes
    body["data"]["plan.json"] = json.dumps(plan)
    body["metadata"]["resourceVersion"] += "0"


class TestPlan:
    async def test_what_is_written_is_what_is_read(self, cluster: FakeCluster) -> None:
        world = training()
        draft = think(replace(world, faults=stalls(world, culprit=2)), policy()).draft
        await plans.write(cluster, world.job, Memory().of("ns", "j"), draft)
        memory = Memory().of("ns", "j")
        assert await plans.load(cluster, world.job, memory, NOW) == draft
        assert memory.draft == draft

    async def test_of_two_writers_one_is_told_to_look_again(self, cluster: FakeCluster) -> None:
        job, draft = training().job, training().draft
        one, two = Memory().of("ns", "j"), Memory().of("ns", "j")
        await plans.write(cluster, job, one, draft)
        await plans.load(cluster, job, two, NOW)
        await plans.write(cluster, job, one, draft.with_plan(checkpoint_request=1))
        with pytest.raises(Conflict):
            await plans.write(cluster, job, two, draft.with_plan(checkpoint_request=5))
        assert (await plans.load(cluster, job, two, NOW) or draft).plan.checkpoint_request == 1

    async def test_the_plan_of_an_earlier_job_of_the_name_is_not_ours(self, cluster: FakeCluster) -> None:
        world = training()
        await plans.write(cluster, world.job, Memory().of("ns", "j"), world.draft)
        successor = replace(world.job, uid="another")
        assert await plans.load(cluster, successor, Memory().of("ns", "j"), NOW) is None

    def test_a_plan_that_was_deleted_is_made_anew_above_all_that_workers_may_have_seen(self) -> None:
        world = training()
        pods = tuple(view.pod for view in world.workers if view.pod is not None)
        draft = plans.first(world.job, pods, NOW)
        assert draft.plan.version >= NOW
        assert draft.state.incarnations == {str(n): 0 for n in range(5)}
        assert all(worker.leaving for worker in draft.state.workers)

    def test_five_thousand_workers_fit_a_config_map(self) -> None:
        draft = training(replicas=5000, spares=50).draft
        data = draft.to_data()
        assert sum(map(len, data.values())) < 2**20
        assert Draft.from_data(data) == draft

    async def test_a_plan_that_names_an_unknown_mode_is_written_anew_as_it_was(self, cluster: FakeCluster) -> None:
        world, memory = training(), Memory().of("ns", "j")
        await plans.write(cluster, world.job, memory, world.draft.with_plan(sync_mode=SyncMode.EDIT))
        edit(cluster, sync_mode="Sideways")
        draft = await plans.load(cluster, world.job, memory, NOW)
        assert draft is not None
        assert draft.plan.sync_mode is SyncMode.EDIT
        assert "Sideways" in draft.state.plan_refused
        assert await plans.load(cluster, world.job, Memory().of("ns", "j"), NOW) == draft, "and that is what is written"

    async def test_an_operator_that_never_knew_it_otherwise_goes_on_in_sync(self, cluster: FakeCluster) -> None:
        world = training()
        await plans.write(cluster, world.job, Memory().of("ns", "j"), world.draft)
        edit(cluster, sync_mode="Sideways", version=7)
        draft = await plans.load(cluster, world.job, Memory().of("ns", "j"), NOW)
        assert draft is not None
        assert (draft.plan.sync_mode, draft.plan.members) == (SyncMode.SYNC, world.plan.members)

    async def test_an_edit_by_hand_reaches_the_workers_under_a_new_version(self, cluster: FakeCluster) -> None:
        world, memory = training(), Memory().of("ns", "j")
        await plans.write(cluster, world.job, memory, world.draft)
        edit(cluster, sync_mode="EDiT")
        draft = await plans.load(cluster, world.job, memory, NOW)
        assert draft is not None
        assert (draft.plan.sync_mode, draft.plan.version) == (SyncMode.EDIT, world.plan.version + 1)

    def test_garbage_is_named(self) -> None:
        with pytest.raises(InputError, match="delete it"):
            Draft.from_data({"plan.json": "{", "state.json": "{}"})


class TestIncident:
    async def test_twice_is_once(self, cluster: FakeCluster) -> None:
        world = training()
        draft = think(replace(world, faults=stalls(world, culprit=2)), policy()).draft
        (incident,) = draft.state.incidents
        await incidents.write(cluster, world.job, incident, 3600)
        await incidents.write(cluster, world.job, replace(incident, outcome=Outcome.RECOVERED), 3600)
        (body,) = (body for (plural, _, _), body in cluster.objects.items() if plural == INCIDENTS.plural)
        assert body["spec"]["cause"] == "hang"
        assert body["status"]["outcome"] == "Recovered"
        assert body["status"]["detectedSeconds"] == pytest.approx(3.1)
        assert [option["name"] for option in body["status"]["considered"]] == ["RestartRanks", "ReplaceWorker"]


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
        "variable",
        [
            ("PACEKEEPER_MODE", "Perhaps"),
            ("PACEKEEPER_PORT", "x"),
            ("PACEKEEPER_QUARANTINE_MAX_SHARE", "2"),
            ("PACEKEEPER_LEASE_SECONDS", "0"),
        ],
    )
    def test_a_bad_value_is_named(self, variable: tuple[str, str]) -> None:
        with pytest.raises(InputError, match=variable[0]):
            Settings.from_environment(dict([variable]))
