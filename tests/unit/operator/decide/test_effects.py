"""The effects of a desired state once it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import RunPolicySpec
from pacekeeper_operator.decide.effects import (
    ApplyNetworkPolicy,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    RequestQuarantine,
    ValidateTemplate,
    WriteIncident,
)
from pacekeeper_operator.decide.evaluate import list_effects
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_fresh, build_job, build_policy, build_training, change_worker


def list_effects_of(observation: Observation, kind: type[Effect], **written: Incident) -> list[Effect]:
    found = list_effects(observation, build_policy(), written)
    return [effect for effect in found if isinstance(effect, kind)]


class TestTemplate:
    def test_the_template_is_validated_once_per_generation_before_the_job_has_members(self) -> None:
        accepted = build_fresh()
        not_accepted = accepted.with_desired(accepted.desired.with_placement(template_accepted=0))
        assert list_effects_of(not_accepted, ValidateTemplate) == [ValidateTemplate(1)]
        assert list_effects_of(accepted, ValidateTemplate) == []
        training = build_training()
        assert (
            list_effects_of(
                training.with_desired(training.desired.with_placement(template_accepted=0)), ValidateTemplate
            )
            == []
        )
        assert (
            list_effects_of(
                not_accepted.with_desired(not_accepted.desired.with_lifecycle(completed_at=NOW)), ValidateTemplate
            )
            == []
        )


class TestPods:
    def map_created(self, observation: Observation) -> dict[str, bool]:
        """Map the name of each created worker to whether it is a spare."""
        observation = observation.with_desired(workforce.update_workforce(observation, build_policy()))
        pods = list_effects_of(observation, CreatePod)
        return {effect.worker.name: effect.spare for effect in pods if isinstance(effect, CreatePod)}

    def test_the_first_workers_are_members_and_further_ones_are_spares(self) -> None:
        start = build_fresh(2, 1)
        start = start.with_desired(workforce.update_workforce(start, build_policy()))
        assert self.map_created(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}

    def test_only_later_workers_prefer_nodes_without_incidents(self) -> None:
        def map_preferences(observation: Observation) -> dict[str, bool]:
            cluster_view = replace(observation.cluster_view, unreliable_nodes=("node-7",))
            observation = replace(observation, cluster_view=cluster_view).with_desired(
                workforce.update_workforce(observation, build_policy())
            )
            pods = list_effects_of(observation, CreatePod)
            return {effect.worker.name: bool(effect.unreliable) for effect in pods if isinstance(effect, CreatePod)}

        start = build_fresh(2, 1)
        start = start.with_desired(workforce.update_workforce(start, build_policy()))
        assert map_preferences(start) == {"j-w0-0": False, "j-w1-0": False, "j-w2-0": True}
        observation = change_worker(change_worker(build_training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(observation.state.placement.workers[1], leaving="x", dead=True)
        assert map_preferences(observation.with_desired(observation.desired.with_worker(record))) == {
            "j-w1-1": True,
            "j-w4-1": True,
        }

    def test_later_workers_are_spares_unless_ranks_are_vacant(self) -> None:
        observation = change_worker(change_worker(build_training(), "j-w1-0", gone=True), "j-w4-0", gone=True)
        record = replace(observation.state.placement.workers[1], leaving="x", dead=True)
        observation = observation.with_desired(observation.desired.with_worker(record))
        assert self.map_created(observation) == {"j-w1-1": False, "j-w4-1": True}
        assert self.map_created(change_worker(build_training(), "j-w4-0", gone=True)) == {"j-w4-1": True}

    def test_new_pods_avoid_suspected_nodes(self) -> None:
        observation = change_worker(build_training(), "j-w4-0", gone=True)
        cluster_view = replace(observation.cluster_view, suspects=frozenset({"node-7", "node-2"}))
        observation = replace(observation, cluster_view=cluster_view)
        observation = observation.with_desired(workforce.update_workforce(observation, build_policy()))
        (pod,) = list_effects_of(observation, CreatePod)
        assert isinstance(pod, CreatePod)
        assert pod.avoid == ("node-2", "node-7")

    def test_surplus_and_stray_pods_are_deleted(self) -> None:
        observation = build_training()
        pod = observation.workers[0].pod
        assert pod is not None
        record = replace(observation.state.placement.workers[4], leaving="x", force=True)
        observation = observation.with_desired(observation.desired.with_worker(record))
        observation = replace(observation, stray_pods=(replace(pod, name="j-w9-0", uid="stray"),))
        assert list_effects_of(observation, DeletePod) == [
            DeletePod("j-w4-0", "uid-4", True),
            DeletePod("j-w9-0", "stray"),
        ]


def test_an_incident_is_written_if_it_differs_from_the_cluster() -> None:
    observation = build_training()
    before = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW, NOW, NOW)
    recovered = replace(before, outcome=IncidentOutcome.RECOVERED)
    observation = observation.with_desired(observation.desired.with_incident(recovered))
    assert list_effects_of(observation, WriteIncident) == [WriteIncident(recovered, None)]
    assert list_effects_of(observation, WriteIncident, i=before) == [WriteIncident(recovered, before)]
    assert list_effects_of(observation, WriteIncident, i=recovered) == []


def test_quarantines_are_requested() -> None:
    observation = build_training()
    request = QuarantineRequest("node-1", "uid", "why", "i")
    observation = observation.with_desired(observation.desired.with_incidents(quarantine_requests=(request,)))
    assert list_effects_of(observation, RequestQuarantine) == [RequestQuarantine(request)]


def test_a_network_policy_is_applied_if_the_platform_enables_it() -> None:
    assert list_effects_of(build_training(), ApplyNetworkPolicy) == [ApplyNetworkPolicy(1)]
    assert not [
        effect
        for effect in list_effects(build_training(), build_policy(applies_network_policy=False), {})
        if isinstance(effect, ApplyNetworkPolicy)
    ]


class TestEnd:
    @pytest.mark.parametrize(("ttl", "after", "deleted"), [(60, 59, False), (60, 60, True), (None, 10_000, False)])
    def test_an_ended_job_is_deleted_after_its_time_to_live(self, ttl: int | None, after: float, deleted: bool) -> None:
        observation = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=ttl)))
        ended = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        assert list_effects_of(replace(ended, now=NOW + after), DeleteJob) == ([DeleteJob("u1d2c3")] if deleted else [])
        assert list_effects_of(replace(observation, now=NOW + 10_000), DeleteJob) == [], "it has not ended"
