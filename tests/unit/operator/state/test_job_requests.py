"""The open requests of a job, which are not written."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.protocol.requests import EvidenceRequest, ProbeRequest, ProfileRequest
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.job_requests import InvestigationRequest, JobRequests, LinkCheck, RevertRequest
from testing.operators.observations import NOW, build_training

PROBE = ProbeRequest("probe-1", ("j-w0-0", "j-w1-0"), ((), ()))
MEMBERS = build_training().plan.members


def test_names_differ_between_requests_and_between_leaders() -> None:
    requests = JobRequests()
    names = {
        requests.build_next_name("why", "a-nonce"),
        replace(requests, issued=1).build_next_name("why", "a-nonce"),
        requests.build_next_name("why", "another"),
    }
    assert len(names) == 3
    assert not any("nonce" in name for name in names), "it is also the origin of a membership's secret"


def test_only_the_workers_whose_part_changes_are_concerned() -> None:
    members = {member.worker for member in MEMBERS}
    nothing, probing = JobRequests(), JobRequests(probe=PROBE)
    assert probing.list_concerned_workers(nothing, MEMBERS) == {"j-w0-0", "j-w1-0"}
    assert nothing.list_concerned_workers(probing, MEMBERS) == {"j-w0-0", "j-w1-0"}
    asking = JobRequests(evidence=EvidenceRequest("why-1"))
    assert asking.list_concerned_workers(nothing, MEMBERS) == members
    assert JobRequests(profile=ProfileRequest("p", 1)).list_concerned_workers(nothing, MEMBERS) == members
    bookkeeping = replace(asking, issued=7, investigation=InvestigationRequest(NOW), link_check=LinkCheck(NOW, "why-1"))
    assert bookkeeping.list_concerned_workers(asking, MEMBERS) == set()


def test_requests_change_neither_the_version_nor_what_is_written() -> None:
    desired = build_training().desired
    asking = desired.with_requests(
        evidence=EvidenceRequest("why-1"), probe=PROBE, revert=RevertRequest(NOW), connections_requested_at=NOW
    )
    assert asking != desired
    assert asking.plan.version == desired.plan.version
    assert asking.is_stored_as(desired)
    assert state_codec.encode_state(asking, "j") == state_codec.encode_state(desired, "j")
    assert not asking.with_plan(checkpoint_request=1).is_stored_as(desired)
    assert not asking.with_lifecycle(progress_step=1).is_stored_as(desired)
