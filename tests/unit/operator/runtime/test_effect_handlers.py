"""How each effect is carried out: the objects in the API server afterwards, and the events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.profiling.page import ProfilePage
from pacekeeper_operator import metrics
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.effects import (
    ApplyNetworkPolicy,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    LocalizeProfile,
    RequestQuarantine,
    SaveProfile,
    ValidateTemplate,
    WriteIncident,
)
from pacekeeper_operator.kube.client import (
    EVENTS,
    INCIDENT_OBJECTS,
    NETWORK_POLICIES,
    NODE_QUARANTINES,
    PODS,
    PROFILE_WINDOWS,
    TRAINING_JOBS,
    Conflict,
    NotFound,
    Object,
    ResourceKind,
)
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime.effect_handlers import TEMPLATE_RETRY_SECONDS, WATCH_SETTLE_SECONDS, handle_effect
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import create_job_context
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest, WorkerRecord
from pacekeeper_operator.state.effect_results import QuarantineDecision
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import NOW, build_training
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern


class RecordingCluster(FakeCluster):
    """Records requested deletions, and adds to a new object what the API server would."""

    def __init__(self) -> None:
        super().__init__()
        self.deletions: list[tuple[str, str, str, int | None]] = []
        self.dry_runs = 0

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        self.dry_runs += dry_run
        metadata = {"creationTimestamp": "2026-01-01T00:00:00Z", **body["metadata"]}
        return await super().create(kind, {**body, "metadata": metadata}, dry_run=dry_run)

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "", grace: int | None = None, **_: Any
    ) -> None:
        self.deletions.append((kind.plural, name, uid, grace))
        await super().delete(kind, name, namespace, uid=uid)


@dataclass
class Bench:
    """An operator that works on one job."""

    cluster: RecordingCluster = field(default_factory=RecordingCluster)
    operator: Operator = field(init=False)
    context: JobContext = field(init=False)

    def __post_init__(self) -> None:
        observation = build_training()
        prometheus = PrometheusClient("", "", "")
        self.operator = Operator(
            Settings(), self.cluster, JobRegistry(0.0), INSTALLATION, prometheus, FixedTimeRuntime(), paused=""
        )
        self.context = create_job_context(self.operator, observation.job, {})
        self.context.cache.update(desired=observation.desired)

    async def handle(self, effect: Effect) -> float:
        return await handle_effect(self.operator, self.context, effect)

    def list_events(self) -> list[tuple[str, str, str]]:
        """Return type, reason, and note of each event, oldest first."""
        found = [body for (plural, _, _), body in self.cluster.objects.items() if plural == EVENTS.plural]
        return [(body["type"], body["reason"], body["note"]) for body in found]


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestTemplate:
    async def test_an_accepted_template_is_no_event(self, bench: Bench) -> None:
        assert await bench.handle(ValidateTemplate(1)) == TEMPLATE_RETRY_SECONDS
        assert bench.context.cache.results.template is not None
        assert (bench.context.cache.results.template.rejection, bench.list_events()) == ("", [])
        assert (bench.cluster.dry_runs, bench.cluster.objects) == (1, {})

    async def test_a_refused_template_is_one_event(self, bench: Bench) -> None:
        bench.context.job = replace(bench.context.job, spec=replace(bench.context.job.spec, template={"spec": None}))
        for _ in range(2):
            await bench.handle(ValidateTemplate(1))
            assert bench.context.cache.results.template is not None
            rejection = bench.context.cache.results.template.rejection
            assert rejection.startswith("spec.template: is not a pod template")
            assert bench.list_events() == [("Warning", "InvalidTemplate", rejection)]
            bench.context.cache.update(desired=build_training().desired.with_placement(template_rejected=1))
        bench.context.cache.update(desired=build_training().desired.with_placement(template_rejected=0))
        await bench.handle(ValidateTemplate(1))
        assert len(bench.list_events()) == 2, "this generation has no event yet"

    async def test_a_refused_template_of_a_new_job_is_an_event(self, bench: Bench) -> None:
        bench.context.job = replace(bench.context.job, spec=replace(bench.context.job.spec, template={"spec": None}))
        bench.context.cache._desired = None
        await bench.handle(ValidateTemplate(1))
        assert len(bench.list_events()) == 1

    async def test_a_template_that_has_changed_is_not_validated(self, bench: Bench) -> None:
        assert await bench.handle(ValidateTemplate(0)) == 0.0
        assert (bench.context.cache.results.template, bench.cluster.dry_runs) == (None, 0)


class TestPods:
    async def test_creating_a_pod_is_repeatable(self, bench: Bench) -> None:
        effect = CreatePod(WorkerRecord("j-w7-0", 7, 0))
        assert await bench.handle(effect) == WATCH_SETTLE_SECONDS
        assert await bench.handle(effect) == WATCH_SETTLE_SECONDS
        assert [key for key in bench.cluster.objects if key[0] == PODS.plural] == [("pods", "ns", "j-w7-0")]

    async def test_a_pod_name_in_use_is_an_error(self, bench: Bench) -> None:
        metadata = {"name": "j-w7-0", "namespace": "ns", "uid": "u"}
        await bench.cluster.create(PODS, {"metadata": metadata, "spec": {}, "status": {}})
        with pytest.raises(kopf.TemporaryError, match="taken by a pod that is not this job's"):
            await bench.handle(CreatePod(WorkerRecord("j-w7-0", 7, 0)))

    @pytest.mark.parametrize(("force", "grace"), [(True, 0), (False, None)])
    async def test_a_pod_is_deleted_by_its_uid(self, bench: Bench, force: bool, grace: int | None) -> None:
        assert await bench.handle(DeletePod("j-w1-0", "uid-1", force)) == WATCH_SETTLE_SECONDS
        assert bench.cluster.deletions == [("pods", "j-w1-0", "uid-1", grace)]


async def test_a_job_is_deleted_by_its_uid(bench: Bench) -> None:
    assert await bench.handle(DeleteJob("u1d2c3")) == WATCH_SETTLE_SECONDS
    assert bench.cluster.deletions == [(TRAINING_JOBS.plural, "j", "u1d2c3", None)]


class TestQuarantine:
    async def test_a_quarantine_decision_is_an_event_when_it_changes(self, bench: Bench) -> None:
        node = {"metadata": {"name": "node-1", "uid": "n1", "labels": {}}, "spec": {}, "status": {}}
        bench.cluster._store(("nodes", "", "node-1"), node)
        wanted = RequestQuarantine(QuarantineRequest("node-1", "n1", "XID 79", "i", at=NOW))
        for _ in range(2):
            assert await bench.handle(wanted) > 0
        decision = bench.context.cache.results.quarantine_decisions["i", "node-1"]
        assert decision.verdict is QuarantineVerdict.SUSPECTED
        assert [(kind, reason) for kind, reason, _ in bench.list_events()] == [("Normal", "QuarantineNode")]
        assert (NODE_QUARANTINES.plural, "", "node-1") in bench.cluster.objects
        bench.context.cache.results.quarantine_decisions["i", "node-1"] = QuarantineDecision(
            QuarantineVerdict.PAUSED, "remedies were paused"
        )
        await bench.handle(wanted)
        assert len(bench.list_events()) == 2


class TestNetwork:
    async def test_the_policy_is_created_and_repaired_and_otherwise_unchanged(self, bench: Bench) -> None:
        def find_policy() -> dict[str, Any]:
            (found,) = (body for key, body in bench.cluster.objects.items() if key[0] == NETWORK_POLICIES.plural)
            return found

        await bench.handle(ApplyNetworkPolicy(1))
        made = find_policy()["metadata"]["resourceVersion"]
        await bench.handle(ApplyNetworkPolicy(1))
        assert find_policy()["metadata"]["resourceVersion"] == made
        wanted = find_policy()["spec"]
        find_policy()["spec"] = {**wanted, "ingress": [{}]}
        await bench.handle(ApplyNetworkPolicy(1))
        assert find_policy()["spec"] == wanted

    async def test_a_policy_that_another_operator_has_just_created_is_accepted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail_create(*_: object, **__: object) -> Object:
            raise Conflict("exists already")

        monkeypatch.setattr(bench.cluster, "create", fail_create)
        assert await bench.handle(ApplyNetworkPolicy(1)) > 0


def build_incident(**changes: Any) -> Incident:
    known = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "rank 2 hangs", NOW - 9, NOW - 8, NOW - 7)
    return replace(known, **changes)


ACTED = {"remedy": str(Remedy.RESTART_RANKS), "applied": NOW - 7}


class TestIncidents:
    async def write_incident(
        self, bench: Bench, now: Incident, before: Incident | None = None
    ) -> list[tuple[str, str, str]]:
        """Write an incident, and return the events of it."""
        known = len(bench.list_events())
        assert await bench.handle(WriteIncident(now, before)) == 0.0
        assert bench.context.written_incidents[now.name] == now
        assert (INCIDENT_OBJECTS.plural, "ns", "i") in bench.cluster.objects
        return bench.list_events()[known:]

    async def test_beginning_and_end_of_an_incident_are_one_event_each(self, bench: Bench) -> None:
        open_incident = build_incident(**ACTED)
        (event,) = await self.write_incident(bench, open_incident)
        assert event == ("Warning", "IncidentOpened", "rank 2 hangs; applied: RestartRanks (i)")
        assert await self.write_incident(bench, replace(open_incident, evidence=("more",)), open_incident) == []
        closed = replace(open_incident, outcome=IncidentOutcome.RECOVERED, recovered=NOW - 1)
        (event,) = await self.write_incident(bench, closed, open_incident)
        assert event == ("Normal", "IncidentClosed", "i: Recovered 8.0 s after the first sign; rank 2 hangs")
        assert (
            await self.write_incident(bench, replace(closed, quarantine_summary="node-1 is quarantined"), closed) == []
        )

    async def test_an_incident_that_ended_before_it_was_written_is_one_event(self, bench: Bench) -> None:
        ended = build_incident(remedy=None, outcome=IncidentOutcome.RECOMMENDED)
        assert await self.write_incident(bench, ended) == [("Normal", "IncidentClosed", "i: Recommended; rank 2 hangs")]

    async def test_an_incident_contains_its_quarantine_summary(self, bench: Bench) -> None:
        def read_message() -> object:
            return bench.cluster.objects[INCIDENT_OBJECTS.plural, "ns", "i"]["status"].get("message")

        await self.write_incident(bench, build_incident())
        assert read_message() is None
        await self.write_incident(bench, build_incident(quarantine_summary="node-1 is quarantined"), build_incident())
        assert read_message() == "node-1 is quarantined"

    async def test_a_recommended_remedy_is_in_the_event(self, bench: Bench) -> None:
        (event,) = await self.write_incident(bench, build_incident(remedy=str(Remedy.REPLACE_WORKER)))
        assert event[2] == "rank 2 hangs; recommended: ReplaceWorker (i)"

    async def test_an_incident_without_a_remedy_recommends_nothing(self, bench: Bench) -> None:
        (event,) = await self.write_incident(bench, build_incident())
        assert event[2] == "rank 2 hangs; recommended: nothing (i)"

    @pytest.mark.parametrize(
        ("outcome", "kind"),
        [
            (IncidentOutcome.FAILED, "Warning"),
            (IncidentOutcome.INEFFECTIVE, "Warning"),
            (IncidentOutcome.SUPERSEDED, "Normal"),
        ],
    )
    async def test_an_ineffective_remedy_is_a_warning(self, bench: Bench, outcome: IncidentOutcome, kind: str) -> None:
        open_incident = build_incident(**ACTED)
        await self.write_incident(bench, open_incident)
        (event,) = await self.write_incident(bench, replace(open_incident, outcome=outcome), open_incident)
        assert event[0] == kind

    async def test_incidents_and_remedies_are_counted_once(self, bench: Bench) -> None:
        def read_counter(counter: Any, *labels: str) -> float:
            return float(counter.labels(*labels)._value.get())

        open_incident = (IncidentCause.HANG, IncidentClass.UNKNOWN, "Act")
        before = (
            read_counter(metrics.INCIDENTS_OPENED, *open_incident),
            read_counter(metrics.REMEDIES_APPLIED, Remedy.RESTART_RANKS),
        )
        await self.write_incident(bench, build_incident(**ACTED))
        await self.write_incident(bench, build_incident(**ACTED, evidence=("more",)), build_incident(**ACTED))
        after = (
            read_counter(metrics.INCIDENTS_OPENED, *open_incident),
            read_counter(metrics.REMEDIES_APPLIED, Remedy.RESTART_RANKS),
        )
        assert after == (before[0] + 1, before[1] + 1)

    async def test_only_remedies_that_were_applied_are_counted(self, bench: Bench) -> None:
        def count_remedies() -> float:
            return sum(sample.value for metric in metrics.REMEDIES_APPLIED.collect() for sample in metric.samples)

        before = count_remedies()
        await self.write_incident(bench, build_incident(remedy=str(Remedy.RESTART_RANKS)))
        bench.cluster.objects.clear()
        await self.write_incident(bench, build_incident(applied=NOW))
        assert count_remedies() == pytest.approx(before, abs=0.5)


class TestProfiles:
    async def test_patterns_are_localized_and_saved_with_their_incident(self, bench: Bench) -> None:
        slow = [
            build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == 1 else HEALTHY_WORK, 0.6)
            for rank in range(3)
        ]
        bench.context.cache.profile.by_rank = dict(build_answers(slow))
        await bench.handle(LocalizeProfile("profile-7", 4))
        done = bench.context.cache.profile.localized
        assert done is not None
        assert (done.window, done.localization.finding.culprit) == ("profile-7", "train.py:augment on rank 1")
        assert done.localization.remarks == ("3 of 4 ranks have answered",)
        ((kind, reason, note),) = bench.list_events()
        assert (kind, reason) == ("Normal", "ProfileWindow")
        assert "train.py:augment on rank 1" in note

        with pytest.raises(NotFound):  # retried: another effect writes the incident
            await bench.handle(SaveProfile("profile-7", "why"))
        await bench.cluster.create(INCIDENT_OBJECTS, {"metadata": {"name": "why", "namespace": "ns", "uid": "u"}})
        for _ in range(2):
            await bench.handle(SaveProfile("profile-7", "why"))
        window = await bench.cluster.get(PROFILE_WINDOWS, "why", "ns")
        assert window["metadata"]["ownerReferences"][0]["uid"] == "u"
        page = ProfilePage.from_json(window["spec"]["content"].encode())
        assert [answer.pattern.rank for answer in page.answers] == [1, 0, 2]
        assert page.plots[0].function == "train.py:augment"
        assert page.plots[0].seconds == pytest.approx((0.0, 0.2, 0.0), abs=1e-3)
        assert bench.context.cache.profile.localized is not None
        assert bench.context.cache.profile.localized.page == ""
