"""The groups that a rank talks in, written into the runtime folder for launcher and sidecar. Starts without torch.

A *channel* is a group of two: one rank's sends to another in one group. Each counts by itself, on both ends alike, so
that the n-th send is the n-th receive; what others of the group send each other does not come in between.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pacekeeper.runtime import read_json, write_json
from pacekeeper_analysis.communicators import MAX_COMMUNICATORS, Communicator, format_ranks
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import read_dataclass, read_tuple

log = logging.getLogger(__name__)

MAX_GROUP_NAME_CHARACTERS = 80
MAX_COMMUNICATORS_FILE_BYTES = 2 << 20
"""Bytes. A longer one is none of ours."""


class Communicators:
    """Those that a rank has used in this round, the newest MAX_COMMUNICATORS of them."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of their file, which is another round's now; None: nobody reads it."""
        self._path = path
        self._known: dict[int, Communicator] = {}
        self._destroyed: dict[int, None] = {}
        """Of these, those that were destroyed, the first one first."""
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)

    def add(self, identity: int, ranks: Sequence[int], name: str = "") -> None:
        """Known from now on. Where torch does not know the `ranks`, or they cannot be written down, it is not."""
        if self._path is None or not ranks:
            return
        self._destroyed.pop(identity, None)  # torch gives the same ranks the same name again
        if identity in self._known:
            return
        try:
            communicator = read_dataclass(Communicator, {"identity": identity, "members": format_ranks(ranks), "name": name})
        except InputError as error:
            log.warning("nobody will know who waits for whom in a group of %d ranks: %s", len(ranks), error)
            return
        if len(self._known) == MAX_COMMUNICATORS:
            eldest = next(iter(self._destroyed or self._known))
            self._destroyed.pop(eldest, None)
            self._known.pop(eldest)
        self._known[identity] = communicator
        try:
            write_json(self._path, {"communicators": [vars(each) for each in self._known.values()]})
        except OSError as error:  # a full volume is no reason to end the training
            log.warning("nobody will know who waits for whom in a new group of %d ranks: %s", len(ranks), error)

    def mark_destroyed(self, identity: int) -> None:
        """It stays as long as there is room: records still speak of it."""
        if identity in self._known:
            self._destroyed[identity] = None


def read_communicators(path: Path) -> tuple[Communicator, ...]:
    """What a rank has written; () where it has not written yet, or what is there is nothing of the kind."""
    try:
        content: Any = read_json(path) if path.stat().st_size <= MAX_COMMUNICATORS_FILE_BYTES else None
        given = content["communicators"] if isinstance(content, Mapping) else ()
        return read_tuple(
            lambda each, where: read_dataclass(Communicator, each, where), given, "communicators", MAX_COMMUNICATORS
        )
    except FileNotFoundError:
        return ()
    except (InputError, KeyError, OSError, ValueError) as error:
        log.warning("%s: %s", path, error)
        return ()


def compute_group_identity(name: str, description: str, ranks: Iterable[int]) -> int:
    """The same number on all ranks of the group, another one for other groups, even of the same name; never 0."""
    return zlib.crc32(f"{name}:{description}:{format_ranks(list(ranks))}".encode()) or 1


def compute_channel_identity(group: int, source: int, destination: int) -> int:
    """Identity of what rank `source` sends to rank `destination` in the group with this identity."""
    return zlib.crc32(f"{group}:{source}>{destination}".encode()) or 1


def extract_group_name(description: str) -> str:
    """What the script calls the group: its mesh's dimension, or its description; "": torch has made one up."""
    if description in ("undefined", "default_pg"):
        return ""
    return "".join(filter(str.isprintable, description.removeprefix("mesh_")))[:MAX_GROUP_NAME_CHARACTERS]
