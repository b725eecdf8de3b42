"""Writes of the operator: one writer at a time, once, and readable by the next operator."""

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


class TestJobState:
    async def test_a_written_state_is_read_back(self, cluster: FakeCluster) -> None:
        observation = build_training()
        desired = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).desired
        await job_state.write_state(cluster, observation.job, JobCache(), desired)
        memory = JobCache()
        assert await job_state.load_state(cluster, observation.job, memory) == desired
        assert memory.desired == desired

    async def test_the_second_of_two_writers_gets_a_conflict(self, cluster: FakeCluster) -> None:
        job, desired = build_training().job, build_training().desired
        one, two = JobCache(), JobCache()
        await job_state.write_state(cluster, job, one, desired)
        await job_state.load_state(cluster, job, two)
        await job_state.write_state(cluster, job, one, desired.with_plan(checkpoint_request=1))
        with pytest.raises(Conflict):
            await job_state.write_state(cluster, job, two, desired.with_plan(checkpoint_request=5))
        assert (await job_state.load_state(cluster, job, two) or desired).plan.checkpoint_request == 1

    async def test_the_plan_of_an_earlier_job_of_the_name_is_not_used(self, cluster: FakeCluster) -> None:
        observation = build_training()
        await job_state.write_state(cluster, observation.job, JobCache(), observation.desired)
        ((_, body),) = cluster.objects.items()
        body["metadata"]["uid"] = "of the first"
        successor = replace(observation.job, uid="another")
        with pytest.raises(kopf.TemporaryError, match="is gone"):
            await job_state.load_state(cluster, successor, JobCache())
        assert await cluster.find(TRAINING_JOB_STATES, "j", "ns"), "the plan may belong to a later job"
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j", "uid": "another"}})
        assert await job_state.load_state(cluster, successor, JobCache()) is None

    @pytest.mark.parametrize("there", [True, False])
    async def test_a_plan_that_was_deleted_with_its_job_is_not_created_again(
        self, cluster: FakeCluster, there: bool
    ) -> None:
        """A restored backup from before the job, for example, reports no deletion."""
        observation, memory = build_training(), JobCache()
        await job_state.write_state(cluster, observation.job, memory, observation.desired)
        cluster.objects.clear()
        assert await job_state.load_state(cluster, observation.job, memory) is None
        if there:
            metadata = {"namespace": "ns", "name": "j", "uid": observation.job.uid}
            await cluster.create(TRAINING_JOBS, {"metadata": metadata})
            await job_state.create_state(cluster, observation.job, memory, (), NOW)
        else:
            with pytest.raises(kopf.TemporaryError, match="is gone"):
                await job_state.create_state(cluster, observation.job, memory, (), NOW)
        assert (await cluster.find(TRAINING_JOB_STATES, "j", "ns") is not None) is there

    def test_a_deleted_plan_is_created_again_above_all_versions_that_workers_may_have_seen(self) -> None:
        observation = build_training()
        pods = tuple(view.pod for view in observation.workers if view.pod is not None)
        desired = job_state.build_initial_state(observation.job, pods, NOW, 7)
        assert desired.plan.version >= NOW
        assert desired.state.placement.highest_round == 7, "the next round has a higher number"
        assert desired.state.placement.incarnations == {str(n): 0 for n in range(5)}
        assert all(worker.leaving for worker in desired.state.placement.workers)


class TestIncident:
    async def test_a_known_incident_is_not_created_twice_and_a_deleted_one_is_created_again(
        self, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        observation = build_training()
        (incident,) = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).desired.state.incidents.current
        assert await incidents.write_incident(cluster, observation.job, incident, 3600)
        created, create = [], cluster.create

        async def counted(*what: Any, **named: Any) -> Any:
            created.append(what)
            return await create(*what, **named)

        monkeypatch.setattr(cluster, "create", counted)
        ended = replace(incident, outcome=IncidentOutcome.RECOVERED)
        assert not await incidents.write_incident(cluster, observation.job, ended, 3600, known=True)
        assert created == []
        await cluster.delete(INCIDENT_OBJECTS, incident.name, "ns")
        assert await incidents.write_incident(cluster, observation.job, ended, 3600, known=True)
        body = await cluster.get(INCIDENT_OBJECTS, incident.name, "ns")
        assert body["status"]["outcome"] == "Recovered"

    async def test_a_closed_incident_stays_as_it_ended(self, cluster: FakeCluster) -> None:
        """A lost plan is created again, and the same fault of the same round has the same name."""
        observation = build_training()
        (incident,) = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).desired.state.incidents.current
        await incidents.write_incident(
            cluster, observation.job, replace(incident, outcome=IncidentOutcome.RECOVERED), 3600
        )
        for again in (incident, replace(incident, outcome=IncidentOutcome.FAILED)):
            assert not await incidents.write_incident(cluster, observation.job, again, 3600)
            body = await cluster.get(INCIDENT_OBJECTS, incident.name, "ns")
            assert body["status"]["outcome"] == "Recovered"

    async def test_closing_an_incident_twice_writes_it_once(self, cluster: FakeCluster) -> None:
        observation = build_training()
        desired = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).desired
        (incident,) = desired.state.incidents.current
        await incidents.write_incident(cluster, observation.job, incident, 3600)
        await incidents.write_incident(
            cluster, observation.job, replace(incident, outcome=IncidentOutcome.RECOVERED), 3600
        )
        (body,) = (body for (plural, _, _), body in cluster.objects.items() if plural == INCIDENT_OBJECTS.plural)
        assert body["spec"]["cause"] == "hang"
        assert body["status"]["outcome"] == "Recovered"
        assert body["status"]["detectedSeconds"] == pytest.approx(3.1)
        assert [option["name"] for option in body["status"]["considered"]] == ["RestartRanks", "ReplaceWorker"]


class TestSettings:
    def test_settings_are_read_from_the_environment(self) -> None:
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

    def test_the_operators_own_condition_cannot_be_a_witness(self) -> None:
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
