"""A job's Workload in the API server, and what comes of a queue's word in a pass."""

from __future__ import annotations

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

RUNS, GONE = WorkloadProgress(pods_left=True, ready=True), WorkloadProgress(pods_left=False)
HERE = QueueDecision(admitted=True, counts={WORKERS_POD_SET: 4, SPARES_POD_SET: 1})


@pytest.fixture
def cluster() -> FakeCluster:
    """One that serves Kueue's older version only."""
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


def queued(**changes: Any) -> TrainingJob:
    return replace(build_training(**changes).job, queue="team")


def workload(cluster: FakeCluster) -> Object | None:
    found = [body for (plural, _, _), body in cluster.objects.items() if plural == "workloads"]
    return found[0] if found else None


def say(cluster: FakeCluster, *conditions: str, **counts: int) -> None:
    """As Kueue does. `counts`: pods that are admitted, by set."""
    body = workload(cluster)
    assert body is not None
    told = [{"type": kind, "status": "True", "reason": "R", "message": "m"} for kind in conditions]
    sets = [{"name": name, "count": count, "flavors": {"gpu": "h100"}} for name, count in counts.items()]
    body["status"] = {"conditions": told, "admission": {"podSetAssignments": sets}}


class TestAttend:
    async def test_it_is_made_and_waits(self, operator: Operator, cluster: FakeCluster) -> None:
        turn = await service.sync_workload(operator, queued(), None, GONE)
        assert turn == QueueDecision(admitted=False, message="waits in queue team")
        body = workload(cluster)
        assert body is not None
        assert body["apiVersion"] == "kueue.x-k8s.io/v1beta1"
        workers, spares = body["spec"]["podSets"]
        assert [c["name"] for c in workers["template"]["spec"]["containers"]] == ["trainer"]
        assert workers["template"]["metadata"]["labels"]["pacekeeper.dev/job"] == "j"
        assert "podAntiAffinity" in spares["template"]["spec"]["affinity"]

    async def test_admitted_it_knows_where_its_pods_may_be(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, queued(), None, GONE)
        say(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        turn = await service.sync_workload(operator, queued(), None, GONE)
        assert (turn.admitted, turn.counts) == (True, {"workers": 4, "spares": 1})
        assert turn.find_placement(spare=True) == NodePlacement({"pool": "h100"}, ({"key": "gpu"},))
        cluster.objects.pop(("resourceflavors", "", "h100"))
        assert await service.sync_workload(operator, queued(), turn, RUNS) == turn, "flavors are read once"

    async def test_an_operator_that_has_just_begun_only_looks(self, operator: Operator, cluster: FakeCluster) -> None:
        assert await service.read_decision(operator, queued()) == QueueDecision(admitted=False, message=queues.NOT_MADE)
        assert workload(cluster) is None

    async def test_a_pause_by_its_user_gives_its_place_up(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, queued(), None, GONE)
        paused = queued()
        paused = replace(paused, spec=replace(paused.spec, suspend=True))
        await service.sync_workload(operator, paused, None, GONE)
        body = workload(cluster)
        assert body is not None
        assert body["spec"]["active"] is False
        await service.sync_workload(operator, queued(), None, GONE)
        assert body is not workload(cluster)
        assert (workload(cluster) or {})["spec"]["active"] is True

    async def test_other_pods_are_asked_for_anew(self, operator: Operator, cluster: FakeCluster) -> None:
        """While it waits its Workload is changed; one with quota is made anew once no pod is left."""
        await service.sync_workload(operator, queued(), None, GONE)
        await service.sync_workload(operator, queued(replicas=3), None, GONE)
        body = workload(cluster)
        assert body is not None
        assert body["spec"]["podSets"][0]["count"] == 3
        say(cluster, "QuotaReserved", "Admitted", workers=3, spares=1)
        held = QueueDecision(admitted=False, message=queues.OTHER_PODS)
        assert await service.sync_workload(operator, queued(), HERE, RUNS) == held
        assert workload(cluster) is not None, "its pods still use the quota"
        assert await service.sync_workload(operator, queued(), held, GONE) == held
        assert workload(cluster) is None
        assert (await service.sync_workload(operator, queued(), held, GONE)).message == "waits in queue team"

    async def test_evicted_it_gives_its_quota_back(self, operator: Operator, cluster: FakeCluster) -> None:
        await service.sync_workload(operator, queued(), None, GONE)
        say(cluster, "QuotaReserved", "Admitted", "Evicted", workers=4)
        turn = await service.sync_workload(operator, queued(), HERE, RUNS)
        assert turn.message == "evicted (R): m"
        assert queues.has_quota(workload(cluster) or {})
        await service.sync_workload(operator, queued(), turn, GONE)
        body = workload(cluster)
        assert body is not None
        assert not queues.has_quota(body)
        assert "admission" not in body["status"]

    async def test_the_end_is_told_and_nothing_is_made_after_it(self, operator: Operator, cluster: FakeCluster) -> None:
        ended = WorkloadProgress(pods_left=False, finished="its ranks have finished")
        await service.sync_workload(operator, queued(), None, ended)
        assert workload(cluster) is None
        await service.sync_workload(operator, queued(), None, GONE)
        await service.sync_workload(operator, queued(), None, ended)
        (told,) = (workload(cluster) or {})["status"]["conditions"]
        assert (told["type"], told["status"], told["reason"]) == ("Finished", "True", "Succeeded")

    async def test_a_cluster_without_kueue_holds_it_and_says_what_to_do(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        del cluster.objects["kueue.x-k8s.io", "", ""]
        turn = await service.sync_workload(operator, queued(), None, GONE)
        assert turn == QueueDecision(admitted=False, message=queues.NOT_SERVED)


class TestPriority:
    def told(self, cluster: FakeCluster) -> Object:
        spec = (workload(cluster) or {})["spec"]
        return {field: spec[field] for field in sorted(spec) if field.startswith("priority")}

    async def test_by_its_label_and_by_another_one_later(self, operator: Operator, cluster: FakeCluster) -> None:
        for name, value in {"dear": 100, "cheap": -5}.items():
            cluster.objects["workloadpriorityclasses", "", name] = {"metadata": {"name": name}, "value": value}
        for name, value in {"dear": 100, "cheap": -5}.items():
            await service.sync_workload(operator, replace(queued(), priority_class=name), None, GONE)
            source = "kueue.x-k8s.io/workloadpriorityclass"
            assert self.told(cluster) == {
                "priority": value,
                "priorityClassName": name,
                "priorityClassSource": source,
            }
        cluster.objects.pop(("workloadpriorityclasses", "", "cheap"))
        await service.sync_workload(operator, replace(queued(), priority_class="cheap"), None, GONE)
        await service.sync_workload(operator, queued(), None, GONE)
        assert self.told(cluster) == {}

    @pytest.mark.parametrize("version", queues.KUEUE_VERSIONS)
    async def test_by_its_pods(self, operator: Operator, cluster: FakeCluster, version: str) -> None:
        cluster.objects["kueue.x-k8s.io", "", ""]["versions"] = [{"version": version}]
        cluster.objects["priorityclasses", "", "gold"] = {"metadata": {"name": "gold"}, "value": 7}
        job = queued()
        template = {**job.spec.template, "spec": {**job.spec.template["spec"], "priorityClassName": "gold"}}
        job = replace(job, spec=replace(job.spec, template=template))
        await service.sync_workload(operator, job, None, GONE)
        before = workload(cluster)
        await service.sync_workload(operator, job, None, GONE)
        assert workload(cluster) is before
        reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "gold"}
        old = {"priorityClassName": "gold", "priorityClassSource": "scheduling.k8s.io/priorityclass"}
        assert self.told(cluster) == {"priority": 7} | (
            old if version == "v1beta1" else {"priorityClassRef": reference}
        )

    async def test_a_class_that_is_not_there(self, operator: Operator, cluster: FakeCluster) -> None:
        with pytest.raises(kopf.TemporaryError, match=r"class dear \(label .*not among the workload.*: make"):
            await service.sync_workload(operator, replace(queued(), priority_class="dear"), None, GONE)
        assert workload(cluster) is None


class TestSent:
    """MultiKueue has copied the job from another cluster, and its Workload with it."""

    def sent(self, cluster: FakeCluster, **changes: Any) -> tuple[TrainingJob, Object]:
        job = replace(queued(**changes), prebuilt_workload="from-there")
        templates: dict[str, Object] = {WORKERS_POD_SET: {}, SPARES_POD_SET: {}}
        body = queues.build_workload(replace(queued(), prebuilt_workload="from-there"), "v1beta1", templates)
        del body["metadata"]["ownerReferences"], body["metadata"]["labels"]
        body["metadata"]["resourceVersion"] = "1"
        cluster.objects["workloads", "ns", "from-there"] = body
        say(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        return job, body

    async def test_it_waits_for_its_workload_and_makes_none(self, operator: Operator, cluster: FakeCluster) -> None:
        turn = await service.sync_workload(operator, replace(queued(), prebuilt_workload="from-there"), None, GONE)
        assert turn == QueueDecision(admitted=False, message=queues.NOT_SENT)
        assert workload(cluster) is None

    async def test_it_takes_what_was_sent_for_its_own(self, operator: Operator, cluster: FakeCluster) -> None:
        job, _ = self.sent(cluster)
        turn = await service.sync_workload(operator, job, None, GONE)
        assert (turn.admitted, turn.counts) == (True, {"workers": 4, "spares": 1})
        (owner,) = (workload(cluster) or {})["metadata"]["ownerReferences"]
        assert owner["uid"] == job.uid
        assert (
            await service.sync_workload(operator, job, turn, RUNS) == turn == await service.read_decision(operator, job)
        )

    async def test_nobody_is_admitted_by_what_another_has_asked_for(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        no = QueueDecision(admitted=False, message=queues.NOT_ITS_OWN)
        larger, body = self.sent(cluster, replicas=5)
        assert (
            await service.sync_workload(operator, larger, None, GONE)
            == no
            == await service.read_decision(operator, larger)
        )
        assert "ownerReferences" not in body["metadata"]
        job, body = self.sent(cluster)
        body["metadata"]["ownerReferences"] = [{"uid": "another"}]
        assert (
            await service.sync_workload(operator, job, None, GONE) == no == await service.read_decision(operator, job)
        )


class TestElsewhere:
    """Another controller runs the job."""

    def elsewhere(self, phase: str = "", queue: str = "team") -> tuple[TrainingJob, Object]:
        job = queued()
        body = {"metadata": {"name": "j", "namespace": "ns"}, "status": {"phase": phase} if phase else {}}
        return replace(job, queue=queue, spec=replace(job.spec, managed_by="kueue.x-k8s.io/multikueue")), body

    async def passes(self, operator: Operator, phase: str = "", queue: str = "team") -> float:
        job, body = self.elsewhere(phase, queue)
        return await reconcile_job(operator, create_job_context(operator, job, body))

    async def test_it_stands_in_its_queue_and_nothing_else_is_touched(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        before = dict(cluster.objects)
        assert await self.passes(operator) == QUEUE_POLL_SECONDS
        say(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        await self.passes(operator)
        assert [plural for plural, _, _ in cluster.objects.keys() - before.keys()] == ["workloads"]

    async def test_without_a_queue_not_even_that(self, operator: Operator, cluster: FakeCluster) -> None:
        before = dict(cluster.objects)
        assert await self.passes(operator, queue="") > QUEUE_POLL_SECONDS
        assert cluster.objects == before

    @pytest.mark.parametrize(
        ("phase", "told"),
        [
            ("Running", ("PodsReady", "True", "Started")),
            ("Complete", ("Finished", "True", "Succeeded")),
            ("Failed", ("Finished", "True", "Failed")),
        ],
    )
    async def test_its_queue_hears_how_far_it_is_there(
        self, operator: Operator, cluster: FakeCluster, phase: str, told: tuple[str, str, str]
    ) -> None:
        await self.passes(operator)
        say(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        await self.passes(operator, phase)
        conditions = (workload(cluster) or {})["status"]["conditions"]
        assert told in [(each["type"], each["status"], each["reason"]) for each in conditions]


class TestPass:
    async def at_work(self, operator: Operator, cluster: FakeCluster, world: Observation) -> JobContext:
        await store_job(cluster, world)
        await operator.stores.pods.refresh(cluster, ())
        return create_job_context(operator, replace(world.job, queue="team"), {})

    def conditions(self, cluster: FakeCluster) -> dict[str, tuple[str, str, str]]:
        found = cluster.objects["trainingjobs", "ns", "j"]["status"]["conditions"]
        return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found}

    async def test_a_job_that_is_not_admitted_stops_and_says_why(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        desk = await self.at_work(operator, cluster, build_training())
        await reconcile_job(operator, desk)
        await desk.effect_runner.wait_until_idle()
        assert desk.cache.desired is not None
        assert desk.cache.desired.plan.stop is Stop.SUSPEND
        assert workload(cluster) is not None
        assert self.conditions(cluster)["Suspended"] == ("False", "Queued", f"{queues.NOT_MADE}; 5 workers are leaving")
        for name in [name for plural, _, name in cluster.objects if plural == "pods"]:
            await cluster.delete(PODS, name, "ns")
        await operator.stores.pods.refresh(cluster, ())
        await reconcile_job(operator, desk)
        assert self.conditions(cluster)["Suspended"] == ("True", "Queued", "waits in queue team")
        assert self.conditions(cluster)["Reconciling"] == ("True", "Queued", "waits in queue team")
        assert cluster.objects["trainingjobs", "ns", "j"]["status"]["phase"] == "Suspended"

    async def test_one_that_trains_is_not_held_by_an_operator_that_has_just_begun(
        self, operator: Operator, cluster: FakeCluster
    ) -> None:
        world = build_training()
        await service.sync_workload(operator, replace(world.job, queue="team"), None, GONE)
        say(cluster, "QuotaReserved", "Admitted", workers=4, spares=1)
        desk = await self.at_work(operator, cluster, world)
        await reconcile_job(operator, desk)
        assert desk.cache.desired is not None
        assert desk.cache.desired.plan.stop is Stop.NO

    async def test_one_that_trains_goes_on_while_kueue_is_away(self, operator: Operator, cluster: FakeCluster) -> None:
        """An upgrade takes its API group away for a moment. Whoever has just begun knows of no admission."""
        group = cluster.objects.pop(("kueue.x-k8s.io", "", ""))
        desk = await self.at_work(operator, cluster, build_training())
        for _ in range(2):
            await reconcile_job(operator, desk)
            await desk.effect_runner.wait_until_idle()
            assert desk.cache.desired is not None
            assert desk.cache.desired.plan.stop is Stop.NO
            assert len(desk.cache.desired.state.placement.workers) == 5
        kind, reason, words = self.conditions(cluster)["ActionBlocked"]
        assert (kind, reason, queues.NOT_SERVED_NOW in words) == ("True", "ActionFailed", True)
        cluster.objects["kueue.x-k8s.io", "", ""] = group
        assert not (
            await service.sync_workload(operator, replace(desk.job), desk.cache.results.queue_decision, RUNS)
        ).admitted

    async def test_one_that_waits_goes_on_waiting(self, operator: Operator, cluster: FakeCluster) -> None:
        del cluster.objects["kueue.x-k8s.io", "", ""]
        desk = await self.at_work(operator, cluster, build_fresh())
        await reconcile_job(operator, desk)
        assert self.conditions(cluster)["Suspended"][1:] == ("Queued", queues.NOT_SERVED)

    async def test_its_pods_go_where_its_flavour_is(self, operator: Operator, cluster: FakeCluster) -> None:
        desk = await self.at_work(operator, cluster, build_training())
        there = NodePlacement({"pool": "h100"}, ({"key": "gpu"},))
        desk.cache.results.queue_decision = replace(
            HERE, flavors={WORKERS_POD_SET: frozenset({"h100"})}, placements={"h100": there}
        )
        await handle_effect(operator, desk, CreatePod(WorkerRecord("j-w9-0", 9, 0)))
        pod = cluster.objects["pods", "ns", "j-w9-0"]
        assert pod["spec"]["nodeSelector"] == {"pool": "h100"}
        assert {"key": "gpu"} in pod["spec"]["tolerations"]
        await handle_effect(operator, desk, CreatePod(WorkerRecord("j-w8-0", 8, 0), spare=True))
        assert "nodeSelector" not in cluster.objects["pods", "ns", "j-w8-0"]["spec"]
