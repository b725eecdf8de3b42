"""The roles in which the API server's parts use it, and it uses its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .api_faults import ApiFaults
from .changes import ObjectChange
from .objects import Object, ServedKind


class ControllerApi(Protocol):
    """The API server, for the controllers that are part of it."""

    faults: ApiFaults

    def get(self, plural: str, name: str, namespace: str = "") -> Object | None: ...

    def list_all(self, plural: str, namespace: str = "") -> list[Object]: ...

    def patch(
        self, plural: str, name: str, namespace: str, patch: Object, *, subresource: str = "", manager: str = "world"
    ) -> Object:
        """Apply a merge patch."""

    def delete(
        self,
        plural: str,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        manager: str = "world",
        propagation: str = "Background",
    ) -> None:
        """Delete an object. Raises ApiError if it does not exist."""

    def call_later(self, bounds: tuple[float, float], call: Callable[..., object], *arguments: Any) -> None:
        """Call back within these seconds, or later if the server is unavailable."""


class OpenWatch(Protocol):
    """A client's watch, for the API server."""

    place: str
    kind: ServedKind

    def on_change(self, change: ObjectChange) -> None:
        """Send the event of a change, right after the change."""

    def end(self, *, history_lost: bool) -> None:
        """End the stream from the server's side."""

    def break_off(self) -> None:
        """Break the stream: the server is down."""
