"""Workers that are placed together or not at all, where the cluster's scheduler can do it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator import metrics
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.decide import evaluate
from pacekeeper_operator.decide.effects import CreatePod
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.kube.client import PODS
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods import gangs
from pacekeeper_operator.pods.gangs import Gang
from pacekeeper_operator.runtime.effect_handlers import handle_effect
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import create_job_context
from pacekeeper_operator.services import gangs as service
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import WorkerRecord
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.observations import build_fresh, build_policy, build_training

JOB = build_training().job
GROUP = ("podgroups", JOB.namespace, JOB.name)
TWO = Gang(2)


@pytest.fixture
def cluster() -> FakeCluster:
    """One that places gangs, as Kubernetes 1.36 does."""
    metrics.publish_job_metrics("ns", "j", None)
    made = FakeCluster()
    made.objects[gangs.SCHEDULING_API_GROUP, "", ""] = {
        "metadata": {},
        "versions": [{"version": "v1"}, {"version": "v1alpha2"}],
    }
    return made


def named(cluster: FakeCluster) -> list[Any]:
    """The PodGroups that pods name."""
    pods = [body for (plural, _, _), body in cluster.objects.items() if plural == PODS.plural]
    return [pod["spec"].get("schedulingGroup", {}).get("podGroupName") for pod in pods]


class TestGang:
    def test_all_seats_of_an_attempt_and_nobody_who_comes_later(self) -> None:
        world = build_fresh()
        size = world.job.spec.replicas
        assert workforce.build_gang(world) == Gang(size, 0)
        failed = world.with_desired(world.desired.with_placement(attempts=3))
        assert workforce.build_gang(failed) == Gang(size, 3), "each attempt anew"
        assert workforce.build_gang(build_training()) is None

    def test_one_worker_is_no_gang(self) -> None:
        world = build_fresh()
        job = replace(world.job, spec=replace(world.job.spec, replicas=1))
        assert workforce.build_gang(replace(world, job=job)) is None

    def test_spares_belong_to_it_too(self) -> None:
        """They are as good as the others as long as no seat is taken, and a spare alone would take somebody's room."""
        world = build_fresh()
        worker = WorkerRecord(f"{world.job.name}-w0-0", 0, 0)
        world = world.with_desired(world.desired.with_placement(workers=(worker, replace(worker, ordinal=99))))
        effects = evaluate.list_effects(world, build_policy(), {})
        made = [effect for effect in effects if isinstance(effect, CreatePod)]
        assert [(effect.spare, effect.gang) for effect in made] == [
            (False, workforce.build_gang(world)),
            (True, workforce.build_gang(world)),
        ]


class TestService:
    async def test_made_once_and_found_again(self, cluster: FakeCluster) -> None:
        assert await service.ensure_pod_group(cluster, JOB, TWO) == JOB.name
        made = cluster.objects[GROUP]
        assert made["apiVersion"] == "scheduling.k8s.io/v1alpha2"
        assert made["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
        assert made["metadata"]["ownerReferences"][0]["uid"] == JOB.uid
        before = cluster.version
        assert await service.ensure_pod_group(cluster, JOB, Gang(2, attempt=5)) == JOB.name
        assert cluster.version == before

    async def test_the_newest_version_that_both_know(self, cluster: FakeCluster) -> None:
        cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""]["versions"] += [{"version": "v1alpha3"}, {"version": "v9"}]
        await service.ensure_pod_group(cluster, JOB, TWO)
        assert cluster.objects[GROUP]["apiVersion"] == "scheduling.k8s.io/v1alpha3"

    @pytest.mark.parametrize("versions", [None, ["v1"], ["v1", "v1alpha1"]])
    async def test_where_there_are_none_pods_are_placed_one_by_one(
        self, cluster: FakeCluster, versions: list[str] | None
    ) -> None:
        del cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""]
        if versions is not None:
            served = {"metadata": {}, "versions": [{"version": version} for version in versions]}
            cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""] = served
        before = cluster.version
        assert await service.ensure_pod_group(cluster, JOB, TWO) == ""
        assert cluster.version == before

    async def test_another_size_takes_another_one(self, cluster: FakeCluster) -> None:
        await service.ensure_pod_group(cluster, JOB, TWO)
        with pytest.raises(kopf.TemporaryError, match="an earlier gang"):
            await service.ensure_pod_group(cluster, JOB, Gang(3))
        assert await service.ensure_pod_group(cluster, JOB, Gang(3)) == JOB.name
        assert cluster.objects[GROUP]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3

    async def test_somebody_elses_is_not_touched(self, cluster: FakeCluster) -> None:
        other = gangs.build_pod_group(replace(JOB, uid="another"), Gang(7), "v1alpha2")
        cluster.objects[GROUP] = other
        with pytest.raises(kopf.TemporaryError, match="is not the job's: delete it, or rename the job"):
            await service.ensure_pod_group(cluster, JOB, TWO)
        assert cluster.objects[GROUP] is other


class TestPods:
    @pytest.fixture
    def operator(self, cluster: FakeCluster) -> Operator:
        made = Operator(
            Settings(network_policies=False), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", "")
        )
        made.paused = ""
        return made

    @pytest.fixture
    def desk(self, operator: Operator) -> JobContext:
        return self.desk_of(operator, JOB)

    def desk_of(self, operator: Operator, job: TrainingJob) -> JobContext:
        return create_job_context(operator, job, {"metadata": {"namespace": job.namespace, "name": job.name}})

    async def test_all_of_a_gang_name_one_group_and_ask_once(
        self, cluster: FakeCluster, operator: Operator, desk: JobContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        served = cluster.find_served_version

        async def counted(group: str, versions: Sequence[str]) -> str:
            asked.append(group)
            return await served(group, versions)

        monkeypatch.setattr(cluster, "find_served_version", counted)
        workers = [WorkerRecord(f"{JOB.name}-w{i}-0", i, 0) for i in range(3)]
        await asyncio.gather(*(handle_effect(operator, desk, CreatePod(worker, gang=TWO)) for worker in workers))
        assert named(cluster) == [JOB.name] * 3
        assert asked == [gangs.SCHEDULING_API_GROUP]

    async def test_who_is_replaced_is_placed_alone(
        self, cluster: FakeCluster, operator: Operator, desk: JobContext
    ) -> None:
        await handle_effect(operator, desk, CreatePod(WorkerRecord(f"{JOB.name}-w0-1", 0, 1)))
        assert named(cluster) == [None]
        assert GROUP not in cluster.objects

    async def test_what_the_user_has_written_stays(self, cluster: FakeCluster, operator: Operator) -> None:
        template = {
            **JOB.spec.template,
            "spec": {**JOB.spec.template["spec"], "schedulingGroup": {"podGroupName": "ours"}},
        }
        job = replace(JOB, spec=replace(JOB.spec, template=template))
        await handle_effect(
            operator, self.desk_of(operator, job), CreatePod(WorkerRecord(f"{JOB.name}-w0-0", 0, 0), gang=TWO)
        )
        assert named(cluster) == ["ours"]
