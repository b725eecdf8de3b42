"""What the API server denies is said, in its own words, and holds up nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.kube.client import (
    INCIDENT_OBJECTS,
    PODS,
    TRAINING_JOB_STATES,
    TRAINING_JOBS,
    Denied,
    Object,
    ObjectRejected,
    ResourceKind,
)
from pacekeeper_operator.observe.job_cache import JobRegistry, WorkerContact
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods.manifests import build_worker_pod
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import create_job_context, reconcile_job
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import NOW, build_fresh, build_training


class Choosy(FakeCluster):
    """Refuses what it is told to refuse: plural → what every creation and replacement raises."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[str, Exception] = {}

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        self._ask(kind)
        given = {"uid": f"given-{len(self.objects)}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        return await super().create(kind, {**body, "metadata": {**given, **body["metadata"]}}, dry_run=dry_run)

    async def replace(self, kind: ResourceKind, body: Object) -> Object:
        self._ask(kind)
        return await super().replace(kind, body)

    def _ask(self, kind: ResourceKind) -> None:
        if kind.plural in self.refuses:
            raise self.refuses[kind.plural]

    def names(self, kind: ResourceKind) -> set[str]:
        return {name for (plural, _, name) in self.objects if plural == kind.plural}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.objects[TRAINING_JOBS.plural, "ns", "j"].get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status()["conditions"] if c["type"] == kind)


async def looking(cluster: FakeCluster, job: TrainingJob) -> tuple[Operator, JobContext]:
    """An operator that has listed everything, and its desk for the job."""
    operator = Operator(
        Settings(), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""), FixedTimeRuntime(), paused=""
    )
    await operator.stores.pods.refresh(cluster, ())
    await operator.stores.nodes.refresh(cluster, ())
    return operator, create_job_context(operator, job, {})


async def of_live_job() -> tuple[Choosy, Operator, JobContext]:
    """A job of two workers that trains, without a spare; each of its workers has just been heard."""
    cluster, world = Choosy(), build_training(replicas=2, spares=0)
    await store_job(cluster, world)
    operator, desk = await looking(cluster, world.job)
    for view in world.workers:
        assert view.heartbeat is not None
        desk.cache.contacts[view.name] = WorkerContact(view.heartbeat, NOW, open_polls=1)
    return cluster, operator, desk


async def passes(operator: Operator, desk: JobContext, count: int = 2) -> float:
    """Passes, each after what the one before has sent off; seconds until the next is wanted."""
    pause = 0.0
    for _ in range(count):
        pause = await reconcile_job(operator, desk)
        await desk.effect_runner.wait_until_idle()
        await operator.stores.pods.refresh(operator.cluster, ())
    return pause


DENIALS = [
    Denied('pods "j-w0-0" is forbidden: exceeded quota: one, requested: pods=1, used: pods=1, limited: pods=1'),
    Denied('pods "j-w0-0" is forbidden: error looking up service account ns/nobody: serviceaccount "nobody" not found'),
    Denied('pods "j-w0-0" is forbidden: no PriorityClass with name urgent was found'),
    kopf.TemporaryError('POST /api/v1/namespaces/ns/pods: status 500: failed calling webhook "w.example": refused'),
]


class TestPodsThatAreRefused:
    @pytest.mark.parametrize("denial", DENIALS)
    async def test_a_new_job_says_so_at_once_in_the_api_servers_words(self, denial: Exception) -> None:
        cluster, world = Choosy(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = denial
        operator, desk = await looking(cluster, world.job)
        pause = await passes(operator, desk)
        assert cluster.status()["phase"] == "Pending"
        running = cluster.condition("Running")
        assert (running["status"], running["reason"]) == ("False", "PodDenied")
        assert str(denial) in running["message"]
        assert str(denial) in cluster.condition("ActionBlocked")["message"]
        assert pause < 5.0, "it is tried again soon"

    async def test_a_quota_that_the_sidecar_fails_names_it_and_the_value_that_sets_it(self) -> None:
        cluster, world = Choosy(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        words = "failed quota: team: must specify limits.cpu for: pacekeeper-sidecar"
        cluster.refuses["pods"] = Denied(f'pods "j-w0-0" is forbidden: {words}')
        operator, desk = await looking(cluster, world.job)
        await passes(operator, desk)
        message = cluster.condition("Running")["message"]
        assert words in message
        assert "chart's value sidecarResources" in message
        assert "sidecarResources" in cluster.condition("ActionBlocked")["message"]

    async def test_a_template_that_a_webhook_denies_is_invalid(self) -> None:
        cluster, world = Choosy(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = ObjectRejected(
            'admission webhook "w.example" denied the request: no images from there'
        )
        operator, desk = await looking(cluster, world.job)
        await passes(operator, desk, 3)
        invalid = cluster.condition("InvalidTemplate")
        assert (invalid["status"], "no images from there" in invalid["message"]) == ("True", True)

    async def test_it_begins_once_nothing_refuses_it_any_more(self) -> None:
        cluster, world = Choosy(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = DENIALS[0]
        operator, desk = await looking(cluster, world.job)
        await passes(operator, desk)
        cluster.refuses.clear()
        assert isinstance(operator.runtime, FixedTimeRuntime)
        operator.runtime.passed += 5
        await passes(operator, desk, 3)
        assert cluster.names(PODS) == {"j-w0-0", "j-w1-0", "j-w2-0"}
        assert cluster.condition("ActionBlocked")["status"] == "False"

    @pytest.mark.parametrize("denial", DENIALS)
    async def test_a_live_job_that_cannot_replace_a_worker_says_so_and_its_incident_is_written(
        self, denial: Exception
    ) -> None:
        cluster, operator, desk = await of_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["pods"] = denial
        await operator.stores.pods.refresh(cluster, ())
        await passes(operator, desk)
        assert cluster.status()["phase"] == "Recovering"
        blocked = cluster.condition("ActionBlocked")
        assert (blocked["status"], blocked["reason"]) == ("True", "PodDenied")
        assert "create j-w1-1" in blocked["message"]
        assert str(denial) in blocked["message"]
        assert cluster.names(INCIDENT_OBJECTS) == {"j-r1-worker-lost-w1-0-u1d2c"}

    async def test_incidents_that_cannot_be_written_keep_nothing_else_from_being_done(self) -> None:
        cluster, operator, desk = await of_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["incidents"] = ObjectRejected("incidents is invalid: spec.message: Too long")
        await operator.stores.pods.refresh(cluster, ())
        await passes(operator, desk)
        assert cluster.status()["phase"] == "Recovering"
        assert "Too long" in cluster.condition("ActionBlocked")["message"]
        assert "j-w1-1" in cluster.names(PODS)

    async def test_bookkeeping_that_cannot_be_written_is_said_and_nothing_is_done_that_is_not_written(self) -> None:
        cluster, operator, desk = await of_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["trainingjobstates"] = Denied("trainingjobstates is forbidden: exceeded quota: count")
        await operator.stores.pods.refresh(cluster, ())
        with pytest.raises(Denied):
            await reconcile_job(operator, desk)
        await desk.effect_runner.wait_until_idle()
        blocked = cluster.condition("ActionBlocked")
        assert (blocked["status"], "job state: trainingjobstates is forbidden" in blocked["message"]) == (
            "True",
            True,
        )
        assert cluster.names(PODS) == {"j-w0-0"}
        assert not cluster.names(INCIDENT_OBJECTS)


async def test_a_pod_without_a_record_is_deleted() -> None:
    """Its creation took so long that nobody wanted it any more when it came."""
    cluster, operator, desk = await of_live_job()
    for ordinal, uid in ((7, desk.job.uid), (8, "of an earlier job of this name")):
        pod = build_worker_pod(desk.job, ordinal, 0, INSTALLATION)
        pod["metadata"] |= {"uid": f"late-{ordinal}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        pod["metadata"]["ownerReferences"][0]["uid"] = uid
        await cluster.create(PODS, pod)
    await operator.stores.pods.refresh(cluster, ())
    await passes(operator, desk)
    assert cluster.names(PODS) == {"j-w0-0", "j-w1-0", "j-w8-0"}, "what is another's is for the garbage collector"


async def test_a_job_created_anew_under_the_same_name_inherits_nothing() -> None:
    """The old one's finalizer was taken away by force; its state and what this operator knows are still there."""
    cluster, world = Choosy(), build_training(replicas=2, spares=0)
    complete = world.with_desired(world.desired.with_lifecycle(completed_at=NOW - 5, stopped_at=NOW - 5))
    await store_job(cluster, complete)
    operator, old = await looking(cluster, world.job)
    await passes(operator, old)
    assert cluster.status()["phase"] == "Complete"

    anew = replace(world.job, uid="another-uid")
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"].pop("status")
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"]["metadata"]["uid"] = "another-uid"
    desk = create_job_context(operator, anew, {})
    assert desk.cache is not old.cache
    await passes(operator, desk, 3)
    assert cluster.status()["phase"] == "Pending"
    (owner,) = cluster.objects[TRAINING_JOB_STATES.plural, "ns", "j"]["metadata"]["ownerReferences"]
    assert owner["uid"] == "another-uid"
    assert desk.cache.desired is not None
    assert not desk.cache.desired.state.lifecycle.completed_at
    assert not desk.cache.desired.plan.members


async def test_an_operator_that_comes_later_finds_nothing_of_the_earlier_job_either() -> None:
    cluster, world = Choosy(), build_training(replicas=2, spares=0)
    await store_job(cluster, world.with_desired(world.desired.with_lifecycle(completed_at=NOW - 5, stopped_at=NOW - 5)))
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"]["metadata"]["uid"] = "another-uid"
    operator, desk = await looking(cluster, replace(world.job, uid="another-uid"))
    await passes(operator, desk, 3)
    assert cluster.status()["phase"] == "Pending"
