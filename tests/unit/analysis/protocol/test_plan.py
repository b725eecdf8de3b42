"""The plan and the reports are unchanged by the wire, and errors name what is wrong with an invalid one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import (
    MAX_WORKER_PATHS,
    Hop,
    Member,
    Paths,
    Plan,
    PlannedPath,
    Stop,
    SyncMode,
    WorkerPath,
    WorkerPlan,
    WorkerRole,
    choose_rendezvous,
)

PLAN = Plan(
    version=7,
    membership=2,
    round=3,
    members=(Member("j-w0-0", "10.0.0.1", (0, 1)), Member("j-w4-0", "10.0.0.5", (2, 3))),
    restarts=5,
    sync_mode=SyncMode.SYNC,
    shares=(8, 8, 4, 4),
    sequence_cost=(1e-3, 0.0, 2.5e-9),
    secret="5ec2e7",
    step_seconds=0.25,
)


PATHS = Paths(
    wanted=(PlannedPath(1, 2, "s1"), PlannedPath(3, 0, "s2"), PlannedPath(0, 1, "s2")),
    hops=(Hop("10.98.0.1", "s1"), Hop("10.98.0.3", "s2"), Hop("10.98.1.1", "s1"), Hop("10.98.0.5", "s3")),
    first_port=21000,
    last_port=21999,
)


def test_a_plan_is_the_same_after_json() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_a_worker_receives_its_own_part() -> None:
    part = PLAN.build_worker_plan("j-w4-0")
    assert (part.role, part.ranks, part.world_size, part.store) == (WorkerRole.MEMBER, (2, 3), 4, "10.0.0.1:29400")
    assert not part.serves_store
    assert part.peer_addresses == ("10.0.0.1",)
    first = PLAN.build_worker_plan("j-w0-0")
    assert (part.shares, part.sequence_cost) == (None, None), "the worker of rank 0 hands them to the others"
    assert (first.shares, first.sequence_cost) == (PLAN.shares, PLAN.sequence_cost)
    for worker_plan in (part, first):
        assert WorkerPlan.from_json(json.loads(json.dumps(worker_plan.to_json()))) == worker_plan


def test_a_worker_that_is_no_member_is_a_spare_or_leaves() -> None:
    assert PLAN.build_worker_plan("j-w9-0").role is WorkerRole.SPARE
    assert Plan(stop=Stop.FINISH).build_worker_plan("j-w9-0").role is WorkerRole.LEAVE


def test_members_leave_when_their_pods_end_or_nothing_is_left_to_do() -> None:
    one = replace(PLAN, leaving=("j-w4-0",))
    assert (one.build_worker_plan("j-w4-0").role, one.build_worker_plan("j-w0-0").role) == (
        WorkerRole.LEAVE,
        WorkerRole.MEMBER,
    )
    assert one.build_worker_plan("j-w9-0").role is WorkerRole.SPARE
    assert replace(PLAN, stop=Stop.FINISH).build_worker_plan("j-w4-0").role is WorkerRole.LEAVE
    assert replace(PLAN, stop=Stop.SUSPEND).build_worker_plan("j-w4-0").role is WorkerRole.MEMBER, (
        "it saves, and stays warm"
    )


def test_the_secret_is_sent_to_members_only() -> None:
    assert {PLAN.build_worker_plan(member.worker).secret for member in PLAN.members} == {"5ec2e7"}
    assert PLAN.build_worker_plan("j-w9-0").secret == ""
    assert replace(PLAN, stop=Stop.FINISH).build_worker_plan("j-w9-0").secret == ""


def test_the_secret_is_not_printed_with_a_plan_or_its_errors() -> None:
    assert "5ec2e7" not in repr(PLAN) + repr(PLAN.build_worker_plan("j-w0-0"))
    with pytest.raises(InputError) as refused:
        WorkerPlan.from_json({**PLAN.build_worker_plan("j-w0-0").to_json(), "secret": "5ec2e7x"})
    assert "5ec2e7" not in str(refused.value)


def test_each_membership_has_a_secret_of_its_own() -> None:
    assert replace(PLAN, version=8).with_membership_secret(PLAN, "0a").secret == "5ec2e7"
    assert replace(PLAN, membership=3).with_membership_secret(PLAN, "0a").secret == "0a"
    old = replace(PLAN, secret="")
    assert replace(old, version=8).with_membership_secret(old, "0a").secret == "", (
        "the launchers are in the midst of it"
    )


@pytest.mark.parametrize(
    ("ports", "place"),
    [
        ([4001, 4002], (4001, "0a")),
        ([4001, None], (4001, "")),  # an older launcher or sidecar, which receives no secret
        ([None, 4002], (29400, "")),
        ([None], (29400, "")),
        ([], (29400, "")),
    ],
)
def test_the_rendezvous_is_at_the_first_members_address_and_authenticated_where_all_support_it(
    ports: list[int | None], place: tuple[int, str]
) -> None:
    assert choose_rendezvous(ports, "0a") == place


def test_a_worker_receives_the_paths_that_begin_or_end_with_it() -> None:
    plan = replace(PLAN, paths=PATHS)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for worker, peer, address in (("j-w0-0", "j-w4-0", "10.0.0.5"), ("j-w4-0", "j-w0-0", "10.0.0.1")):
        worker_plan = plan.build_worker_plan(worker)
        assert WorkerPlan.from_json(json.loads(json.dumps(worker_plan.to_json()))) == worker_plan
        assert worker_plan.paths is not None
        assert (worker_plan.paths.spines, worker_plan.paths.first_port, worker_plan.paths.last_port) == (
            3,
            21000,
            21999,
        )
        assert worker_plan.paths.wanted == (
            WorkerPath(1, 2, "s1", ("10.98.0.1", "10.98.1.1"), peer, address),
            WorkerPath(3, 0, "s2", ("10.98.0.3",), peer, address),
        ), "what stays within a worker takes no path"
    assert plan.build_worker_plan("j-w9-0").paths is None, "a spare has no traffic"


def test_in_an_unknown_fabric_paths_have_a_number_instead_of_a_spine() -> None:
    plan = replace(PLAN, paths=Paths((PlannedPath(1, 2, draw=4),), ()))
    worker_plan = plan.build_worker_plan("j-w4-0").paths
    assert worker_plan is not None
    assert worker_plan.wanted == (WorkerPath(1, 2, "", (), "j-w0-0", "10.0.0.1", 4),)


def test_no_worker_receives_more_paths_than_it_takes() -> None:
    count = MAX_WORKER_PATHS + 1
    members = (Member("a", "10.0.0.1", (0,)), Member("b", "10.0.0.2", tuple(range(1, count + 1))))
    wanted = tuple(PlannedPath(0, rank, "s1") for rank in range(1, count + 1))
    worker_plan = Plan(members=members, paths=replace(PATHS, wanted=wanted)).build_worker_plan("b")
    assert worker_plan.paths is not None
    assert len(worker_plan.paths.wanted) == MAX_WORKER_PATHS
    assert WorkerPlan.from_json(worker_plan.to_json()) == worker_plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wanted": [{"source": 0, "destination": 9, "spine": "s1"}]}, "no member has rank 9 of 4 ranks"),
        ({"wanted": [{"source": -1, "destination": 2, "spine": "s1"}]}, r"paths\.wanted\[0\]\.source"),
        ({"wanted": [{"source": 0, "spine": "s1"}]}, r"paths\.wanted\[0\]: destination must be given"),
        ({"wanted": [{"source": 0, "destination": 2, "spine": "s9"}]}, "no address of s9"),
        ({"wanted": [{"source": 0, "destination": 2, "spine": "s1"}] * 2}, "two paths"),
        ({"hops": [{"address": "leaf", "spine": "s1"}]}, "'leaf' is not an IP address"),
        ({"hops": [{"address": "fd00:0::1", "spine": "s1"}]}, "give it as fd00::1"),
        ({"hops": {"10.98.0.1": "s1"}}, r"paths\.hops: must be a list"),
        ({"first_port": 80}, r"paths\.first_port"),
        ({"first_port": 21900}, "ports 21900 to 21999 are too few"),
        ({"last_port": "21999"}, r"paths\.last_port"),
    ],
)
def test_bad_paths_name_the_field(change: dict[str, object], message: str) -> None:
    data = replace(PLAN, paths=PATHS).to_json()
    with pytest.raises(InputError, match=message):
        Plan.from_json({**data, "paths": {**data["paths"], **change}})


def test_a_workers_plan_names_bad_paths_too() -> None:
    data = replace(PLAN, paths=PATHS).build_worker_plan("j-w0-0").to_json()
    bad = {**data["paths"]["wanted"][0], "address": "worker-4"}
    with pytest.raises(InputError, match="'worker-4' is not an IP address"):
        WorkerPlan.from_json({**data, "paths": {**data["paths"], "wanted": [bad]}})
    with pytest.raises(InputError, match=r"paths\.wanted: 33 items"):
        WorkerPlan.from_json({**data, "paths": {**data["paths"], "wanted": [data["paths"]["wanted"][0]] * 33}})


def test_unknown_fields_of_a_newer_version_are_left_out() -> None:
    assert Plan.from_json({**PLAN.to_json(), "novelty": 1}) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shares": [8, 8]}, "2 shares for 4 ranks"),
        ({"shares": [24, 0, 0, 0]}, "at least 1"),
        ({"members": [{"worker": "w", "address": "a", "ranks": [0, 0]}]}, "exactly once"),
        ({"sync_mode": "Quantum"}, "Quantum"),
        ({"sequence_cost": [1.0, -1.0, 0.0]}, "plan.sequence_cost: .* none below 0"),
        ({"sequence_cost": [0.0, 0.0, 0.0]}, "plan.sequence_cost: .* one above"),
        ({"sequence_cost": [1.0]}, "plan.sequence_cost: .* must be three numbers"),
        ({"sequence_cost": "fast"}, "plan.sequence_cost: .* must be three numbers"),
        ({"secret": "not hex"}, "plan.secret: must be hexadecimal"),
        ({"secret": 7}, "plan.secret: must be hexadecimal"),
    ],
)
def test_bad_plans_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan.from_json({**PLAN.to_json(), **change})


def test_a_workers_plan_names_a_bad_cost_too() -> None:
    with pytest.raises(InputError, match=r"plan\.sequence_cost: .* none below 0"):
        WorkerPlan.from_json({**PLAN.build_worker_plan("j-w0-0").to_json(), "sequence_cost": [-1.0, 1.0, 0.0]})
