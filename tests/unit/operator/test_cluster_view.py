"""What other jobs, earlier reports, and the operator's own probes add to the observation of a job."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, Plan
from pacekeeper_analysis.protocol.reports import Evidence, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidenceRequest
from pacekeeper_operator import file_limits
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.file_limits import FileLimits
from pacekeeper_operator.observe import reachability
from pacekeeper_operator.observe.gather import build_observation, collect_cluster_view
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry, WorkerContact
from pacekeeper_operator.observe.peer_jobs import HUNG_NODE_SECONDS, SUSPECT_NODE_SECONDS, NodeSnapshot
from pacekeeper_operator.observe.views import view_node
from pacekeeper_operator.pods.checkpoint_server import build_checkpoint_server_name
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.state.cluster_view import RECENT_POLL_SECONDS, ClusterView, PodView
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    Incident,
    PastIncident,
    Placement,
    QuarantineRequest,
    State,
)
from pacekeeper_operator.state.effect_results import QuarantineDecision
from testing.operators.observations import NOW, build_crash, build_job, build_training

MINE = replace(build_job(), uid="mine", name="mine", created_at=NOW)
ATTEMPTED = DesiredState(Plan(), State(placement=Placement(attempts=2, template_accepted=1)))


def collect_view(*others: JobCache, desired: DesiredState = ATTEMPTED) -> ClusterView:
    memory = JobRegistry(0.0)
    for other in others:
        assert other.job is not None
        known = memory.get_or_create(other.job)
        known.update(desired=other.desired, phase=other.phase)
    return collect_cluster_view(memory, MINE, desired, NodeSnapshot(), NOW)


def build_other_job(
    desired: DesiredState | None = ATTEMPTED, phase: JobPhase = JobPhase.PENDING, **changes: Any
) -> JobCache:
    values: dict[str, Any] = {"name": "other", "uid": "other", "created_at": NOW - 100}
    return JobCache(replace(build_job(), **(values | changes)), desired, phase=phase)


def build_past_incidents(*past: PastIncident) -> DesiredState:
    return ATTEMPTED.with_incidents(past=past)


class TestTurns:
    def test_an_older_waiting_job_goes_first(self) -> None:
        assert collect_view(build_other_job()).older_waiting_job == "other"

    @pytest.mark.parametrize(
        "differs",
        [
            build_other_job(None),
            build_other_job(phase=JobPhase.RUNNING),
            build_other_job(spec=replace(build_job().spec, suspend=True)),
            build_other_job(generation=2),
            build_other_job(ATTEMPTED.with_placement(attempts=0)),
            build_other_job(ATTEMPTED.with_placement(attempts=3)),
            build_other_job(ATTEMPTED.with_plan(members=build_training().plan.members)),
            build_other_job(namespace="another"),
        ],
        ids=[
            "it has no state",
            "it trains",
            "it is suspended",
            "its template is not accepted",
            "it has not failed yet",
            "it has failed more often",
            "it has members",
            "it is another tenant's",
        ],
    )
    def test_jobs_in_other_states_do_not_go_first(self, differs: JobCache) -> None:
        assert collect_view(differs).older_waiting_job == ""

    def test_neither_a_younger_job_nor_the_job_itself_goes_first(self) -> None:
        younger = build_other_job()
        assert younger.job is not None
        assert (
            collect_view(
                JobCache(replace(younger.job, created_at=NOW + 1), ATTEMPTED, phase=JobPhase.PENDING)
            ).older_waiting_job
            == ""
        )
        itself = JobCache(MINE, ATTEMPTED, phase=JobPhase.PENDING)
        assert collect_view(itself).older_waiting_job == ""
        elder = JobCache(replace(MINE, created_at=NOW - 9), ATTEMPTED, phase=JobPhase.PENDING)
        assert collect_view(elder).older_waiting_job == "", "the same job in the registry"

    def test_a_first_attempt_and_a_job_with_members_do_not_wait(self) -> None:
        assert collect_view(build_other_job(), desired=ATTEMPTED.with_placement(attempts=0)).older_waiting_job == ""
        assert (
            collect_view(
                build_other_job(), desired=ATTEMPTED.with_plan(members=build_training().plan.members)
            ).older_waiting_job
            == ""
        )

    def test_jobs_of_the_same_second_are_ordered_by_uid(self) -> None:
        for uid, first in (("a", "other"), ("z", "")):
            assert collect_view(build_other_job(created_at=NOW, uid=uid)).older_waiting_job == first


class TestSuspects:
    def list_suspects(
        self, cause: IncidentCause, class_: IncidentClass, node: str | None, age: float
    ) -> frozenset[str]:
        past = PastIncident(cause, NOW - age, 5.0, node=node, class_=class_)
        incident = Incident("i", cause, class_, 1, "m", NOW, NOW - age, NOW, node=node)
        by_past = collect_view(build_other_job(build_past_incidents(past))).suspects
        by_current = collect_view(build_other_job(ATTEMPTED.with_incident(incident))).suspects
        assert by_past == by_current
        return by_past

    def test_nodes_with_a_recent_infrastructure_failure_are_suspects(self) -> None:
        infrastructure = IncidentClass.INFRASTRUCTURE
        assert self.list_suspects(IncidentCause.NODE_LOST, infrastructure, "node-1", 1) == {"node-1"}
        assert self.list_suspects(IncidentCause.GPU_ERROR, infrastructure, "node-1", SUSPECT_NODE_SECONDS - 1) == {
            "node-1"
        }
        assert (
            self.list_suspects(IncidentCause.GPU_ERROR, infrastructure, "node-1", SUSPECT_NODE_SECONDS + 1)
            == frozenset()
        )
        assert self.list_suspects(IncidentCause.GPU_ERROR, IncidentClass.APPLICATION, "node-1", 1) == frozenset()
        assert self.list_suspects(IncidentCause.HANG, infrastructure, "node-1", 1) == frozenset()
        assert self.list_suspects(IncidentCause.NODE_LOST, infrastructure, None, 1) == frozenset()

    def test_incidents_of_other_tenants_make_no_suspects(self) -> None:
        past = PastIncident(IncidentCause.NODE_LOST, NOW - 1, 5.0, node="node-1", class_=IncidentClass.INFRASTRUCTURE)
        assert collect_view(build_other_job(build_past_incidents(past), namespace="another")).suspects == frozenset()


class TestHangs:
    def test_hangs_of_this_namespace_are_counted_and_of_others_recorded(self) -> None:
        hangs = (
            PastIncident(IncidentCause.HANG, NOW - 1, 5.0, node="node-1"),
            PastIncident(IncidentCause.HANG, NOW - HUNG_NODE_SECONDS + 1, 5.0, node="node-1"),
            PastIncident(IncidentCause.HANG, NOW - HUNG_NODE_SECONDS - 1, 5.0, node="node-2"),
            PastIncident(IncidentCause.CRASH, NOW - 1, 5.0, node="node-3"),
            PastIncident(IncidentCause.HANG, NOW - 1, 5.0),
        )
        here = collect_view(build_other_job(build_past_incidents(*hangs)))
        assert (dict(here.hung_nodes), here.hung_elsewhere) == ({"node-1": 2}, frozenset())
        elsewhere = collect_view(build_other_job(build_past_incidents(*hangs), namespace="another"))
        assert (dict(elsewhere.hung_nodes), elsewhere.hung_elsewhere) == ({}, frozenset({"node-1"}))
        assert elsewhere.past_durations == {}
        assert here.past_durations[IncidentCause.CRASH] == (5.0,)
        assert not collect_view(JobCache(MINE, build_past_incidents(*hangs))).hung_nodes, (
            "its own hangs are in its state"
        )


class TestReachedElsewhere:
    def is_reached_elsewhere(self, cache: JobCache, ago: float) -> bool:
        assert cache.job is not None
        memory = JobRegistry(0.0)
        known = memory.get_or_create(cache.job)
        known.update(desired=cache.desired)
        memory.mark_reporting(known, NOW - ago)
        return collect_cluster_view(memory, MINE, ATTEMPTED, NodeSnapshot(), NOW).reached_elsewhere

    @pytest.mark.parametrize(("ago", "expected"), [(RECENT_POLL_SECONDS - 1, True), (RECENT_POLL_SECONDS + 1, False)])
    def test_another_jobs_worker_shows_that_the_operator_is_not_cut_off(self, ago: float, expected: bool) -> None:
        assert self.is_reached_elsewhere(build_other_job(namespace="another"), ago) is expected
        assert not self.is_reached_elsewhere(JobCache(MINE, ATTEMPTED), ago)


class TestMemory:
    async def test_settled_faults_are_forgotten_once_that_is_written(self) -> None:
        observation = build_training()
        memory = JobCache(observation.job)
        for name in ("j-w0-0", "j-w9-0"):
            memory.contacts[name] = WorkerContact(Heartbeat(worker=name), NOW)
            memory.evidence[name] = Evidence("old" if name == "j-w9-0" else "new", name, 1, ())
            memory.faults.add(build_crash(name, 0), workers=10)
        memory.results.quarantine_decisions = {
            (name, "node-1"): QuarantineDecision(QuarantineVerdict.SUSPECTED, "w") for name in ("asked", "dropped")
        }
        wanted = QuarantineRequest("node-1", "u", "why", "asked")
        desired = observation.desired.with_requests(evidence=EvidenceRequest("new")).with_incidents(
            quarantine_requests=(wanted,)
        )
        memory.publish(desired, "7")
        assert list(memory.contacts) == ["j-w0-0"]
        assert list(memory.evidence) == ["j-w0-0"]
        assert [fault.worker for fault in memory.faults.values()] == ["j-w0-0"]
        assert list(memory.results.quarantine_decisions) == [("asked", "node-1")]
        assert (memory.desired, memory.resource_version) == (desired, "7")

    def test_a_job_is_identified_by_its_uid(self) -> None:
        memory = JobRegistry(0.0)
        known = memory.get_or_create(MINE)
        assert memory.get_or_create(replace(MINE, generation=2)) is known
        later = memory.get_or_create(replace(MINE, uid="later"))
        assert later is not known
        assert memory.find("ns", "mine") is later
        memory.forget(MINE)
        assert memory.find("ns", "mine") is later
        memory.forget(replace(MINE, uid="later"))
        assert memory.find("ns", "mine") is None
        memory.forget(MINE)

    def test_one_job_or_all_jobs_can_be_woken(self) -> None:
        memory = JobRegistry(0.0)
        one, two = memory.get_or_create(MINE), memory.get_or_create(replace(MINE, name="two"))
        memory.wake("ns", "mine")
        assert (one.wake.is_set(), two.wake.is_set()) == (True, False)
        memory.wake("ns", "unknown")
        memory.wake_all()
        assert two.wake.is_set()


class TestObservation:
    def observe(self, memory: JobCache, *pods: PodView) -> Any:
        return build_observation(NOW - 60, memory, pods, ClusterView(), NOW)

    def test_settled_faults_and_unrequested_evidence_are_not_observed(self) -> None:
        observation = build_training()
        desired = observation.desired.settle_faults(("j-w0-0-rank-0-round-1",)).with_requests(
            evidence=EvidenceRequest("new")
        )
        memory = JobCache(observation.job, desired)
        for name in ("j-w0-0", "j-w1-0"):
            memory.faults.add(build_crash(name, int(name[3])), workers=10)
            memory.evidence[name] = Evidence("old" if name == "j-w0-0" else "new", name, 1, ())
        seen = self.observe(memory)
        assert [fault.worker for fault in seen.faults] == ["j-w1-0"]
        assert [item.worker for item in seen.evidence] == ["j-w1-0"]

    def test_pods_without_a_worker_are_strays_until_they_are_deleted(self) -> None:
        observation = build_training()
        stray = PodView("j-w9-0", "u", "Running", "node-1", created_at=NOW)
        going = replace(stray, name="j-w8-0", deleting=True)
        seen = self.observe(JobCache(observation.job, observation.desired), stray, going)
        assert [pod.name for pod in seen.stray_pods] == ["j-w9-0"]

    def test_the_pod_of_the_checkpoint_server_is_no_stray_unless_it_serves_something_else(self) -> None:
        observation = build_training()
        server = CheckpointEndpoint("00" * 32)
        desired = observation.desired.with_plan(checkpoint_server=server)
        pod = PodView(build_checkpoint_server_name(observation.job, server.secret), "u", "Running", "node-1")
        other = replace(pod, name=build_checkpoint_server_name(observation.job, "11" * 32))
        seen = self.observe(JobCache(observation.job, desired), pod, other)
        assert (seen.checkpoint_server, seen.stray_pods) == (pod, (other,))

    def test_ages_of_states_and_steps_count_from_their_reports(self) -> None:
        observation = build_training()
        memory = JobCache(observation.job, observation.desired)
        memory.contacts["j-w0-0"] = WorkerContact(Heartbeat(), NOW - 3, state_since=NOW - 9, stepped_at=NOW - 5)
        memory.contacts["j-w1-0"] = WorkerContact(Heartbeat(), NOW - 3, state_since=NOW - 9)
        ages = [(view.state_seconds, view.seconds_since_step) for view in self.observe(memory).workers[:3]]
        assert ages == [(9.0, 5.0), (9.0, None), (0.0, None)]


def test_only_the_ready_condition_makes_a_node_ready() -> None:
    def ready(**conditions: str) -> bool:
        reports = [{"type": name, "status": status} for name, status in conditions.items()]
        return view_node(
            {"metadata": {"name": "n", "uid": "u"}, "status": {"conditions": reports}}, NodeHealthRules()
        ).ready

    assert ready(MemoryPressure="False", Ready="True")
    assert not ready(MemoryPressure="True", Ready="False")
    assert not ready()


class TestReachability:
    async def test_a_host_that_listens_or_refuses_is_reachable(self) -> None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await reachability.can_reach_worker("127.0.0.1", port)
        server.close()
        await server.wait_closed()
        assert await reachability.can_reach_worker("127.0.0.1", port), "refused: the host answers"

    @pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.EHOSTUNREACH, "no route to host")])
    async def test_a_silent_host_is_probed_twice(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        attempts = []

        async def open_connection(address: str, port: int) -> Any:
            attempts.append((address, port))
            raise error

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        assert await reachability.can_reach_node("192.0.2.1") is False
        assert attempts == [("192.0.2.1", reachability.KUBELET_PORT)] * reachability.REACH_ATTEMPTS

    async def test_without_a_free_file_reachability_is_unknown(self) -> None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        try:
            assert await reachability.can_reach_worker("127.0.0.1", port) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert await reachability.can_reach_worker("127.0.0.1", port) is True
        server.close()

    @pytest.mark.parametrize(("route", "answer"), [(False, None), (True, False)], ids=["ours", "a router's answer"])
    async def test_a_missing_local_route_is_no_evidence(
        self, route: bool, answer: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Datagrams:
            def __init__(self, *_: object) -> None: ...

            def __enter__(self) -> Datagrams:
                return self

            def __exit__(self, *_: object) -> None: ...

            def connect(self, _address: object) -> None:
                if not route:
                    raise OSError(errno.ENETUNREACH, "no route")

        async def open_connection(_address: str, _port: int) -> Any:
            raise OSError(errno.ENETUNREACH, "no route")

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        monkeypatch.setattr(socket, "socket", Datagrams)
        assert await reachability.can_reach_node("192.0.2.1") is answer

    async def test_a_probe_of_a_delayed_operator_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reachability, "REACH_TIMEOUT_SECONDS", 0.001)
        monkeypatch.setattr(reachability, "REACH_TIMEOUT_SLACK_SECONDS", 0.01)

        async def open_connection(_address: str, _port: int) -> Any:
            asyncio.get_running_loop().call_soon(time.sleep, 0.05)
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        assert await reachability.can_reach_node("192.0.2.1") is None

    @pytest.mark.parametrize("listens", [True, False], ids=["listens", "refuses"])
    async def test_an_unread_answer_counts_on_a_busy_operator(
        self, listens: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each iteration of the event loop takes longer than the timeout of a probe."""
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if not listens:
            server.close()
            await server.wait_closed()
        monkeypatch.setattr(reachability, "REACH_TIMEOUT_SECONDS", 0.01)
        monkeypatch.setattr(reachability, "REACH_ATTEMPTS", 1)
        loop, over = asyncio.get_running_loop(), False

        def be_busy() -> None:
            time.sleep(0.015)
            if not over:
                loop.call_soon(be_busy)

        loop.call_soon(be_busy)
        assert await reachability.can_reach_worker("127.0.0.1", port) is True
        over = True
        server.close()

    async def test_concurrent_probes_are_bounded_by_free_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            file_limits,
            "read_file_limits",
            lambda: FileLimits(file_limits.RESERVED_FILES + 2 * file_limits.PROBE_FILES_DIVISOR),
        )
        monkeypatch.setattr(reachability, "REACH_SLOT_TIMEOUT_SECONDS", 0.2)
        under_way, most, gate = 0, 0, asyncio.Event()

        async def open_connection(_address: str, _port: int) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                await gate.wait()
            finally:
                under_way -= 1
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        monkeypatch.setattr(reachability, "REACH_TIMEOUT_SECONDS", 5.0)
        attempts = [asyncio.create_task(reachability.can_reach_node(f"192.0.2.{number}")) for number in range(3)]
        done, _ = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [None], "the probe did not run"
        gate.set()
        assert sorted(map(str, await asyncio.gather(*attempts))) == ["None", "True", "True"]
        assert most == 2


class TestFiles:
    @pytest.mark.parametrize("limit", [1, 256, 1024, 20_000, 2**30])
    def test_shares_fit_the_limit_and_none_is_empty(self, limit: int) -> None:
        shares = FileLimits(limit)
        assert shares.probes >= 1
        assert shares.connections >= 1
        assert shares.probes + shares.connections + file_limits.RESERVED_FILES <= max(
            limit, file_limits.RESERVED_FILES + 2
        )

    def test_the_file_limit_is_raised_to_the_hard_limit(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        try:
            assert file_limits.read_file_limits().limit == 512
            assert file_limits.raise_file_limit().limit == (2**30 if before[1] == resource.RLIM_INFINITY else before[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
