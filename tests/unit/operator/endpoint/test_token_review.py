"""How token reviews of the API server are interpreted, and what sidecars may do with a valid token."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.reports import (
    CheckpointReport,
    Evidence,
    FlowWindow,
    Heartbeat,
    LauncherState,
    LinkProbe,
    LinkWindow,
    RankWindow,
    StepProgress,
)
from pacekeeper_analysis.protocol.requests import EvidenceRequest, ProbeRequest, ProbeTarget
from pacekeeper_operator.endpoint.sidecars import (
    MAX_FAULT_NAME_CHARACTERS,
    Caller,
    RetryLater,
    SidecarService,
    _check_fault_name,
)
from pacekeeper_operator.endpoint.token_review import (
    Forbidden,
    PodIdentity,
    TokenReviewer,
    Unauthenticated,
    find_token_flaw,
)
from pacekeeper_operator.kube.client import Cluster, Object, ResourceKind
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.observations import NOW, build_crash, build_training

CLAIMS = base64.urlsafe_b64encode(json.dumps({"aud": ["pacekeeper"], "exp": NOW + 60}).encode()).decode()
TOKEN = f"header.{CLAIMS}.signature"
POD, UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"
USER = {"username": "system:serviceaccount:ns:default", "extra": {POD: ["j-w0-0"], UID: ["uid-0"]}}
GOOD: dict[str, Any] = {"authenticated": True, "audiences": ["pacekeeper"], "user": USER}


class Reviewer:
    """An API server that returns `status` for every token."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status

    async def create(self, _kind: ResourceKind, _body: Object) -> Object:
        return {"status": self.status}


async def review_token(**status: Any) -> PodIdentity:
    return await TokenReviewer(cast(Cluster, Reviewer(GOOD | status)), FixedTimeRuntime()).review(TOKEN, "192.0.2.1")


class TestReviews:
    async def test_a_valid_token_identifies_its_pod(self) -> None:
        assert await review_token() == PodIdentity("ns", "j-w0-0", "uid-0")

    @pytest.mark.parametrize(
        ("status", "message"),
        [
            ({"authenticated": False, "error": "the signature is wrong"}, "the signature is wrong"),
            ({"authenticated": False}, "not good for audience pacekeeper"),
            ({"audiences": ["https://kubernetes.default.svc"]}, "not good for audience pacekeeper"),
            ({"audiences": []}, "not good for audience pacekeeper"),
        ],
    )
    async def test_a_token_for_another_audience_is_refused(self, status: dict[str, Any], message: str) -> None:
        with pytest.raises(Unauthenticated, match=message):
            await review_token(**status)

    @pytest.mark.parametrize(
        "user",
        [
            {**USER, "username": "somebody"},
            {**USER, "username": "system:node:ns:default"},
            {**USER, "username": "system:serviceaccount:ns:default:more"},
            {**USER, "extra": {UID: ["uid-0"]}},
            {**USER, "extra": {POD: ["j-w0-0"]}},
            {"username": USER["username"]},
        ],
    )
    async def test_a_token_without_a_pod_is_forbidden(self, user: dict[str, Any]) -> None:
        with pytest.raises(Forbidden, match="is not bound to a pod"):
            await review_token(user=user)

    def test_an_odd_token_is_refused(self) -> None:
        claims = {"aud": "pacekeeper", "exp": 10**400}
        endless = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        assert find_token_flaw(f"a.{endless}.c", NOW) == "", "the API server reviews it"
        assert find_token_flaw(f"\udce9.{endless}.c", NOW) == "the bearer token is not a JSON web token"

    async def test_a_token_that_is_no_text_is_refused(self) -> None:
        with pytest.raises(Unauthenticated, match="not a JSON web token"):
            await TokenReviewer(cast(Cluster, Reviewer(GOOD)), FixedTimeRuntime()).review("a.\udce9.c", "192.0.2.1")

    def test_the_error_for_a_missing_token_states_what_to_send(self) -> None:
        assert find_token_flaw("", NOW).startswith("send a service account token with audience pacekeeper")


W0, W1, SPARE = (Caller("ns", "j", f"j-w{n}-0") for n in (0, 1, 2))
OBSERVATION = build_training(2, 1)


class ServiceBench:
    def __init__(self) -> None:
        self.memory, self.runtime = JobRegistry(0.0), FixedTimeRuntime()
        self.job: JobCache = self.memory.get_or_create(OBSERVATION.job)
        self.job.update(desired=OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")))
        self.sidecars = SidecarService(cast(Cluster, Reviewer(GOOD)), self.memory, self.runtime)


@pytest.fixture
def bench() -> ServiceBench:
    return ServiceBench()


def build_evidence(caller: Caller, request: str = "why", *ranks: int) -> Evidence:
    windows = tuple(RankWindow(rank, (1,), (0.1,), (0.1,), (8,)) for rank in ranks)
    return Evidence(request, caller.worker, 1, windows)


class TestCallers:
    async def test_a_caller_is_the_recorded_worker_of_its_pod(self, bench: ServiceBench) -> None:
        assert await bench.sidecars.authenticate(TOKEN, "192.0.2.1") == W0

    async def test_a_caller_whose_pod_is_not_recorded_retries_later(self, bench: ServiceBench) -> None:
        first = replace(OBSERVATION.state.placement.workers[0], uid="")
        bench.job.update(desired=OBSERVATION.desired.with_worker(first))
        with pytest.raises(RetryLater, match="is not recorded yet"):
            await bench.sidecars.authenticate(TOKEN, "192.0.2.1")

    async def test_a_caller_of_a_deleted_job_retries_later(self, bench: ServiceBench) -> None:
        bench.memory.forget(OBSERVATION.job)
        with pytest.raises(RetryLater, match="is no longer known"):
            await bench.sidecars.receive_fault(W0, build_crash("j-w0-0", 0))

    async def test_a_heartbeat_must_name_its_own_worker(self, bench: ServiceBench) -> None:
        with pytest.raises(Forbidden, match="may not report for an unnamed worker: set `worker`"):
            await bench.sidecars.poll(W0, Heartbeat(), 0, 0)
        with pytest.raises(Forbidden, match="may not report for j-w1-0"):
            await bench.sidecars.poll(W0, Heartbeat(worker="j-w1-0"), 0, 0)


class TestEvidence:
    def test_complete_evidence_wakes_the_loop(self, bench: ServiceBench) -> None:
        bench.sidecars.receive_evidence(W0, build_evidence(W0, "why", 0, 1))
        assert [window.rank for window in bench.job.evidence["j-w0-0"].windows] == [0], "of its own rank"
        assert not bench.job.wake.is_set()
        bench.sidecars.receive_evidence(W1, build_evidence(W1, "why", 1))
        assert bench.job.wake.is_set()

    def test_evidence_that_was_not_requested_is_dropped(self, bench: ServiceBench) -> None:
        bench.sidecars.receive_evidence(W0, build_evidence(W0, "another", 0))
        bench.sidecars.receive_evidence(SPARE, build_evidence(SPARE, "why", 0))
        assert bench.job.evidence == {}
        bench.job._desired = None
        bench.sidecars.receive_evidence(W0, build_evidence(W0, "why", 0))
        assert bench.job.evidence == {}

    def test_a_link_probe_wakes_the_loop_once_its_sources_have_reported(self, bench: ServiceBench) -> None:
        assert bench.job.desired is not None
        target = ProbeTarget("j-w1-0", "10.0.0.1:1")
        probe = ProbeRequest("probe-9", ("j-w0-0",), ((target,),))
        bench.job.update(desired=bench.job.desired.with_requests(probe=probe))
        report = Evidence("probe-9", "j-w0-0", 1, probes=(LinkProbe("j-w1-0", 1e8, 0.001),))
        is_awaited = bench.sidecars.needs_evidence
        assert (is_awaited(W0, "probe-9"), is_awaited(W1, "probe-9"), is_awaited(SPARE, "probe-9")) == (
            True,
            False,
            False,
        )
        bench.sidecars.receive_evidence(W1, replace(report, worker="j-w1-0"))
        bench.sidecars.receive_evidence(W0, replace(report, request="probe-8"))
        assert (bench.job.probes, bench.job.wake.is_set()) == ({}, False)
        bench.sidecars.receive_evidence(W0, report)
        assert (bench.job.probes, bench.job.evidence) == ({"j-w0-0": report}, {})
        assert bench.job.wake.is_set()

    def test_links_and_flows_are_accepted_only_for_own_ranks(self, bench: ServiceBench) -> None:
        ends = tuple(LinkWindow("10.0.0.1:1", "10.0.0.2:2", rank) for rank in (-1, 0, 1))
        flows = tuple(FlowWindow(7, 0, 1, rank) for rank in (0, 1))
        bench.sidecars.receive_evidence(W0, replace(build_evidence(W0, "why", 0), links=ends, flows=flows))
        accepted = bench.job.evidence["j-w0-0"]
        assert [end.rank for end in accepted.links] == [0]
        assert [flow.rank for flow in accepted.flows] == [0]

    def test_only_requested_evidence_is_needed(self, bench: ServiceBench) -> None:
        def is_awaited(caller: Caller, request: str = "why") -> bool:
            return bench.sidecars.needs_evidence(caller, request)

        assert (is_awaited(W0), is_awaited(SPARE), is_awaited(W0, "another")) == (True, False, False)


class TestHeartbeats:
    async def send_heartbeat(self, bench: ServiceBench, **fields: Any) -> None:
        await bench.sidecars.poll(W0, Heartbeat(worker="j-w0-0", **fields), 0, 0)

    async def test_the_times_of_state_and_step_change_with_their_values(self, bench: ServiceBench) -> None:
        await self.send_heartbeat(bench, state=LauncherState.WARM, progress=StepProgress(5))
        contact = bench.job.contacts["j-w0-0"]
        assert (contact.state_since, contact.stepped_at, contact.last_seen_at) == (NOW, None, NOW)
        bench.runtime.passed = 10
        await self.send_heartbeat(bench, state=LauncherState.WARM, progress=StepProgress(5))
        assert (contact.state_since, contact.stepped_at, contact.last_seen_at) == (NOW, None, NOW + 10)
        bench.runtime.passed = 20
        await self.send_heartbeat(bench, state=LauncherState.RUNNING, progress=StepProgress(6))
        assert (contact.state_since, contact.stepped_at) == (NOW + 20, NOW + 20)
        bench.runtime.passed = 30
        await self.send_heartbeat(bench, state=LauncherState.RUNNING, progress=StepProgress(4))
        assert contact.stepped_at == NOW + 20, "the step went back"

    async def test_only_relevant_heartbeats_wake_the_loop(self, bench: ServiceBench) -> None:
        await self.send_heartbeat(bench, state=LauncherState.RUNNING)
        bench.job.wake.clear()
        await self.send_heartbeat(
            bench, state=LauncherState.RUNNING, progress=StepProgress(9), checkpoint=CheckpointReport(9)
        )
        assert not bench.job.wake.is_set()
        await self.send_heartbeat(bench, state=LauncherState.RUNNING, round=2)
        assert bench.job.wake.is_set()


class TestNames:
    def test_the_name_of_a_fault_is_limited(self) -> None:
        name = "j-w0-0-".ljust(MAX_FAULT_NAME_CHARACTERS, "x")
        _check_fault_name(replace(build_crash("j-w0-0", 0), name=name))
        for bad in (f"{name}x", "j-w1-0-x", "j-w0-0"):
            with pytest.raises(InputError, match="must begin with j-w0-0-"):
                _check_fault_name(replace(build_crash("j-w0-0", 0), name=bad))


class TestFaults:
    async def test_a_settled_fault_is_acknowledged_and_not_stored(self, bench: ServiceBench) -> None:
        fault = build_crash("j-w0-0", 0)
        bench.job.update(desired=OBSERVATION.desired.settle_faults((fault.name,)))
        await bench.sidecars.receive_fault(W0, fault)
        assert not bench.job.faults
        assert not bench.job.wake.is_set()
