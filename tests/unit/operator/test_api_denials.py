"""Denials by the API server are reported with its message, and delay nothing else."""

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


class RefusingCluster(FakeCluster):
    """It refuses by `refuses`: plural → the error that each creation and replacement raises."""

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


async def start_operator(cluster: FakeCluster, job: TrainingJob) -> tuple[Operator, JobContext]:
    """Return an operator that has listed everything, and its context for the job."""
    operator = Operator(
        Settings(), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""), FixedTimeRuntime(), paused=""
    )
    await operator.stores.pods.refresh(cluster, ())
    await operator.stores.nodes.refresh(cluster, ())
    return operator, create_job_context(operator, job, {})


async def start_live_job() -> tuple[RefusingCluster, Operator, JobContext]:
    """Start a job of two workers that trains, without a spare; each worker has just reported."""
    cluster, observation = RefusingCluster(), build_training(replicas=2, spares=0)
    await store_job(cluster, observation)
    operator, context = await start_operator(cluster, observation.job)
    for view in observation.workers:
        assert view.heartbeat is not None
        context.cache.contacts[view.name] = WorkerContact(view.heartbeat, NOW, open_polls=1)
    return cluster, operator, context


async def run_passes(operator: Operator, context: JobContext, count: int = 2) -> float:
    """Run passes, each after the effects of the one before; return the seconds until the next."""
    pause = 0.0
    for _ in range(count):
        pause = await reconcile_job(operator, context)
        await context.effect_runner.wait_until_idle()
        await operator.stores.pods.refresh(operator.cluster, ())
    return pause


DENIALS = [
    Denied('pods "j-w0-0" is forbidden: exceeded quota: one, requested: pods=1, used: pods=1, limited: pods=1'),
    Denied('pods "j-w0-0" is forbidden: error looking up service account ns/absent: serviceaccount "absent" not found'),
    Denied('pods "j-w0-0" is forbidden: no PriorityClass with name urgent was found'),
    kopf.TemporaryError('POST /api/v1/namespaces/ns/pods: status 500: failed calling webhook "w.example": refused'),
]


class TestRefusedPods:
    @pytest.mark.parametrize("denial", DENIALS)
    async def test_a_new_job_reports_the_api_servers_message_at_once(self, denial: Exception) -> None:
        cluster, observation = RefusingCluster(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = denial
        operator, context = await start_operator(cluster, observation.job)
        pause = await run_passes(operator, context)
        assert cluster.status()["phase"] == "Pending"
        running = cluster.condition("Running")
        assert (running["status"], running["reason"]) == ("False", "PodDenied")
        assert str(denial) in running["message"]
        assert str(denial) in cluster.condition("ActionBlocked")["message"]
        assert pause < 5.0, "it is tried again soon"

    async def test_a_quota_that_refuses_the_sidecar_names_the_chart_value(self) -> None:
        cluster, observation = RefusingCluster(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        detail = "failed quota: team: must specify limits.cpu for: pacekeeper-sidecar"
        cluster.refuses["pods"] = Denied(f'pods "j-w0-0" is forbidden: {detail}')
        operator, context = await start_operator(cluster, observation.job)
        await run_passes(operator, context)
        message = cluster.condition("Running")["message"]
        assert detail in message
        assert "chart's value sidecarResources" in message
        assert "sidecarResources" in cluster.condition("ActionBlocked")["message"]

    async def test_a_template_that_a_webhook_denies_is_invalid(self) -> None:
        cluster, observation = RefusingCluster(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = ObjectRejected(
            'admission webhook "w.example" denied the request: no images from there'
        )
        operator, context = await start_operator(cluster, observation.job)
        await run_passes(operator, context, 3)
        invalid = cluster.condition("InvalidTemplate")
        assert (invalid["status"], "no images from there" in invalid["message"]) == ("True", True)

    async def test_a_job_starts_once_its_pods_are_accepted(self) -> None:
        cluster, observation = RefusingCluster(), build_fresh()
        await cluster.create(TRAINING_JOBS, {"metadata": {"namespace": "ns", "name": "j"}})
        cluster.refuses["pods"] = DENIALS[0]
        operator, context = await start_operator(cluster, observation.job)
        await run_passes(operator, context)
        cluster.refuses.clear()
        assert isinstance(operator.runtime, FixedTimeRuntime)
        operator.runtime.passed += 5
        await run_passes(operator, context, 3)
        assert cluster.names(PODS) == {"j-w0-0", "j-w1-0", "j-w2-0"}
        assert cluster.condition("ActionBlocked")["status"] == "False"

    @pytest.mark.parametrize("denial", DENIALS)
    async def test_a_live_job_that_cannot_replace_a_worker_reports_it_and_writes_its_incident(
        self, denial: Exception
    ) -> None:
        cluster, operator, context = await start_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["pods"] = denial
        await operator.stores.pods.refresh(cluster, ())
        await run_passes(operator, context)
        assert cluster.status()["phase"] == "Recovering"
        blocked = cluster.condition("ActionBlocked")
        assert (blocked["status"], blocked["reason"]) == ("True", "PodDenied")
        assert "create j-w1-1" in blocked["message"]
        assert str(denial) in blocked["message"]
        assert cluster.names(INCIDENT_OBJECTS) == {"j-r1-worker-lost-w1-0-u1d2c"}

    async def test_incidents_that_cannot_be_written_block_nothing_else(self) -> None:
        cluster, operator, context = await start_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["incidents"] = ObjectRejected("incidents is invalid: spec.message: Too long")
        await operator.stores.pods.refresh(cluster, ())
        await run_passes(operator, context)
        assert cluster.status()["phase"] == "Recovering"
        assert "Too long" in cluster.condition("ActionBlocked")["message"]
        assert "j-w1-1" in cluster.names(PODS)

    async def test_a_state_that_cannot_be_written_is_reported_and_blocks_all_effects(self) -> None:
        cluster, operator, context = await start_live_job()
        await cluster.delete(PODS, "j-w1-0", "ns")
        cluster.refuses["trainingjobstates"] = Denied("trainingjobstates is forbidden: exceeded quota: count")
        await operator.stores.pods.refresh(cluster, ())
        with pytest.raises(Denied):
            await reconcile_job(operator, context)
        await context.effect_runner.wait_until_idle()
        blocked = cluster.condition("ActionBlocked")
        assert (blocked["status"], "job state: trainingjobstates is forbidden" in blocked["message"]) == (
            "True",
            True,
        )
        assert cluster.names(PODS) == {"j-w0-0"}
        assert not cluster.names(INCIDENT_OBJECTS)


async def test_a_pod_without_a_record_is_deleted() -> None:
    """Its creation took longer than the job needed the pod."""
    cluster, operator, context = await start_live_job()
    for ordinal, uid in ((7, context.job.uid), (8, "of an earlier job of this name")):
        pod = build_worker_pod(context.job, ordinal, 0, INSTALLATION)
        pod["metadata"] |= {"uid": f"late-{ordinal}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        pod["metadata"]["ownerReferences"][0]["uid"] = uid
        await cluster.create(PODS, pod)
    await operator.stores.pods.refresh(cluster, ())
    await run_passes(operator, context)
    assert cluster.names(PODS) == {"j-w0-0", "j-w1-0", "j-w8-0"}, "the garbage collector deletes pods of other owners"


async def test_a_job_created_again_under_the_same_name_inherits_nothing() -> None:
    """The old job's finalizer was removed by force; its state and the operator's cache still exist."""
    cluster, observation = RefusingCluster(), build_training(replicas=2, spares=0)
    complete = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW - 5, stopped_at=NOW - 5))
    await store_job(cluster, complete)
    operator, old = await start_operator(cluster, observation.job)
    await run_passes(operator, old)
    assert cluster.status()["phase"] == "Complete"

    successor = replace(observation.job, uid="another-uid")
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"].pop("status")
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"]["metadata"]["uid"] = "another-uid"
    context = create_job_context(operator, successor, {})
    assert context.cache is not old.cache
    await run_passes(operator, context, 3)
    assert cluster.status()["phase"] == "Pending"
    (owner,) = cluster.objects[TRAINING_JOB_STATES.plural, "ns", "j"]["metadata"]["ownerReferences"]
    assert owner["uid"] == "another-uid"
    assert context.cache.desired is not None
    assert not context.cache.desired.state.lifecycle.completed_at
    assert not context.cache.desired.plan.members


async def test_a_later_operator_finds_nothing_of_the_earlier_job() -> None:
    cluster, observation = RefusingCluster(), build_training(replicas=2, spares=0)
    await store_job(
        cluster, observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW - 5, stopped_at=NOW - 5))
    )
    cluster.objects[TRAINING_JOBS.plural, "ns", "j"]["metadata"]["uid"] = "another-uid"
    operator, context = await start_operator(cluster, replace(observation.job, uid="another-uid"))
    await run_passes(operator, context, 3)
    assert cluster.status()["phase"] == "Pending"
