"""One pass over a job, with an API server that sometimes fails."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import kopf
import pytest
from prometheus_client import REGISTRY

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import Evidence, RankMetrics
from pacekeeper_operator import metrics
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import CheckpointSpec
from pacekeeper_operator.decide import STEPS
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.stragglers.straggler import EVIDENCE_ANSWER_SECONDS
from pacekeeper_operator.endpoint.sidecars import Caller, SidecarService
from pacekeeper_operator.handlers.trainingjobs import run_job_loop
from pacekeeper_operator.kube.client import PODS, TRAINING_JOB_STATES, Denied, NotFound, ObjectRejected
from pacekeeper_operator.observe.job_cache import JobRegistry, WorkerContact
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.observe.rank_metrics import read_rank_rows
from pacekeeper_operator.runtime import job_state
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import (
    clean_up,
    close_incidents,
    create_job_context,
    describe_resize,
    hide_job_metrics,
    reconcile_job,
)
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.job_requests import JobRequests
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import NOW, build_fresh, build_job, build_policy, build_training, change_worker


async def start_operator(cluster: FakeCluster, observation: Observation) -> tuple[Operator, JobContext]:
    """Start an operator with up-to-date stores, before its first pass."""
    await store_job(cluster, observation)
    operator = Operator(
        Settings(network_policies=False), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", "")
    )
    operator.paused = ""
    await operator.stores.pods.refresh(cluster, ())
    return operator, create_job_context(operator, observation.job, {})


def find_condition(cluster: FakeCluster, name: str) -> dict[str, Any]:
    found = cluster.objects["trainingjobs", "ns", "j"]["status"]["conditions"]
    return next(item for item in found if item["type"] == name)


@pytest.fixture
def cluster() -> FakeCluster:
    metrics.publish_job_metrics("ns", "j", None)  # the test before may have exported metrics of it
    return FakeCluster()


@pytest.mark.parametrize(
    "status",
    [{}, {"observedGeneration": -1}, {"phase": "Running", "round": 3, "checkpointSubPath": "j"}],
    ids=["a new job", "by the API server", "with a lost state"],
)
async def test_a_jobs_checkpoints_lie_in_its_folder_on_its_claim(status: dict[str, Any], cluster: FakeCluster) -> None:
    job = build_job(1, 0, checkpoint=CheckpointSpec(volume_claim_name="claim"))
    operator, _ = await start_operator(cluster, build_fresh(job=job))
    await cluster.delete(TRAINING_JOB_STATES, "j", "ns")
    context = create_job_context(operator, job, {"status": status})
    for _ in range(3):
        await reconcile_job(operator, context)
        await context.effect_runner.wait_until_idle()
    pod = next(body for key, body in cluster.objects.items() if key[0] == "pods")
    mounts = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")["volumeMounts"]
    assert next(mount for mount in mounts if mount["mountPath"] == "/checkpoints").get("subPath") == "j"
    assert cluster.objects["trainingjobs", "ns", "j"]["status"].get("checkpointSubPath") == "j"


async def test_a_failing_list_of_pods_changes_nothing(cluster: FakeCluster) -> None:
    """After a 429 at the restart of the operator, no worker counts as lost."""
    observation = build_training(replicas=2, spares=1)
    await store_job(cluster, observation)
    cluster.failures["pods"] = [kopf.TemporaryError("429 too many requests")]
    operator = Operator(Settings(), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""))
    with pytest.raises(kopf.TemporaryError):
        await operator.stores.pods.refresh(cluster, ())
    assert not operator.stores.pods.listed.is_set()
    await operator.stores.pods.refresh(cluster, ())
    cluster.failures["pods"] = [kopf.TemporaryError("429 too many requests")]
    with pytest.raises(kopf.TemporaryError):
        await operator.stores.pods.refresh(cluster, ())
    context = create_job_context(operator, observation.job, {})
    await reconcile_job(operator, context)
    await context.effect_runner.wait_until_idle()
    assert context.cache.desired is not None
    state = context.cache.desired.state
    assert [w.name for w in state.placement.workers if not w.leaving] == ["j-w0-0", "j-w1-0", "j-w2-0"]
    assert not state.incidents.current


class TestRequests:
    """A job whose rank 2 has become slow, and whose ranks do not answer."""

    async def start(self, cluster: FakeCluster, runtime: FixedTimeRuntime) -> tuple[Operator, JobContext]:
        """Start a leader that has received the ranks' metrics."""
        operator = Operator(
            Settings(network_policies=False),
            cluster,
            JobRegistry(0.0),
            INSTALLATION,
            PrometheusClient("", "", ""),
            runtime,
            paused="",
        )
        await operator.stores.pods.refresh(cluster, ())
        context = create_job_context(operator, build_job(), {})
        for rank, view in enumerate(build_training().members):
            assert view.heartbeat is not None
            own = 0.16 if rank == 2 else 0.08
            rows = read_rank_rows([RankMetrics(rank, 32, 0.17, own, own / 8, 0.17 - own, 8, 0.1)])
            heartbeat = replace(view.heartbeat, training=replace(view.heartbeat.training, sync_mode="Sync"))
            context.cache.contacts[view.name] = WorkerContact(heartbeat, NOW, open_polls=1, rank_rows=rows)
        return operator, context

    async def test_a_pass_that_only_requests_writes_nothing(self, cluster: FakeCluster) -> None:
        await store_job(cluster, build_training())
        runtime = FixedTimeRuntime()
        operator, context = await self.start(cluster, runtime)
        await reconcile_job(operator, context)
        first, version = context.cache.requests.evidence_name, context.cache.resource_version
        stored = cluster.objects["trainingjobstates", "ns", "j"]
        assert first.startswith("straggler-")
        runtime.passed += EVIDENCE_ANSWER_SECONDS + 1.0
        await reconcile_job(operator, context)
        assert context.cache.requests.evidence_name not in ("", first), "requested again"
        assert context.cache.resource_version == version
        assert cluster.objects["trainingjobstates", "ns", "j"] == stored
        assert context.cache.plan is not None
        assert context.cache.plan.version == build_training().plan.version
        assert "evidenceRequest" not in json.dumps(stored)

    async def test_a_state_that_another_writer_has_changed_ends_the_requests(self, cluster: FakeCluster) -> None:
        await store_job(cluster, build_training())
        operator, context = await self.start(cluster, FixedTimeRuntime())
        await reconcile_job(operator, context)
        first = context.cache.requests.evidence_name
        stored = cluster.objects["trainingjobstates", "ns", "j"]
        await cluster.replace(TRAINING_JOB_STATES, copy.deepcopy(stored))
        context.cache.needs_reload = True
        await job_state.load_state(cluster, context.job, context.cache)
        assert context.cache.requests == JobRequests()
        await reconcile_job(operator, context)
        assert context.cache.requests.evidence_name not in ("", first)

    async def test_a_new_leader_asks_again_and_drops_old_answers(self, cluster: FakeCluster) -> None:
        await store_job(cluster, build_training())
        runtime = FixedTimeRuntime()
        operator, context = await self.start(cluster, runtime)
        await reconcile_job(operator, context)
        first, state = context.cache.requests.evidence_name, context.cache.desired
        assert state is not None
        runtime.passed += 1.0
        operator, context = await self.start(cluster, runtime)
        await reconcile_job(operator, context)
        second = context.cache.requests.evidence_name
        assert second.startswith("straggler-"), "at once: nothing shows when the last leader asked"
        assert second != first
        assert context.cache.desired is not None
        assert context.cache.desired.is_stored_as(state), "the investigation goes on"
        sidecars, caller = SidecarService(cluster, operator.jobs, runtime), Caller("ns", "j", "j-w0-0")
        assert not sidecars.needs_evidence(caller, first)
        sidecars.receive_evidence(caller, Evidence(first, "j-w0-0", 1))
        assert context.cache.evidence == {}
        assert sidecars.needs_evidence(caller, second)


async def test_a_failing_step_does_not_affect_others_and_is_reported(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_step(_observation: Observation, _policy: Policy) -> DesiredState:
        raise ZeroDivisionError("a bug")

    steps = tuple((name, fail_step if name == "investigation" else step) for name, step in STEPS)
    monkeypatch.setattr("pacekeeper_operator.decide.evaluate.STEPS", steps)
    observation = change_worker(build_training(replicas=2, spares=1), "j-w1-0", gone=True)
    result = evaluate_job(observation, build_policy())
    assert [incident.cause for incident in result.desired.state.incidents.current] == [IncidentCause.WORKER_LOST]
    assert result.failed_steps == ("investigation: ZeroDivisionError('a bug')",)

    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, context)
    assert "a bug" in find_condition(cluster, "ActionBlocked")["message"]


async def test_a_refused_write_of_the_state_is_reported_in_the_status(cluster: FakeCluster) -> None:
    """No effect is carried out that is not written, and the status is written nevertheless."""
    observation = build_training(replicas=2, spares=1)
    operator, context = await start_operator(cluster, observation)
    await cluster.delete(PODS, "j-w1-0", "ns")
    await operator.stores.pods.refresh(cluster, ())
    cluster.refusals["trainingjobstates"] = [ObjectRejected("etcdserver: request is too large")]
    with pytest.raises(ObjectRejected):
        await reconcile_job(operator, context)
    await context.effect_runner.wait_until_idle()
    assert find_condition(cluster, "ActionBlocked")["status"] == "True"
    assert "too large" in find_condition(cluster, "ActionBlocked")["message"]
    assert not [key for key in cluster.objects if key[0] == "incidents"], "what is not written does not hold"
    await reconcile_job(operator, context)
    await context.effect_runner.wait_until_idle()
    assert [key for key in cluster.objects if key[0] == "incidents"]
    assert find_condition(cluster, "ActionBlocked")["status"] == "False"


async def test_an_unreadable_state_is_reported_with_its_remedy(cluster: FakeCluster) -> None:
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    cluster.objects["trainingjobstates", "ns", "j"]["state"] = "rubbish"
    with pytest.raises(InputError):
        await reconcile_job(operator, context)
    assert "delete it" in find_condition(cluster, "ActionBlocked")["message"]
    await check_deletion_despite_unreadable_state(operator, context)


def read_metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"pacekeeper_job_{name}", {"namespace": "ns", "trainingjob": "j", **labels})


async def test_the_status_of_a_job_is_exported_until_its_metrics_are_hidden(cluster: FakeCluster) -> None:
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, context)
    status = cluster.objects["trainingjobs", "ns", "j"]["status"]
    assert read_metric("phase", phase=status["phase"]) == 1
    assert read_metric("workers", state="desired") == 2
    assert read_metric("restarts_left") == read_metric("restarts_allowed") == context.job.spec.remediation.max_restarts
    cluster.objects["trainingjobstates", "ns", "j"]["state"] = "rubbish"
    context.cache._desired = None
    with pytest.raises(InputError):
        await reconcile_job(operator, context)
    assert read_metric("condition", condition="ActionBlocked", reason="ActionFailed") == 1
    assert read_metric("restarts_left") is None, "they are unknown"
    hide_job_metrics(context.job)
    assert read_metric("phase", phase=status["phase"]) is None
    assert read_metric("condition", condition="ActionBlocked", reason="ActionFailed") is None


def test_a_resize_is_described() -> None:
    four_workers, no_workers = build_training(replicas=4).plan, Plan()
    three_workers = replace(four_workers, members=four_workers.members[:3])
    assert (describe_resize(four_workers, three_workers), describe_resize(three_workers, four_workers)) == (
        "4 → 3",
        "3 → 4",
    )
    assert not any(
        describe_resize(*pair)
        for pair in [(four_workers, four_workers), (no_workers, four_workers), (four_workers, no_workers)]
    )


class StopFlag(asyncio.Event):
    """A flag like that of kopf, which is also tested as a bool."""

    def __bool__(self) -> bool:
        return self.is_set()


async def test_a_stopped_job_loop_exports_no_metrics(cluster: FakeCluster) -> None:
    operator, _ = await start_operator(cluster, build_training(replicas=2, spares=1))
    await operator.stores.nodes.refresh(cluster, ())
    body = {**cluster.objects["trainingjobs", "ns", "j"], "spec": {"replicas": 2, "template": {}}}
    stopped = StopFlag()
    handler: Any = run_job_loop  # kopf gives it more than it takes
    loop = asyncio.create_task(handler(memo=kopf.Memo(operator=operator), body=body, stopped=stopped))
    async with asyncio.timeout(60):
        while read_metric("workers", state="desired") is None:  # noqa: ASYNC110  # a gauge can only be polled
            await asyncio.sleep(0)
    stopped.set()
    await loop
    assert read_metric("workers", state="desired") is None


async def check_deletion_despite_unreadable_state(operator: Operator, context: JobContext) -> None:
    """Check that an unreadable state does not prevent the deletion of pods that the API server lists."""
    with pytest.raises(InputError):
        await close_incidents(operator, context)
    assert not await clean_up(operator, context), "three pods were still there"
    assert await clean_up(operator, context)


async def test_an_operator_that_does_not_lead_writes_nothing(cluster: FakeCluster) -> None:
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    before = dict(cluster.objects)
    operator.is_leader = lambda: False
    with pytest.raises(kopf.TemporaryError, match="Lease"):
        await reconcile_job(operator, context)
    assert cluster.objects == before


async def test_a_failing_pass_does_not_wake_the_next_one(cluster: FakeCluster) -> None:
    """Otherwise the loop repeats without a pause while the Lease is not held."""
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    operator.is_leader = lambda: False
    context.cache.wake.set()
    with pytest.raises(kopf.TemporaryError, match="Lease"):
        await reconcile_job(operator, context)
    assert not context.cache.wake.is_set()


async def test_a_deleted_state_is_written_again_and_no_worker_is_replaced(cluster: FakeCluster) -> None:
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, context)
    del cluster.objects["trainingjobstates", "ns", "j"]
    await cluster.delete(PODS, "j-w2-0", "ns")
    await operator.stores.pods.refresh(cluster, ())
    with pytest.raises(NotFound):
        await reconcile_job(operator, context)
    await reconcile_job(operator, context)
    written = state_codec.decode_state(cluster.objects["trainingjobstates", "ns", "j"], "j").desired
    assert [member.worker for member in written.plan.members] == ["j-w0-0", "j-w1-0"]


async def test_a_state_deleted_without_pending_writes_is_written_again(
    cluster: FakeCluster,
) -> None:
    """Otherwise the next operator would find nothing, and replace all workers."""
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, context)
    del cluster.objects["trainingjobstates", "ns", "j"]
    await reconcile_job(operator, context)
    assert ("trainingjobstates", "ns", "j") not in cluster.objects, "no pass reads it"
    operator.jobs.verify_states(await cluster.list_with_version(TRAINING_JOB_STATES), "")
    assert context.cache.wake.is_set()
    await reconcile_job(operator, context)
    written = state_codec.decode_state(cluster.objects["trainingjobstates", "ns", "j"], "j").desired
    assert [member.worker for member in written.plan.members] == ["j-w0-0", "j-w1-0"]


async def test_a_state_that_becomes_unreadable_fails_each_pass_until_it_is_repaired(cluster: FakeCluster) -> None:
    """A pass with the cached state would report that all is well."""
    operator, context = await start_operator(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, context)
    state = cluster.objects["trainingjobstates", "ns", "j"]
    await cluster.replace(TRAINING_JOB_STATES, {**state, "plan": "rubbish"})
    operator.jobs.verify_states(await cluster.list_with_version(TRAINING_JOB_STATES), "")
    for _ in range(3):
        with pytest.raises(InputError, match="cannot be read"):
            await reconcile_job(operator, context)
    await cluster.replace(
        TRAINING_JOB_STATES, {**state, "metadata": cluster.objects["trainingjobstates", "ns", "j"]["metadata"]}
    )
    await reconcile_job(operator, context)


async def test_a_namespace_that_may_not_be_read_is_skipped(cluster: FakeCluster) -> None:
    """For example, it is being deleted and has lost its RoleBinding."""
    await store_job(cluster, build_training(replicas=2, spares=1))
    settings = Settings(network_policies=False)
    operator = Operator(settings, cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""))
    cluster.failures["pods"] = [Denied("pods is forbidden")]
    await operator.stores.pods.refresh(cluster, ("terminating", "ns"))
    assert operator.stores.pods.listed.is_set()
    assert len(operator.stores.pods.get_group(("ns", "j"))) == 3


def test_an_earlier_job_does_not_replace_a_later_one_of_its_name() -> None:
    """Its loop may still end while a new job of its name exists."""
    registry, earlier = JobRegistry(0.0), build_training().job
    assert earlier.created_at is not None
    later = replace(earlier, uid="later", created_at=earlier.created_at + 60)
    cached = registry.get_or_create(later)
    assert registry.get_or_create(earlier) is not cached
    assert registry.find("ns", "j") is cached
    registry.forget(earlier)
    assert registry.find("ns", "j") is cached
