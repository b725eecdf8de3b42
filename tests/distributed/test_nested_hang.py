"""Hangs among real ranks in nested groups, 2 × 2 × 2 over gloo: the verdict names the rank that holds all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper_analysis.failures.hang import HangKind, HangVerdict, diagnose_hang
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from testing.training.launchers import LauncherTeam, create_team

PORT = 29417
SCRIPT = Path(__file__).parents[2] / "testing" / "scripts" / "nested.py"


def start_workers(one: LauncherTeam) -> None:
    """Workers a and b, each with a replica."""
    for name in ("a", "b"):
        one.start(name)
    members = one.build_members(a=[0, 1, 2, 3], b=[4, 5, 6, 7])
    one.give_plan(Plan(version=1, membership=1, members=members, store_port=PORT, restarts=5))


def list_stalls(one: LauncherTeam) -> list[FaultReport]:
    return [fault for worker in one.workers.values() for fault in worker.read_faults(FaultKind.STALLED)]


def diagnose_fault(tmp_path: Path, rank: int, kind: str) -> HangVerdict:
    with create_team(
        tmp_path, steps=12, faults=[{"rank": rank, "step": 7, "kind": kind}], script=SCRIPT, hang_deadline=0.6
    ) as one:
        start_workers(one)
        found = one.wait_for(lambda: diagnose_hang(list_stalls(one), world_size=8), "a verdict")
        newest = {state.rank: (state, fault) for fault in list_stalls(one) for state in fault.ranks}
        for state, fault in newest.values():
            if state.collective != "NONE":
                (group,) = (group for group in fault.communicators if group.identity == state.group)
                assert state.rank in group.ranks
        return found


@pytest.mark.parametrize("kind", ["sleep", "deadlock"])
def test_a_hang_inside_one_tensor_group(tmp_path: Path, kind: str) -> None:
    """Rank 3's partner waits for it in the tensor group; the other stage waits to be sent something, and the other
    replica in the data groups."""
    found = diagnose_fault(tmp_path, 3, kind)
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (3,)), found
    assert "rank 2 waits in ALL_REDUCE" in found.waits
    assert "group 'tensor' of ranks 2-3 for rank 3" in found.waits
    assert "nested.py" in found.evidence[0]


def test_a_sender_that_never_sends(tmp_path: Path) -> None:
    found = diagnose_fault(tmp_path, 1, "before sending")
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,)), found
    assert "from rank 1 to rank 3 for rank 1" in found.waits


def test_a_rank_that_stands_still_while_its_gradients_are_under_way(tmp_path: Path) -> None:
    """It has entered all that the others wait for, so they go on to the next step, and wait for it there."""
    found = diagnose_fault(tmp_path, 6, "sleep in backward")
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (6,)), found


def test_another_collective_than_the_partner_has_entered(tmp_path: Path) -> None:
    found = diagnose_fault(tmp_path, 4, "broadcast")
    assert found.kind is HangKind.MISMATCH, found
    assert set(found.ranks) <= {4, 5}


def test_groups_entered_in_another_order_than_by_the_peers(tmp_path: Path) -> None:
    found = diagnose_fault(tmp_path, 5, "order")
    assert found.kind is HangKind.MISMATCH, found
    assert 5 in found.ranks


def test_a_stopped_rank(tmp_path: Path) -> None:
    found = diagnose_fault(tmp_path, 0, "stop")
    assert (found.kind, found.ranks) == (HangKind.STOPPED, (0,)), found


def test_a_rank_that_dies_is_no_hang_and_the_next_round_knows_its_own_groups(tmp_path: Path) -> None:
    faults = [{"rank": 2, "step": 7, "kind": "kill"}, {"rank": 2, "step": 3, "kind": "none"}]
    with create_team(tmp_path, steps=9, faults=faults, script=SCRIPT, hang_deadline=5.0) as one:
        start_workers(one)
        assert [worker.wait() for worker in one.workers.values()] == [0, 0], one.read_logs()
        assert "round 2 step 9" in one.read_diary(2)
        assert diagnose_hang(list_stalls(one), world_size=8) is None
        from pacekeeper.observe.collectives.communicator_file import read_communicators

        known = read_communicators(one.workers["a"].runtime.communicators_file(2))
        assert {group.ranks for group in known if group.name == "tensor"} == {(2, 3)}
        assert len({group.name for group in known} & {"data", "tensor", "pipeline"}) == 3
