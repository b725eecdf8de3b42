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

from pacekeeper import object_collectives
from pacekeeper.checkpointing.rank_state import capture_rank_state, restore_rank_state
from pacekeeper.checkpointing.snapshots.snapshot_slots import SlotMemory, Snapshots, unpack_slot
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_status import read_checkpoint_status
from pacekeeper.checkpointing.storage.checkpoint_storage import CheckpointStorage
from pacekeeper.checkpointing.storage.distributed_checkpoint import (
    CheckpointSaver,
    TornCheckpointError,
    load_checkpoint,
)
from pacekeeper.checkpointing.storage.manifests import Manifest
from pacekeeper.checkpointing.storage.object_checkpoints import ObjectCheckpoints
from pacekeeper.checkpointing.versions import NO_STATE_VERSION
from pacekeeper.environment import JobIdentity
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.safe_serialization import pack_value, unpack_value
from testing.storage.faulty_store import create_store, read_objects

from ..border import Border, Enter, call_directly
from ..mutations import Mutated, as_json, mutate_bytes, mutate_document, mutate_one_part, mutate_text, to_bytes

SINGLE_RANK_GROUP = cast(ProcessGroup, SimpleNamespace(rank=lambda: 0))
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


def build_state(value: float) -> dict[str, Any]:
    return {
        "large": torch.full((1000,), value),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "other": {"bytes": b"bytes", "number": value},
    }


def to_comparable(state: dict[str, Any]) -> object:
    """What can be compared."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@cache
def build_volume() -> dict[str, Any]:
    """A published checkpoint: its files by name, the manifest as a document."""
    group = cast(CpuGroup, SimpleNamespace(group=SINGLE_RANK_GROUP, all_agree=bool, all_gather=lambda value: [value]))
    with tempfile.TemporaryDirectory() as location:
        folder = CheckpointFolder(Path(location), round_=1, job=JOB)
        folder.claim()
        with (
            patch.object(object_collectives, "gather_objects", lambda value, _: [value]),
            patch.object(object_collectives, "scatter_objects", lambda values, _: values[0]),
        ):
            saver = CheckpointSaver(group, lambda _: lambda: None)
            files = saver.write(saver.stage(build_state(2.0)), folder.get_partial_path(100), SINGLE_RANK_GROUP)
        manifest = Manifest(100, 1, 1, {"large": "float32 [1000]"}, ("model",), files, JOB.name, JOB.uid)
        assert folder.publish(manifest)
        contents: dict[str, Any] = {
            str(path.relative_to(location)): path.read_bytes()
            for path in Path(location, STEP).iterdir()
            if path.is_file()
        }
        document = json.loads(contents[MANIFEST])
        del document["checksum"]  # as of an older version: nothing that is behind it would be tried
        return {**contents, MANIFEST: document, "owner.json": OWNER}


@contextmanager
def open_volume() -> Iterator[Enter]:
    """What is there is restored, or nothing is: `None`."""
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / STEP).mkdir()

        def enter(files: dict[str, Any]) -> object:
            for name, data in files.items():
                (Path(path) / name).write_bytes(to_bytes(data))
            for claim in Path(path).glob(".owner-*"):  # of the case before
                shutil.rmtree(claim)
            folder = CheckpointFolder(Path(path), round_=2, job=JOB)
            folder.claim()
            return load_newest(folder)

        yield enter


@cache
def build_objects() -> dict[str, Any]:
    """The same checkpoint in an object store, with its claim: objects by name, those of JSON as documents."""
    filesystem, store = create_store()
    checkpoints = ObjectCheckpoints(store, 1, job=JOB)
    checkpoints.claim()
    stored, files = build_volume(), checkpoints.begin_attempt(100)
    contents = {name.removeprefix(f"{STEP}/"): data for name, data in stored.items() if isinstance(data, bytes)}
    for name, data in contents.items():
        files.write_file(name, len(data), lambda file, data=data: file.write(data))  # type: ignore[misc]
    manifest = Manifest.from_json(stored[MANIFEST])
    assert checkpoints.publish(manifest)
    documents = {f"{files.folder}/manifest.json": stored[MANIFEST]}
    objects = {path.removeprefix("/bucket/folder/"): data for path, data in read_objects(filesystem).items()}
    documents |= {name: json.loads(data) for name, data in objects.items() if "/" not in name}
    return {**objects, **documents}


def open_objects(objects: dict[str, Any]) -> object:
    """What is there is restored, or nothing is: `None`."""
    _, store = create_store()
    for name, data in objects.items():
        store.put(name, to_bytes(data))
    checkpoints = ObjectCheckpoints(store, 2, job=JOB)
    checkpoints.claim()
    return load_newest(checkpoints)


def load_newest(storage: CheckpointStorage) -> object:
    """The first checkpoint that is whole: its step and its state; `None`: there is none."""
    for manifest in storage.list_published():
        loaded = build_state(0.0)
        try:
            load_checkpoint(loaded, storage.open_checkpoint(manifest), manifest.files)
        except TornCheckpointError:
            continue
        return manifest.step, to_comparable(loaded)
    return None


def mutate_volume(rng: Random, files: dict[str, Any]) -> Mutated:
    """A file is another one, is damaged, or is in the place of another."""
    names = sorted(files)
    if rng.random() < 0.15:
        first, second = rng.sample(names, 2)
        return Mutated({**files, first: files[second], second: files[first]}, f"{first} and {second} are exchanged")
    return mutate_one_part(
        rng, files, {name: mutate_bytes if isinstance(files[name], bytes) else mutate_text for name in names}
    )


def check_whole_or_none(result: Any, valid: Any) -> str:
    return "" if result is None or result == valid else f"another state: {str(result)[:300]}"


@cache
def build_slot() -> bytes:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        snapshots = Snapshots(folder, "replica", round_=1, world_size=2, fingerprint=7, memory=SlotMemory(lambda: 1e12))
        snapshots.write(5, {"model": build_state(3.0)}, fingerprint=7)
        snapshots.publish(torch.frombuffer(bytearray(capture_rank_state(9) * 2), dtype=torch.uint8))
        return (folder / "replica.0").read_bytes()


@contextmanager
def open_shared_memory() -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def enter(data: bytes) -> object:
            (folder / "replica.0").write_bytes(data)
            reader = Snapshots(
                folder, "replica", round_=2, world_size=2, fingerprint=7, memory=SlotMemory(lambda: 1e12)
            )
            for version, _ in reader.list_versions():
                slot = None if version == NO_STATE_VERSION else reader.read(version)
                if slot is not None:
                    state, ranks = unpack_slot(slot, None)
                    return version, to_comparable(state["model"]), ranks
            return None

        yield enter


def unpack_from_peer(data: bytes) -> object:
    """A slot whose checksum is good all the same: its writer is another program, or hostile."""
    state, ranks = unpack_slot(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), None)
    return [restore_rank_state(rank) for rank in ranks[:2]], state


def unpack_without_check(data: bytes) -> None:
    """What a state may hold is its owner's affair: NaN, too."""
    unpack_value(data)


def pack_examples() -> list[bytes]:
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
    return [pack_value(values), pack_value(build_state(1.0)), pack_value([])]


def mutate_packed(rng: Random, data: bytes) -> Mutated:
    """Its bytes, or its description with a length that fits."""
    length = int.from_bytes(data[8:16], "little")
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    mutated = mutate_document(rng, json.loads(data[16 : 16 + length]))
    description = as_json(mutated.value)
    start = -(-(16 + length) // 64) * 64
    head = data[:8] + len(description).to_bytes(8, "little") + description
    return Mutated(head.ljust(-(-len(head) // 64) * 64, b"\0") + data[start:], mutated.how, mutated.place)


def read_status(data: Any) -> object:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(to_bytes(data))
        return read_checkpoint_status(Path(file.name))


STATUS = {"step": 100, "published_ns": 10**12, "failed_rank": 3, "error": "rank 3: no space"}

BORDERS = [
    Border("checkpoints", lambda: [build_volume()], mutate_volume, open_volume, check=check_whole_or_none, cases=250),
    Border(
        "object store",
        lambda: [build_objects()],
        mutate_volume,
        call_directly(open_objects),
        check=check_whole_or_none,
        cases=100,
    ),
    Border("snapshots", lambda: [build_slot()], mutate_bytes, open_shared_memory, check=check_whole_or_none, cases=200),
    Border("snapshots of peers", lambda: [build_slot()], mutate_bytes, call_directly(unpack_from_peer), cases=200),
    Border("packed values", pack_examples, mutate_packed, call_directly(unpack_without_check), cases=400),
    Border("checkpoint status", lambda: [STATUS], mutate_text, call_directly(read_status), refusals=()),
]
