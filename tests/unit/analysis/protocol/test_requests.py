"""Each worker's part of the open requests, and what versions of operator and sidecar understand of each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Member, Plan, WorkerPlan
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.requests import (
    EvidencePart,
    EvidenceRequest,
    ProbeRequest,
    ProbeTarget,
    ProfileRequest,
    Requests,
    WorkerRequests,
)

PLAN = Plan(version=7, membership=1, members=(Member("a", "10.0.0.1", (0,)), Member("b", "10.0.0.2", (1,))))
PROBE = ProbeRequest("probe-1", ("a", "s"), ((ProbeTarget("b", "10.0.0.2:1"),), (ProbeTarget("a", "10.0.0.1:1"),)))
REQUESTS = Requests(EvidenceRequest("why-1", (EvidencePart.LINKS,)), PROBE, ProfileRequest("profile-1", 100))


def build_part(worker: str, requests: Requests = REQUESTS) -> WorkerRequests:
    return requests.build_worker_requests(worker, is_member=PLAN.has_member(worker))


def send(content: dict[str, Any]) -> Any:
    return json.loads(json.dumps(content))


def test_members_are_asked_for_everything_and_others_for_their_probes_only() -> None:
    part, spare = build_part("a"), build_part("s")
    assert (part.evidence, part.profile) == (REQUESTS.evidence, REQUESTS.profile)
    assert part.probe is not None
    assert part.probe.targets == PROBE.targets[0]
    assert (spare.evidence, spare.profile) == (None, None)
    assert spare.probe is not None
    assert spare.probe.targets == PROBE.targets[1]
    assert build_part("t") == WorkerRequests()


def test_the_identity_differs_if_and_only_if_the_part_differs() -> None:
    other_probe = Requests(REQUESTS.evidence, ProbeRequest("probe-2", ("a",), ((),)), REQUESTS.profile)
    assert build_part("a").identity != build_part("a", other_probe).identity
    assert build_part("b").identity == build_part("b", other_probe).identity, "it takes no part in either"
    assert build_part("b").identity != build_part("b", Requests(REQUESTS.evidence)).identity
    assert build_part("b", Requests()).identity == WorkerRequests().identity


@pytest.mark.parametrize(
    "answer",
    [
        PollAnswer(PLAN.build_worker_plan("a"), build_part("a")),
        PollAnswer(requests=build_part("a")),
        PollAnswer(requests=WorkerRequests()),
        PollAnswer(PLAN.build_worker_plan("a")),
    ],
    ids=["both", "requests", "no request any more", "plan"],
)
def test_an_answer_is_read_as_it_was_sent(answer: PollAnswer) -> None:
    assert PollAnswer.from_json(send(answer.to_json())) == answer


def test_an_older_sidecar_reads_the_plan_of_a_newer_operator() -> None:
    answer = send(PollAnswer(PLAN.build_worker_plan("a"), build_part("a")).to_json())
    assert WorkerPlan.from_json(answer) == PLAN.build_worker_plan("a")


def test_a_newer_sidecar_reads_the_plan_of_an_older_operator() -> None:
    """It had requests in the plan, and knew nothing of others."""
    older = PLAN.build_worker_plan("a").to_json() | {"evidence_request": "why-6", "probe": None, "profile": None}
    assert PollAnswer.from_json(send(older)) == PollAnswer(PLAN.build_worker_plan("a"))


def test_what_a_newer_operator_adds_to_requests_is_ignored_and_acknowledged() -> None:
    newer = send(build_part("a").to_json())
    newer |= {"identity": f"{newer['identity']},dance-3", "dance": {"name": "dance-3"}}
    newer["evidence"]["parts"].append("Dreams")
    read = WorkerRequests.from_json(newer)
    assert read.evidence == REQUESTS.evidence
    assert read.identity == newer["identity"], "otherwise the operator would send it again at once"


@pytest.mark.parametrize("requests", [7, [], {"evidence": 7}, {"evidence": {"parts": "x"}}, {"probe": {"name": 7}}])
def test_malformed_requests_are_refused(requests: Any) -> None:
    with pytest.raises(InputError, match="requests"):
        PollAnswer.from_json({"requests": requests})
