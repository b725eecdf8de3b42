"""Checkpoints, snapshots, packed values: what is damaged is none, and never another state."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import ProcessGroup

from pacekeeper import exchange
from pacekeeper.environment import JobIdentity
from pacekeeper.keep.checkpoints import CheckpointFolder
from pacekeeper.keep.distributed_checkpoint import CheckpointSaver, TornCheckpointError, load_checkpoint
from pacekeeper.keep.manifests import Manifest
from pacekeeper.keep.news import read_checkpoint_status
from pacekeeper.keep.rank_state import capture_rank_state, restore_rank_state
from pacekeeper.keep.snapshots import Snapshots, unpack_slot
from pacekeeper.keep.versions import NO_STATE_VERSION
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.plain import pack_value
from pacekeeper.plain import unpack_value as unpack_plain

from ..border import Border, Enter, by
from ..mutations import Mutated, as_json, content, document, one_of, text, written

ALONE = cast(ProcessGroup, SimpleNamespace(rank=lambda: 0))
JOB = JobIdentity("team/one", "uid-1")
OWNER = {
    "owner": "r1-00",
    "job": JOB.name,
    "uid": JOB.uid,
    "round": 1,
    "adopted": ["team/other"],
    "superseded": ["uid-0"],
    "host": "host",
    "pid": 7,
    "started": 9,
}
STEP = "step-00000100"
MANIFEST = f"{STEP}/manifest.json"


def state(value: float) -> dict[str, Any]:
    return {
        "large": torch.full((1000,), value),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "other": {"bytes": b"bytes", "number": value},
    }


def told(found: dict[str, Any]) -> object:
    """What can be compared."""
    return {name: its.tolist() if isinstance(its, torch.Tensor) else its for name, its in found.items()}


@cache
def volume() -> dict[str, Any]:
    """A published checkpoint: its files by name, the manifest as a document."""
    group = cast(CpuGroup, SimpleNamespace(group=ALONE, all_agree=bool, all_gather=lambda mine: [mine]))
    with tempfile.TemporaryDirectory() as place:
        folder = CheckpointFolder(Path(place), round_=1, job=JOB)
        folder.claim()
        with (
            patch.object(exchange, "collect", lambda mine, _: [mine]),
            patch.object(exchange, "scatter", lambda each, _: each[0]),
        ):
            saver = CheckpointSaver(group, lambda _: lambda: None)
            files = saver.write(saver.stage(state(2.0)), folder.get_partial_path(100), ALONE)
        manifest = Manifest(100, 1, 1, {"large": "float32 [1000]"}, ("model",), files, JOB.name, JOB.uid)
        assert folder.publish(manifest)
        found: dict[str, Any] = {
            str(path.relative_to(place)): path.read_bytes() for path in Path(place, STEP).iterdir() if path.is_file()
        }
        said = json.loads(found[MANIFEST])
        del said["checksum"]  # as of an older version: nothing that is behind it would be tried
        return {**found, MANIFEST: said, "owner.json": OWNER}


@contextmanager
def on_a_volume() -> Iterator[Enter]:
    """What is there is restored, or nothing is: `None`."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / STEP).mkdir()

        def enter(files: dict[str, Any]) -> object:
            for name, data in files.items():
                (Path(place) / name).write_bytes(written(data))
            for claim in Path(place).glob(".owner-*"):  # of the case before
                shutil.rmtree(claim)
            folder = CheckpointFolder(Path(place), round_=2, job=JOB)
            folder.claim()
            for manifest in folder.list_published():
                empty = state(0.0)
                try:
                    load_checkpoint(empty, folder.find_folder(manifest), manifest.files)
                except TornCheckpointError:
                    continue
                return manifest.step, told(empty)
            return None

        yield enter


def mutate_volume(dice: Random, files: dict[str, Any]) -> Mutated:
    """A file is another one, is damaged, or is in the place of another."""
    names = sorted(files)
    if dice.random() < 0.15:
        one, other = dice.sample(names, 2)
        return Mutated({**files, one: files[other], other: files[one]}, f"{one} and {other} are exchanged")
    return one_of(dice, files, {name: content if isinstance(files[name], bytes) else text for name in names})


def whole_or_none(found: Any, valid: Any) -> str:
    return "" if found is None or found == valid else f"another state: {str(found)[:300]}"


@cache
def slot() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        snapshots = Snapshots(folder, "replica", round_=1, world_size=2, fingerprint=7, read_memory_left=lambda: 1e12)
        snapshots.write(5, {"model": state(3.0)}, fingerprint=7)
        snapshots.publish(torch.frombuffer(bytearray(capture_rank_state(9) * 2), dtype=torch.uint8))
        return (folder / "replica.0").read_bytes()


@contextmanager
def in_shared_memory() -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def enter(data: bytes) -> object:
            (folder / "replica.0").write_bytes(data)
            reader = Snapshots(folder, "replica", round_=2, world_size=2, fingerprint=7, read_memory_left=lambda: 1e12)
            for version, _ in reader.list_versions():
                found = None if version == NO_STATE_VERSION else reader.read(version)
                if found is not None:
                    kept, ranks = unpack_slot(found, None)
                    return version, told(kept["model"]), ranks
            return None

        yield enter


def from_a_peer(data: bytes) -> object:
    """A slot whose checksum is good all the same: its writer is another program, or hostile."""
    kept, ranks = unpack_slot(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), None)
    return [restore_rank_state(rank) for rank in ranks[:2]], kept


def plain(data: bytes) -> None:
    """What a state may hold is its owner's affair: NaN, too."""
    unpack_plain(data)


def packed() -> list[bytes]:
    values = {
        "array": np.arange(6.0).reshape(2, 3),
        "number": np.float32(1.5),
        "tuple": (1, "a", None, True, b"bytes"),
        "set": {1, 2},
        "complex": 1j,
        "type": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "manifest": Manifest(1, 1, 1, {"a": "b"}, ("c",)),
    }
    return [pack_value(values), pack_value(state(1.0)), pack_value([])]


def mutate_packed(dice: Random, data: bytes) -> Mutated:
    """Its bytes, or its description with a length that fits."""
    length = int.from_bytes(data[8:16], "little")
    if dice.random() < 0.3:
        return content(dice, data)
    found = document(dice, json.loads(data[16 : 16 + length]))
    described = as_json(found.value)
    start = -(-(16 + length) // 64) * 64
    head = data[:8] + len(described).to_bytes(8, "little") + described
    return Mutated(head.ljust(-(-len(head) // 64) * 64, b"\0") + data[start:], found.how, found.place)


def news(data: Any) -> object:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(written(data))
        return read_checkpoint_status(Path(file.name))


NEWS = {"step": 100, "published_ns": 10**12, "failed_rank": 3, "error": "rank 3: no room"}

BORDERS = [
    Border("checkpoints", lambda: [volume()], mutate_volume, on_a_volume, judge=whole_or_none, cases=250),
    Border("snapshots", lambda: [slot()], content, in_shared_memory, judge=whole_or_none, cases=200),
    Border("snapshots of peers", lambda: [slot()], content, by(from_a_peer), cases=200),
    Border("packed values", packed, mutate_packed, by(plain), cases=400),
    Border("news of checkpoints", lambda: [NEWS], text, by(news), refusals=()),
]
