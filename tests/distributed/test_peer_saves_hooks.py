"""With `PACEKEEPER_PEER_SAVES`, an unchanged script keeps its saves in memory, too."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from pacekeeper.checkpointing.peer_saves import save_hooks
from pacekeeper.checkpointing.peer_saves.storage_writer import PeerStorageWriter
from pacekeeper.integrations.torchtitan import _find_saves_in_memory
from testing.training.ranks import run_ranks

RANKS = 2
dcp: Any = checkpoint


def block_storage() -> None:
    """From here on, the storage of this process never answers."""

    def write_data(*_: Any) -> Any:
        threading.Event().wait()

    setattr(FileSystemWriter, "write_data", write_data)  # noqa: B010  # of another signature


def make_state(value: int) -> dict[str, Any]:
    return {"weight": torch.full((3,), float(value)), "step": value}


@pytest.mark.oldest_torch
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unchanged_script_loads_from_memory_what_its_storage_does_not_have(
    asynchronous: bool, tmp_path: Path
) -> None:
    def rank_main(_: int) -> tuple[int, float, list[str]]:
        os.environ["PACEKEEPER_PEER_SAVES"] = "1"
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        block_storage()
        for value in (1, 2):
            if asynchronous:
                writer = FileSystemWriter(tmp_path / "newest")
                dcp.async_save(make_state(value), storage_writer=writer).result()
            else:
                dcp.save(make_state(value), checkpoint_id=tmp_path / "newest")
        state = make_state(0)
        if asynchronous:
            dcp.load(state, storage_reader=FileSystemReader(tmp_path / "newest"))
        else:
            dcp.load(state, checkpoint_id=tmp_path / "newest")
        return state["step"], state["weight"][0].item(), os.listdir(tmp_path / "newest")

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(2, 2.0, [])] * RANKS


def test_torchtitan_resumes_from_memory(tmp_path: Path) -> None:
    def rank_main(_: int) -> tuple[int, int, int]:
        dist.init_process_group("gloo")
        checkpointer: Any = SimpleNamespace(folder=str(tmp_path / "titan"), _find_load_step=lambda **_: 5)
        _find_saves_in_memory(checkpointer)
        first = checkpointer._find_load_step()
        block_storage()
        dcp.save(make_state(7), checkpoint_id=tmp_path / "titan" / "step-7")
        state = make_state(0)
        dcp.load(state, checkpoint_id=f"{checkpointer.folder}/step-{checkpointer._find_load_step()}")
        return first, state["step"], checkpointer._find_load_step(folder="elsewhere")

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(5, 7, 5)] * RANKS


class OtherWriter(FileSystemWriter):
    """A writer that is not torch's own."""


def test_what_cannot_or_need_not_be_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    def rank_main(_: int) -> list[bool]:
        before = save_hooks.choose_writer({"checkpoint_id": tmp_path}).keys()
        dist.init_process_group("gloo")
        others: list[dict[str, Any]] = [
            {},
            {"checkpoint_id": tmp_path, "no_dist": True},
            {"checkpoint_id": tmp_path, "use_collectives": False},
            {"storage_writer": OtherWriter(tmp_path)},
        ]
        process = checkpoint.state_dict_saver.AsyncCheckpointerType.PROCESS
        in_process = {"checkpoint_id": tmp_path, "async_checkpointer_type": process}
        return [
            "storage_writer" not in before,
            all(save_hooks.choose_writer(options) is options for options in others),
            save_hooks.choose_async_writer(in_process) is in_process,
            *(
                "storage_writer" in save_hooks.choose_writer({"checkpoint_id": f"{tmp_path}/{name}-1"})
                for name in "abcade"
            ),
        ]

    expected = [True] * 3 + [True, True, True, True, True, False]
    assert run_ranks(rank_main, 1) == [expected]


def test_names_do_not_depend_on_numbers() -> None:
    ids = ("/checkpoints/step-200", "s3://bucket/pytorch_model_fsdp_0/", "/checkpoints/17")
    assert [save_hooks.derive_name(checkpoint_id) for checkpoint_id in ids] == ["step", "pytorch_model_fsdp", "save"]
    assert PeerStorageWriter.validate_checkpoint_id("/tmp/17")
