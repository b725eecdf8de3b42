"""The groups that a rank communicates in, in a file for launcher and sidecar. This module does not import torch.

A *channel* is a group of two: one rank's sends to another in one group. Each has its own count, the same on both ends,
so that the n-th send is the n-th receive, independent of other sends in the group.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import replace_file

log = logging.getLogger(__name__)

MAX_GROUP_NAME_CHARACTERS = 80
MAX_COMMUNICATORS = 256
"""Upper limit of communicators of one rank, or of one worker in one message."""
MAX_COMMUNICATOR_RANKS = 1 << 20
"""Upper limit of ranks of one communicator."""
MAX_MEMBERS_LENGTH = 4_000
"""Upper limit of characters that name one communicator's members."""


class Communicators:
    """Communicators that a rank has used in this round, the newest MAX_COMMUNICATORS of them."""

    def __init__(self, path: Path | None) -> None:
        """Remove an earlier round's file. `path` None: no file is written."""
        self._path = path
        self._known: dict[int, dict[str, Any]] = {}
        """Content of the file by identity, oldest first."""
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
        members = format_ranks(ranks)
        if len(ranks) > MAX_COMMUNICATOR_RANKS or len(members) > MAX_MEMBERS_LENGTH or len(set(ranks)) < len(ranks):
            log.warning("no wait analysis for a group of %d ranks, which cannot be published", len(ranks))
            return
        if len(self._known) == MAX_COMMUNICATORS:
            oldest = next(iter(self._destroyed or self._known))
            self._destroyed.pop(oldest, None)
            self._known.pop(oldest)
        self._known[identity] = {"identity": identity, "members": members, "name": name}
        try:
            content = {"communicators": list(self._known.values())}
            replace_file(self._path, json.dumps(content, separators=(",", ":")))
        except OSError as error:  # a full volume is no reason to end the training
            log.warning(
                "no wait analysis for a new group of %d ranks, which cannot be published: %s", len(ranks), error
            )

    def mark_destroyed(self, identity: int) -> None:
        """Mark a communicator as destroyed. It stays while there is room, since records refer to it."""
        if identity in self._known:
            self._destroyed[identity] = None


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


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as runs with a common stride, in order: (0, 1, 2, 3, 8) is "0-3,8", (0, 4, 8) is "0-8:4"."""
    pieces, position = [], 0
    while position < len(ranks):
        end = position + 1
        stride = ranks[end] - ranks[position] if end < len(ranks) else 0
        if stride > 0:
            while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == stride:
                end += 1
        if stride <= 0 or (end - position <= 1 and stride != 1):
            pieces.append(str(ranks[position]))
            position += 1
            continue
        pieces.append(f"{ranks[position]}-{ranks[end]}" + (f":{stride}" if stride > 1 else ""))
        position = end + 1
    return ",".join(pieces)
