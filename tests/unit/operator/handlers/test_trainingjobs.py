"""Which events of a TrainingJob wake its loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest

from pacekeeper_operator.api.names import ANNOTATION_PROFILE
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.effects import CreatePod
from pacekeeper_operator.handlers import trainingjobs
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.services.shared.managed_jobsets import ManagedJobSets
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import WorkerRecord
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.managed_jobsets import build_managed_jobset
from testing.operators.observations import build_training
from tests.unit.operator.runtime.test_job_context import open_bench


class StopFlag(asyncio.Event):
    """A flag like that of kopf."""

    def __bool__(self) -> bool:
        return self.is_set()


class Memo(kopf.Memo):
    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        self.operator = self
        self.jobs = JobRegistry(0.0)
        self.known = self.jobs.get_or_create(job)
        self.jobsets = ManagedJobSets(Settings(), FakeCluster(), OperatorRuntime())


def build_manifest(managed_by: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"template": {}, "replicas": 2} | ({"managedBy": managed_by} if managed_by else {})
    metadata = {"namespace": "ns", "name": "j", "uid": "u", "generation": 3, "resourceVersion": "17"}
    return {"metadata": metadata, "spec": spec}


async def wakes_loop(body: dict[str, Any], job: TrainingJob) -> bool:
    memo = Memo(job)
    changed: Any = trainingjobs.on_job_changed  # kopf hands over more than it takes
    await changed(memo=memo, body=body, namespace="ns", name="j")
    return memo.known.wake.is_set()


async def test_the_phase_of_a_jobsets_job_requests_a_pass_over_the_jobset() -> None:
    memo, body = Memo(TrainingJob.parse(build_manifest())), build_manifest() | {"status": {"phase": "Running"}}
    memo.jobsets.store.update(build_managed_jobset(name="j"))
    assert memo.jobsets.take_due() == [("ns", "j")]
    changed: Any = trainingjobs.on_job_changed
    for step in (1, 2):  # only the first is news
        body["status"]["step"] = step
        await changed(memo=memo, body=body, namespace="ns", name="j")
        assert memo.jobsets.take_due() == ([("ns", "j")] if step == 1 else [])


@pytest.mark.parametrize("queued", ["", "waits for its queue"])
async def test_a_status_written_by_the_operator_does_not_wake_the_loop(queued: str) -> None:
    """A job that its queue holds is cached with another spec than its object has."""
    job = TrainingJob.parse(build_manifest())
    job = replace(job, queue_hold_reason=queued, spec=replace(job.spec, suspend=bool(queued)))
    body = build_manifest() | {"status": {"phase": "Running", "step": 7}}
    body["metadata"]["resourceVersion"] = "18"
    assert not await wakes_loop(body, job)


@pytest.mark.parametrize(
    "metadata",
    [
        {"generation": 4},
        {"generation": 4, "deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"annotations": {ANNOTATION_PROFILE: "now"}},
        {"uid": "another"},
    ],
)
async def test_a_change_by_the_user_wakes_the_loop(metadata: dict[str, Any]) -> None:
    body = build_manifest()
    body["metadata"] |= metadata
    assert await wakes_loop(body, TrainingJob.parse(build_manifest()))


async def test_a_change_before_a_queued_pass_begins_is_in_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await open_bench(build_training())
    operator, body, generations = bench.operator, build_manifest(), list[int]()
    stopped = StopFlag()

    async def reconcile(_: Any, context: JobContext) -> float:
        generations.append(context.job.generation)
        return 3600.0

    monkeypatch.setattr(trainingjobs, "reconcile_job", reconcile)
    async with operator.passes.lock:  # another job's pass begins
        loop = asyncio.create_task(
            trainingjobs._reconcile_until_stopped(
                operator, TrainingJob.parse(body), cast(Any, body), cast(Any, stopped)
            )
        )
        for _ in range(20):
            await asyncio.sleep(0)
        body["metadata"]["generation"] = 4
    for _ in range(100):
        await asyncio.sleep(0)
    stopped.set()
    await asyncio.wait_for(loop, 60)
    assert generations == [4]


async def test_clean_up_waits_for_a_pod_under_creation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the pod appears after the list that finds none, and outlives its job."""
    bench = await open_bench(build_training())
    operator, body, stopped = bench.operator, build_manifest(), StopFlag()
    requested, answered, created = asyncio.Event(), asyncio.Event(), list[str]()

    async def create(effect: Any) -> float:
        requested.set()
        await answered.wait()
        created.append(effect.key)
        return 0.0

    async def reconcile(_: Any, context: JobContext) -> float:
        context.effect_runner.handle = create
        await context.effect_runner.submit([CreatePod(WorkerRecord("j-w0-0", 0, 0))])
        return 3600.0

    monkeypatch.setattr(trainingjobs, "reconcile_job", reconcile)
    loop = asyncio.create_task(
        trainingjobs._reconcile_until_stopped(operator, TrainingJob.parse(body), cast(Any, body), cast(Any, stopped))
    )
    await asyncio.wait_for(requested.wait(), 60)
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stopped.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not loop.done()
    answered.set()
    await asyncio.wait_for(loop, 60)
    assert created


async def test_a_deleted_job_is_finalized_despite_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf removes its finalizer when this returns, in a running operator and in one that has just started."""
    bench = await open_bench(build_training())
    operator, body, errors = bench.operator, build_manifest(), [KeyError("x"), kopf.TemporaryError("busy"), None, None]
    left = [True, True, False, True]  # what each attempt finds, unless it fails

    async def clean_up(_operator: Any, _context: Any) -> bool:
        error = errors.pop(0)
        found = left.pop(0)
        if error is not None:
            raise error
        return found

    async def fail_close(_operator: Any, _context: Any) -> None:
        raise KeyError("y")

    monkeypatch.setattr(trainingjobs, "clean_up", clean_up)
    monkeypatch.setattr(trainingjobs, "close_incidents", fail_close)
    monkeypatch.setattr(operator.runtime, "sleep", lambda _: asyncio.sleep(0))
    body["metadata"]["uid"] = bench.observation.job.uid
    handler: Any = trainingjobs.finalize_job
    async with operator.jobs.get_or_create(
        TrainingJob.parse_identity(body)
    ).reconcile_lock:  # the loop has not ended yet
        finalizing = asyncio.create_task(handler(memo=kopf.Memo(operator=operator), body=body))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(errors) == 4
    await asyncio.wait_for(finalizing, 60)
    assert errors == []


async def test_a_status_written_by_another_controller_wakes_the_loop() -> None:
    body = build_manifest("kueue.x-k8s.io/multikueue")
    assert await wakes_loop(body | {"status": {"phase": "Running"}}, TrainingJob.parse(body))
