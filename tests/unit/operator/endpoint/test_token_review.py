"""What the API server's word on a token is worth, and what sidecars may do with a good one."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import ProbeRequest, ProbeTarget
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
    """The API server, which says `status` of every token."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status

    async def create(self, _kind: ResourceKind, _body: Object) -> Object:
        return {"status": self.status}


async def judged(**status: Any) -> PodIdentity:
    return await TokenReviewer(cast(Cluster, Reviewer(GOOD | status)), FixedTimeRuntime()).review(TOKEN, "192.0.2.1")


class TestReviews:
    async def test_a_good_one_is_of_its_pod(self) -> None:
        assert await judged() == PodIdentity("ns", "j-w0-0", "uid-0")

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            ({"authenticated": False, "error": "the signature is wrong"}, "the signature is wrong"),
            ({"authenticated": False}, "not good for audience pacekeeper"),
            ({"audiences": ["https://kubernetes.default.svc"]}, "not good for audience pacekeeper"),
            ({"audiences": []}, "not good for audience pacekeeper"),
        ],
    )
    async def test_one_that_is_not_good_for_us_is_none(self, status: dict[str, Any], words: str) -> None:
        with pytest.raises(Unauthenticated, match=words):
            await judged(**status)

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
    async def test_who_is_no_pod_may_not(self, user: dict[str, Any]) -> None:
        with pytest.raises(Forbidden, match="is not bound to a pod"):
            await judged(user=user)

    def test_what_is_made_to_be_odd_is_none(self) -> None:
        claims = {"aud": "pacekeeper", "exp": 10**400}
        for_ever = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        assert find_token_flaw(f"a.{for_ever}.c", NOW) == "", "the API server is asked"
        assert find_token_flaw(f"\udce9.{for_ever}.c", NOW) == "the bearer token is not a JSON web token"

    async def test_one_that_is_no_text_is_refused_as_others_are(self) -> None:
        with pytest.raises(Unauthenticated, match="not a JSON web token"):
            await TokenReviewer(cast(Cluster, Reviewer(GOOD)), FixedTimeRuntime()).review("a.\udce9.c", "192.0.2.1")

    def test_none_is_told_what_to_send(self) -> None:
        assert find_token_flaw("", NOW).startswith("send a service account token with audience pacekeeper")


W0, W1, SPARE = (Caller("ns", "j", f"j-w{n}-0") for n in (0, 1, 2))
WORLD = build_training(2, 1)


class Served:
    def __init__(self) -> None:
        self.memory, self.runtime = JobRegistry(0.0), FixedTimeRuntime()
        self.job: JobCache = self.memory.get_or_create(WORLD.job)
        self.job.update(desired=WORLD.desired.with_plan(evidence_request="why"))
        self.sidecars = SidecarService(cast(Cluster, Reviewer(GOOD)), self.memory, self.runtime)


@pytest.fixture
def served() -> Served:
    return Served()


def evidence(caller: Caller, request: str = "why", *ranks: int) -> Evidence:
    windows = tuple(RankWindow(rank, (1,), (0.1,), (0.1,), (8,)) for rank in ranks)
    return Evidence(request, caller.worker, 1, windows)


class TestCallers:
    async def test_a_worker_is_who_was_written_down(self, served: Served) -> None:
        assert await served.sidecars.authenticate(TOKEN, "192.0.2.1") == W0

    async def test_one_whose_pod_is_not_written_down_yet_is_to_come_again(self, served: Served) -> None:
        first = replace(WORLD.state.placement.workers[0], uid="")
        served.job.update(desired=WORLD.desired.with_worker(first))
        with pytest.raises(RetryLater, match="is not recorded yet"):
            await served.sidecars.authenticate(TOKEN, "192.0.2.1")

    async def test_after_its_job_has_gone_there_is_nothing_to_tell(self, served: Served) -> None:
        served.memory.forget(WORLD.job)
        with pytest.raises(RetryLater, match="is no longer known"):
            await served.sidecars.receive_fault(W0, build_crash("j-w0-0", 0))

    async def test_one_that_does_not_say_who_it_is_is_told_how(self, served: Served) -> None:
        with pytest.raises(Forbidden, match="may not report for an unnamed worker: set `worker`"):
            await served.sidecars.poll(W0, Heartbeat(), 0, 0)
        with pytest.raises(Forbidden, match="may not report for j-w1-0"):
            await served.sidecars.poll(W0, Heartbeat(worker="j-w1-0"), 0, 0)


class TestEvidence:
    def test_of_those_who_were_asked_wakes_the_loop_once_it_is_complete(self, served: Served) -> None:
        served.sidecars.receive_evidence(W0, evidence(W0, "why", 0, 1))
        assert [window.rank for window in served.job.evidence["j-w0-0"].windows] == [0], "of its own rank"
        assert not served.job.wake.is_set()
        served.sidecars.receive_evidence(W1, evidence(W1, "why", 1))
        assert served.job.wake.is_set()

    def test_of_others_is_dropped(self, served: Served) -> None:
        served.sidecars.receive_evidence(W0, evidence(W0, "another", 0))
        served.sidecars.receive_evidence(SPARE, evidence(SPARE, "why", 0))
        assert served.job.evidence == {}
        served.job._desired = None
        served.sidecars.receive_evidence(W0, evidence(W0, "why", 0))
        assert served.job.evidence == {}

    def test_of_a_probe_wakes_the_loop_once_its_sources_have_told(self, served: Served) -> None:
        assert served.job.desired is not None
        target = ProbeTarget("j-w1-0", "10.0.0.1:1")
        probe = ProbeRequest("probe-9", ("j-w0-0",), ((target,),))
        served.job.update(desired=served.job.desired.with_plan(probe=probe))
        told = Evidence("probe-9", "j-w0-0", 1, probes=(LinkProbe("j-w1-0", 1e8, 0.001),))
        awaited = served.sidecars.needs_evidence
        assert (awaited(W0, "probe-9"), awaited(W1, "probe-9"), awaited(SPARE, "probe-9")) == (True, False, False)
        served.sidecars.receive_evidence(W1, replace(told, worker="j-w1-0"))
        served.sidecars.receive_evidence(W0, replace(told, request="probe-8"))
        assert (served.job.probes, served.job.wake.is_set()) == ({}, False)
        served.sidecars.receive_evidence(W0, told)
        assert (served.job.probes, served.job.evidence) == ({"j-w0-0": told}, {})
        assert served.job.wake.is_set()

    def test_of_connections_and_flows_is_believed_about_ones_own_ranks(self, served: Served) -> None:
        ends = tuple(LinkWindow("10.0.0.1:1", "10.0.0.2:2", rank) for rank in (-1, 0, 1))
        flows = tuple(FlowWindow(7, 0, 1, rank) for rank in (0, 1))
        served.sidecars.receive_evidence(W0, replace(evidence(W0, "why", 0), links=ends, flows=flows))
        taken = served.job.evidence["j-w0-0"]
        assert [end.rank for end in taken.links] == [0]
        assert [flow.rank for flow in taken.flows] == [0]

    def test_who_is_awaited(self, served: Served) -> None:
        def awaited(caller: Caller, request: str = "why") -> bool:
            return served.sidecars.needs_evidence(caller, request)

        assert (awaited(W0), awaited(SPARE), awaited(W0, "another")) == (True, False, False)


class TestHeard:
    async def say(self, served: Served, **said: Any) -> None:
        await served.sidecars.poll(W0, Heartbeat(worker="j-w0-0", **said), 0, 0)

    async def test_since_when_a_worker_is_as_it_is(self, served: Served) -> None:
        await self.say(served, state=LauncherState.WARM, progress=StepProgress(5))
        contact = served.job.contacts["j-w0-0"]
        assert (contact.state_since, contact.stepped_at, contact.last_seen_at) == (NOW, None, NOW)
        served.runtime.passed = 10
        await self.say(served, state=LauncherState.WARM, progress=StepProgress(5))
        assert (contact.state_since, contact.stepped_at, contact.last_seen_at) == (NOW, None, NOW + 10)
        served.runtime.passed = 20
        await self.say(served, state=LauncherState.RUNNING, progress=StepProgress(6))
        assert (contact.state_since, contact.stepped_at) == (NOW + 20, NOW + 20)
        served.runtime.passed = 30
        await self.say(served, state=LauncherState.RUNNING, progress=StepProgress(4))
        assert contact.stepped_at == NOW + 20, "it has gone back"

    async def test_only_what_matters_wakes_the_loop(self, served: Served) -> None:
        await self.say(served, state=LauncherState.RUNNING)
        served.job.wake.clear()
        await self.say(served, state=LauncherState.RUNNING, progress=StepProgress(9), checkpoint=CheckpointReport(9))
        assert not served.job.wake.is_set()
        await self.say(served, state=LauncherState.RUNNING, round=2)
        assert served.job.wake.is_set()


class TestNames:
    def test_a_faults_name_may_be_as_long_as_names_are(self) -> None:
        name = "j-w0-0-".ljust(MAX_FAULT_NAME_CHARACTERS, "x")
        _check_fault_name(replace(build_crash("j-w0-0", 0), name=name))
        for bad in (f"{name}x", "j-w1-0-x", "j-w0-0"):
            with pytest.raises(InputError, match="must begin with j-w0-0-"):
                _check_fault_name(replace(build_crash("j-w0-0", 0), name=bad))


class TestFaults:
    async def test_one_that_is_settled_is_acknowledged_and_not_looked_into_again(self, served: Served) -> None:
        fault = build_crash("j-w0-0", 0)
        served.job.update(desired=WORLD.desired.settle_faults((fault.name,)))
        await served.sidecars.receive_fault(W0, fault)
        assert not served.job.faults
        assert not served.job.wake.is_set()
