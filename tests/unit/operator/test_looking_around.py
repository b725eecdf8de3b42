"""What an operator does beside its jobs: it asks Prometheus, looks whether it is paused, and expires incidents."""

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
    """One that counts what is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []
        self.away = False

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        self.looks.append(kind.plural)
        if self.away:
            raise kopf.TemporaryError("the API server does not answer")
        return await super().find(kind, name, namespace)

    async def list_with_version(self, kind: ResourceKind, namespace: str = "", **named: Any) -> Any:
        self.looks.append(f"all {kind.plural}{f' of {namespace}' if namespace else ''}")
        return await super().list_with_version(kind, namespace, **named)


class Asked(PrometheusClient):
    """Answers at once, and remembers when it was asked."""

    def __init__(self) -> None:
        super().__init__("", "", "")
        self.times: list[float] = []
        self.trouble, self.slow, self.takes = "", False, 0.0
        self.gpu: tuple[GpuValue, ...] = ()
        self.errors: tuple[GpuValue, ...] | None = ()
        self.looks = 0
        self.runtime: VirtualRuntime

    async def sample(self, now: float, jobs: Collection[JobName] = ()) -> PrometheusSample:  # noqa: ARG002
        self.times.append(now)
        if self.takes:
            await self.runtime.sleep(self.takes)
        return PrometheusSample(now, gpu_values=self.gpu, error=self.trouble, timed_out=self.slow)

    async def read_gpu_errors(self) -> tuple[GpuValue, ...] | None:
        self.looks += 1
        return self.errors


class Place:
    def __init__(self, **settings: Any) -> None:
        self.cluster, self.prometheus, self.timeline = Cluster(), Asked(), Timeline()
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
def place() -> Place:
    return Place()


class Watching:
    """Runs `run_periodic_tasks` while it is entered."""

    def __init__(self, place: Place) -> None:
        self.place = place

    async def __aenter__(self) -> Place:
        self.task = self.place.runtime.start_task(run_periodic_tasks(self.place.operator), "watch over")
        return self.place

    async def __aexit__(self, *_: object) -> None:
        assert not self.task.done()
        self.task.cancel()


class TestPaused:
    async def test_nobody_may_act_before_somebody_has_looked(self, place: Place) -> None:
        assert place.operator.paused == PAUSE_UNKNOWN
        place.cluster.away = True
        async with Watching(place):
            await place.timeline.run(1)
            assert place.operator.paused == PAUSE_UNKNOWN
            place.cluster.away = False
            await place.timeline.run(SAMPLE_SECONDS)
            assert place.operator.paused == ""

    async def test_it_is_looked_at_now_and_then(self, place: Place) -> None:
        async with Watching(place):
            await place.timeline.run(10 * SAMPLE_SECONDS)
        assert 3 <= place.cluster.looks.count(CONFIG_MAPS.plural) <= 5

    async def test_by_whom_and_why(self, place: Place) -> None:
        async with Watching(place):
            await place.timeline.run(1)
            assert place.operator.paused == ""
            await place.pause(data={"reason": "a fire drill"})
            await place.timeline.run(4 * SAMPLE_SECONDS)
        assert place.operator.paused == "remedies are paused by ConfigMap system/pacekeeper-pause: a fire drill"

    @pytest.mark.parametrize("body", [{}, {"data": None}, {"data": {}}])
    async def test_nobody_need_say_why(self, place: Place, body: dict[str, Any]) -> None:
        await place.pause(**body)
        async with Watching(place):
            await place.timeline.run(1)
        assert place.operator.paused.endswith("no reason given")

    async def test_by_the_settings_whatever_else_there_is(self) -> None:
        place = Place(paused=True)
        await place.pause(data={"reason": "a fire drill"})
        async with Watching(place):
            await place.timeline.run(1)
        assert place.operator.paused == "remedies are paused by the operator's settings"

    async def test_jobs_are_woken_when_it_changes_and_only_then(self, place: Place) -> None:
        place.job(JobPhase.RUNNING)
        wake = place.memory.get_or_create(build_training().job).wake
        async with Watching(place):
            await place.timeline.run(1)
            assert wake.is_set(), "it was not known before"
            wake.clear()
            await place.timeline.run(10 * SAMPLE_SECONDS)
            assert not wake.is_set()
            await place.pause()
            await place.timeline.run(4 * SAMPLE_SECONDS)
            assert wake.is_set()


class TestPrometheus:
    @pytest.mark.parametrize(
        ("phase", "asked"),
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
    async def test_is_asked_while_some_job_is_active(self, place: Place, phase: JobPhase | None, asked: bool) -> None:
        place.job(phase)
        async with Watching(place):
            await place.timeline.run(4 * SAMPLE_SECONDS + 1)
        assert len(place.prometheus.times) == (5 if asked else 0)

    async def test_slow_is_not_away_until_what_was_heard_is_stale(self, place: Place) -> None:
        place.job(JobPhase.RUNNING)
        async with Watching(place):
            await place.timeline.run(1)
            heard = place.operator.prometheus.sample
            assert not heard.error
            place.prometheus.trouble, place.prometheus.slow = "it does not answer within 3 s", True
            await place.timeline.run(MAX_SAMPLE_AGE_SECONDS - 2)
            assert place.operator.prometheus.sample is heard
            assert not place.operator.prometheus.get_metrics(build_training().job, place.runtime.now()).prometheus_error
            await place.timeline.run(4)
            assert place.operator.prometheus.sample.error == "it does not answer within 3 s"

    async def test_an_answer_that_takes_its_time_holds_nothing_up_and_is_as_old_as_its_question(
        self, place: Place
    ) -> None:
        place.job(JobPhase.RUNNING)
        place.prometheus.takes = 10.0
        asked_at = place.runtime.now()
        async with Watching(place):
            await place.timeline.run(9)
            assert len(place.prometheus.times) == 1
            assert place.cluster.looks.count(CONFIG_MAPS.plural) >= 2
            await place.timeline.run(2)
            assert place.operator.prometheus.sample.queried_at == asked_at

    async def test_an_error_of_a_gpu_wakes_whoever_is_there_and_nobody_else(self, place: Place) -> None:
        for number, name in enumerate(("here", "there")):
            metadata = {"name": f"{name}-w0-0", "namespace": "ns", "labels": {LABEL_JOB: name}, "uid": name}
            pod: Object = {"metadata": metadata | {"creationTimestamp": format_time(NOW)}}
            pod |= {"spec": {"nodeName": f"node-{number}", "containers": []}, "status": {"phase": "Running"}}
            place.operator.stores.pods.apply_event(pod, deleted=False)
        here, there = (
            place.memory.get_or_create(replace(build_job(), name=name, uid=name)) for name in ("here", "there")
        )
        here.update(phase=JobPhase.RUNNING)
        place.prometheus.gpu = (GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0),)
        async with Watching(place):
            await place.timeline.run(1)
            here.wake.clear()  # of that nothing is paused, too
            there.wake.clear()
            place.prometheus.gpu = (GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 48.0),)
            await place.timeline.run(SAMPLE_SECONDS)
            assert (here.wake.is_set(), there.wake.is_set()) == (True, False)
            here.wake.clear()
            await place.timeline.run(SAMPLE_SECONDS)
            assert not here.wake.is_set(), "that it is as it was is no news"

    async def test_errors_of_gpus_are_asked_for_more_often_and_make_their_jobs_pass_first(self, place: Place) -> None:
        metadata = {"name": "j-w0-0", "namespace": "ns", "labels": {LABEL_JOB: "j"}, "uid": "u"}
        pod: Object = {"metadata": metadata | {"creationTimestamp": format_time(NOW)}}
        place.operator.stores.pods.apply_event(
            pod | {"spec": {"nodeName": "node-0", "containers": []}, "status": {"phase": "Running"}}, deleted=False
        )
        known = place.memory.get_or_create(replace(build_job(), name="j", uid="j"))
        known.update(phase=JobPhase.RUNNING)
        looking = place.runtime.start_task(place.operator.prometheus.poll_gpu_errors(), "GPUs")
        await place.timeline.run(2)
        assert place.prometheus.looks == 0, "where no sample has come, none of it is asked for either"
        async with Watching(place):
            await place.timeline.run(0.1)
            known.wake.clear()
            error = GpuValue("node-0", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0)
            place.prometheus.errors = (error,)
            await place.timeline.run(GPU_ERROR_POLL_SECONDS)
            assert len(place.prometheus.times) == 1
            assert known.wake.is_set()
            assert place.operator.passes.jobs_with_new_gpu_errors == {("ns", "j")}
            assert place.operator.prometheus.sample.get_metrics("ns", "j").gpu_values == (error,)
            place.prometheus.errors = None
            await place.timeline.run(GPU_ERROR_POLL_SECONDS)
            assert place.operator.prometheus.sample.gpu_values == (error,), "what cannot be had is no word on a GPU"
        assert not looking.done()
        looking.cancel()

    @pytest.mark.parametrize(("trouble", "up"), [("", 1.0), ("it does not answer", 0.0)])
    async def test_whether_it_answers_is_measured(self, place: Place, trouble: str, up: float) -> None:
        place.job(JobPhase.RUNNING)
        place.prometheus.trouble = trouble
        async with Watching(place):
            await place.timeline.run(1)
        assert metrics.PROMETHEUS_UP._value.get() == up

    async def test_what_it_said_long_ago_is_no_news(self, place: Place) -> None:
        job = build_training().job
        at = place.runtime.now()
        place.operator.prometheus.sample = PrometheusSample(at, {"reporting_ranks": {("ns", "j"): 2.0}}, error="")
        assert place.operator.prometheus.get_metrics(job, at + MAX_SAMPLE_AGE_SECONDS).reporting_ranks == 2.0
        assert (
            place.operator.prometheus.get_metrics(job, at + MAX_SAMPLE_AGE_SECONDS + 1).prometheus_error
            == PROMETHEUS_NOT_QUERIED
        )


class TestBlind:
    def test_a_watch_that_has_told_something_lives(self, place: Place) -> None:
        start = place.memory.started_at
        assert place.operator.stores.find_watch_failure(start + FIRST_WATCH_EVENT_SECONDS) == ""
        assert "no watch has reported anything" in place.operator.stores.find_watch_failure(
            start + FIRST_WATCH_EVENT_SECONDS + 1
        )
        place.operator.stores.nodes.has_watch_events = True
        assert place.operator.stores.find_watch_failure(start + FIRST_WATCH_EVENT_SECONDS + 1) == ""
        place.operator.stores.pods.missed_changes = MAX_MISSED_POD_CHANGES - 1
        assert place.operator.stores.find_watch_failure(start) == ""
        place.operator.stores.pods.missed_changes = MAX_MISSED_POD_CHANGES
        assert "the watch of pods is dead" in place.operator.stores.find_watch_failure(start)


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
        ids=["there", "gone", "about to go", "ended", "another of its name", "given up", "no worker"],
    )
    async def test_a_worker_that_was_to_stay_is_lost_until_its_jobs_pass_begins(
        self, place: Place, changes: dict[str, Any], lost: bool
    ) -> None:
        world = build_training()
        memory = place.memory.get_or_create(world.job)
        first, *others = world.desired.state.placement.workers
        first = replace(first, leaving=changes.get("leaving", ""))
        memory.update(desired=world.desired.with_placement(workers=(first, *others)))
        name = world.job.namespace, world.job.name
        metadata: Object = {
            "name": changes.get("name", first.name),
            "namespace": name[0],
            "labels": {LABEL_JOB: name[1]},
            "uid": changes.get("uid", first.uid),
            "creationTimestamp": format_time(NOW),
        }
        pod: Object = {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}}
        place.operator.stores.pods.apply_event(pod, deleted=False)
        memory.wake.clear()
        assert not place.operator.passes.jobs_with_lost_worker
        if "deleting" in changes:
            metadata["deletionTimestamp"] = format_time(NOW)
        pod["status"] = {"phase": changes.get("phase", "Running"), "podIP": "10.0.0.9"}
        place.operator.stores.pods.apply_event(pod, deleted=changes.get("deleted", False))
        assert memory.wake.is_set()
        assert place.operator.passes.jobs_with_lost_worker == ({name} if lost else set())
        place.operator.passes.mark_evaluated(name)
        assert not place.operator.passes.jobs_with_lost_worker


class TestResync:
    async def test_lists_every_minute_and_sooner_where_that_failed(self, place: Place) -> None:
        task = place.runtime.start_task(place.operator.stores.resync(), "resync")
        await place.timeline.run(1)
        assert place.cluster.looks == ["all fabrics", "all trainingjobstates", "all nodes", "all pods"]
        await place.operator.stores.wait_until_listed()
        place.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
        await place.timeline.run(60)
        assert place.cluster.looks[4:] == ["all fabrics", "all trainingjobstates", "all nodes"]
        await place.timeline.run(3)
        assert place.cluster.looks[7:] == ["all fabrics", "all trainingjobstates", "all nodes", "all pods"]
        assert not task.done()
        task.cancel()

    async def test_one_that_begins_to_lead_reads_what_is_written_of_all_jobs_by_one_list(self, place: Place) -> None:
        state = {"metadata": {"name": "j", "namespace": "ns", "uid": "u"}}
        await place.cluster.create(TRAINING_JOB_STATES, state)
        place.operator.start_leading()
        task = place.runtime.start_task(place.operator.stores.resync(), "resync")
        await place.timeline.run(1)
        assert list(place.operator.stores.listed_states) == [("ns", "j")]
        place.operator.on_serving_changed(serves=False)
        assert place.operator.stores.listed_states == {}, "another one may write from now on"
        task.cancel()

    @pytest.mark.parametrize("leads", [True, False])
    async def test_where_the_api_server_was_restored_from_a_backup_the_leader_ends(
        self, place: Place, leads: bool
    ) -> None:
        """kopf's watch of jobs cannot be turned back."""
        place.operator.stores.is_leader = lambda: leads
        place.cluster.version = 100
        task = place.runtime.start_task(place.operator.stores.resync(), "resync")
        await place.timeline.run(1)
        place.cluster.version = 50
        await place.timeline.run(60)
        assert isinstance(place.runtime.failure, Superseded) == task.done() == leads
        task.cancel()

    async def test_one_that_does_not_lead_reads_none(self, place: Place) -> None:
        place.operator.stores.is_leader = lambda: False
        task = place.runtime.start_task(place.operator.stores.resync(), "resync")
        await place.timeline.run(61)
        assert "all trainingjobstates" not in place.cluster.looks
        task.cancel()

    @pytest.mark.parametrize(
        ("version", "written", "doubted"),
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
    async def test_what_somebody_else_has_written_or_deleted_is_looked_at_anew(
        self, place: Place, version: str, written: str | None, doubted: bool
    ) -> None:
        known = place.memory.get_or_create(build_training().job)
        known.resource_version = version
        body = {"metadata": {"name": "j", "namespace": "ns", "resourceVersion": written}}
        place.memory.verify_states(Listing([] if written is None else [body], 5), "ns")
        assert (known.needs_reload, known.wake.is_set()) == (doubted, doubted)
        place.memory.verify_states(Listing([], 5), "another")
        assert known.needs_reload == doubted, "that list says nothing of this namespace"

    async def test_where_that_list_is_denied_jobs_are_asked_for_one_by_one(self, place: Place) -> None:
        place.cluster.failures[TRAINING_JOB_STATES.plural] = [Denied("the namespace is being deleted")]
        place.operator.start_leading()
        task = place.runtime.start_task(place.operator.stores.resync(), "resync")
        await place.timeline.run(1)
        assert place.operator.stores.listed_states == {}
        await asyncio.wait_for(place.operator.stores.wait_until_listed(), 60)
        task.cancel()


class TestRetention:
    @pytest.fixture
    async def kept(self, place: Place) -> Place:
        """Incidents of two namespaces: some whose time is over, some whose is not, some without one."""
        for namespace in ("ns", "other"):
            for name, until in (("old", NOW - 1), ("new", NOW + 1), ("for-ever", None)):
                annotations = {} if until is None else {ANNOTATION_RETAIN_UNTIL: format_time(until)}
                metadata = {"name": name, "namespace": namespace, "annotations": annotations}
                body = {"metadata": metadata, "spec": {"jobRef": {"uid": "u"}}}
                await place.cluster.create(INCIDENT_OBJECTS, body)
        return place

    def left(self, place: Place) -> set[tuple[str, str]]:
        return {key[1:] for key in place.cluster.objects if key[0] == INCIDENT_OBJECTS.plural}

    async def test_those_whose_time_is_over_go(self, kept: Place) -> None:
        await incidents.clean_up_incidents(kept.cluster, (), NOW)
        assert self.left(kept) == {(place, name) for place in ("ns", "other") for name in ("new", "for-ever")}

    async def test_none_goes_while_the_time_is_in_doubt(self, kept: Place) -> None:
        await incidents.clean_up_incidents(kept.cluster, (), None)
        assert len(self.left(kept)) == 6

    async def test_in_namespaces_that_the_operator_serves(self, kept: Place) -> None:
        await incidents.clean_up_incidents(kept.cluster, ("ns",), NOW)
        assert ("other", "old") in self.left(kept)
        assert ("ns", "old") not in self.left(kept)

    async def test_one_that_cannot_be_listed_does_not_keep_the_others(self, kept: Place) -> None:
        kept.cluster.failures[INCIDENT_OBJECTS.plural] = [Denied("its RoleBinding is gone")]
        await incidents.clean_up_incidents(kept.cluster, ("other", "ns"), NOW)
        assert ("other", "old") in self.left(kept)
        assert ("ns", "old") not in self.left(kept)

    async def test_where_none_can_be_listed_it_is_tried_again_soon(self, kept: Place) -> None:
        kept.cluster.failures[INCIDENT_OBJECTS.plural] = [Denied("no"), Denied("no")]
        with pytest.raises(Denied):
            await incidents.clean_up_incidents(kept.cluster, ("other", "ns"), NOW)

    async def test_they_are_looked_for_at_the_start_a_minute_later_and_every_ten_minutes(self, place: Place) -> None:
        async with Watching(place):
            await place.timeline.run(SAMPLE_SECONDS)
            assert place.cluster.looks.count("all incidents") == 1
            await place.timeline.run(60 + SAMPLE_SECONDS)
            assert place.cluster.looks.count("all incidents") == 2
            await place.timeline.run(RETENTION_INTERVAL_SECONDS - 2 * SAMPLE_SECONDS)
            assert place.cluster.looks.count("all incidents") == 2
            await place.timeline.run(4 * SAMPLE_SECONDS)
            assert place.cluster.looks.count("all incidents") == 3


class TestOrphans:
    """Incidents that nobody would ever close."""

    @pytest.fixture
    async def found(self, place: Place) -> Place:
        await place.cluster.create(TRAINING_JOBS, {"metadata": {"name": "j", "namespace": "ns", "uid": "there"}})
        for name, uid, status in (
            ("open", "there", {}),
            ("orphan", "gone", {}),
            ("ended", "gone", {"outcome": "Recovered"}),
        ):
            metadata = {"name": name, "namespace": "ns", "labels": {LABEL_JOB: "j"}}
            body = {"metadata": metadata, "spec": {"jobRef": {"uid": uid}}, "status": status}
            await place.cluster.create(INCIDENT_OBJECTS, body)
        return place

    def outcomes(self, place: Place) -> dict[str, str]:
        stored = {key[2]: body for key, body in place.cluster.objects.items() if key[0] == INCIDENT_OBJECTS.plural}
        return {name: (body.get("status") or {}).get("outcome", "") for name, body in stored.items()}

    async def test_those_of_jobs_that_are_gone_are_closed(self, found: Place) -> None:
        await incidents.clean_up_incidents(found.cluster, (), NOW)
        assert self.outcomes(found) == {"open": "", "orphan": "Superseded", "ended": "Recovered"}

    async def test_one_that_cannot_be_closed_is_left(self, found: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise Denied("no")

        monkeypatch.setattr(found.cluster, "patch", refuse)
        await incidents.clean_up_incidents(found.cluster, (), NOW)
        assert self.outcomes(found)["orphan"] == ""

    async def test_those_of_a_bookkeeping_that_was_lost_are_closed(self, found: Place) -> None:
        await incidents.supersede_unknown(found.cluster, replace(build_job(), uid="there"), ("other",))
        assert self.outcomes(found)["open"] == "Superseded"

    async def test_those_that_it_knows_stay(self, found: Place) -> None:
        await incidents.supersede_unknown(found.cluster, replace(build_job(), uid="there"), ("open",))
        assert self.outcomes(found)["open"] == ""


async def test_a_token_is_believed_for_longer_only_while_its_very_pod_stays(place: Place) -> None:
    def pod(**metadata: Any) -> Object:
        named = {"namespace": "ns", "name": "j-w0-0", "uid": "u1", "labels": {LABEL_JOB: "j"}, **metadata}
        named["creationTimestamp"] = "2026-01-01T00:00:00Z"
        return {"metadata": named, "spec": {}, "status": {"phase": "Running"}}

    stays, pods = place.operator.stores.is_pod_alive, place.operator.stores.pods
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
    pods.apply_event(pod(resourceVersion="1"), deleted=False)
    assert stays(PodIdentity("ns", "j-w0-0", "u1"))
    assert not stays(PodIdentity("ns", "j-w0-0", "u0")), "an earlier one of that name"
    pods.apply_event(pod(resourceVersion="2", deletionTimestamp="2026-01-01T00:00:00Z"), deleted=False)
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
    pods.apply_event(pod(resourceVersion="3"), deleted=True)
    assert not stays(PodIdentity("ns", "j-w0-0", "u1"))
