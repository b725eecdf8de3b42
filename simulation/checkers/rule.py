"""The base class of invariants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..kubernetes.api.changes import ObjectChange
from ..world import World
from .cluster_history import ClusterHistory

MAX_REQUEST_DELAY_SECONDS = 60.0
"""A request that was correct when it was sent may take effect this much later: webhooks and API servers are slow."""


class Rule:
    """An invariant, described by `description`.

    It receives all changes of `kinds`, and checks the world every few seconds. It yields violations as text.
    """

    description: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    by_history: ClassVar[bool] = False
    """Whether it compares a write with an earlier state. It is suspended after etcd was restored: operators need time
    to notice that."""

    def __init__(self, world: World, history: ClusterHistory) -> None:
        self.world = world
        self.history = history

    def check_change(self, _change: ObjectChange) -> Iterator[str]:
        """Check right after a change, which is in the history already."""
        return iter(())

    def check_world(self) -> Iterator[str]:
        return iter(())
