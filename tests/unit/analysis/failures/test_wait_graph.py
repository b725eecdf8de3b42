"""The wait-for graph of nested groups: which rank blocks all others, worked out by hand for each rule."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import pytest

from pacekeeper_analysis.failures.hang import HangKind, HangVerdict, diagnose_hang
from pacekeeper_analysis.failures.wait_graph import WaitGraph
from pacekeeper_analysis.protocol.communicators import Communicator, format_entered
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, RankState

IN_TORCH = 'File "/lib/torch/distributed/distributed_c10d.py", line 12 in all_reduce'
IN_SCRIPT = 'File "/job/train.py", line 9 in spin'
RANK = RankState(
    rank=0,
    phase="TRAIN",
    phase_seconds=9.0,
    step=41,
    collective="NONE",
    group=0,
    sequence=0,
    collectives_entered=100,
    waiting_seconds=3.0,
    process_state="S",
    moving=False,
    stack=IN_TORCH,
)


@dataclass
class StalledJob:
    """Ranks that stand still; each reports the groups that it is in."""

    groups: dict[str, Communicator]
    ranks: dict[int, RankState] = field(default_factory=dict)
    entered: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def from_mesh(cls, data: int = 2, pipeline: int = 2, tensor: int = 2) -> StalledJob:
        """Rank = (data · pipeline + stage) · tensor + place; groups d0 …, t0 …, p0 …, by their lowest ranks."""
        world_size = data * pipeline * tensor
        of_data = [range(low, world_size, pipeline * tensor) for low in range(pipeline * tensor)]
        of_tensor = [range(low, low + tensor) for low in range(0, world_size, tensor)]
        groups, identity = {}, 0
        for name, sets in (("data", of_data), ("tensor", of_tensor)):
            for ranks in sets:
                identity += 1
                members = f"{ranks[0]}-{ranks[-1]}:{ranks.step}" if ranks.step > 1 else f"{ranks[0]}-{ranks[-1]}"
                groups[f"{name[0]}{ranks[0]}"] = Communicator(identity, members, name)
        job = cls(groups)
        for rank in range(world_size):
            job.set_outside(rank)
        return job

    def set_outside(self, rank: int, **changes: object) -> None:
        self.ranks[rank] = replace(RANK, rank=rank, stack=IN_SCRIPT, **changes)  # type: ignore[arg-type]  # fields of RankState

    def set_inside(
        self, rank: int, group: str, sequence: int, collective: str = "ALL_REDUCE", **changes: object
    ) -> None:
        identity = self.groups[group].identity
        self.ranks[rank] = replace(RANK, rank=rank, group=identity, sequence=sequence, collective=collective, **changes)  # type: ignore[arg-type]  # fields of RankState
        self.entered.setdefault(rank, {})[identity] = sequence

    def set_entered(self, rank: int, group: str, sequence: int) -> None:
        self.entered.setdefault(rank, {})[self.groups[group].identity] = sequence

    def build_stalls(self) -> list[FaultReport]:
        return [
            FaultReport(
                f"w{rank}-stall",
                FaultKind.STALLED,
                f"w{rank}",
                1,
                10.0,
                ranks=(replace(state, entered=format_entered(self.entered.get(rank, {}))),),
                communicators=tuple(group for group in self.groups.values() if rank in group.ranks),
            )
            for rank, state in self.ranks.items()
        ]

    def diagnose(self) -> HangVerdict:
        found = diagnose_hang(self.build_stalls(), world_size=len(self.ranks))
        assert found is not None
        return found


def test_a_hang_inside_one_tensor_group_names_its_rank_and_not_those_that_wait_elsewhere() -> None:
    """Ranks 0-7 as 2 × 2 × 2: rank 3 hangs; 2 waits in tensor group 2-3; 6 and 7 wait for 2 and 3 in the data groups; 0
    and 1 receive from 2 and 3, and 4 and 5 from 6 and 7."""
    job = StalledJob.from_mesh()
    job.set_inside(2, "t2", 40)
    job.set_inside(6, "d2", 9)
    job.set_inside(7, "d3", 9)
    for rank, source in ((0, 2), (1, 3), (4, 6), (5, 7)):
        job.groups[f"c{rank}"] = Communicator(100 + rank, f"{source},{rank}", "pipeline")
        job.set_inside(rank, f"c{rank}", 5, "RECV", peer=source)
    job.set_entered(3, "t2", 39)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (3,))
    assert "rank 2 waits in ALL_REDUCE 40 of group 'tensor' of ranks 2-3 for rank 3" in found.waits
    assert "rank 1 waits in RECV 5 from rank 3 to rank 1 for rank 3" in found.waits
    assert found.waits.endswith("4 more wait elsewhere")


def test_a_rank_that_waits_elsewhere_with_an_operation_entered_is_not_waited_for() -> None:
    """Rank 1 has entered the data groups' all-reduce without waiting for it. It waits in its tensor group for rank 0,
    which waits in its data group for rank 4. No rank waits for rank 1, which has entered what rank 5 waits in."""
    job = StalledJob.from_mesh()
    job.set_inside(0, "d0", 7)
    job.set_inside(1, "t0", 20)
    job.set_entered(1, "d1", 7)
    job.set_inside(5, "t4", 20)
    job.set_entered(5, "d1", 7)
    for rank in (2, 3, 6, 7):
        job.set_inside(rank, f"d{rank % 4}", 7)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (4,))


def test_two_groups_entered_in_another_order_are_a_cycle() -> None:
    job = StalledJob.from_mesh(1, 1, 4)
    job.groups = {"a": Communicator(1, "0-3", "a"), "b": Communicator(2, "0,1", "b")}
    job.set_inside(0, "a", 5)
    job.set_inside(1, "b", 3)
    job.set_inside(2, "a", 5)
    job.set_inside(3, "a", 5)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (0, 1))
    assert "ranks 0,2-3 wait in ALL_REDUCE 5 of group 'a' of ranks 0-3 for rank 1" in found.waits
    assert "rank 1 waits in ALL_REDUCE 3 of group 'b' of ranks 0-1 for rank 0" in found.waits


def test_a_different_collective_in_one_of_several_groups_is_a_mismatch() -> None:
    job = StalledJob.from_mesh()
    job.set_inside(2, "t2", 40)
    job.set_inside(3, "t2", 40, "BROADCAST")
    job.set_inside(6, "d2", 9)
    job.set_inside(7, "d3", 9)
    for rank in (0, 1, 4, 5):
        job.set_inside(rank, f"t{rank - rank % 2}", 39)
    found = job.diagnose()
    assert found.kind is HangKind.MISMATCH
    assert set(found.ranks) < {2, 3}, "of two, it is unknown which one is right"


@pytest.mark.parametrize(("stack", "kind"), [(IN_TORCH, HangKind.MISMATCH), (IN_SCRIPT, HangKind.NEVER_ENTERED)])
def test_a_rank_that_lags_in_a_group_waits_there_or_stands_still_in_its_own_code(stack: str, kind: HangKind) -> None:
    """With a bucket under way a rank counts as inside of it, independent of what it does at the same time."""
    job = StalledJob.from_mesh(4, 1, 1)
    for rank in range(4):
        job.set_inside(rank, "d0", 51, stack=IN_TORCH)
    job.set_inside(2, "d0", 50, stack=stack)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (kind, (2,))


def test_a_rank_that_creates_a_group_waits_for_its_members() -> None:
    """No collective reports it: they meet in the store."""
    job = StalledJob.from_mesh(4, 1, 1)
    for rank in (0, 1, 3):
        job.set_outside(rank)
        making = 'File "/lib/torch/distributed/distributed_c10d.py", line 9 in _new_process_group_helper'
        job.ranks[rank] = replace(job.ranks[rank], stack=making)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (2,))


def test_a_rank_that_works_while_its_collective_is_under_way_is_slow_and_not_hung() -> None:
    job = StalledJob.from_mesh(2, 1, 1)
    for rank in range(2):
        job.set_inside(rank, "d0", 50, waiting_seconds=30.0)
    job.set_inside(1, "d0", 50, stack=IN_SCRIPT, moving=True)
    assert diagnose_hang(job.build_stalls(), world_size=2) is None


def test_all_inside_of_one_group_are_a_link_of_that_group() -> None:
    job = StalledJob.from_mesh()
    for rank in range(8):
        job.set_inside(rank, f"d{rank % 4}", 9, waiting_seconds=11.0)
    for rank in (2, 3):
        job.set_inside(rank, "t2", 40, waiting_seconds=11.0)
    job.set_inside(0, "t0", 40, waiting_seconds=11.0)
    job.set_entered(1, "t0", 40)
    job.set_entered(0, "d0", 9)
    for rank in (4, 5, 6, 7):
        job.set_inside(rank, f"d{rank % 4}", 9, waiting_seconds=2.0)
    job.set_entered(1, "d1", 9)
    found = job.diagnose()
    assert (found.kind, found.ranks, found.members) == (HangKind.COMMUNICATION, (), (2, 3))
    assert found.waits == "all 2 ranks entered ALL_REDUCE 40 of group 'tensor' of ranks 2-3 and none came out of it"


def test_a_sent_message_that_does_not_arrive_is_a_link_although_both_ends_wait() -> None:
    """Stage 0 has sent, continues, and waits for the gradient; stage 1 waits for what stage 0 has sent."""
    job = StalledJob({"there": Communicator(1, "0,1"), "back": Communicator(2, "1,0")})
    job.set_inside(0, "back", 4, "RECV", peer=1, waiting_seconds=12.0)
    job.set_entered(0, "there", 6)
    job.set_inside(1, "there", 5, "RECV", peer=0, waiting_seconds=12.0)
    job.set_entered(1, "back", 3)
    found = job.diagnose()
    assert (found.kind, found.members) == (HangKind.COMMUNICATION, (0, 1))
    assert "RECV 5 from rank 0 to rank 1 and rank 1 did not come out of it" in found.evidence[0]


def test_a_receive_waits_for_its_sender_only() -> None:
    job = StalledJob({"d": Communicator(9, "0-3"), "there": Communicator(1, "0,1")})
    job.set_outside(0)
    for rank in (2, 3):
        job.set_inside(rank, "d", 8)
    job.set_inside(1, "there", 5, "RECV", peer=0)
    job.set_entered(0, "there", 4)
    job.set_entered(0, "d", 8)
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (0,))
    unknown = StalledJob({})
    unknown.groups["there"] = Communicator(1, "0,1")
    unknown.set_outside(0)
    unknown.set_inside(1, "there", 5, "RECV", peer=0)
    unknown.groups = {}
    assert unknown.diagnose().waits == "rank 1 waits in RECV 5 from rank 0 to rank 1 for rank 0", "by its peer"


def test_a_receive_from_any_rank_waits_for_all_others_of_the_group() -> None:
    job = StalledJob({"d": Communicator(9, "0-2")})
    job.set_outside(2)
    job.set_inside(0, "d", 3, "RECV")
    job.set_inside(1, "d", 8, "RECV")
    found = job.diagnose()
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (2,))
    job.set_inside(2, "d", 1, "RECV")
    assert (job.diagnose().kind, job.diagnose().ranks) == (HangKind.MISMATCH, (0, 1, 2)), "no rank sends"


def test_a_group_of_one_waits_for_no_rank() -> None:
    job = StalledJob({"alone": Communicator(3, "0"), "d": Communicator(9, "0,1")})
    job.set_inside(0, "alone", 3, waiting_seconds=12.0)
    job.set_inside(1, "d", 8)
    found = job.diagnose()
    assert (found.kind, found.members) == (HangKind.COMMUNICATION, (0,))


def test_groups_of_one_identity_and_other_ranks_are_not_confused() -> None:
    """An identity has 32 bits; a job of thousands of groups may have two of the same."""
    job = StalledJob({"a": Communicator(7, "0,1"), "b": Communicator(7, "2,3")})
    job.set_inside(0, "a", 4)
    job.set_outside(1)
    job.set_inside(2, "b", 900, waiting_seconds=1.0)
    job.set_inside(3, "b", 900, waiting_seconds=1.0)
    found = job.diagnose()
    assert found.ranks == (1,)
    assert found.waits == "rank 0 waits in ALL_REDUCE 4 of ranks 0-1 for rank 1; 2 more wait elsewhere"


def test_reports_of_groups_without_the_workers_ranks_do_not_count() -> None:
    """Nor do reports of ranks that do not exist."""
    job = StalledJob({"a": Communicator(7, "0,1")})
    job.set_inside(0, "a", 4)
    job.set_outside(1)
    reports = [replace(fault, communicators=(Communicator(7, "1,5-9"),)) for fault in job.build_stalls()]
    found = diagnose_hang(reports, world_size=2)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))


@pytest.mark.parametrize("spread", [1, 4096])
def test_thousands_of_ranks_in_nested_groups_are_evaluated_in_a_moment(spread: int) -> None:
    """Even where each of them is somewhere else in the group of all."""
    ranks, hung = 4096, 1234
    all_ranks = Communicator(1, f"0-{ranks - 1}", "data")
    faults = []
    for rank in range(ranks):
        low = rank - rank % 8
        tensor = Communicator(2 + low, f"{low}-{low + 7}", "tensor")
        state = replace(
            RANK, rank=rank, collective="ALL_REDUCE", group=1, sequence=100 + rank % spread, entered="1:100,2:5"
        )
        if low == hung - hung % 8:
            state = replace(state, group=2 + low, sequence=70, entered=f"{2 + low:x}:70")
        if rank == hung:
            state = replace(state, collective="NONE", sequence=69, entered=f"{2 + low:x}:69", stack=IN_SCRIPT)
        faults.append(
            FaultReport(
                f"w{rank}", FaultKind.STALLED, f"w{rank}", 1, 10.0, ranks=(state,), communicators=(all_ranks, tensor)
            )
        )
    began = time.process_time()
    found = diagnose_hang(faults, world_size=ranks)
    assert time.process_time() - began < 3.0, "it takes 0.2 s; by the square of the ranks, many"
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (hung,))


def test_ranks_without_a_report_have_no_sinks() -> None:
    sinks = WaitGraph({}, (), ()).find_sinks()
    assert (sinks.ranks_outside, sinks.wait_cycles, sinks.pending_collectives, sinks.unknown_ranks) == ((), (), (), ())
