"""What is known of the groups of real ranks: who is in them, how far each has come, and who sends to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.operations import NO_GROUP, decode_operations
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_rank.records import Collective, Phase, RecordKind
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("native")


def read_collectives(folder: Path, rank: int) -> NDArray[np.void]:
    found = RingReader(RuntimeFolder(folder).ring(rank)).records()
    chosen: NDArray[np.void] = found[found["kind"] == RecordKind.COLLECTIVE]
    return chosen


def read_known_communicators(folder: Path, rank: int) -> dict[int, Communicator]:
    found = read_communicators(RuntimeFolder(folder).communicators_file(rank))
    return {communicator.identity: communicator for communicator in found}


def test_the_groups_of_a_mesh_are_known_by_name_and_ranks_alike_on_all_members(tmp_path: Path) -> None:
    def rank_main(_: int) -> None:
        import pacekeeper.auto  # noqa: F401

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
        for name in ("tensor", "data", "tensor"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(name))

    run_ranks(rank_main, 8, runtime=tmp_path)
    members: dict[int, set[str]] = {}
    for rank in range(8):
        groups = read_known_communicators(tmp_path, rank)
        tensor, data = rank - rank % 2, rank % 4
        found = sorted((group.name, group.ranks) for group in groups.values())
        assert found == [("data", (data, data + 4)), ("tensor", (tensor, tensor + 1))], rank
        for group in groups.values():
            members.setdefault(group.identity, set()).add(group.members)
            assert group.identity in read_collectives(tmp_path, rank)["group"]
    assert len(members) == 8, "four of each, each with an identity of its own"
    assert all(len(lines) == 1 for lines in members.values())


def test_sends_and_receives_are_counted_by_channel_so_that_collectives_stay_in_step(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        stages: Any = dist.new_group([1, 2], group_desc="stages")
        mine = torch.full((4,), float(rank))
        if rank == 1:
            dist.isend(mine, 2, group=stages).wait()  # type: ignore[union-attr]  # this rank belongs to it
            dist.send(mine, 2, group=stages)
        if rank == 2:
            dist.irecv(mine, 1, group=stages).wait()  # type: ignore[union-attr]  # the same
            dist.recv(mine, group=stages)
            assert mine.tolist() == [1.0] * 4
        if rank != 0:
            ops = [dist.P2POp(dist.isend, mine, 3 - rank), dist.P2POp(dist.irecv, torch.zeros(4), 3 - rank)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        dist.all_reduce(torch.ones(1))

    run_ranks(rank_main, 3, runtime=tmp_path)
    for rank in range(3):
        (world,) = (
            record for record in read_collectives(tmp_path, rank) if record["collective"] == Collective.ALL_REDUCE
        )
        assert (world["sequence"], world["peer"]) == (1, -1), "sends among its peers do not count"
        assert read_known_communicators(tmp_path, rank)[int(world["group"])].ranks == (0, 1, 2)
    of_one, of_two = (read_collectives(tmp_path, rank) for rank in (1, 2))
    sends = of_one[of_one["collective"] == Collective.SEND]
    receives = of_two[of_two["collective"] == Collective.RECV]
    assert sends["peer"].tolist() == [2, 2, 2]
    assert receives["peer"].tolist() == [1, -1, 1], "the sender of what is received from any rank is unknown"
    for send, receive in ((0, 0), (2, 2)):
        assert (sends["group"][send], sends["sequence"][send]) == (receives["group"][receive], (1, 0, 1)[receive])
    channel = read_known_communicators(tmp_path, 2)[int(receives["group"][0])]
    assert (channel.ranks, channel.name) == ((1, 2), "stages")
    entered = RingReader(RuntimeFolder(tmp_path).ring(1)).state()["entered"]
    assert (int(sends["group"][0]), 2) in [tuple(place) for place in entered.tolist()]


def test_groups_made_in_flight_groups_of_one_and_destroyed_ones(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[int]:
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        single: Any = dist.new_group([rank], use_local_synchronization=True, group_desc="single")
        dist.all_reduce(torch.ones(1), group=single)
        ring = RingReader(RuntimeFolder(tmp_path).ring(rank))
        taken = []
        for number in range(5):
            passing: Any = dist.new_group([0, 1], group_desc=f"passing {number}")
            dist.all_reduce(torch.ones(1), group=passing)
            dist.destroy_process_group(passing)
            del passing
            taken.append(int((ring.state()["entered"]["group"] > 0).sum()))
        split: Any = dist.split_group(split_ranks=[[0, 1]], group_desc="split")
        dist.all_reduce(torch.ones(1), group=split)
        return taken

    for taken in run_ranks(rank_main, 2, runtime=tmp_path):
        assert max(taken) <= 3, "those that are gone give their places back"
    for rank in range(2):
        groups = read_known_communicators(tmp_path, rank)
        assert [group.ranks for group in groups.values() if group.name == "single"] == [(rank,)]
        assert [group.ranks for group in groups.values() if group.name == "split"] == [(0, 1)]
        assert {group.name for group in groups.values()} >= {f"passing {number}" for number in range(5)}
        assert {int(record["group"]) for record in read_collectives(tmp_path, rank)} == set(groups)
    assert len({identity for rank in range(2) for identity in read_known_communicators(tmp_path, rank)}) == 2 + 5 + 1


def test_the_evidence_has_the_collectives_of_the_last_whole_steps_and_how_long_each_held_the_rank_up(
    tmp_path: Path,
) -> None:
    def rank_main(rank: int) -> None:
        import time

        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            time.sleep(0.2 * rank)
            model(torch.ones(2, 4)).sum().backward()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            time.sleep(0.02)
            work.wait()
            dist.barrier()
            optimizer.step()

    run_ranks(rank_main, 2, runtime=tmp_path)
    rings = RankRings(RuntimeFolder(tmp_path), 32)
    assert rings.build_evidence("e", "w", 1).operations == ()
    evidence = rings.build_evidence("e", "w", 1, [EvidencePart.OPERATIONS])
    assert evidence.windows == ()
    waits = [0.0, 0.0]
    for answer in evidence.operations:
        found = decode_operations(answer.operations)
        assert sorted(set(found["step"])) == [2, 3, 4], "the first step of a round is no training yet"
        assert NO_GROUP not in found["group"]
        assert {evidence.communicators[group].ranks for group in found["group"]} == {(0, 1)}
        for step in (3, 4):  # DDP settles its buckets in the one before
            buckets, asynchronous, barrier = found[found["step"] == step]
            assert barrier["collective"] == Collective.BARRIER
            assert asynchronous["wait"] < asynchronous["end"] - asynchronous["start"] - 0.015, "it overlapped"
            assert 0 <= buckets["wait"] <= buckets["end"] - buckets["start"]
            waits[answer.rank] += buckets["wait"]
    assert waits[0] > max(0.1, 2 * waits[1]), "it waits for the other rank, which sleeps for 0.4 s in these steps"


def test_a_step_that_does_not_fit_is_left_out_whole(tmp_path: Path) -> None:
    from pacekeeper.observe.collectives.operations import select_last_operations
    from pacekeeper_rank.record_ring import RingWriter, create_ring

    create_ring(tmp_path / "0", 0, 1)
    ring = RingWriter(tmp_path / "0")
    for step in range(1, 6):
        begin = step * 1_000_000_000
        for number in range(3):
            start = begin + number * 100_000_000
            ring.write(
                RecordKind.COLLECTIVE, start, start + 50_000_000, step, Phase.TRAIN, 0.02, 1, 7, 3 * step + number, 64
            )
        ring.write(RecordKind.STEP, begin, begin + 900_000_000, step, Phase.TRAIN)
    records = RingReader(tmp_path / "0").records()
    found = select_last_operations(records, {7: 0}, max_operations=7)
    assert found["step"].tolist() == [4, 4, 4, 5, 5, 5]
    assert found["start"].tolist() == [np.float32(0.1 * (at % 3)) for at in range(6)]
    assert found["wait"].tolist() == [np.float32(0.02)] * 6
    assert select_last_operations(records, {}, max_operations=7)["group"].tolist() == [NO_GROUP] * 6
    assert set(select_last_operations(records[4:], {7: 0})["step"]) == {3, 4, 5}, "step 2 has lost a part"
    assert len(select_last_operations(records[:0], {})) == 0
