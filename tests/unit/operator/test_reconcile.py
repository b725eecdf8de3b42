"""One pass over a job, with an API server that does not always answer."""

from __future__ import annotations

import kopf
import pytest

from pacekeeper_operator.cluster import CONFIG_MAPS, JOBS, PODS
from pacekeeper_operator.manifests import Installation, plan_config_map, worker_pod
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.observe.prometheus import Prometheus
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.reconcile import Desk, reconcile
from pacekeeper_operator.settings import Settings
from tests.support.fake_cluster import FakeCluster
from tests.support.worlds import training

INSTALLATION = Installation("https://operator", "")


async def written(cluster: FakeCluster, world: Observation) -> None:
    """The API server holds the job, its plan and its pods."""
    await cluster.create(JOBS, {"metadata": {"namespace": world.job.namespace, "name": world.job.name}})
    plan = plan_config_map(world.job, world.plan)
    plan["data"] = world.draft.to_data()
    await cluster.create(CONFIG_MAPS, plan)
    for record in world.state.workers:
        pod = worker_pod(world.job, record.ordinal, record.incarnation, INSTALLATION)
        pod["metadata"] |= {"uid": record.uid, "creationTimestamp": "2026-01-01T00:00:00Z"}
        pod["spec"]["nodeName"] = record.node
        pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{record.ordinal}"}
        await cluster.create(PODS, pod)


async def test_a_list_of_pods_that_fails_is_no_news() -> None:
    """A 429 at the operator's restart: nobody has gone because nobody could be seen."""
    cluster, world = FakeCluster(), training(replicas=2, spares=1)
    await written(cluster, world)
    cluster.failures["pods"] = [kopf.TemporaryError("429 too many requests")]
    operator = Operator(Settings(), cluster, Memory(), INSTALLATION, Prometheus("", "", ""))
    desk = Desk(world.job, {}, operator.memory.of("ns", "j"))
    with pytest.raises(kopf.TemporaryError):
        await reconcile(operator, desk)
    await reconcile(operator, desk)
    assert desk.memory.draft is not None
    state = desk.memory.draft.state
    assert [worker.name for worker in state.workers if not worker.leaving] == ["j-w0-0", "j-w1-0", "j-w2-0"]
    assert not state.incidents
