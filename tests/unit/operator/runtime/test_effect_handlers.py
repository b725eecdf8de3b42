"""How each effect is carried out: what is in the API server afterwards, and what people are told."""

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


class Cluster(FakeCluster):
    """One that remembers how deletions were asked for, and gives a new object what the API server would."""

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
    """An operator at work on one job."""

    cluster: Cluster = field(default_factory=Cluster)
    operator: Operator = field(init=False)
    desk: JobContext = field(init=False)

    def __post_init__(self) -> None:
        world = build_training()
        prometheus = PrometheusClient("", "", "")
        self.operator = Operator(
            Settings(), self.cluster, JobRegistry(0.0), INSTALLATION, prometheus, FixedTimeRuntime(), paused=""
        )
        self.desk = create_job_context(self.operator, world.job, {})
        self.desk.cache.update(desired=world.desired)

    async def do(self, effect: Effect) -> float:
        return await handle_effect(self.operator, self.desk, effect)

    def events(self) -> list[tuple[str, str, str]]:
        """Type, reason and note of each, oldest first."""
        found = [body for (plural, _, _), body in self.cluster.objects.items() if plural == EVENTS.plural]
        return [(body["type"], body["reason"], body["note"]) for body in found]


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestTemplate:
    async def test_that_is_accepted_is_no_event(self, bench: Bench) -> None:
        assert await bench.do(ValidateTemplate(1)) == TEMPLATE_RETRY_SECONDS
        assert bench.desk.cache.results.template is not None
        assert (bench.desk.cache.results.template.rejection, bench.events()) == ("", [])
        assert (bench.cluster.dry_runs, bench.cluster.objects) == (1, {})

    async def test_that_is_refused_is_told_once(self, bench: Bench) -> None:
        bench.desk.job = replace(bench.desk.job, spec=replace(bench.desk.job.spec, template={"spec": None}))
        for _ in range(2):
            await bench.do(ValidateTemplate(1))
            assert bench.desk.cache.results.template is not None
            words = bench.desk.cache.results.template.rejection
            assert words.startswith("spec.template: is not a pod template")
            assert bench.events() == [("Warning", "InvalidTemplate", words)]
            bench.desk.cache.update(desired=build_training().desired.with_placement(template_rejected=1))
        bench.desk.cache.update(desired=build_training().desired.with_placement(template_rejected=0))
        await bench.do(ValidateTemplate(1))
        assert len(bench.events()) == 2, "of this generation nobody has been told yet"

    async def test_also_where_nothing_is_written_of_the_job_yet(self, bench: Bench) -> None:
        bench.desk.job = replace(bench.desk.job, spec=replace(bench.desk.job.spec, template={"spec": None}))
        bench.desk.cache._desired = None
        await bench.do(ValidateTemplate(1))
        assert len(bench.events()) == 1

    async def test_one_that_has_changed_meanwhile_is_not_tried(self, bench: Bench) -> None:
        assert await bench.do(ValidateTemplate(0)) == 0.0
        assert (bench.desk.cache.results.template, bench.cluster.dry_runs) == (None, 0)


class TestPods:
    async def test_creation_is_repeatable(self, bench: Bench) -> None:
        effect = CreatePod(WorkerRecord("j-w7-0", 7, 0))
        assert await bench.do(effect) == WATCH_SETTLE_SECONDS
        assert await bench.do(effect) == WATCH_SETTLE_SECONDS
        assert [key for key in bench.cluster.objects if key[0] == PODS.plural] == [("pods", "ns", "j-w7-0")]

    async def test_a_name_that_somebody_else_has_taken_is_told(self, bench: Bench) -> None:
        metadata = {"name": "j-w7-0", "namespace": "ns", "uid": "u"}
        await bench.cluster.create(PODS, {"metadata": metadata, "spec": {}, "status": {}})
        with pytest.raises(kopf.TemporaryError, match="taken by a pod that is not this job's"):
            await bench.do(CreatePod(WorkerRecord("j-w7-0", 7, 0)))

    @pytest.mark.parametrize(("force", "grace"), [(True, 0), (False, None)])
    async def test_deletion_is_of_this_very_pod(self, bench: Bench, force: bool, grace: int | None) -> None:
        assert await bench.do(DeletePod("j-w1-0", "uid-1", force)) == WATCH_SETTLE_SECONDS
        assert bench.cluster.deletions == [("pods", "j-w1-0", "uid-1", grace)]


async def test_a_job_is_deleted_by_its_uid(bench: Bench) -> None:
    assert await bench.do(DeleteJob("u1d2c3")) == WATCH_SETTLE_SECONDS
    assert bench.cluster.deletions == [(TRAINING_JOBS.plural, "j", "u1d2c3", None)]


class TestQuarantine:
    async def test_what_became_of_the_node_is_told_when_it_changes(self, bench: Bench) -> None:
        node = {"metadata": {"name": "node-1", "uid": "n1", "labels": {}}, "spec": {}, "status": {}}
        bench.cluster._store(("nodes", "", "node-1"), node)
        wanted = RequestQuarantine(QuarantineRequest("node-1", "n1", "XID 79", "i", at=NOW))
        for _ in range(2):
            assert await bench.do(wanted) > 0
        ruling = bench.desk.cache.results.quarantine_decisions["i", "node-1"]
        assert ruling.verdict is QuarantineVerdict.SUSPECTED
        assert [(kind, reason) for kind, reason, _ in bench.events()] == [("Normal", "QuarantineNode")]
        assert (NODE_QUARANTINES.plural, "", "node-1") in bench.cluster.objects
        bench.desk.cache.results.quarantine_decisions["i", "node-1"] = QuarantineDecision(
            QuarantineVerdict.PAUSED, "remedies were paused"
        )
        await bench.do(wanted)
        assert len(bench.events()) == 2


class TestNetwork:
    async def test_the_policy_is_made_and_put_right_and_otherwise_left_alone(self, bench: Bench) -> None:
        def policy() -> dict[str, Any]:
            (found,) = (body for key, body in bench.cluster.objects.items() if key[0] == NETWORK_POLICIES.plural)
            return found

        await bench.do(ApplyNetworkPolicy(1))
        made = policy()["metadata"]["resourceVersion"]
        await bench.do(ApplyNetworkPolicy(1))
        assert policy()["metadata"]["resourceVersion"] == made
        wanted = policy()["spec"]
        policy()["spec"] = {**wanted, "ingress": [{}]}
        await bench.do(ApplyNetworkPolicy(1))
        assert policy()["spec"] == wanted

    async def test_one_that_another_operator_has_just_made_will_do(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def taken(*_: object, **__: object) -> Object:
            raise Conflict("exists already")

        monkeypatch.setattr(bench.cluster, "create", taken)
        assert await bench.do(ApplyNetworkPolicy(1)) > 0


def incident(**changes: Any) -> Incident:
    known = Incident("i", IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "rank 2 hangs", NOW - 9, NOW - 8, NOW - 7)
    return replace(known, **changes)


ACTED = {"remedy": str(Remedy.RESTART_RANKS), "applied": NOW - 7}


class TestIncidents:
    async def write(self, bench: Bench, now: Incident, before: Incident | None = None) -> list[tuple[str, str, str]]:
        """What people are told by it."""
        known = len(bench.events())
        assert await bench.do(WriteIncident(now, before)) == 0.0
        assert bench.desk.written_incidents[now.name] == now
        assert (INCIDENT_OBJECTS.plural, "ns", "i") in bench.cluster.objects
        return bench.events()[known:]

    async def test_beginning_and_end_are_told_once(self, bench: Bench) -> None:
        opened = incident(**ACTED)
        (told,) = await self.write(bench, opened)
        assert told == ("Warning", "IncidentOpened", "rank 2 hangs; applied: RestartRanks (i)")
        assert await self.write(bench, replace(opened, evidence=("more",)), opened) == []
        closed = replace(opened, outcome=IncidentOutcome.RECOVERED, recovered=NOW - 1)
        (told,) = await self.write(bench, closed, opened)
        assert told == ("Normal", "IncidentClosed", "i: Recovered 8.0 s after the first sign; rank 2 hangs")
        assert await self.write(bench, replace(closed, quarantine_summary="node-1 is quarantined"), closed) == []

    async def test_one_that_is_over_before_it_is_written_is_told_as_such(self, bench: Bench) -> None:
        over = incident(remedy=None, outcome=IncidentOutcome.RECOMMENDED)
        assert await self.write(bench, over) == [("Normal", "IncidentClosed", "i: Recommended; rank 2 hangs")]

    async def test_what_became_of_the_node_stands_in_it(self, bench: Bench) -> None:
        def message() -> object:
            return bench.cluster.objects[INCIDENT_OBJECTS.plural, "ns", "i"]["status"].get("message")

        await self.write(bench, incident())
        assert message() is None
        await self.write(bench, incident(quarantine_summary="node-1 is quarantined"), incident())
        assert message() == "node-1 is quarantined"

    async def test_what_is_only_recommended_says_so(self, bench: Bench) -> None:
        (told,) = await self.write(bench, incident(remedy=str(Remedy.REPLACE_WORKER)))
        assert told[2] == "rank 2 hangs; recommended: ReplaceWorker (i)"

    async def test_nothing_can_be_done(self, bench: Bench) -> None:
        (told,) = await self.write(bench, incident())
        assert told[2] == "rank 2 hangs; recommended: nothing (i)"

    @pytest.mark.parametrize(
        ("outcome", "kind"),
        [
            (IncidentOutcome.FAILED, "Warning"),
            (IncidentOutcome.INEFFECTIVE, "Warning"),
            (IncidentOutcome.SUPERSEDED, "Normal"),
        ],
    )
    async def test_what_did_not_help_is_a_warning(self, bench: Bench, outcome: IncidentOutcome, kind: str) -> None:
        opened = incident(**ACTED)
        await self.write(bench, opened)
        (told,) = await self.write(bench, replace(opened, outcome=outcome), opened)
        assert told[0] == kind

    async def test_they_are_counted(self, bench: Bench) -> None:
        def count(counter: Any, *labels: str) -> float:
            return float(counter.labels(*labels)._value.get())

        opened = (IncidentCause.HANG, IncidentClass.UNKNOWN, "Act")
        before = count(metrics.INCIDENTS_OPENED, *opened), count(metrics.REMEDIES_APPLIED, Remedy.RESTART_RANKS)
        await self.write(bench, incident(**ACTED))
        await self.write(bench, incident(**ACTED, evidence=("more",)), incident(**ACTED))
        after = count(metrics.INCIDENTS_OPENED, *opened), count(metrics.REMEDIES_APPLIED, Remedy.RESTART_RANKS)
        assert after == (before[0] + 1, before[1] + 1)

    async def test_only_remedies_that_were_applied_are_counted(self, bench: Bench) -> None:
        def remedies() -> float:
            return sum(sample.value for metric in metrics.REMEDIES_APPLIED.collect() for sample in metric.samples)

        before = remedies()
        await self.write(bench, incident(remedy=str(Remedy.RESTART_RANKS)))
        bench.cluster.objects.clear()
        await self.write(bench, incident(applied=NOW))
        assert remedies() == pytest.approx(before, abs=0.5)


class TestBehaviour:
    async def test_patterns_are_localised_and_kept_with_their_incident(self, bench: Bench) -> None:
        slow = [
            build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == 1 else HEALTHY_WORK, 0.6)
            for rank in range(3)
        ]
        bench.desk.cache.profile.by_rank = dict(build_answers(slow))
        await bench.do(LocalizeProfile("profile-7", 4))
        done = bench.desk.cache.profile.localized
        assert done is not None
        assert (done.window, done.localization.finding.culprit) == ("profile-7", "train.py:augment on rank 1")
        assert done.localization.remarks == ("3 of 4 ranks have answered",)
        ((kind, reason, note),) = bench.events()
        assert (kind, reason) == ("Normal", "ProfileWindow")
        assert "train.py:augment on rank 1" in note

        with pytest.raises(NotFound):  # tried again: the incident is written by another errand
            await bench.do(SaveProfile("profile-7", "why"))
        await bench.cluster.create(INCIDENT_OBJECTS, {"metadata": {"name": "why", "namespace": "ns", "uid": "u"}})
        for _ in range(2):
            await bench.do(SaveProfile("profile-7", "why"))
        kept = await bench.cluster.get(PROFILE_WINDOWS, "why", "ns")
        assert kept["metadata"]["ownerReferences"][0]["uid"] == "u"
        page = ProfilePage.from_json(kept["spec"]["content"].encode())
        assert [answer.pattern.rank for answer in page.answers] == [1, 0, 2]
        assert page.plots[0].function == "train.py:augment"
        assert page.plots[0].seconds == pytest.approx((0.0, 0.2, 0.0), abs=1e-3)
        assert bench.desk.cache.profile.localized is not None
        assert bench.desk.cache.profile.localized.page == ""
