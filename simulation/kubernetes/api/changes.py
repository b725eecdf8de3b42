"""The changes of objects, as the API server announces them."""

from __future__ import annotations

from dataclasses import dataclass

from .objects import Object

RESTORED = "etcd"
"""Actor of the changes when a backup is restored."""


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """A change of one object."""

    type: str  # ADDED, MODIFIED, or DELETED
    plural: str
    object: Object  # as it is now; if deleted: as it was last, with the version of its deletion
    previous: Object | None
    actor: str  # the operator's pod, or the manager
    time: float  # virtual seconds
    verb: str  # create, update, patch, apply, delete
    version: int
