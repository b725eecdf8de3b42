"""Reads the groups that a rank communicates in, from the file that the rank writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacekeeper.runtime_folder import read_bounded
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.decoding import parse_json, read_dataclass, read_tuple
from pacekeeper_rank.collectives.communicators import MAX_COMMUNICATORS

MAX_COMMUNICATORS_FILE_BYTES = 2 << 20
"""Limit of the file in bytes. A longer one is not from Pacekeeper."""

log = logging.getLogger(__name__)


def read_communicators(path: Path) -> tuple[Communicator, ...]:
    """Return what a rank has written; () if the file is missing or invalid. Groups that are not valid are left out."""
    written = read_bounded(path, MAX_COMMUNICATORS_FILE_BYTES)
    if written is None or len(written) > MAX_COMMUNICATORS_FILE_BYTES:
        return ()
    try:
        content: Any = parse_json(written)
        entries = content["communicators"] if isinstance(content, Mapping) else ()
        read = read_tuple(lambda entry, field: _read_entry(path, entry, field), entries, path.name, MAX_COMMUNICATORS)
        return tuple(communicator for communicator in read if communicator is not None)
    except (InputError, KeyError) as error:
        log.warning("%s: %s", path, error)
        return ()


def _read_entry(path: Path, entry: object, field: str) -> Communicator | None:
    try:
        return read_dataclass(Communicator, entry, field)
    except InputError as error:  # runs of ranks that overlap, in a group that is too large to compare them all
        log.warning("%s: no wait analysis for a group: %s", path, error)
        return None
