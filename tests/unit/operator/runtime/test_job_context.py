"""The context of a pass: its policy, the time of the next pass, status writes, and the end of a job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.conditions import Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import (
    CleanPodPolicy,
    JobPhase,
    RemediationMode,
    RequestedSyncMode,
    RunPolicySpec,
)
from pacekeeper_operator.decide.effects import DeletePod, RequestQuarantine
from pacekeeper_operator.kube.client import EVENTS, INCIDENT_OBJECTS, PODS, TRAINING_JOBS, ObjectRejected
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry, WorkerContact
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime import job_state
from pacekeeper_operator.runtime import reconcile as reconciling
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import (
    IDLE_PASS_INTERVAL_SECONDS,
    MAX_IDLE_PASSES_PER_SECOND,
    MAX_STATUSES_PER_SECOND,
    MIN_STATUS_INTERVAL_SECONDS,
    PASS_INTERVAL_JITTER,
    STATUS_INTERVAL_JITTER,
    build_policy,
    clean_up,
    close_incidents,
    create_job_context,
    reconcile_job,
)
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.shared.node_priority import NODE_PRIORITY_THRESHOLD
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident, QuarantineRequest
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION, store_job
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import (
    NOW,
    build_crash,
    build_fresh,
    build_job,
    build_remediation,
    build_training,
    change_heartbeat,
    change_members,
)


class RecordingCluster(FakeCluster):
    """Records the status writes of jobs, and how pods are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[dict[str, Any]] = []
        self.graces: dict[str, int | None] = {}

    async def patch(self, kind: Any, name: str, body: Any, namespace: str = "", **named: Any) -> Any:
        if kind is TRAINING_JOBS:
            self.statuses.append(body["status"])
        return await super().patch(kind, name, body, namespace, **named)

    async def delete(
        self, kind: Any, name: str, namespace: str = "", *, grace: int | None = None, **named: Any
    ) -> None:
        if kind is PODS:
            self.graces[name] = grace
        await super().delete(kind, name, namespace, **named)


class JobBench:
    """An operator with up-to-date stores and one job. Its clock stands still until a test moves it."""

    def __init__(self, observation: Observation, settings: Settings | None = None) -> None:
        self.cluster, self.observation, self.runtime = RecordingCluster(), observation, FixedTimeRuntime()
        settings = settings or Settings(network_policies=False)
        prometheus = PrometheusClient("", "", "")
        self.operator = Operator(
            settings, self.cluster, JobRegistry(0.0), INSTALLATION, prometheus, self.runtime, paused=""
        )
        self.context: JobContext

    async def open(self) -> JobBench:
        await store_job(self.cluster, self.observation)
        for view in self.observation.cluster_view.nodes.values():
            status = {"conditions": [{"type": "Ready", "status": "True" if view.ready else "False"}]}
            self.cluster._store(
                ("nodes", "", view.name), {"metadata": {"name": view.name, "uid": view.uid}, "status": status}
            )
        await self.operator.stores.pods.refresh(self.cluster, ())
        await self.operator.stores.nodes.refresh(self.cluster, ())
        self.context = create_job_context(self.operator, self.observation.job, {})
        for member in self.observation.workers:
            if member.heartbeat is not None:
                self.context.cache.contacts[member.name] = WorkerContact(member.heartbeat, NOW, open_polls=1)
        return self

    def read_reason(self, name: str) -> str:
        """Return the reason of a condition in the newest status."""
        return next(str(one["reason"]) for one in self.cluster.statuses[-1]["conditions"] if one["type"] == name)

    async def run_pass(self) -> float:
        pause = await reconcile_job(self.operator, self.context)
        await self.context.effect_runner.wait_until_idle()
        await self.operator.stores.pods.refresh(self.cluster, ())
        for _ in range(3):  # numbers are written concurrently, and this API server answers at once
            await asyncio.sleep(0)
        return pause


async def open_bench(observation: Observation, settings: Settings | None = None) -> JobBench:
    return await JobBench(observation, settings).open()


class TestPolicy:
    @pytest.mark.parametrize("own", [RemediationMode.ACT, RemediationMode.RECOMMEND])
    @pytest.mark.parametrize("cap", [RemediationMode.ACT, RemediationMode.RECOMMEND])
    async def test_a_job_acts_only_where_both_job_and_platform_allow_it(
        self, own: RemediationMode, cap: RemediationMode
    ) -> None:
        bench = JobBench(build_training(), Settings(mode=cap))
        own_job = build_job(remediation=build_remediation(mode=own))
        assert (build_policy(bench.operator, own_job).mode is RemediationMode.ACT) is (
            own is cap is RemediationMode.ACT
        )


class TestPassInterval:
    """Seconds until the next pass, unless something wakes it earlier."""

    async def test_a_training_job_has_passes_at_the_sampling_interval(self) -> None:
        bench = await open_bench(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        assert await bench.run_pass() == 3.0

    async def test_many_training_jobs_have_passes_less_often(self) -> None:
        bench = await open_bench(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        bench.operator.passes.active_jobs = 1000
        pauses = [await bench.run_pass() for _ in range(20)]
        mean = 1000 / MAX_IDLE_PASSES_PER_SECOND
        assert (
            (1 - PASS_INTERVAL_JITTER) * mean <= min(pauses) < mean < max(pauses) <= (1 + PASS_INTERVAL_JITTER) * mean
        ), "the intervals differ"

    async def test_a_large_job_has_passes_less_often_unless_a_worker_is_cut_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reconciling, "MAX_CHECKED_WORKERS_PER_SECOND", 1.0)  # of its four workers
        bench = await open_bench(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        pauses = [await bench.run_pass() for _ in range(20)]
        assert (1 - PASS_INTERVAL_JITTER) * 4.0 <= min(pauses) < 4.0 < max(pauses) <= (1 + PASS_INTERVAL_JITTER) * 4.0
        bench.context.cache.contacts["j-w1-0"].is_cut_off = True
        assert await bench.run_pass() == 3.0, "a worker is cut off"

    async def test_a_job_with_a_silent_worker_or_an_open_incident_has_frequent_passes(self) -> None:
        """The poll of a worker has ended, or an incident is open."""
        bench = await open_bench(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        bench.operator.passes.active_jobs = 1000
        contact = bench.context.cache.contacts["j-w1-0"]
        contact.open_polls, contact.last_seen_at = 0, NOW - 2.9
        assert await bench.run_pass() > 10.0, "its next poll is expected"
        contact.is_cut_off = True
        assert await bench.run_pass() == 3.0
        contact.is_cut_off = False
        contact.last_seen_at = NOW - 3.1
        assert await bench.run_pass() == 3.0
        open_incident = Incident(
            "slow",
            IncidentCause.STRAGGLER,
            IncidentClass.PERFORMANCE,
            1,
            "m",
            NOW - 9,
            NOW - 8,
            NOW - 7,
            remedy="Rebalance",
            live=True,
        )
        observation = build_training()
        bench = await open_bench(observation.with_desired(observation.desired.with_incidents(current=(open_incident,))))
        bench.operator.passes.active_jobs = 1000
        assert await bench.run_pass() <= bench.operator.settings.sample_seconds

    async def test_a_job_with_a_silent_worker_has_a_pass_once_the_grace_of_a_new_operator_is_over(self) -> None:
        bench = await open_bench(build_training(), Settings(network_policies=False, sample_seconds=3.0))
        bench.operator.passes.active_jobs = 1000
        await bench.run_pass()
        bench.operator.jobs.started_at = NOW - 4.0
        del bench.context.cache.contacts["j-w1-0"]
        assert await bench.run_pass() == bench.operator.settings.grace_after_start - 4.0

    async def test_a_recovering_job_or_one_with_a_fault_has_a_pass_soon(self) -> None:
        bench = await open_bench(change_members(build_training(), start={"first_step_at": None}))
        assert await bench.run_pass() == 0.5
        assert bench.context.cache.phase is JobPhase.RECOVERING
        bench = await open_bench(build_training())
        bench.context.cache.faults.add(replace(build_crash("j-w1-0", 1), noticed_at=NOW), workers=5)
        assert await bench.run_pass() == 0.5

    async def test_a_suspended_job_has_rare_passes_once_its_pods_have_left(self) -> None:
        observation = build_training(job=build_job(suspend=True))
        bench = await open_bench(observation)
        await bench.run_pass()
        bench.runtime.passed = 3.0
        assert await bench.run_pass() == 5.0
        for key in [key for key in bench.cluster.objects if key[0] == "pods"]:
            del bench.cluster.objects[key]
        await bench.operator.stores.pods.refresh(bench.cluster, ())
        bench.context.cache.contacts.clear()
        await bench.run_pass()
        assert await bench.run_pass() == IDLE_PASS_INTERVAL_SECONDS

    @pytest.mark.parametrize(("ttl", "after", "pause"), [(None, 0, 5.0), (8, 5, 3.0), (8, 7.9, 0.5), (600, 0, 5.0)])
    async def test_an_ended_job_has_a_pass_when_its_time_to_live_is_over(
        self, ttl: int | None, after: float, pause: float
    ) -> None:
        """Its pods still run."""
        run_policy = RunPolicySpec(ttl_seconds_after_finished=ttl, clean_pod_policy=CleanPodPolicy.NONE)
        observation = build_training(job=build_job(run_policy=run_policy))
        observation = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        bench = await open_bench(observation)
        bench.runtime.passed = after
        assert await bench.run_pass() == pytest.approx(pause, abs=0.05)

    async def test_an_ended_job_has_rare_passes_once_its_pods_have_ended(self) -> None:
        observation = build_training()
        observation = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW, stopped_at=NOW))
        bench = await open_bench(observation)
        for (plural, _, _), body in bench.cluster.objects.items():
            if plural == "pods":
                body["status"]["phase"] = "Succeeded"
                body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 100)
        bench.cluster.version += 200
        await bench.operator.stores.pods.refresh(bench.cluster, ())
        assert await bench.run_pass() == IDLE_PASS_INTERVAL_SECONDS


class TestStatusWrites:
    async def test_numbers_are_written_at_intervals_and_conditions_at_once(self) -> None:
        bench = await open_bench(build_training())
        await bench.run_pass()
        first = len(bench.cluster.statuses)
        for _ in range(3):
            await bench.run_pass()
        assert len(bench.cluster.statuses) == first, "nothing has changed"
        contact = bench.context.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        bench.runtime.passed = MIN_STATUS_INTERVAL_SECONDS - 1
        await bench.run_pass()
        assert len(bench.cluster.statuses) == first
        bench.runtime.passed = (1 + STATUS_INTERVAL_JITTER) * MIN_STATUS_INTERVAL_SECONDS
        await bench.run_pass()
        assert len(bench.cluster.statuses) == first + 1
        bench.operator.paused = "maintenance"
        await bench.run_pass()
        assert len(bench.cluster.statuses) == first + 2

    async def test_a_new_operator_does_not_write_numbers_at_once(self) -> None:
        """Writes of a thousand jobs would delay a new operator."""
        bench = await open_bench(build_training())
        await bench.run_pass()
        contact = bench.context.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        status, count = bench.cluster.statuses[-1], len(bench.cluster.statuses)
        bench.context = create_job_context(
            bench.operator, bench.observation.job, {**bench.context.body, "status": status}
        )
        await bench.run_pass()
        assert len(bench.cluster.statuses) == count
        bench.runtime.passed = (1 + STATUS_INTERVAL_JITTER) * MIN_STATUS_INTERVAL_SECONDS
        await bench.run_pass()
        assert len(bench.cluster.statuses) == count + 1

    async def test_a_status_that_changes_back_during_a_write_is_written_again(self) -> None:
        """Otherwise the status would keep what held only for a moment."""
        bench = await open_bench(build_training())
        await bench.run_pass()
        slow, patch = asyncio.Event(), bench.cluster.patch

        async def patch_slowly(*what: Any, **named: Any) -> Any:
            await slow.wait()
            return await patch(*what, **named)

        bench.cluster.patch = patch_slowly  # type: ignore[method-assign]
        bench.operator.paused = "maintenance"
        await bench.run_pass()
        bench.operator.paused = ""
        await bench.run_pass()
        bench.context.cache.wake.clear()
        slow.set()
        await asyncio.wait_for(bench.context.cache.wake.wait(), 60)
        assert bench.read_reason("Degraded") == Reason.PAUSED
        await bench.run_pass()
        assert bench.read_reason("Degraded") != Reason.PAUSED

    async def test_an_unchanged_status_is_written_again_after_a_failed_write(self) -> None:
        """The API server may have applied the write, and its answer was lost."""
        bench = await open_bench(build_training())
        await bench.run_pass()
        count, patch = len(bench.cluster.statuses), bench.cluster.patch

        async def fail_patch(*_: Any, **__: Any) -> Any:
            raise kopf.TemporaryError("no answer")

        bench.cluster.patch = fail_patch  # type: ignore[method-assign]
        bench.operator.paused = "maintenance"
        await bench.run_pass()
        bench.operator.paused, bench.cluster.patch = "", patch  # type: ignore[method-assign]
        await asyncio.wait_for(bench.context.cache.wake.wait(), 60)
        await bench.run_pass()
        assert len(bench.cluster.statuses) == count + 1

    async def test_numbers_of_many_jobs_are_written_less_often(self) -> None:
        bench = await open_bench(build_training())
        bench.operator.passes.active_jobs = 1000
        await bench.run_pass()
        first = len(bench.cluster.statuses)
        contact = bench.context.cache.contacts["j-w0-0"]
        contact.heartbeat = change_heartbeat(contact.heartbeat, {"progress": {"step": 501}})
        for passed, count in (
            (MIN_STATUS_INTERVAL_SECONDS, first),
            ((1 + STATUS_INTERVAL_JITTER) * 1000 / MAX_STATUSES_PER_SECOND, first + 1),
        ):
            bench.runtime.passed = passed
            await bench.run_pass()
            assert len(bench.cluster.statuses) == count

    async def test_a_status_contains_only_what_the_state_contains(self) -> None:
        bench = await open_bench(build_training())
        await bench.run_pass()
        await bench.cluster.delete(PODS, "j-w1-0", "ns")
        await bench.operator.stores.pods.refresh(bench.cluster, ())
        bench.cluster.refusals["trainingjobstates"] = [ObjectRejected("etcdserver: request is too large")]
        with pytest.raises(ObjectRejected):
            await reconcile_job(bench.operator, bench.context)
        assert bench.read_reason("Recovering") == Reason.NO_INCIDENT, "what is not written does not hold"
        await reconcile_job(bench.operator, bench.context)
        await bench.context.effect_runner.wait_until_idle()
        assert bench.read_reason("Recovering") == Reason.INCIDENT_OPEN

    async def test_only_a_change_of_sync_mode_of_the_plan_is_an_event(self) -> None:
        observation = build_training(job=build_job(sync_mode=RequestedSyncMode.EDIT))
        bench = await open_bench(observation)
        await bench.run_pass()
        await bench.run_pass()
        (event,) = (body for key, body in bench.cluster.objects.items() if key[0] == EVENTS.plural)
        assert (event["reason"], event["note"]) == ("SyncModeChanged", "Sync → EDiT: spec.syncMode is EDiT")
        assert bench.context.cache.desired is not None
        version = bench.context.cache.desired.plan.version
        bench.context.job = replace(bench.context.job, spec=replace(bench.context.job.spec, replicas=3))
        await bench.run_pass()
        assert bench.context.cache.desired.plan.version > version
        assert len([key for key in bench.cluster.objects if key[0] == EVENTS.plural]) == 1


class TestSweptIncidents:
    """Ended incidents whose end is written in the cluster leave the state."""

    def build_ended_incident(self, name: str = "i") -> Incident:
        known = Incident(
            name, IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "m", NOW - 9, NOW - 8, NOW - 7, applied=NOW - 7
        )
        return replace(known, outcome=IncidentOutcome.RECOVERED, recovered=NOW - 1)

    async def test_a_written_ended_incident_is_removed_from_the_state(self) -> None:
        observation = build_training()
        bench = await open_bench(
            observation.with_desired(observation.desired.with_incident(self.build_ended_incident()))
        )
        await bench.run_pass()
        assert bench.context.written_incidents.keys() == {"i"}
        await bench.run_pass()
        assert bench.context.cache.desired is not None
        assert bench.context.cache.desired.state.incidents.current == ()
        assert bench.context.written_incidents == {}
        assert len([key for key in bench.cluster.objects if key[0] == INCIDENT_OBJECTS.plural]) == 1

    async def test_an_incident_that_blames_a_node_stays_until_the_quarantine_is_decided(self) -> None:
        observation = build_training()
        wanted = QuarantineRequest("node-9", "unused", "why", "blaming", at=NOW)
        desired = observation.desired.with_incident(self.build_ended_incident("blaming")).with_incident(
            self.build_ended_incident()
        )
        bench = await open_bench(observation.with_desired(desired.with_incidents(quarantine_requests=(wanted,))))
        await bench.run_pass()
        assert bench.context.written_incidents.keys() == {"blaming", "i"}
        await bench.run_pass()
        assert bench.context.written_incidents.keys() == {"blaming"}, "its decision is written first"
        for _ in range(3):
            await bench.run_pass()
        assert bench.context.written_incidents == {}

    async def test_an_open_incident_stays_in_the_state(self) -> None:
        observation = change_members(build_training(), start={"first_step_at": None})
        open_ = replace(self.build_ended_incident(), outcome=None, recovered=None)
        bench = await open_bench(observation.with_desired(observation.desired.with_incident(open_)))
        for _ in range(3):
            await bench.run_pass()
        assert bench.context.cache.desired is not None
        assert bench.context.cache.desired.state.incidents.open == (open_,)
        assert bench.context.written_incidents == {"i": open_}


class TestDeletedJobs:
    async def test_pods_are_deleted_with_their_grace_period(self) -> None:
        bench = await open_bench(build_training(2, 1))
        bench.context.cache.update(desired=build_training(2, 1).desired)
        assert not await clean_up(bench.operator, bench.context)
        assert bench.cluster.graces == {"j-w0-0": None, "j-w1-0": None, "j-w2-0": None}
        assert await clean_up(bench.operator, bench.context)

    @pytest.mark.parametrize("why", ["not ready", "no such node", "overdue", "by force"])
    async def test_a_pod_whose_end_no_kubelet_will_confirm_is_deleted_by_force(self, why: str) -> None:
        observation = build_training(2, 0)
        desired = observation.desired
        nodes = dict(observation.cluster_view.nodes)
        if why == "not ready":
            nodes["node-1"] = replace(nodes["node-1"], ready=False)
        elif why == "no such node":
            del nodes["node-1"]
        elif why == "by force":
            desired = desired.with_worker(replace(desired.state.placement.workers[1], force=True))
        bench = await open_bench(replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes)))
        bench.context.cache.update(desired=desired)
        for (plural, _, name), body in bench.cluster.objects.items():
            if plural == "pods":
                overdue = why == "overdue" and name == "j-w1-0"
                body["metadata"]["finalizers"] = ["example.com/finalizer"]
                body["metadata"]["deletionTimestamp"] = "1970-01-01T00:00:00Z" if overdue else "2200-01-01T00:00:00Z"
        assert not await clean_up(bench.operator, bench.context)
        assert bench.cluster.graces == {"j-w1-0": 0}, "the other one is being deleted already"

    async def test_an_unscheduled_pod_is_not_deleted_by_force(self) -> None:
        observation = build_training(1, 0)
        observation = observation.with_desired(
            observation.desired.with_worker(replace(observation.state.placement.workers[0], node=""))
        )
        bench = await open_bench(observation)
        assert not await clean_up(bench.operator, bench.context)
        assert bench.cluster.graces == {"j-w0-0": None}

    async def test_open_incidents_are_closed_and_others_keep_their_outcome(self) -> None:
        builder = TestSweptIncidents()
        observation = build_training()
        desired = observation.desired.with_incident(builder.build_ended_incident()).with_incident(
            replace(builder.build_ended_incident("open"), outcome=None)
        )
        bench = await open_bench(observation.with_desired(desired))
        await close_incidents(bench.operator, bench.context)
        found = {key[2]: body for key, body in bench.cluster.objects.items() if key[0] == INCIDENT_OBJECTS.plural}
        assert {name: body["status"]["outcome"] for name, body in found.items()} == {
            "i": "Recovered",
            "open": "Superseded",
        }

    async def test_a_job_without_a_state_has_no_incidents_to_close(self) -> None:
        bench = JobBench(build_fresh())
        bench.context = create_job_context(bench.operator, build_fresh().job, {})
        await close_incidents(bench.operator, bench.context)
        assert bench.cluster.objects == {}


async def test_a_state_written_by_another_is_read_before_the_next_pass() -> None:
    bench = await open_bench(build_training())
    await bench.run_pass()
    cache = bench.context.cache
    assert cache.desired is not None
    other = JobCache(bench.observation.job)
    await job_state.load_state(bench.cluster, bench.observation.job, other)
    await job_state.write_state(
        bench.cluster, bench.observation.job, other, cache.desired.with_lifecycle(completed_at=NOW - 1)
    )
    cache.resource_version = ""
    await bench.run_pass()
    assert cache.desired.state.lifecycle.completed_at == NOW - 1


async def test_a_new_spare_prefers_nodes_without_incidents() -> None:
    """The whole path from the node histories to the pod in the API server."""
    bench = await open_bench(build_training())
    del bench.cluster.objects["pods", "ns", "j-w4-0"]
    await bench.operator.stores.pods.refresh(bench.cluster, ())
    bench.operator.node_histories.unreliable_nodes = ("node-9",)
    await reconcile_job(bench.operator, bench.context)
    await bench.context.effect_runner.wait_until_idle()
    body = bench.cluster.objects["pods", "ns", "j-w4-1"]
    (preference,) = body["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (requirement,) = preference["preference"]["matchFields"]
    assert (requirement["operator"], requirement["values"]) == ("NotIn", ["node-9"])


class TestNodePriority:
    @pytest.mark.parametrize("backlog", [NODE_PRIORITY_THRESHOLD - 1, NODE_PRIORITY_THRESHOLD])
    async def test_other_effects_wait_while_very_many_nodes_wait_for_quarantine(self, backlog: int) -> None:
        bench = await open_bench(build_training(replicas=2))
        node = next(iter(bench.observation.cluster_view.nodes.values()))
        wanted = QuarantineRequest(node.name, node.uid, "it shows an XID", "incident", at=NOW)
        bench.operator.node_registry.priority_gate.set_backlog(backlog)
        await bench.context.effect_runner.submit([RequestQuarantine(wanted), DeletePod("j-w0-0", "u-w0")])
        assert bench.cluster.objects.get(("nodequarantines", "", node.name)) is not None
        assert bench.context.cache.results.quarantine_decisions[wanted.node_key].recorded, (
            "a deletion from now on ends it"
        )
        assert ("j-w0-0" in bench.cluster.graces) == (backlog < NODE_PRIORITY_THRESHOLD), (
            "the node of this effect counts, too"
        )
        bench.operator.node_registry.priority_gate.set_backlog(0)
        await asyncio.wait_for(bench.context.effect_runner.wait_until_idle(), 60)
        assert "j-w0-0" in bench.cluster.graces
