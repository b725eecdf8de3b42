"""Periodic tasks of the operator: it polls Prometheus and the pause, and expires incidents."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator import metrics
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import ANNOTATION_RETAIN_UNTIL, LABEL_JOB, PAUSE_CONFIG_MAP
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.async_runtime import Superseded
from pacekeeper_operator.endpoint.token_review import PodIdentity
from pacekeeper_operator.kube.client import (
    CONFIG_MAPS,
    INCIDENT_OBJECTS,
    TRAINING_JOB_STATES,
    TRAINING_JOBS,
    Denied,
    Listing,
    Object,
    ResourceKind,
)
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient, PrometheusSample
from pacekeeper_operator.services import incidents
from pacekeeper_operator.services.operator import PAUSE_UNKNOWN, Operator
from pacekeeper_operator.services.periodic_tasks import RETENTION_INTERVAL_SECONDS, run_periodic_tasks
from pacekeeper_operator.services.shared.prometheus_poller import GPU_ERROR_POLL_SECONDS, MAX_SAMPLE_AGE_SECONDS
from pacekeeper_operator.services.shared.watched_stores import FIRST_WATCH_EVENT_SECONDS, MAX_MISSED_POD_CHANGES
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.job_metrics import PROMETHEUS_NOT_QUERIED, GpuValue
from pacekeeper_operator.state.network import JobName
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.observations import NOW, build_job, build_training
from testing.operators.virtual_time import Timeline, VirtualRuntime

SAMPLE_SECONDS = 2.0


class Cluster(FakeCluster):
    """A cluster that records the objects and lists that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.polls: list[str] = []
        self.away = False

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        self.polls.append(kind.plural)
        if self.away:
            raise kopf.TemporaryError("the API server does not answer")
        return await super().find(kind, name, namespace)

    async def list_with_version(self, kind: ResourceKind, namespace: str = "", **named: Any) -> Any:
        self.polls.append(f"all {kind.plural}{f' of {namespace}' if namespace else ''}")
        return await super().list_with_version(kind, namespace, **named)


class FakePrometheus(PrometheusClient):
    """It answers at once, and records the times of queries."""

    def __init__(self) -> None:
        super().__init__("", "", "")
        self.times: list[float] = []
        self.trouble, self.slow, self.takes = "", False, 0.0
        self.gpu: tuple[GpuValue, ...] = ()
        self.errors: tuple[GpuValue, ...] | None = ()
        self.polls = 0
        self.runtime: VirtualRuntime

    async def sample(self, now: float, jobs: Collection[JobName] = ()) -> PrometheusSample:  # noqa: ARG002
        self.times.append(now)
        if self.takes:
            await self.runtime.sleep(self.takes)
        return PrometheusSample(now, gpu_values=self.gpu, error=self.trouble, timed_out=self.slow)

    async def read_gpu_errors(self) -> tuple[GpuValue, ...] | None:
        self.polls += 1
        return self.errors


class Harness:
    def __init__(self, **settings: Any) -> None:
        self.cluster, self.prometheus, self.timeline = Cluster(), FakePrometheus(), Timeline()
        self.runtime = self.prometheus.runtime = VirtualRuntime(self.timeline)
        self.memory = JobRegistry(self.runtime.now())
        values = {"namespace": "system", "sample_seconds": SAMPLE_SECONDS, **settings}
        self.operator = Operator(
            Settings(**values), self.cluster, self.memory, INSTALLATION, self.prometheus, self.runtime
        )

    def job(self, phase: JobPhase | None) -> None:
        self.memory.get_or_create(build_training().job).update(phase=phase)

    async def pause(self, **body: Any) -> None:
        await self.cluster.create(CONFIG_MAPS, {"metadata": {"name": PAUSE_CONFIG_MAP, "namespace": "system"}, **body})


@pytest.fixture
def harness() -> Harness:
    return Harness()


class PeriodicTasks:
    """Runs `run_periodic_tasks` while it is entered."""

    def __init__(self, harness: Harness) -> None:
        self.place = harness

    async def __aenter__(self) -> Harness:
        self.task = self.place.runtime.start_task(run_periodic_tasks(self.place.operator), "watch over")
        return self.place

    async def __aexit__(self, *_: object) -> None:
        assert not self.task.done()
        self.task.cancel()


class TestPaused:
    async def test_the_pause_is_unknown_until_it_has_been_read(self, harness: Harness) -> None:
        assert harness.operator.paused == PAUSE_UNKNOWN
        harness.cluster.away = True
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
            assert harness.operator.paused == PAUSE_UNKNOWN
            harness.cluster.away = False
            await harness.timeline.run(SAMPLE_SECONDS)
            assert harness.operator.paused == ""

    async def test_the_pause_is_polled(self, harness: Harness) -> None:
        async with PeriodicTasks(harness):
            await harness.timeline.run(10 * SAMPLE_SECONDS)
        assert 3 <= harness.cluster.polls.count(CONFIG_MAPS.plural) <= 5

    async def test_the_pause_names_its_author_and_reason(self, harness: Harness) -> None:
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
            assert harness.operator.paused == ""
            await harness.pause(data={"reason": "a fire drill"})
            await harness.timeline.run(4 * SAMPLE_SECONDS)
        assert harness.operator.paused == "remedies are paused by ConfigMap system/pacekeeper-pause: a fire drill"

    @pytest.mark.parametrize("body", [{}, {"data": None}, {"data": {}}])
    async def test_a_pause_needs_no_reason(self, harness: Harness, body: dict[str, Any]) -> None:
        await harness.pause(**body)
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
        assert harness.operator.paused.endswith("no reason given")

    async def test_a_pause_by_the_settings_takes_precedence(self) -> None:
        harness = Harness(paused=True)
        await harness.pause(data={"reason": "a fire drill"})
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
        assert harness.operator.paused == "remedies are paused by the operator's settings"

    async def test_jobs_are_woken_only_when_the_pause_changes(self, harness: Harness) -> None:
        harness.job(JobPhase.RUNNING)
        wake = harness.memory.get_or_create(build_training().job).wake
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
            assert wake.is_set(), "the pause was unknown before"
            wake.clear()
            await harness.timeline.run(10 * SAMPLE_SECONDS)
            assert not wake.is_set()
            await harness.pause()
            await harness.timeline.run(4 * SAMPLE_SECONDS)
            assert wake.is_set()


class TestPrometheus:
    @pytest.mark.parametrize(
        ("phase", "polled"),
        [
            (JobPhase.PENDING, True),
            (JobPhase.STARTING, True),
            (JobPhase.RUNNING, True),
            (JobPhase.RECOVERING, True),
            (JobPhase.SUSPENDED, False),
            (JobPhase.COMPLETE, False),
            (JobPhase.FAILED, False),
            (None, False),
        ],
    )
    async def test_prometheus_is_polled_while_a_job_is_active(
        self, harness: Harness, phase: JobPhase | None, polled: bool
    ) -> None:
        harness.job(phase)
        async with PeriodicTasks(harness):
            await harness.timeline.run(4 * SAMPLE_SECONDS + 1)
        assert len(harness.prometheus.times) == (5 if polled else 0)

    async def test_a_slow_prometheus_is_available_until_its_sample_is_outdated(self, harness: Harness) -> None:
        harness.job(JobPhase.RUNNING)
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
            sample = harness.operator.prometheus.sample
            assert not sample.error
            harness.prometheus.trouble, harness.prometheus.slow = "it does not answer within 3 s", True
            await harness.timeline.run(MAX_SAMPLE_AGE_SECONDS - 2)
            assert harness.operator.prometheus.sample is sample
            assert not harness.operator.prometheus.get_metrics(
                build_training().job, harness.runtime.now()
            ).prometheus_error
            await harness.timeline.run(4)
            assert harness.operator.prometheus.sample.error == "it does not answer within 3 s"

    async def test_a_late_sample_delays_nothing_and_is_as_old_as_its_query(self, harness: Harness) -> None:
        harness.job(JobPhase.RUNNING)
        harness.prometheus.takes = 10.0
        asked_at = harness.runtime.now()
        async with PeriodicTasks(harness):
            await harness.timeline.run(9)
            assert len(harness.prometheus.times) == 1
            assert harness.cluster.polls.count(CONFIG_MAPS.plural) >= 2
            await harness.timeline.run(2)
            assert harness.operator.prometheus.sample.queried_at == asked_at

    async def test_a_gpu_error_wakes_only_the_job_on_its_node(self, harness: Harness) -> None:
        for number, name in enumerate(("here", "there")):
            metadata = {"name": f"{name}-w0-0", "namespace": "ns", "labels": {LABEL_JOB: name}, "uid": name}
            pod: Object = {"metadata": metadata | {"creationTimestamp": format_time(NOW)}}
            pod |= {"spec": {"nodeName": f"node-{number}", "containers": []}, "status": {"phase": "Running"}}
            harness.operator.stores.pods.apply_event(pod, deleted=False)
        here, there = (
            harness.memory.get_or_create(replace(build_job(), name=name, uid=name)) for name in ("here", "there")
        )
        here.update(phase=JobPhase.RUNNING)
        harness.prometheus.gpu = (GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0),)
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
            here.wake.clear()  # the end of the unknown pause wakes jobs, too
            there.wake.clear()
            harness.prometheus.gpu = (GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 48.0),)
            await harness.timeline.run(SAMPLE_SECONDS)
            assert (here.wake.is_set(), there.wake.is_set()) == (True, False)
            here.wake.clear()
            await harness.timeline.run(SAMPLE_SECONDS)
            assert not here.wake.is_set(), "an unchanged error wakes no job"

    async def test_gpu_errors_are_polled_more_often_and_prioritize_their_jobs(self, harness: Harness) -> None:
        metadata = {"name": "j-w0-0", "namespace": "ns", "labels": {LABEL_JOB: "j"}, "uid": "u"}
        pod: Object = {"metadata": metadata | {"creationTimestamp": format_time(NOW)}}
        harness.operator.stores.pods.apply_event(
            pod | {"spec": {"nodeName": "node-0", "containers": []}, "status": {"phase": "Running"}}, deleted=False
        )
        known = harness.memory.get_or_create(replace(build_job(), name="j", uid="j"))
        known.update(phase=JobPhase.RUNNING)
        task = harness.runtime.start_task(harness.operator.prometheus.poll_gpu_errors(), "GPUs")
        await harness.timeline.run(2)
        assert harness.prometheus.polls == 0, "without a sample there are no queries for errors"
        async with PeriodicTasks(harness):
            await harness.timeline.run(0.1)
            known.wake.clear()
            error = GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0)
            harness.prometheus.errors = (error,)
            await harness.timeline.run(GPU_ERROR_POLL_SECONDS)
            assert len(harness.prometheus.times) == 1
            assert known.wake.is_set()
            assert harness.operator.passes.jobs_with_new_gpu_errors == {("ns", "j")}
            assert harness.operator.prometheus.sample.get_metrics("ns", "j").gpu_values == (error,)
            harness.prometheus.errors = None
            await harness.timeline.run(GPU_ERROR_POLL_SECONDS)
            assert harness.operator.prometheus.sample.gpu_values == (error,), "a failed query keeps the known errors"
        assert not task.done()
        task.cancel()

    @pytest.mark.parametrize(("error", "up"), [("", 1.0), ("it does not answer", 0.0)])
    async def test_a_metric_shows_whether_prometheus_answers(self, harness: Harness, error: str, up: float) -> None:
        harness.job(JobPhase.RUNNING)
        harness.prometheus.trouble = error
        async with PeriodicTasks(harness):
            await harness.timeline.run(1)
        assert metrics.PROMETHEUS_UP._value.get() == up

    async def test_an_outdated_sample_is_not_used(self, harness: Harness) -> None:
        job = build_training().job
        at = harness.runtime.now()
        harness.operator.prometheus.sample = PrometheusSample(at, {"reporting_ranks": {("ns", "j"): 2.0}}, error="")
        assert harness.operator.prometheus.get_metrics(job, at + MAX_SAMPLE_AGE_SECONDS).reporting_ranks == 2.0
        assert (
            harness.operator.prometheus.get_metrics(job, at + MAX_SAMPLE_AGE_SECONDS + 1).prometheus_error
            == PROMETHEUS_NOT_QUERIED
        )


class TestWatchFailure:
    def test_a_watch_with_events_is_alive(self, harness: Harness) -> None:
        start = harness.memory.started_at
        assert harness.operator.stores.find_watch_failure(start + FIRST_WATCH_EVENT_SECONDS) == ""
        assert "no watch has reported anything" in harness.operator.stores.find_watch_failure(
            start + FIRST_WATCH_EVENT_SECONDS + 1
        )
        harness.operator.stores.nodes.has_watch_events = True
        assert harness.operator.stores.find_watch_failure(start + FIRST_WATCH_EVENT_SECONDS + 1) == ""
        harness.operator.stores.pods.missed_changes = MAX_MISSED_POD_CHANGES - 1
        assert harness.operator.stores.find_watch_failure(start) == ""
        harness.operator.stores.pods.missed_changes = MAX_MISSED_POD_CHANGES
        assert "the watch of pods is dead" in harness.operator.stores.find_watch_failure(start)


class TestLostWorkers:
    @pytest.mark.parametrize(
        ("changes", "lost"),
        [
            ({}, False),
            ({"deleted": True}, True),
            ({"deleting": True}, True),
            ({"phase": "Failed"}, True),
            ({"deleted": True, "uid": "another"}, False),
            ({"deleted": True, "leaving": "it is not wanted any more"}, False),
            ({"deleted": True, "name": "stray"}, False),
        ],
        ids=["there", "gone", "terminating", "ended", "another pod of its name", "leaving", "no worker"],
    )
    async def test_a_worker_without_a_reason_to_leave_is_lost_until_its_jobs_pass_begins(
        self, harness: Harness, changes: dict[str, Any], lost: bool
    ) -> None:
        observation = build_training()
        memory = harness.memory.get_or_create(observation.job)
        first, *others = observation.desired.state.placement.workers
        first = replace(first, leaving=changes.get("leaving", ""))
        memory.update(desired=observation.desired.with_placement(workers=(first, *others)))
        name = observation.job.namespace, observation.job.name
        metadata: Object = {
            "name": changes.get("name", first.name),
            "namespace": name[0],
            "labels": {LABEL_JOB: name[1]},
            "uid": changes.get("uid", first.uid),
            "creationTimestamp": format_time(NOW),
        }
        pod: Object = {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}}
        harness.operator.stores.pods.apply_event(pod, deleted=False)
        memory.wake.clear()
        assert not harness.operator.passes.jobs_with_lost_worker
        if "deleting" in changes:
            metadata["deletionTimestamp"] = format_time(NOW)
        pod["status"] = {"phase": changes.get("phase", "Running"), "podIP": "10.0.0.9"}
        harness.operator.stores.pods.apply_event(pod, deleted=changes.get("deleted", False))
        assert memory.wake.is_set()
        assert harness.operator.passes.jobs_with_lost_worker == ({name} if lost else set())
        harness.operator.passes.mark_evaluated(name)
        assert not harness.operator.passes.jobs_with_lost_worker


class TestResync:
    async def test_resync_runs_every_minute_and_sooner_after_a_failure(self, harness: Harness) -> None:
        task = harness.runtime.start_task(harness.operator.stores.resync(), "resync")
        await harness.timeline.run(1)
        assert harness.cluster.polls == ["all fabrics", "all trainingjobstates", "all nodes", "all pods"]
        await harness.operator.stores.wait_until_listed()
        harness.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
        await harness.timeline.run(60)
        assert harness.cluster.polls[4:] == ["all fabrics", "all trainingjobstates", "all nodes"]
        await harness.timeline.run(3)
        assert harness.cluster.polls[7:] == ["all fabrics", "all trainingjobstates", "all nodes", "all pods"]
        assert not task.done()
        task.cancel()

    async def test_a_new_leader_reads_the_states_of_all_jobs_by_one_list(self, harness: Harness) -> None:
        state = {"metadata": {"name": "j", "namespace": "ns", "uid": "u"}}
        await harness.cluster.create(TRAINING_JOB_STATES, state)
        harness.operator.start_leading()
        task = harness.runtime.start_task(harness.operator.stores.resync(), "resync")
        await harness.timeline.run(1)
        assert list(harness.operator.stores.listed_states) == [("ns", "j")]
        harness.operator.on_serving_changed(serves=False)
        assert harness.operator.stores.listed_states == {}, "another operator may write from now on"
        task.cancel()

    @pytest.mark.parametrize("leads", [True, False])
    async def test_a_restored_api_server_ends_the_leader(self, harness: Harness, leads: bool) -> None:
        """kopf's watch of jobs cannot be turned back."""
        harness.operator.stores.is_leader = lambda: leads
        harness.cluster.version = 100
        task = harness.runtime.start_task(harness.operator.stores.resync(), "resync")
        await harness.timeline.run(1)
        harness.cluster.version = 50
        await harness.timeline.run(60)
        assert isinstance(harness.runtime.failure, Superseded) == task.done() == leads
        task.cancel()

    async def test_a_follower_reads_no_states(self, harness: Harness) -> None:
        harness.operator.stores.is_leader = lambda: False
        task = harness.runtime.start_task(harness.operator.stores.resync(), "resync")
        await harness.timeline.run(61)
        assert "all trainingjobstates" not in harness.cluster.polls
        task.cancel()

    @pytest.mark.parametrize(
        ("version", "written", "needs_reload"),
        [
            ("2", "2", False),
            ("1", "2", True),
            ("1", None, True),
            ("9", "2", False),
            ("9", None, False),
            ("", "2", False),
        ],
        ids=["the same", "another", "deleted", "written since", "made since", "not read yet"],
    )
    async def test_a_state_changed_by_another_writer_is_read_again(
        self, harness: Harness, version: str, written: str | None, needs_reload: bool
    ) -> None:
        known = harness.memory.get_or_create(build_training().job)
        known.resource_version = version
        body = {"metadata": {"name": "j", "namespace": "ns", "resourceVersion": written}}
        harness.memory.verify_states(Listing([] if written is None else [body], 5), "ns")
        assert (known.needs_reload, known.wake.is_set()) == (needs_reload, needs_reload)
        harness.memory.verify_states(Listing([], 5), "another")
        assert known.needs_reload == needs_reload, "the list covers another namespace"

    async def test_if_the_list_is_denied_states_are_read_one_by_one(self, harness: Harness) -> None:
        harness.cluster.failures[TRAINING_JOB_STATES.plural] = [Denied("the namespace is being deleted")]
        harness.operator.start_leading()
        task = harness.runtime.start_task(harness.operator.stores.resync(), "resync")
        await harness.timeline.run(1)
        assert harness.operator.stores.listed_states == {}
        await asyncio.wait_for(harness.operator.stores.wait_until_listed(), 60)
        task.cancel()


class TestRetention:
    @pytest.fixture
    async def stored_incidents(self, harness: Harness) -> Harness:
        """Incidents of two namespaces: some expired, some not, some without an end."""
        for namespace in ("ns", "other"):
            for name, until in (("old", NOW - 1), ("new", NOW + 1), ("for-ever", None)):
                annotations = {} if until is None else {ANNOTATION_RETAIN_UNTIL: format_time(until)}
                metadata = {"name": name, "namespace": namespace, "annotations": annotations}
                body = {"metadata": metadata, "spec": {"jobRef": {"uid": "u"}}}
                await harness.cluster.create(INCIDENT_OBJECTS, body)
        return harness

    def list_incidents(self, harness: Harness) -> set[tuple[str, str]]:
        return {key[1:] for key in harness.cluster.objects if key[0] == INCIDENT_OBJECTS.plural}

    async def test_expired_incidents_are_deleted(self, stored_incidents: Harness) -> None:
        await incidents.clean_up_incidents(stored_incidents.cluster, (), NOW)
        assert self.list_incidents(stored_incidents) == {
            (harness, name) for harness in ("ns", "other") for name in ("new", "for-ever")
        }

    async def test_no_incident_is_deleted_while_the_clock_is_in_doubt(self, stored_incidents: Harness) -> None:
        await incidents.clean_up_incidents(stored_incidents.cluster, (), None)
        assert len(self.list_incidents(stored_incidents)) == 6

    async def test_incidents_are_deleted_only_in_served_namespaces(self, stored_incidents: Harness) -> None:
        await incidents.clean_up_incidents(stored_incidents.cluster, ("ns",), NOW)
        assert ("other", "old") in self.list_incidents(stored_incidents)
        assert ("ns", "old") not in self.list_incidents(stored_incidents)

    async def test_a_namespace_that_cannot_be_listed_does_not_protect_the_others(
        self, stored_incidents: Harness
    ) -> None:
        stored_incidents.cluster.failures[INCIDENT_OBJECTS.plural] = [Denied("its RoleBinding is gone")]
        await incidents.clean_up_incidents(stored_incidents.cluster, ("other", "ns"), NOW)
        assert ("other", "old") in self.list_incidents(stored_incidents)
        assert ("ns", "old") not in self.list_incidents(stored_incidents)

    async def test_failed_lists_are_retried_soon(self, stored_incidents: Harness) -> None:
        stored_incidents.cluster.failures[INCIDENT_OBJECTS.plural] = [Denied("no"), Denied("no")]
        with pytest.raises(Denied):
            await incidents.clean_up_incidents(stored_incidents.cluster, ("other", "ns"), NOW)

    async def test_expiry_runs_at_the_start_a_minute_later_and_every_ten_minutes(self, harness: Harness) -> None:
        async with PeriodicTasks(harness):
            await harness.timeline.run(SAMPLE_SECONDS)
            assert harness.cluster.polls.count("all incidents") == 1
            await harness.timeline.run(60 + SAMPLE_SECONDS)
            assert harness.cluster.polls.count("all incidents") == 2
            await harness.timeline.run(RETENTION_INTERVAL_SECONDS - 2 * SAMPLE_SECONDS)
            assert harness.cluster.polls.count("all incidents") == 2
            await harness.timeline.run(4 * SAMPLE_SECONDS)
            assert harness.cluster.polls.count("all incidents") == 3


class TestOrphans:
    """Incidents that no pass would close."""

    @pytest.fixture
    async def orphans(self, harness: Harness) -> Harness:
        await harness.cluster.create(TRAINING_JOBS, {"metadata": {"name": "j", "namespace": "ns", "uid": "there"}})
        for name, uid, status in (
            ("open", "there", {}),
            ("orphan", "gone", {}),
            ("ended", "gone", {"outcome": "Recovered"}),
        ):
            metadata = {"name": name, "namespace": "ns", "labels": {LABEL_JOB: "j"}}
            body = {"metadata": metadata, "spec": {"jobRef": {"uid": uid}}, "status": status}
            await harness.cluster.create(INCIDENT_OBJECTS, body)
        return harness

    def read_outcomes(self, harness: Harness) -> dict[str, str]:
        stored = {key[2]: body for key, body in harness.cluster.objects.items() if key[0] == INCIDENT_OBJECTS.plural}
        return {name: (body.get("status") or {}).get("outcome", "") for name, body in stored.items()}

    async def test_incidents_of_deleted_jobs_are_closed(self, orphans: Harness) -> None:
        await incidents.clean_up_incidents(orphans.cluster, (), NOW)
        assert self.read_outcomes(orphans) == {"open": "", "orphan": "Superseded", "ended": "Recovered"}

    async def test_an_incident_that_cannot_be_closed_is_left(
        self, orphans: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise Denied("no")

        monkeypatch.setattr(orphans.cluster, "patch", refuse)
        await incidents.clean_up_incidents(orphans.cluster, (), NOW)
        assert self.read_outcomes(orphans)["orphan"] == ""

    async def test_incidents_of_a_lost_state_are_closed(self, orphans: Harness) -> None:
        await incidents.supersede_unknown(orphans.cluster, replace(build_job(), uid="there"), ("other",))
        assert self.read_outcomes(orphans)["open"] == "Superseded"

    async def test_incidents_in_the_state_stay_open(self, orphans: Harness) -> None:
        await incidents.supersede_unknown(orphans.cluster, replace(build_job(), uid="there"), ("open",))
        assert self.read_outcomes(orphans)["open"] == ""


async def test_a_tokens_pod_is_alive_only_while_the_same_pod_exists(harness: Harness) -> None:
    def pod(**metadata: Any) -> Object:
        named = {"namespace": "ns", "name": "j-w0-0", "uid": "u1", "labels": {LABEL_JOB: "j"}, **metadata}
        named["creationTimestamp"] = "2026-01-01T00:00:00Z"
        return {"metadata": named, "spec": {}, "status": {"phase": "Running"}}

    stays, pods = harness.operator.stores.is_pod_alive, harness.operator.stores.pods
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
    pods.apply_event(pod(resourceVersion="1"), deleted=False)
    assert stays(PodIdentity("ns", "j-w0-0", "u1"))
    assert not stays(PodIdentity("ns", "j-w0-0", "u0")), "an earlier pod of that name"
    pods.apply_event(pod(resourceVersion="2", deletionTimestamp="2026-01-01T00:00:00Z"), deleted=False)
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
    pods.apply_event(pod(resourceVersion="3"), deleted=True)
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
