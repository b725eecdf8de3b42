"""An API server in memory, for the few promises that pure tests need: unique names and compare-and-swap."""

from __future__ import annotations

import copy
from typing import Any

from pacekeeper_operator.cluster import Cluster, Conflict, Kind, Listing, NotFound, Object


class FakeCluster(Cluster):
    """Objects by kind, namespace and name; every write gives them a new resourceVersion."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.failures: dict[str, list[Exception]] = {}  # plural → what its next lists raise, one each
        self.refusals: dict[str, list[Exception]] = {}  # plural → what its next creations and replacements raise
        self.version = 0

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        found = self.objects.get((kind.plural, namespace, name))
        if found is None:
            raise NotFound(f"{kind.plural} {namespace}/{name}")
        return copy.deepcopy(found)

    async def listing(self, kind: Kind, namespace: str = "", *, labels: str = "", **_: Any) -> Listing:
        """Labels are compared for equality; fields select nothing here."""
        if waiting := self.failures.get(kind.plural):
            raise waiting.pop(0)
        wanted = dict(pair.split("=", 1) for pair in labels.split(",") if "=" in pair)
        items = [
            copy.deepcopy(body)
            for (plural, place, _), body in self.objects.items()
            if plural == kind.plural
            and namespace in ("", place)
            and wanted.items() <= body["metadata"].get("labels", {}).items()
        ]
        return Listing(items, self.version)

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        self._refuse(kind)
        key = self._key(kind, body)
        if key in self.objects:
            raise Conflict(f"{key} exists already")
        return body if dry_run else self._store(key, body)

    async def replace(self, kind: Kind, body: Object) -> Object:
        self._refuse(kind)
        key = self._key(kind, body)
        if key not in self.objects:
            raise NotFound(str(key))
        if body["metadata"].get("resourceVersion") != self.objects[key]["metadata"]["resourceVersion"]:
            raise Conflict(f"{key} has changed")
        return self._store(key, body)

    async def patch(self, kind: Kind, name: str, body: Any, namespace: str = "", **_: Any) -> Object:
        key = (kind.plural, namespace, name)
        return self._store(key, {**self.objects[key], **body})

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace: int | None = None,  # noqa: ARG002  # nothing here has a kubelet
    ) -> None:
        key = (kind.plural, namespace, name)
        if key in self.objects and uid in ("", self.objects[key]["metadata"].get("uid")):
            del self.objects[key]

    def _refuse(self, kind: Kind) -> None:
        if waiting := self.refusals.get(kind.plural):
            raise waiting.pop(0)

    def _key(self, kind: Kind, body: Object) -> tuple[str, str, str]:
        return kind.plural, body["metadata"].get("namespace", ""), body["metadata"]["name"]

    def _store(self, key: tuple[str, str, str], body: Object) -> Object:
        self.version += 1
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = stored
        return copy.deepcopy(stored)
