"""One pass over a job, with an API server that does not always answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import kopf
import pytest
from prometheus_client import REGISTRY

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_operator import metrics
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import CheckpointSpec
from pacekeeper_operator.decide import STEPS
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.handlers.trainingjobs import run_job_loop
from pacekeeper_operator.kube.client import PODS, TRAINING_JOB_STATES, Denied, NotFound, ObjectRejected
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
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
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.observations import build_fresh, build_job, build_policy, build_training, change_worker


async def at_work(cluster: FakeCluster, world: Observation) -> tuple[Operator, JobContext]:
    """An operator that has looked around, before its first pass."""
    await store_job(cluster, world)
    operator = Operator(
        Settings(network_policies=False), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", "")
    )
    operator.paused = ""
    await operator.stores.pods.refresh(cluster, ())
    return operator, create_job_context(operator, world.job, {})


def condition(cluster: FakeCluster, name: str) -> dict[str, Any]:
    found = cluster.objects["trainingjobs", "ns", "j"]["status"]["conditions"]
    return next(item for item in found if item["type"] == name)


@pytest.fixture
def cluster() -> FakeCluster:
    metrics.publish_job_metrics("ns", "j", None)  # whatever the test before has shown of it
    return FakeCluster()


@pytest.mark.parametrize(
    "status",
    [{}, {"observedGeneration": -1}, {"phase": "Running", "round": 3, "checkpointSubPath": "j"}],
    ids=["a new job", "by the API server", "whose bookkeeping is lost"],
)
async def test_a_jobs_checkpoints_lie_in_its_folder_on_its_claim(status: dict[str, Any], cluster: FakeCluster) -> None:
    its = build_job(1, 0, checkpoint=CheckpointSpec(volume_claim_name="claim"))
    operator, _ = await at_work(cluster, build_fresh(job=its))
    await cluster.delete(TRAINING_JOB_STATES, "j", "ns")
    desk = create_job_context(operator, its, {"status": status})
    for _ in range(3):
        await reconcile_job(operator, desk)
        await desk.effect_runner.wait_until_idle()
    pod = next(body for key, body in cluster.objects.items() if key[0] == "pods")
    mounts = next(its for its in pod["spec"]["containers"] if its["name"] == "trainer")["volumeMounts"]
    assert next(mount for mount in mounts if mount["mountPath"] == "/checkpoints").get("subPath") == "j"
    assert cluster.objects["trainingjobs", "ns", "j"]["status"].get("checkpointSubPath") == "j"


async def test_a_list_of_pods_that_fails_is_no_news(cluster: FakeCluster) -> None:
    """A 429 at the operator's restart: nobody has gone because nobody could be seen."""
    world = build_training(replicas=2, spares=1)
    await store_job(cluster, world)
    cluster.failures["pods"] = [kopf.TemporaryError("429 too many requests")]
    operator = Operator(Settings(), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""))
    with pytest.raises(kopf.TemporaryError):
        await operator.stores.pods.refresh(cluster, ())
    assert not operator.stores.pods.listed.is_set()
    await operator.stores.pods.refresh(cluster, ())
    cluster.failures["pods"] = [kopf.TemporaryError("429 too many requests")]
    with pytest.raises(kopf.TemporaryError):
        await operator.stores.pods.refresh(cluster, ())
    desk = create_job_context(operator, world.job, {})
    await reconcile_job(operator, desk)
    await desk.effect_runner.wait_until_idle()
    assert desk.cache.desired is not None
    state = desk.cache.desired.state
    assert [w.name for w in state.placement.workers if not w.leaving] == ["j-w0-0", "j-w1-0", "j-w2-0"]
    assert not state.incidents.current


async def test_a_step_that_fails_costs_its_own_work_only_and_is_told(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_observation: Observation, _policy: Policy) -> DesiredState:
        raise ZeroDivisionError("a bug of ours")

    steps = tuple((name, broken if name == "investigation" else step) for name, step in STEPS)
    monkeypatch.setattr("pacekeeper_operator.decide.evaluate.STEPS", steps)
    world = change_worker(build_training(replicas=2, spares=1), "j-w1-0", gone=True)
    thought = evaluate_job(world, build_policy())
    assert [incident.cause for incident in thought.desired.state.incidents.current] == [IncidentCause.WORKER_LOST]
    assert thought.failed_steps == ("investigation: ZeroDivisionError('a bug of ours')",)

    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, desk)
    assert "a bug of ours" in condition(cluster, "ActionBlocked")["message"]


async def test_a_write_that_is_refused_keeps_nobody_from_saying_so(cluster: FakeCluster) -> None:
    """Nothing is done that is not written, and the status is said all the same."""
    world = build_training(replicas=2, spares=1)
    operator, desk = await at_work(cluster, world)
    await cluster.delete(PODS, "j-w1-0", "ns")
    await operator.stores.pods.refresh(cluster, ())
    cluster.refusals["trainingjobstates"] = [ObjectRejected("etcdserver: request is too large")]
    with pytest.raises(ObjectRejected):
        await reconcile_job(operator, desk)
    await desk.effect_runner.wait_until_idle()
    assert condition(cluster, "ActionBlocked")["status"] == "True"
    assert "too large" in condition(cluster, "ActionBlocked")["message"]
    assert not [key for key in cluster.objects if key[0] == "incidents"], "it is not written, so it is not so"
    await reconcile_job(operator, desk)
    await desk.effect_runner.wait_until_idle()
    assert [key for key in cluster.objects if key[0] == "incidents"]
    assert condition(cluster, "ActionBlocked")["status"] == "False"


async def test_bookkeeping_that_cannot_be_read_is_told_with_its_remedy(cluster: FakeCluster) -> None:
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    cluster.objects["trainingjobstates", "ns", "j"]["state"] = "rubbish"
    with pytest.raises(InputError):
        await reconcile_job(operator, desk)
    assert "delete it" in condition(cluster, "ActionBlocked")["message"]
    await close_incidents_of_a_deleted_job(operator, desk)


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"pacekeeper_job_{name}", {"namespace": "ns", "trainingjob": "j", **labels})


async def test_what_is_said_of_the_job_is_shown_to_prometheus_until_nobody_looks_at_it(cluster: FakeCluster) -> None:
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, desk)
    status = cluster.objects["trainingjobs", "ns", "j"]["status"]
    assert shown("phase", phase=status["phase"]) == 1
    assert shown("workers", state="desired") == 2
    assert shown("restarts_left") == shown("restarts_allowed") == desk.job.spec.remediation.max_restarts
    cluster.objects["trainingjobstates", "ns", "j"]["state"] = "rubbish"
    desk.cache._desired = None
    with pytest.raises(InputError):
        await reconcile_job(operator, desk)
    assert shown("condition", condition="ActionBlocked", reason="ActionFailed") == 1
    assert shown("restarts_left") is None, "nobody knows"
    hide_job_metrics(desk.job)
    assert shown("phase", phase=status["phase"]) is None
    assert shown("condition", condition="ActionBlocked", reason="ActionFailed") is None


def test_who_trains_with_fewer_or_more_workers_says_so() -> None:
    four, none = build_training(replicas=4).plan, Plan()
    three = replace(four, members=four.members[:3])
    assert (describe_resize(four, three), describe_resize(three, four)) == ("4 → 3", "3 → 4")
    assert not any(describe_resize(*pair) for pair in [(four, four), (none, four), (four, none)])


class Stopped(asyncio.Event):
    """As kopf's: asked like a flag, too."""

    def __bool__(self) -> bool:
        return self.is_set()


async def test_who_stops_keeping_a_job_shows_nothing_of_it_any_more(cluster: FakeCluster) -> None:
    operator, _ = await at_work(cluster, build_training(replicas=2, spares=1))
    await operator.stores.nodes.refresh(cluster, ())
    body = {**cluster.objects["trainingjobs", "ns", "j"], "spec": {"replicas": 2, "template": {}}}
    stopped = Stopped()
    handler: Any = run_job_loop  # kopf gives it more than it takes
    keeping = asyncio.create_task(handler(memo=kopf.Memo(operator=operator), body=body, stopped=stopped))
    async with asyncio.timeout(60):
        while shown("workers", state="desired") is None:  # noqa: ASYNC110  # a gauge can only be looked at
            await asyncio.sleep(0)
    stopped.set()
    await keeping
    assert shown("workers", state="desired") is None


async def close_incidents_of_a_deleted_job(operator: Operator, desk: JobContext) -> None:
    """What cannot be read does not hold up its deletion: pods go by the API server's own word."""
    with pytest.raises(InputError):
        await close_incidents(operator, desk)
    assert not await clean_up(operator, desk), "three pods were still there"
    assert await clean_up(operator, desk)


async def test_who_does_not_lead_writes_nothing(cluster: FakeCluster) -> None:
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    before = dict(cluster.objects)
    operator.is_leader = lambda: False
    with pytest.raises(kopf.TemporaryError, match="Lease"):
        await reconcile_job(operator, desk)
    assert cluster.objects == before


async def test_a_pass_that_fails_is_no_news_for_the_next_one(cluster: FakeCluster) -> None:
    """Or the loop goes round without a pause for as long as the Lease is not held."""
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    operator.is_leader = lambda: False
    desk.cache.wake.set()
    with pytest.raises(kopf.TemporaryError, match="Lease"):
        await reconcile_job(operator, desk)
    assert not desk.cache.wake.is_set()


async def test_bookkeeping_that_was_deleted_is_written_anew_and_nobody_is_replaced(cluster: FakeCluster) -> None:
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, desk)
    del cluster.objects["trainingjobstates", "ns", "j"]
    await cluster.delete(PODS, "j-w2-0", "ns")
    await operator.stores.pods.refresh(cluster, ())
    with pytest.raises(NotFound):
        await reconcile_job(operator, desk)
    await reconcile_job(operator, desk)
    written = state_codec.decode_state(cluster.objects["trainingjobstates", "ns", "j"], "j").desired
    assert [member.worker for member in written.plan.members] == ["j-w0-0", "j-w1-0"]


async def test_bookkeeping_that_is_deleted_while_nothing_is_to_be_written_is_written_anew(
    cluster: FakeCluster,
) -> None:
    """Or the operator after this one would find nothing, and replace all workers."""
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, desk)
    del cluster.objects["trainingjobstates", "ns", "j"]
    await reconcile_job(operator, desk)
    assert ("trainingjobstates", "ns", "j") not in cluster.objects, "it was looked for in each pass"
    operator.jobs.verify_states(await cluster.list_with_version(TRAINING_JOB_STATES), "")
    assert desk.cache.wake.is_set()
    await reconcile_job(operator, desk)
    written = state_codec.decode_state(cluster.objects["trainingjobstates", "ns", "j"], "j").desired
    assert [member.worker for member in written.plan.members] == ["j-w0-0", "j-w1-0"]


async def test_a_bookkeeping_that_becomes_illegible_is_said_so_until_somebody_helps(cluster: FakeCluster) -> None:
    """A pass that went on with what it remembers would say that all is well."""
    operator, desk = await at_work(cluster, build_training(replicas=2, spares=1))
    await reconcile_job(operator, desk)
    state = cluster.objects["trainingjobstates", "ns", "j"]
    await cluster.replace(TRAINING_JOB_STATES, {**state, "plan": "rubbish"})
    operator.jobs.verify_states(await cluster.list_with_version(TRAINING_JOB_STATES), "")
    for _ in range(3):
        with pytest.raises(InputError, match="cannot be read"):
            await reconcile_job(operator, desk)
    await cluster.replace(
        TRAINING_JOB_STATES, {**state, "metadata": cluster.objects["trainingjobstates", "ns", "j"]["metadata"]}
    )
    await reconcile_job(operator, desk)


async def test_a_namespace_that_may_not_be_read_is_passed_over(cluster: FakeCluster) -> None:
    """It is being deleted, say, and its RoleBinding has gone."""
    await store_job(cluster, build_training(replicas=2, spares=1))
    settings = Settings(network_policies=False)
    operator = Operator(settings, cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""))
    cluster.failures["pods"] = [Denied("pods is forbidden")]
    await operator.stores.pods.refresh(cluster, ("going", "ns"))
    assert operator.stores.pods.listed.is_set()
    assert len(operator.stores.pods.get_group(("ns", "j"))) == 3


def test_an_earlier_job_does_not_take_a_later_ones_place() -> None:
    """Its loop may still end while the job of its name is there again."""
    memory, earlier = JobRegistry(0.0), build_training().job
    assert earlier.created_at is not None
    later = replace(earlier, uid="later", created_at=earlier.created_at + 60)
    known = memory.get_or_create(later)
    assert memory.get_or_create(earlier) is not known
    assert memory.find("ns", "j") is known
    memory.forget(earlier)
    assert memory.find("ns", "j") is known
