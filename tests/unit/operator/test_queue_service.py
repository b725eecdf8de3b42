"""A job's Workload in the API server, and the effect of a queue's decision in a pass."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_operator import metrics
from pacekeeper_operator.api.names import Object
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.decide.effects import CreatePod
from pacekeeper_operator.kube.client import PODS
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods import queues
from pacekeeper_operator.pods.queues import (
    SPARES_POD_SET,
    WORKERS_POD_SET,
    NodePlacement,
    QueueDecision,
    WorkloadProgress,
)
from pacekeeper_operator.runtime.effect_handlers import QUEUE_POLL_SECONDS, handle_effect
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import create_job_context, reconcile_job
from pacekeeper_operator.services import queues as service
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import WorkerRecord
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.observations import build_fresh, build_training

TRAINING, GONE = WorkloadProgress(pods_left=True, ready=True), WorkloadProgress(pods_left=False)
ADMITTED_HERE = QueueDecision(admitted=True, counts={WORKERS_POD_SET: 4, SPARES_POD_SET: 1})


@pytest.fixture
def cluster() -> FakeCluster:
    """A cluster that serves only Kueue's older version."""
    metrics.publish_job_metrics("ns", "j", None)
    made = FakeCluster()
    made.objects["kueue.x-k8s.io", "", ""] = {"metadata": {}, "versions": [{"version": "v1beta1"}]}
    flavor = {"metadata": {"name": "h100"}, "spec": {"nodeLabels": {"pool": "h100"}, "tolerations": [{"key": "gpu"}]}}
    made.objects["resourceflavors", "", "h100"] = flavor
    return made


@pytest.fixture
def operator(cluster: FakeCluster) -> Operator:
    made = Operator(
        Settings(network_policies=False), cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", "")
    )
    made.paused = ""
    return made


def build_queued_job(**changes: Any) -> TrainingJob:
    return replace(build_training(**changes).job, queue="team")


def find_workload(cluster: FakeCluster) -> Object | None:
    found = [body for (plural, _, _), body in cluster.objects.items() if plural == "workloads"]
    return found[0] if found else None


def set_admission(cluster: FakeCluster, *conditions: str, **counts: int) -> None:
    """Set conditions as Kueue does. `counts`: admitted pods by set."""
    body = find_workload(cluster)
    assert body is not None
    statuses = [{"type": kind, "status": "True", "reason": "R", "message": "m"} for kind in conditions]
    sets = [{"name": name, "count": count, "flavors": {"gpu": "h100"}} for name, count in counts.items()]
    body["status"] = {"conditions": statuses, "admission": {"podSetAssignments": sets}}


class TestWorkload:
    async def test_a_workload_is_created_and_the_job_waits(self, operator: Operator, cluster: FakeCluster) -> None:
        turn = await service.sync_workload(operator, build_queued_job(), None, GONE)
        assert turn == QueueDecision(admitted=False, message="waits in queue team")
        body = find_workload(cluster)
        assert body is not None
        assert body["apiVersion"] == "kueue.x-k8s.io/v1beta1"
        workers, spares = body["spec"]["podSets"]
        assert [c["name"] for c in workers["template"]["spec"]["containers"]] == ["trainer"]
        assert workers["template"]["metadata"]["labels"]["pacekeeper.dev/job"] == "j"
        assert "podAntiAffinity" in spares["template"]["spec"]["affinity"]

    async def test_an_admission_names_the_allowed_nodes(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        set_admission(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        turn = await service.sync_workload(operator, build_queued_job(), None, GONE)
        assert (turn.admitted, turn.counts) == (True, {"workers": 4, "spares": 1})
        assert turn.find_placement(SPARES_POD_SET) == NodePlacement({"pool": "h100"}, ({"key": "gpu"},))
        cluster.objects.pop(("resourceflavors", "", "h100"))
        assert await service.sync_workload(operator, build_queued_job(), turn, TRAINING) == turn, (
            "flavors are read once"
        )

    async def test_the_first_read_creates_no_workload(self, operator: Operator, cluster: FakeCluster) -> None:
        assert await service.read_decision(operator, build_queued_job()) == QueueDecision(
            admitted=False, message=queues.NOT_MADE
        )
        assert find_workload(cluster) is None

    async def test_suspending_a_job_gives_up_its_quota(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        paused = build_queued_job()
        paused = replace(paused, spec=replace(paused.spec, suspend=True))
        await service.sync_workload(operator, paused, None, GONE)
        body = find_workload(cluster)
        assert body is not None
        assert body["spec"]["active"] is False
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        assert body is not find_workload(cluster)
        assert (find_workload(cluster) or {})["spec"]["active"] is True

    async def test_a_changed_job_requests_its_pods_again(self, operator: Operator, cluster: FakeCluster) -> None:
        """The Workload of a waiting job is changed; one with quota is created again once no pod is left."""
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        await service.sync_workload(operator, build_queued_job(replicas=3), None, GONE)
        body = find_workload(cluster)
        assert body is not None
        assert body["spec"]["podSets"][0]["count"] == 3
        set_admission(cluster, "QuotaReserved", "Admitted", workers=3, spares=1)
        waiting = QueueDecision(admitted=False, message=queues.OTHER_PODS)
        assert await service.sync_workload(operator, build_queued_job(), ADMITTED_HERE, TRAINING) == waiting
        assert find_workload(cluster) is not None, "its pods still use the quota"
        assert await service.sync_workload(operator, build_queued_job(), waiting, GONE) == waiting
        assert find_workload(cluster) is None
        assert (
            await service.sync_workload(operator, build_queued_job(), waiting, GONE)
        ).message == "waits in queue team"

    async def test_an_evicted_job_returns_its_quota(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        set_admission(cluster, "QuotaReserved", "Admitted", "Evicted", workers=4)
        turn = await service.sync_workload(operator, build_queued_job(), ADMITTED_HERE, TRAINING)
        assert turn.message == "evicted (R): m"
        assert queues.has_quota(find_workload(cluster) or {})
        await service.sync_workload(operator, build_queued_job(), turn, GONE)
        body = find_workload(cluster)
        assert body is not None
        assert not queues.has_quota(body)
        assert "admission" not in body["status"]

    async def test_the_end_is_reported_and_no_workload_is_created_after_it(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        ended = WorkloadProgress(pods_left=False, finished="its ranks have finished")
        await service.sync_workload(operator, build_queued_job(), None, ended)
        assert find_workload(cluster) is None
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        await service.sync_workload(operator, build_queued_job(), None, ended)
        (condition,) = (find_workload(cluster) or {})["status"]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == ("Finished", "True", "Succeeded")

    async def test_without_kueue_the_job_waits_and_names_the_remedy(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        del cluster.objects["kueue.x-k8s.io", "", ""]
        turn = await service.sync_workload(operator, build_queued_job(), None, GONE)
        assert turn == QueueDecision(admitted=False, message=queues.NOT_SERVED)


class TestPriority:
    def read_priority(self, cluster: FakeCluster) -> Object:
        spec = (find_workload(cluster) or {})["spec"]
        return {field: spec[field] for field in sorted(spec) if field.startswith("priority")}

    async def test_the_priority_follows_the_label(self, operator: Operator, cluster: FakeCluster) -> None:
        for name, value in {"dear": 100, "cheap": -5}.items():
            cluster.objects["workloadpriorityclasses", "", name] = {"metadata": {"name": name}, "value": value}
        for name, value in {"dear": 100, "cheap": -5}.items():
            await service.sync_workload(operator, replace(build_queued_job(), priority_class=name), None, GONE)
            source = "kueue.x-k8s.io/workloadpriorityclass"
            assert self.read_priority(cluster) == {
                "priority": value,
                "priorityClassName": name,
                "priorityClassSource": source,
            }
        cluster.objects.pop(("workloadpriorityclasses", "", "cheap"))
        await service.sync_workload(operator, replace(build_queued_job(), priority_class="cheap"), None, GONE)
        await service.sync_workload(operator, build_queued_job(), None, GONE)
        assert self.read_priority(cluster) == {}

    @pytest.mark.parametrize("version", queues.KUEUE_VERSIONS)
    async def test_the_priority_follows_the_pod_template(
        self, operator: Operator, cluster: FakeCluster, version: str
    ) -> None:
        cluster.objects["kueue.x-k8s.io", "", ""]["versions"] = [{"version": version}]
        cluster.objects["priorityclasses", "", "gold"] = {"metadata": {"name": "gold"}, "value": 7}
        job = build_queued_job()
        template = {**job.spec.template, "spec": {**job.spec.template["spec"], "priorityClassName": "gold"}}
        job = replace(job, spec=replace(job.spec, template=template))
        await service.sync_workload(operator, job, None, GONE)
        before = find_workload(cluster)
        await service.sync_workload(operator, job, None, GONE)
        assert find_workload(cluster) is before
        reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "gold"}
        old = {"priorityClassName": "gold", "priorityClassSource": "scheduling.k8s.io/priorityclass"}
        assert self.read_priority(cluster) == {"priority": 7} | (
            old if version == "v1beta1" else {"priorityClassRef": reference}
        )

    async def test_a_missing_priority_class_is_ignored(self, operator: Operator, cluster: FakeCluster) -> None:
        with pytest.raises(kopf.TemporaryError, match=r"class dear \(label .*not among the workload.*: make"):
            await service.sync_workload(operator, replace(build_queued_job(), priority_class="dear"), None, GONE)
        assert find_workload(cluster) is None


class TestCopiedByMultiKueue:
    """MultiKueue has copied the job from another cluster, and its Workload with it."""

    def build_copied_job(self, cluster: FakeCluster, **changes: Any) -> tuple[TrainingJob, Object]:
        job = replace(build_queued_job(**changes), prebuilt_workload="from-there")
        templates: dict[str, Object] = {WORKERS_POD_SET: {}, SPARES_POD_SET: {}}
        body = queues.build_workload(replace(build_queued_job(), prebuilt_workload="from-there"), "v1beta1", templates)
        del body["metadata"]["ownerReferences"], body["metadata"]["labels"]
        body["metadata"]["resourceVersion"] = "1"
        cluster.objects["workloads", "ns", "from-there"] = body
        set_admission(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        return job, body

    async def test_a_copied_job_waits_for_its_workload_and_creates_none(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        turn = await service.sync_workload(
            operator, replace(build_queued_job(), prebuilt_workload="from-there"), None, GONE
        )
        assert turn == QueueDecision(admitted=False, message=queues.NOT_SENT)
        assert find_workload(cluster) is None

    async def test_a_copied_job_adopts_its_copied_workload(self, operator: Operator, cluster: FakeCluster) -> None:
        job, _ = self.build_copied_job(cluster)
        turn = await service.sync_workload(operator, job, None, GONE)
        assert (turn.admitted, turn.counts) == (True, {"workers": 4, "spares": 1})
        (owner,) = (find_workload(cluster) or {})["metadata"]["ownerReferences"]
        assert owner["uid"] == job.uid
        assert (
            await service.sync_workload(operator, job, turn, TRAINING)
            == turn
            == await service.read_decision(operator, job)
        )

    async def test_a_job_is_not_admitted_by_a_workload_of_another(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        not_admitted = QueueDecision(admitted=False, message=queues.NOT_ITS_OWN)
        larger, body = self.build_copied_job(cluster, replicas=5)
        assert (
            await service.sync_workload(operator, larger, None, GONE)
            == not_admitted
            == await service.read_decision(operator, larger)
        )
        assert "ownerReferences" not in body["metadata"]
        job, body = self.build_copied_job(cluster)
        body["metadata"]["ownerReferences"] = [{"uid": "another"}]
        assert (
            await service.sync_workload(operator, job, None, GONE)
            == not_admitted
            == await service.read_decision(operator, job)
        )


class TestOtherController:
    """Another controller runs the job."""

    def build_foreign_job(self, phase: str = "", queue: str = "team") -> tuple[TrainingJob, Object]:
        job = build_queued_job()
        body = {"metadata": {"name": "j", "namespace": "ns"}, "status": {"phase": phase} if phase else {}}
        return replace(job, queue=queue, spec=replace(job.spec, managed_by="kueue.x-k8s.io/multikueue")), body

    async def run_pass(self, operator: Operator, phase: str = "", queue: str = "team") -> float:
        job, body = self.build_foreign_job(phase, queue)
        return await reconcile_job(operator, create_job_context(operator, job, body))

    async def test_a_foreign_job_has_only_its_workload(self, operator: Operator, cluster: FakeCluster) -> None:
        before = dict(cluster.objects)
        assert await self.run_pass(operator) == QUEUE_POLL_SECONDS
        set_admission(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        await self.run_pass(operator)
        assert [plural for plural, _, _ in cluster.objects.keys() - before.keys()] == ["workloads"]

    async def test_a_foreign_job_without_a_queue_has_no_workload(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        before = dict(cluster.objects)
        assert await self.run_pass(operator, queue="") > QUEUE_POLL_SECONDS
        assert cluster.objects == before

    @pytest.mark.parametrize(
        ("phase", "expected"),
        [
            ("Running", ("PodsReady", "True", "Started")),
            ("Complete", ("Finished", "True", "Succeeded")),
            ("Failed", ("Finished", "True", "Failed")),
        ],
    )
    async def test_the_workload_shows_the_phase_of_a_foreign_job(
        self, operator: Operator, cluster: FakeCluster, phase: str, expected: tuple[str, str, str]
    ) -> None:
        await self.run_pass(operator)
        set_admission(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        await self.run_pass(operator, phase)
        conditions = (find_workload(cluster) or {})["status"]["conditions"]
        assert expected in [(each["type"], each["status"], each["reason"]) for each in conditions]


class TestPass:
    async def start_training(self, operator: Operator, cluster: FakeCluster, observation: Observation) -> JobContext:
        await store_job(cluster, observation)
        await operator.stores.pods.refresh(cluster, ())
        return create_job_context(operator, replace(observation.job, queue="team"), {})

    def read_conditions(self, cluster: FakeCluster) -> dict[str, tuple[str, str, str]]:
        found = cluster.objects["trainingjobs", "ns", "j"]["status"]["conditions"]
        return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found}

    async def test_a_job_that_is_not_admitted_stops_and_reports_the_reason(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        context = await self.start_training(operator, cluster, build_training())
        await reconcile_job(operator, context)
        await context.effect_runner.wait_until_idle()
        assert context.cache.desired is not None
        assert context.cache.desired.plan.stop is Stop.SUSPEND
        assert find_workload(cluster) is not None
        assert self.read_conditions(cluster)["Suspended"] == (
            "False",
            "Queued",
            f"{queues.NOT_MADE}; 5 workers are leaving",
        )
        for name in [name for plural, _, name in cluster.objects if plural == "pods"]:
            await cluster.delete(PODS, name, "ns")
        await operator.stores.pods.refresh(cluster, ())
        await reconcile_job(operator, context)
        assert self.read_conditions(cluster)["Suspended"] == ("True", "Queued", "waits in queue team")
        assert self.read_conditions(cluster)["Reconciling"] == ("True", "Queued", "waits in queue team")
        assert cluster.objects["trainingjobs", "ns", "j"]["status"]["phase"] == "Suspended"

    async def test_a_training_job_is_not_stopped_by_a_new_operator(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        observation = build_training()
        await service.sync_workload(operator, replace(observation.job, queue="team"), None, GONE)
        set_admission(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        context = await self.start_training(operator, cluster, observation)
        await reconcile_job(operator, context)
        assert context.cache.desired is not None
        assert context.cache.desired.plan.stop is Stop.NO

    async def test_a_training_job_continues_while_kueue_is_unavailable(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        """An upgrade removes its API group for a moment. A new operator has read no admission yet."""
        group = cluster.objects.pop(("kueue.x-k8s.io", "", ""))
        context = await self.start_training(operator, cluster, build_training())
        for _ in range(2):
            await reconcile_job(operator, context)
            await context.effect_runner.wait_until_idle()
            assert context.cache.desired is not None
            assert context.cache.desired.plan.stop is Stop.NO
            assert len(context.cache.desired.state.placement.workers) == 5
        kind, reason, message = self.read_conditions(cluster)["ActionBlocked"]
        assert (kind, reason, queues.NOT_SERVED_NOW in message) == ("True", "ActionFailed", True)
        cluster.objects["kueue.x-k8s.io", "", ""] = group
        assert not (
            await service.sync_workload(operator, replace(context.job), context.cache.results.queue_decision, TRAINING)
        ).admitted

    async def test_a_waiting_job_keeps_waiting(self, operator: Operator, cluster: FakeCluster) -> None:
        del cluster.objects["kueue.x-k8s.io", "", ""]
        context = await self.start_training(operator, cluster, build_fresh())
        await reconcile_job(operator, context)
        assert self.read_conditions(cluster)["Suspended"][1:] == ("Queued", queues.NOT_SERVED)

    async def test_pods_go_to_the_nodes_of_their_flavor(self, operator: Operator, cluster: FakeCluster) -> None:
        context = await self.start_training(operator, cluster, build_training())
        there = NodePlacement({"pool": "h100"}, ({"key": "gpu"},))
        context.cache.results.queue_decision = replace(
            ADMITTED_HERE, flavors={WORKERS_POD_SET: frozenset({"h100"})}, placements={"h100": there}
        )
        await handle_effect(operator, context, CreatePod(WorkerRecord("j-w9-0", 9, 0), pod_set=WORKERS_POD_SET))
        pod = cluster.objects["pods", "ns", "j-w9-0"]
        assert pod["spec"]["nodeSelector"] == {"pool": "h100"}
        assert {"key": "gpu"} in pod["spec"]["tolerations"]
        await handle_effect(
            operator, context, CreatePod(WorkerRecord("j-w8-0", 8, 0), spare=True, pod_set=SPARES_POD_SET)
        )
        assert "nodeSelector" not in cluster.objects["pods", "ns", "j-w8-0"]["spec"]

    @pytest.mark.parametrize(("level", "is_node"), [("kubernetes.io/hostname", True), ("example.com/rack", False)])
    async def test_no_constraint_excludes_the_node_that_kueue_assigns(
        self, operator: Operator, cluster: FakeCluster, level: str, is_node: bool
    ) -> None:
        context = await self.start_training(operator, cluster, build_training())
        context.cache.results.queue_decision = replace(
            ADMITTED_HERE, topology_levels={SPARES_POD_SET: frozenset({level})}
        )
        record = WorkerRecord("j-w9-0", 9, 0)
        await handle_effect(operator, context, CreatePod(record, spare=True, avoid=("node-7",), pod_set=SPARES_POD_SET))
        pod = cluster.objects["pods", "ns", "j-w9-0"]
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
        assert ("requiredDuringSchedulingIgnoredDuringExecution" in json.dumps(pod["spec"]["affinity"])) is not is_node
