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
    """A cluster that places gangs, as Kubernetes 1.36 does."""
    metrics.publish_job_metrics("ns", "j", None)
    created = FakeCluster()
    created.objects[gangs.SCHEDULING_API_GROUP, "", ""] = {
        "metadata": {},
        "versions": [{"version": "v1"}, {"version": "v1alpha2"}],
    }
    return created


def list_group_names(cluster: FakeCluster) -> list[Any]:
    """Return the PodGroups that pods name."""
    pods = [body for (plural, _, _), body in cluster.objects.items() if plural == PODS.plural]
    return [pod["spec"].get("schedulingGroup", {}).get("podGroupName") for pod in pods]


class TestGang:
    def test_a_gang_contains_all_members_of_an_attempt_and_no_later_worker(self) -> None:
        observation = build_fresh()
        size = observation.job.spec.replicas
        assert workforce.build_gang(observation) == Gang(size, 0)
        failed = observation.with_desired(observation.desired.with_placement(attempts=3))
        assert workforce.build_gang(failed) == Gang(size, 3), "each attempt has its own gang"
        assert workforce.build_gang(build_training()) is None

    def test_one_worker_is_no_gang(self) -> None:
        observation = build_fresh()
        job = replace(observation.job, spec=replace(observation.job.spec, replicas=1))
        assert workforce.build_gang(replace(observation, job=job)) is None

    def test_spares_belong_to_the_gang(self) -> None:
        """Any of them may become a member, and a separate spare could take the node of another."""
        observation = build_fresh()
        worker = WorkerRecord(f"{observation.job.name}-w0-0", 0, 0)
        observation = observation.with_desired(
            observation.desired.with_placement(workers=(worker, replace(worker, ordinal=99)))
        )
        effects = evaluate.list_effects(observation, build_policy(), {})
        created = [effect for effect in effects if isinstance(effect, CreatePod)]
        assert [(effect.spare, effect.gang) for effect in created] == [
            (False, workforce.build_gang(observation)),
            (True, workforce.build_gang(observation)),
        ]


class TestService:
    async def test_a_pod_group_is_created_once_and_found_again(self, cluster: FakeCluster) -> None:
        assert await service.ensure_pod_group(cluster, JOB, TWO) == JOB.name
        created = cluster.objects[GROUP]
        assert created["apiVersion"] == "scheduling.k8s.io/v1alpha2"
        assert created["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
        assert created["metadata"]["ownerReferences"][0]["uid"] == JOB.uid
        before = cluster.version
        assert await service.ensure_pod_group(cluster, JOB, Gang(2, attempt=5)) == JOB.name
        assert cluster.version == before

    async def test_the_newest_api_version_that_both_support_is_used(self, cluster: FakeCluster) -> None:
        cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""]["versions"] += [{"version": "v1alpha3"}, {"version": "v9"}]
        await service.ensure_pod_group(cluster, JOB, TWO)
        assert cluster.objects[GROUP]["apiVersion"] == "scheduling.k8s.io/v1alpha3"

    @pytest.mark.parametrize("versions", [None, ["v1"], ["v1", "v1alpha1"]])
    async def test_without_pod_groups_pods_are_placed_separately(
        self, cluster: FakeCluster, versions: list[str] | None
    ) -> None:
        del cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""]
        if versions is not None:
            discovery = {"metadata": {}, "versions": [{"version": version} for version in versions]}
            cluster.objects[gangs.SCHEDULING_API_GROUP, "", ""] = discovery
        before = cluster.version
        assert await service.ensure_pod_group(cluster, JOB, TWO) == ""
        assert cluster.version == before

    async def test_another_gang_size_replaces_the_pod_group(self, cluster: FakeCluster) -> None:
        await service.ensure_pod_group(cluster, JOB, TWO)
        with pytest.raises(kopf.TemporaryError, match="an earlier gang"):
            await service.ensure_pod_group(cluster, JOB, Gang(3))
        assert await service.ensure_pod_group(cluster, JOB, Gang(3)) == JOB.name
        assert cluster.objects[GROUP]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3

    async def test_a_foreign_pod_group_is_not_changed(self, cluster: FakeCluster) -> None:
        other = gangs.build_pod_group(replace(JOB, uid="another"), Gang(7), "v1alpha2")
        cluster.objects[GROUP] = other
        with pytest.raises(kopf.TemporaryError, match="is not the job's: delete it, or rename the job"):
            await service.ensure_pod_group(cluster, JOB, TWO)
        assert cluster.objects[GROUP] is other


class TestPods:
    @pytest.fixture
    def operator(self, cluster: FakeCluster) -> Operator:
        created = Operator(
            Settings(network_policies=False), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", "")
        )
        created.paused = ""
        return created

    @pytest.fixture
    def context(self, operator: Operator) -> JobContext:
        return self.build_context(operator, JOB)

    def build_context(self, operator: Operator, job: TrainingJob) -> JobContext:
        return create_job_context(operator, job, {"metadata": {"namespace": job.namespace, "name": job.name}})

    async def test_all_pods_of_a_gang_name_one_group_after_one_query(
        self, cluster: FakeCluster, operator: Operator, context: JobContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queried_groups = []
        find_version = cluster.find_served_version

        async def count_query(group: str, versions: Sequence[str]) -> str:
            queried_groups.append(group)
            return await find_version(group, versions)

        monkeypatch.setattr(cluster, "find_served_version", count_query)
        workers = [WorkerRecord(f"{JOB.name}-w{i}-0", i, 0) for i in range(3)]
        await asyncio.gather(*(handle_effect(operator, context, CreatePod(worker, gang=TWO)) for worker in workers))
        assert list_group_names(cluster) == [JOB.name] * 3
        assert queried_groups == [gangs.SCHEDULING_API_GROUP]

    async def test_a_replacement_pod_has_no_group(
        self, cluster: FakeCluster, operator: Operator, context: JobContext
    ) -> None:
        await handle_effect(operator, context, CreatePod(WorkerRecord(f"{JOB.name}-w0-1", 0, 1)))
        assert list_group_names(cluster) == [None]
        assert GROUP not in cluster.objects

    async def test_a_scheduling_group_of_the_user_stays(self, cluster: FakeCluster, operator: Operator) -> None:
        template = {
            **JOB.spec.template,
            "spec": {**JOB.spec.template["spec"], "schedulingGroup": {"podGroupName": "ours"}},
        }
        job = replace(JOB, spec=replace(JOB.spec, template=template))
        await handle_effect(
            operator, self.build_context(operator, job), CreatePod(WorkerRecord(f"{JOB.name}-w0-0", 0, 0), gang=TWO)
        )
        assert list_group_names(cluster) == ["ours"]
