"""The groups that a rank communicates in, in a file for launcher and sidecar. This module does not import torch.

A *channel* is a group of two: one rank's sends to another in one group. Each has its own count, the same on both ends,
so that the n-th send is the n-th receive, independent of other sends in the group.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pacekeeper.runtime_folder import read_json, write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.communicators import MAX_COMMUNICATORS, Communicator, format_ranks
from pacekeeper_analysis.protocol.decoding import read_dataclass, read_tuple

log = logging.getLogger(__name__)

MAX_GROUP_NAME_CHARACTERS = 80
MAX_COMMUNICATORS_FILE_BYTES = 2 << 20
"""Limit of the file in bytes. A longer one is not from Pacekeeper."""


class Communicators:
    """Communicators that a rank has used in this round, the newest MAX_COMMUNICATORS of them."""

    def __init__(self, path: Path | None) -> None:
        """Remove an earlier round's file. `path` None: no file is written."""
        self._path = path
        self._known: dict[int, Communicator] = {}
        self._destroyed: dict[int, None] = {}
        """Destroyed communicators, in order of their destruction."""
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)

    def add(self, identity: int, ranks: Sequence[int], name: str = "") -> None:
        """Publish a communicator, unless torch does not list its `ranks`, or they are not valid."""
        if self._path is None or not ranks:
            return
        self._destroyed.pop(identity, None)  # torch reuses the name for the same ranks
        if identity in self._known:
            return
        try:
            communicator = read_dataclass(
                Communicator, {"identity": identity, "members": format_ranks(ranks), "name": name}
            )
        except InputError as error:
            log.warning("no wait analysis for a group of %d ranks, which cannot be published: %s", len(ranks), error)
            return
        if len(self._known) == MAX_COMMUNICATORS:
            oldest = next(iter(self._destroyed or self._known))
            self._destroyed.pop(oldest, None)
            self._known.pop(oldest)
        self._known[identity] = communicator
        try:
            write_json(self._path, {"communicators": [vars(known) for known in self._known.values()]})
        except OSError as error:  # a full volume is no reason to end the training
            log.warning(
                "no wait analysis for a new group of %d ranks, which cannot be published: %s", len(ranks), error
            )

    def mark_destroyed(self, identity: int) -> None:
        """Mark a communicator as destroyed. It stays while there is room, since records refer to it."""
        if identity in self._known:
            self._destroyed[identity] = None


def read_communicators(path: Path) -> tuple[Communicator, ...]:
    """Return what a rank has written; () if the file is missing or invalid."""
    try:
        content: Any = read_json(path) if path.stat().st_size <= MAX_COMMUNICATORS_FILE_BYTES else None
        entries = content["communicators"] if isinstance(content, Mapping) else ()
        return read_tuple(
            lambda entry, field: read_dataclass(Communicator, entry, field), entries, "communicators", MAX_COMMUNICATORS
        )
    except FileNotFoundError:
        return ()
    except (InputError, KeyError, OSError, ValueError) as error:
        log.warning("%s: %s", path, error)
        return ()


def compute_group_identity(name: str, description: str, ranks: Iterable[int]) -> int:
    """Return a number that is the same on all ranks of a group, and differs between groups of one name; never 0."""
    return zlib.crc32(f"{name}:{description}:{format_ranks(list(ranks))}".encode()) or 1


def compute_channel_identity(group: int, source: int, destination: int) -> int:
    """Return the identity of the channel from rank `source` to `destination` in the group with this identity."""
    return zlib.crc32(f"{group}:{source}>{destination}".encode()) or 1


def extract_group_name(description: str) -> str:
    """Return the script's name of the group: its mesh dimension, or its description; "": torch has generated it."""
    if description in ("undefined", "default_pg"):
        return ""
    return "".join(filter(str.isprintable, description.removeprefix("mesh_")))[:MAX_GROUP_NAME_CHARACTERS]
