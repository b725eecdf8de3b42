"""What of a TrainingJob's events wakes its loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest

from pacekeeper_operator.api.names import ANNOTATION_PROFILE
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.decide.effects import CreatePod
from pacekeeper_operator.handlers import trainingjobs
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.state.desired_state import WorkerRecord
from testing.operators.observations import build_training
from tests.unit.operator.runtime.test_job_context import at


class Stopped(asyncio.Event):
    """As kopf's flag."""

    def __bool__(self) -> bool:
        return self.is_set()


class Memo(kopf.Memo):
    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        self.operator = self
        self.jobs = JobRegistry(0.0)
        self.known = self.jobs.get_or_create(job)


def manifest(managed_by: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"template": {}, "replicas": 2} | ({"managedBy": managed_by} if managed_by else {})
    metadata = {"namespace": "ns", "name": "j", "uid": "u", "generation": 3, "resourceVersion": "17"}
    return {"metadata": metadata, "spec": spec}


async def wakes(body: dict[str, Any], job: TrainingJob) -> bool:
    memo = Memo(job)
    changed: Any = trainingjobs.on_job_changed  # kopf hands over more than it takes
    await changed(memo=memo, body=body, namespace="ns", name="j")
    return memo.known.wake.is_set()


@pytest.mark.parametrize("queued", ["", "waits for its queue"])
async def test_our_own_words_on_it_do_not(queued: str) -> None:
    """Held by its queue, the job is known with another spec than it has."""
    job = TrainingJob.parse(manifest())
    job = replace(job, queue_hold_reason=queued, spec=replace(job.spec, suspend=bool(queued)))
    body = manifest() | {"status": {"phase": "Running", "step": 7}}
    body["metadata"]["resourceVersion"] = "18"
    assert not await wakes(body, job)


@pytest.mark.parametrize(
    "metadata",
    [
        {"generation": 4},
        {"generation": 4, "deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"annotations": {ANNOTATION_PROFILE: "now"}},
        {"uid": "another"},
    ],
)
async def test_what_its_user_wants_does(metadata: dict[str, Any]) -> None:
    body = manifest()
    body["metadata"] |= metadata
    assert await wakes(body, TrainingJob.parse(manifest()))


async def test_what_comes_while_its_pass_waits_for_its_turn_is_in_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    place = await at(build_training())
    operator, body, seen = place.operator, manifest(), list[int]()
    stopped = Stopped()

    async def reconcile(_: Any, desk: JobContext) -> float:
        seen.append(desk.job.generation)
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
    await asyncio.wait_for(loop, 10)
    assert seen == [4]


async def test_a_pod_under_creation_is_there_before_its_job_is_cleaned_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else it appears after the list that finds none, and outlives its job."""
    place = await at(build_training())
    operator, body, stopped = place.operator, manifest(), Stopped()
    sent, answered, created = asyncio.Event(), asyncio.Event(), list[str]()

    async def create(effect: Any) -> float:
        sent.set()
        await answered.wait()
        created.append(effect.key)
        return 0.0

    async def reconcile(_: Any, desk: JobContext) -> float:
        desk.effect_runner.handle = create
        await desk.effect_runner.submit([CreatePod(WorkerRecord("j-w0-0", 0, 0))])
        return 3600.0

    monkeypatch.setattr(trainingjobs, "reconcile_job", reconcile)
    loop = asyncio.create_task(
        trainingjobs._reconcile_until_stopped(operator, TrainingJob.parse(body), cast(Any, body), cast(Any, stopped))
    )
    await asyncio.wait_for(sent.wait(), 10)
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stopped.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not loop.done()
    answered.set()
    await asyncio.wait_for(loop, 10)
    assert created


async def test_a_deleted_job_is_taken_down_whatever_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf releases it when this returns, in the operator that has kept it, and in one that has just begun."""
    place = await at(build_training())
    operator, body, errors = place.operator, manifest(), [KeyError("x"), kopf.TemporaryError("busy"), None, None]
    left = [True, True, False, True]  # what the looks find, where they do not fail

    async def look(_operator: Any, _desk: Any) -> bool:
        error = errors.pop(0)
        found = left.pop(0)
        if error is not None:
            raise error
        return found

    async def fail(_operator: Any, _desk: Any) -> None:
        raise KeyError("y")

    monkeypatch.setattr(trainingjobs, "clean_up", look)
    monkeypatch.setattr(trainingjobs, "close_incidents", fail)
    monkeypatch.setattr(operator.runtime, "sleep", lambda _: asyncio.sleep(0))
    body["metadata"]["uid"] = place.world.job.uid
    handler: Any = trainingjobs.finalize_job
    async with operator.jobs.get_or_create(
        TrainingJob.parse_identity(body)
    ).reconcile_lock:  # the loop has not ended yet
        taking_down = asyncio.create_task(handler(memo=kopf.Memo(operator=operator), body=body))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(errors) == 4
    await asyncio.wait_for(taking_down, 10)
    assert errors == []


async def test_what_another_controller_says_of_it_does() -> None:
    body = manifest("kueue.x-k8s.io/multikueue")
    assert await wakes(body | {"status": {"phase": "Running"}}, TrainingJob.parse(body))
