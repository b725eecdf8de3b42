"""What a peer's plan may have this rank write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan

from pacekeeper.keep.distributed_checkpoint import INDEX, _Saving, load
from pacekeeper.plain import pack
from pacekeeper_analysis.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "checkpoint"


@pytest.fixture
def saving(folder: Path) -> _Saving:
    """The first rank's."""
    return _Saving({"weight": torch.ones(3)}, folder, cast(ProcessGroup, SimpleNamespace(rank=lambda: 0)))


def planned(saving: _Saving) -> SavePlan:
    """What it is to write."""
    (part,) = saving.parts([saving.plan()])
    return cast(SavePlan, part)


def test_files_have_the_names_that_torch_gives_them(saving: _Saving, folder: Path) -> None:
    saving.write(planned(saving))
    assert [path.name for path in folder.iterdir()] == ["__0_0.distcp"]


@pytest.mark.parametrize(
    "storage",
    [
        *map(_StoragePrefix, ["../../x", "/tmp/x", "", "__1_", "__0", "__0_/../../x", "__0_\n", "__0_0_"]),
        _StoragePrefix(cast(Any, None)),
        "__0_",
        None,
    ],
    ids=repr,
)
def test_files_of_another_name_are_refused(saving: _Saving, tmp_path: Path, storage: Any) -> None:
    part = replace(planned(saving), storage_data=storage)
    with pytest.raises(InputError, match="instead of '__0_'"):
        saving.write(part)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_an_index_that_names_files_elsewhere_is_not_read(folder: Path) -> None:
    storage = {index.MetadataIndex("weight"): _StorageInfo("../../x", 0, 1)}
    folder.mkdir(parents=True)
    (folder / INDEX).write_bytes(pack(index.Metadata({}, storage_data=storage)))
    with pytest.raises(InputError, match="names file"):
        load({"weight": torch.ones(3)}, folder)
