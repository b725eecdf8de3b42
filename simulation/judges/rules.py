"""What an invariant is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from .record import ClusterHistory

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..world import World

MAX_REQUEST_DELAY_SECONDS = 60.0
"""A request that was right when it was sent may be carried out so much later: webhooks and API servers are slow."""


class Rule:
    """An invariant, in `words`. It is told of all changes of `kinds`, and looks at the world every few seconds; what it
    yields are the ways in which it is broken, in words."""

    description: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    by_history: ClassVar[bool] = False
    """Whether it holds what is written against what was before: when an etcd has been restored, nobody knows that, and
    operators take a moment to notice."""

    def __init__(self, world: World, record: ClusterHistory) -> None:
        self.world = world
        self.history = record

    def check_change(self, _change: ObjectChange) -> Iterator[str]:
        """Right after a change, which is in the record already."""
        return iter(())

    def check_world(self) -> Iterator[str]:
        return iter(())
