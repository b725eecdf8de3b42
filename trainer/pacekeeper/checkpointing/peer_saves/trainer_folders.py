"""Checkpoint folders of Hugging Face's Trainer: which are complete, and which may be removed.

With FSDP, a folder has model and optimizer as a checkpoint of torch.distributed.checkpoint each. Those may still be in
memory only. The small files next to them (random states, scheduler, state of the Trainer) are always in the folder.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from pacekeeper_analysis.protocol.decoding import parse_json

COMPLETE_MARKER_FILE = "pacekeeper.json"
"""File in a checkpoint that all ranks have completed: a checkpoint that a crash interrupted does not have it."""
BEGUN_MARKER_FILE = ".pacekeeper-begun"
"""File in a checkpoint that is being written, or was when a crash interrupted it."""
SHARDED_PARTS = ("pytorch_model_fsdp_0", "optimizer_0")
"""Folders of model and optimizer with FSDP and sharded state dicts, as Accelerate names them."""
_PART_METADATA_FILE = ".metadata"
_TRAINER_STATE_FILE = "trainer_state.json"


class Completeness(IntEnum):
    """What a checkpoint's folder shows about its small files."""

    NONE = 0
    STATE = 1
    """It has no marker, but the file that Trainer writes last: another program may have written it."""
    MARKED = 2
    """All ranks have written them."""


def begin_checkpoint(folder: Path) -> None:
    """Mark a checkpoint as begun. What its folder has of an earlier attempt no longer counts.

    Call it before any rank writes. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETE_MARKER_FILE).unlink(missing_ok=True)
    (folder / BEGUN_MARKER_FILE).touch()
    for part in SHARDED_PARTS:
        (folder / part / _PART_METADATA_FILE).unlink(missing_ok=True)


def flush_files(folder: Path, rank: int, is_marking: bool) -> None:
    """Wait until the files that a rank has written into a folder are in its storage. Raises OSError.

    `is_marking`: it writes all but the random states of the others. Thousands of ranks need not list the folder.
    """
    own = f"rng_state_{rank}.pth"
    for path in sorted(folder.iterdir()) if is_marking else [folder / own]:
        if path.is_file() and (path.name == own or not path.name.startswith("rng_state_")):
            _flush_path(path)


def mark_complete(folder: Path) -> None:
    """Mark a checkpoint of which all ranks have written their files, atomically. Raises OSError."""
    temporary = folder / f".{COMPLETE_MARKER_FILE}"
    temporary.write_text("{}")
    _flush_path(temporary)
    temporary.replace(folder / COMPLETE_MARKER_FILE)
    (folder / BEGUN_MARKER_FILE).unlink(missing_ok=True)
    _flush_path(folder)


def list_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Return the checkpoint folders by step, the newest first. Raises OSError if the storage does not answer."""
    folders = {}
    try:
        with os.scandir(output_dir) as entries:
            for entry in entries:
                match = re.fullmatch(r"checkpoint-(\d+)", entry.name)
                if match is not None and entry.is_dir():
                    folders[int(match[1])] = Path(entry.path)
    except FileNotFoundError:
        return {}
    return {step: folders[step] for step in sorted(folders, reverse=True)}


def read_step(output_dir: str | Path, checkpoint: str | Path) -> int | None:
    """Return the step of a checkpoint of `output_dir`; None: it is another folder."""
    path = Path(os.path.abspath(checkpoint))
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match is not None and path.parent == Path(os.path.abspath(output_dir)) else None


def get_completeness(folder: Path) -> Completeness:
    """Return what the folder shows. Raises OSError if the storage does not answer."""
    if _path_exists(folder / COMPLETE_MARKER_FILE):
        return Completeness.MARKED
    if _path_exists(folder / BEGUN_MARKER_FILE):
        return Completeness.NONE
    try:
        parse_json((folder / _TRAINER_STATE_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return Completeness.NONE
    return Completeness.STATE


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint has a folder of its model, as with sharded state dicts. Raises OSError as above."""
    return _path_exists(folder / SHARDED_PARTS[0])


def is_part_stored(folder: Path, part: str) -> bool:
    """Return whether the storage has the model or the optimizer of a checkpoint. Raises OSError as above."""
    return _path_exists(folder / part / _PART_METADATA_FILE)


def is_stored(folder: Path) -> bool:
    """Return whether the storage has all of a checkpoint. Raises OSError as above."""
    is_complete = get_completeness(folder) is not Completeness.NONE
    return is_complete and all(is_part_stored(folder, part) for part in SHARDED_PARTS)


def remove_old_checkpoints(output_dir: Path, step: int, limit: int, best: str | None) -> None:
    """Remove old checkpoints so that `limit` are left, as Trainer does, but none that a restart may need.

    `step`: of the newest save. What has a higher one is left of an earlier run, or was lost, and is removed first.
    `best`: the checkpoint that Trainer loads at its end. Raises OSError.
    """
    folders = list_checkpoints(output_dir)
    oldest_first = [folders[its] for its in sorted(folders, key=lambda its: (its <= step, its))]
    for folder in choose_removable(oldest_first, is_stored, limit, None if best is None else Path(best)):
        begin_checkpoint(folder)  # a crash may leave a part of it, which does not count
        shutil.rmtree(folder, ignore_errors=True)


def choose_removable(
    oldest_first: Sequence[Path], is_stored: Callable[[Path], bool], limit: int, best: Path | None
) -> list[Path]:
    """Return the checkpoints to remove so that `limit` are left. The newest that is stored stays, and all after it.

    Those may be in memory only, and can be lost with it.
    """
    newest_first = range(len(oldest_first) - 1, -1, -1)
    newest_stored = next((number for number in newest_first if is_stored(oldest_first[number])), 0)
    kept = {*oldest_first[-1:], *([best] if best in oldest_first else [])}
    surplus = max(0, len(oldest_first) - max(limit, len(kept)))
    return [folder for folder in oldest_first[:newest_stored] if folder not in kept][:surplus]


def _path_exists(path: Path) -> bool:
    """Return whether the path exists. Raises OSError if that is not known: pathlib may then return False."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _flush_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # a file system that cannot flush, or no folders
            raise
    finally:
        os.close(descriptor)
