"""What ranks send each other arrives unchanged, and nothing of it is unpickled."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pacekeeper import object_collectives
from pacekeeper.checkpointing.storage import distributed_checkpoint
from pacekeeper.checkpointing.storage.distributed_checkpoint import (
    CHECKPOINT_INDEX_FILE,
    TORCH_INDEX_FILE,
    CheckpointSaver,
    CheckpointWriteError,
    StagedCopy,
    load_checkpoint,
)
from pacekeeper.checkpointing.storage.manifests import compute_checksum
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.recorder import NoRing, Recorder
from testing.training.ranks import forbid_unpickling, run_ranks

pytestmark = pytest.mark.oldest_torch

RANKS = 3


def init_group() -> dist.ProcessGroup:
    """Of all ranks; from here on a rank that unpickles something fails."""
    dist.init_process_group("gloo")
    forbid_unpickling()
    its = dist.distributed_c10d._get_default_group()
    with pytest.raises(AssertionError, match="unpickles"):
        dist.all_gather_object(["", "", ""], "words", group=its)
    return its


def build_value(rank: int) -> Any:
    """Of another length on each rank."""
    return {"rank": rank, "words": "x" * 1000 * rank, "tensor": torch.full((rank,), rank), 7: (rank, None)}


def to_plain(value: Any) -> Any:
    return {**value, "tensor": value["tensor"].tolist()}


def test_all_ranks_receive_what_is_gathered_or_scattered() -> None:
    def rank_main(rank: int) -> bool:
        everyone = init_group()
        gathered = object_collectives.all_gather_objects(build_value(rank), everyone)
        collected = object_collectives.gather_objects(build_value(rank), everyone)
        scattered = object_collectives.scatter_objects(
            [build_value(2 - its) for its in range(RANKS)] if rank == 0 else None, everyone
        )
        broadcast = object_collectives.broadcast_object(build_value(rank + 2), everyone)
        expected = [to_plain(build_value(its)) for its in range(RANKS)]
        assert [to_plain(its) for its in gathered] == expected
        assert (collected is None) == (rank > 0)
        assert collected is None or [to_plain(its) for its in collected] == expected
        assert to_plain(scattered) == to_plain(build_value(2 - rank))
        assert to_plain(broadcast) == to_plain(build_value(2))
        return True

    assert run_ranks(rank_main, RANKS) == [True] * RANKS


def test_a_pickle_from_a_peer_is_refused_not_run() -> None:
    def rank_main(rank: int) -> bool:
        everyone = init_group()
        content = torch.frombuffer(bytearray(pickle.dumps({"rank": rank})), dtype=torch.uint8)
        if rank == 1:
            object_collectives._encode_object = lambda *_: content  # a hostile peer's own version
        with pytest.raises(InputError, match="another format"):
            object_collectives.all_gather_objects(rank, everyone)
        return True

    assert run_ranks(rank_main, RANKS) == [True] * RANKS


def build_state(rank: int, value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 4), value), "half": torch.full((5,), value, dtype=torch.bfloat16)},
        "optimizer": {"param_groups": {"lr": value, "betas": (value, 0.99), "names": [None, True, "a"]}},
        "other": b"%f" % value,
        f"own.{rank}": b"%d %f" % (rank, value),
    }


def save_state(its: dict[str, Any], folder: Path, everyone: dist.ProcessGroup) -> None:
    saver = CheckpointSaver(CpuGroup(Recorder(NoRing())), lambda _: lambda: None)
    saver.write(saver.stage(its), folder, everyone)


def test_a_checkpoint_is_written_and_read_without_a_pickle_that_could_run_something(tmp_path: Path) -> None:
    def rank_main(rank: int) -> bool:
        everyone = init_group()
        save_state(build_state(rank, 0.5), tmp_path, everyone)
        dist.barrier()
        (tmp_path / TORCH_INDEX_FILE).unlink(missing_ok=True)
        found = build_state((rank + 1) % RANKS, 0.0)
        load_checkpoint(found, tmp_path, {CHECKPOINT_INDEX_FILE: compute_checksum(tmp_path / CHECKPOINT_INDEX_FILE)})
        expected = build_state((rank + 1) % RANKS, 0.5)
        for name, tensor in expected.pop("model").items():
            assert torch.equal(found["model"][name], tensor)
            assert found["model"][name].dtype == tensor.dtype
        found.pop("model")
        assert found == expected
        return True

    assert run_ranks(rank_main, RANKS) == [True] * RANKS


@pytest.mark.parametrize(
    ("owner", "method", "receivers"),
    [
        (DefaultSavePlanner, "create_local_plan", range(RANKS)),
        (DefaultSavePlanner, "create_global_plan", range(RANKS)),
        (distributed_checkpoint, "_copy_into_buffer", [1]),
        (distributed_checkpoint, "_write_items", [1]),
        (FileSystemWriter, "finish", [0]),
    ],
)
def test_no_rank_waits_for_a_rank_that_fails(owner: Any, method: str, receivers: Sequence[int], tmp_path: Path) -> None:
    """receivers: the ranks that receive it at once; the others do by `CheckpointWriter`, which gathers all results."""
    culprit = 0 if method in {"create_global_plan", "finish"} else 1

    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    def rank_main(rank: int) -> str:
        everyone = init_group()
        saver = CheckpointSaver(CpuGroup(Recorder(NoRing())), lambda _: lambda: None)
        if rank == culprit:
            setattr(owner, method, fail)
        try:
            try:
                staged: StagedCopy | str = saver.stage(build_state(rank, 0.5))
            except CheckpointWriteError as failed:
                staged = str(failed)
            saver.write(staged, tmp_path, everyone)
        except Exception as error:
            return str(error)
        return ""

    reason = f"rank {culprit}: OSError: [Errno 5] Input/output error"
    answers = run_ranks(rank_main, RANKS)
    assert [rank for rank, answer in enumerate(answers) if answer] == list(receivers)
    assert all(answer in reason for answer in answers)


def test_an_index_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_INDEX_FILE).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(InputError, match="another format"):
        load_checkpoint({}, tmp_path, {CHECKPOINT_INDEX_FILE: compute_checksum(tmp_path / CHECKPOINT_INDEX_FILE)})


def test_ranks_take_no_copies_if_their_worker_lacks_memory_for_all(tmp_path: Path) -> None:
    """Each by itself would have enough memory."""

    def rank_main(rank: int) -> tuple[str, dict[str, Any]]:
        init_group()
        saver = CheckpointSaver(CpuGroup(Recorder(NoRing())), lambda _: lambda: None, read_memory_left=lambda: 66 << 20)
        own = {f"own.{rank}": torch.ones(1 << 18)}
        with pytest.raises(CheckpointWriteError) as failed:
            saver.stage(own)
        saver.stage({f"own.{rank}": torch.ones(1 << 17)})
        return str(failed.value), saver._planner.state_dict

    reason = "rank 0: its worker's 3 ranks need 3 MiB to copy the state, but their control group has 66 MiB left"
    for message, live in run_ranks(rank_main, RANKS, runtime=tmp_path):
        assert message.startswith(reason)
        assert not live, "the live state is not kept until the next one"
