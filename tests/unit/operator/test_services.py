"""What the operator writes: one at a time, once, and readable by the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.incident import IncidentOutcome
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.kube.client import INCIDENT_OBJECTS, TRAINING_JOB_STATES, TRAINING_JOBS, Conflict
from pacekeeper_operator.observe.job_cache import JobCache
from pacekeeper_operator.runtime import job_state
from pacekeeper_operator.services import incidents
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.observations import NOW, build_policy, build_stalls, build_training


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


class TestBookkeeping:
    async def test_what_is_written_is_what_is_read(self, cluster: FakeCluster) -> None:
        world = build_training()
        draft = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).desired
        await job_state.write_state(cluster, world.job, JobCache(), draft)
        memory = JobCache()
        assert await job_state.load_state(cluster, world.job, memory) == draft
        assert memory.desired == draft

    async def test_of_two_writers_one_is_told_to_look_again(self, cluster: FakeCluster) -> None:
        job, draft = build_training().job, build_training().desired
        one, two = JobCache(), JobCache()
        await job_state.write_state(cluster, job, one, draft)
        await job_state.load_state(cluster, job, two)
        await job_state.write_state(cluster, job, one, draft.with_plan(checkpoint_request=1))
        with pytest.raises(Conflict):
            await job_state.write_state(cluster, job, two, draft.with_plan(checkpoint_request=5))
        assert (await job_state.load_state(cluster, job, two) or draft).plan.checkpoint_request == 1

    async def test_the_plan_of_an_earlier_job_of_the_name_is_not_ours(self, cluster: FakeCluster) -> None:
        world = build_training()
        await job_state.write_state(cluster, world.job, JobCache(), world.desired)
        ((_, body),) = cluster.objects.items()
        body["metadata"]["uid"] = "of the first"
        successor = replace(world.job, uid="another")
        with pytest.raises(kopf.TemporaryError, match="is gone"):
            await job_state.load_state(cluster, successor, JobCache())
        assert await cluster.find(TRAINING_JOB_STATES, "j", "ns"), "it may be a later job's"
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j", "uid": "another"}})
        assert await job_state.load_state(cluster, successor, JobCache()) is None

    @pytest.mark.parametrize("there", [True, False])
    async def test_a_plan_that_went_with_its_job_is_not_made_anew(self, cluster: FakeCluster, there: bool) -> None:
        """After a backup of before the job was restored, say: nobody tells of a deletion then."""
        world, memory = build_training(), JobCache()
        await job_state.write_state(cluster, world.job, memory, world.desired)
        cluster.objects.clear()
        assert await job_state.load_state(cluster, world.job, memory) is None
        if there:
            metadata = {"namespace": "ns", "name": "j", "uid": world.job.uid}
            await cluster.create(TRAINING_JOBS, {"metadata": metadata})
            await job_state.create_state(cluster, world.job, memory, (), NOW)
        else:
            with pytest.raises(kopf.TemporaryError, match="is gone"):
                await job_state.create_state(cluster, world.job, memory, (), NOW)
        assert (await cluster.find(TRAINING_JOB_STATES, "j", "ns") is not None) is there

    def test_a_plan_that_was_deleted_is_made_anew_above_all_that_workers_may_have_seen(self) -> None:
        world = build_training()
        pods = tuple(view.pod for view in world.workers if view.pod is not None)
        draft = job_state.build_initial_state(world.job, pods, NOW, 7)
        assert draft.plan.version >= NOW
        assert draft.state.placement.highest_round == 7, "the next round has a number above it"
        assert draft.state.placement.incarnations == {str(n): 0 for n in range(5)}
        assert all(worker.leaving for worker in draft.state.placement.workers)


class TestIncident:
    async def test_one_that_is_known_is_not_created_in_vain_and_one_that_was_deleted_is_made_anew(
        self, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = build_training()
        (incident,) = evaluate_job(
            replace(world, faults=build_stalls(world, culprit=2)), build_policy()
        ).desired.state.incidents.current
        assert await incidents.write_incident(cluster, world.job, incident, 3600)
        created, create = [], cluster.create

        async def counted(*what: Any, **named: Any) -> Any:
            created.append(what)
            return await create(*what, **named)

        monkeypatch.setattr(cluster, "create", counted)
        ended = replace(incident, outcome=IncidentOutcome.RECOVERED)
        assert not await incidents.write_incident(cluster, world.job, ended, 3600, known=True)
        assert created == []
        await cluster.delete(INCIDENT_OBJECTS, incident.name, "ns")
        assert await incidents.write_incident(cluster, world.job, ended, 3600, known=True)
        body = await cluster.get(INCIDENT_OBJECTS, incident.name, "ns")
        assert body["status"]["outcome"] == "Recovered"

    async def test_one_that_is_over_stays_as_it_ended(self, cluster: FakeCluster) -> None:
        """A plan that was lost is made anew, and the same trouble of the same round has the same name."""
        world = build_training()
        (incident,) = evaluate_job(
            replace(world, faults=build_stalls(world, culprit=2)), build_policy()
        ).desired.state.incidents.current
        await incidents.write_incident(cluster, world.job, replace(incident, outcome=IncidentOutcome.RECOVERED), 3600)
        for again in (incident, replace(incident, outcome=IncidentOutcome.FAILED)):
            assert not await incidents.write_incident(cluster, world.job, again, 3600)
            body = await cluster.get(INCIDENT_OBJECTS, incident.name, "ns")
            assert body["status"]["outcome"] == "Recovered"

    async def test_twice_is_once(self, cluster: FakeCluster) -> None:
        world = build_training()
        draft = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).desired
        (incident,) = draft.state.incidents.current
        await incidents.write_incident(cluster, world.job, incident, 3600)
        await incidents.write_incident(cluster, world.job, replace(incident, outcome=IncidentOutcome.RECOVERED), 3600)
        (body,) = (body for (plural, _, _), body in cluster.objects.items() if plural == INCIDENT_OBJECTS.plural)
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

    def test_the_operators_own_condition_is_no_witness(self) -> None:
        values = {"PACEKEEPER_REPAIR_CONDITION": "Faulty", "PACEKEEPER_QUARANTINE_CONDITIONS": "A,Faulty=False"}
        with pytest.raises(InputError, match="take its own condition for another's"):
            Settings.from_environment(values)
        assert Settings.from_environment({"PACEKEEPER_REPAIR_CONDITION": "Faulty"}).repair_condition == "Faulty"

    @pytest.mark.parametrize(
        "variable",
        [
            ("PACEKEEPER_MODE", "Perhaps"),
            ("PACEKEEPER_PORT", "x"),
            ("PACEKEEPER_QUARANTINE_MAX_SHARE", "2"),
            ("PACEKEEPER_LEASE_SECONDS", "0"),
            ("PACEKEEPER_REPAIR_CONDITION", "two words"),
            ("PACEKEEPER_REPAIR_CONDITION", "Ready"),
            ("PACEKEEPER_REPAIR_CONDITION", "KernelDeadlock"),
            ("PACEKEEPER_REPAIR_CONDITION", "Faulty=True"),
            ("PACEKEEPER_REPAIR_CONDITION", "x" * 317),
        ],
    )
    def test_a_bad_value_is_named(self, variable: tuple[str, str]) -> None:
        with pytest.raises(InputError, match=variable[0]):
            Settings.from_environment(dict([variable]))
