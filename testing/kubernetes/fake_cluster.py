"""An API server in memory, for the few promises that pure tests need: unique names and compare-and-swap."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

from pacekeeper_operator.kube.client import Cluster, Conflict, Listing, NotFound, Object, ResourceKind


class FakeCluster(Cluster):
    """Objects by kind, namespace and name; every write gives them a new resourceVersion."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.failures: dict[str, list[Exception]] = {}  # plural → what its next lists raise, one each
        self.refusals: dict[str, list[Exception]] = {}  # plural → what its next creations and replacements raise
        self.version = 0

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        body = self.objects.get((kind.plural, namespace, name))
        if body is None:
            raise NotFound(f"{kind.plural} {namespace}/{name}")
        return copy.deepcopy(body)

    async def find_metadata(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        body = await self.find(kind, name, namespace)
        return None if body is None else body["metadata"]

    async def list_with_version(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> Listing:
        """Labels and fields are compared for equality, or for the opposite: `!=` of fields, `!` of labels."""
        if failures := self.failures.get(kind.plural):
            raise failures.pop(0)
        required_labels = dict(pair.split("=", 1) for pair in labels.split(",") if "=" in pair)
        excluded_labels = {pair[1:] for pair in labels.split(",") if pair.startswith("!")}
        items = [
            copy.deepcopy(body)
            for (plural, object_namespace, _), body in self.objects.items()
            if plural == kind.plural
            and namespace in ("", object_namespace)
            and required_labels.items() <= body["metadata"].get("labels", {}).items()
            and not excluded_labels & body["metadata"].get("labels", {}).keys()
            and all(_matches_field(body, pair) for pair in fields.split(",") if pair)
        ]
        return Listing(items, self.version)

    async def list_pages(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[Listing]:
        yield await self.list_with_version(kind, namespace, labels=labels, fields=fields)

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        self._refuse(kind)
        key = self._key(kind, body)
        if key in self.objects:
            raise Conflict(f"{key} exists already")
        with_uid = {**body, "metadata": {"uid": f"uid-{self.version + 1}", **body["metadata"]}}
        return body if dry_run else self._store(key, with_uid)

    async def replace(self, kind: ResourceKind, body: Object) -> Object:
        self._refuse(kind)
        key = self._key(kind, body)
        if key not in self.objects:
            raise NotFound(str(key))
        if body["metadata"].get("resourceVersion") != self.objects[key]["metadata"]["resourceVersion"]:
            raise Conflict(f"{key} has changed")
        return self._store(key, body)

    async def patch(self, kind: ResourceKind, name: str, body: Any, namespace: str = "", **_: Any) -> Object:
        """A merge patch; compare-and-swap, where it names a resourceVersion."""
        before = await self.get(kind, name, namespace)
        version = body.get("metadata", {}).get("resourceVersion", before["metadata"]["resourceVersion"])
        if version != before["metadata"]["resourceVersion"]:
            raise Conflict(f"{kind.plural} {name} has changed")
        return self._store((kind.plural, namespace, name), _merge_patch(before, body))

    def _refuse(self, kind: ResourceKind) -> None:
        if refusals := self.refusals.get(kind.plural):
            raise refusals.pop(0)

    def _key(self, kind: ResourceKind, body: Object) -> tuple[str, str, str]:
        return kind.plural, body["metadata"].get("namespace", ""), body["metadata"]["name"]

    def _store(self, key: tuple[str, str, str], body: Object) -> Object:
        self.version += 1
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = stored
        if "deletionTimestamp" in stored["metadata"] and not stored["metadata"].get("finalizers"):
            del self.objects[key]
        return copy.deepcopy(stored)

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "", version: str = "", **_: Any
    ) -> None:
        """What has finalizers stays, until they are taken away."""
        key = (kind.plural, namespace, name)
        body = self.objects.get(key)
        if body is None or uid not in ("", body["metadata"].get("uid")):
            return
        if version not in ("", body["metadata"]["resourceVersion"]):
            return
        if body["metadata"].get("finalizers"):
            self._store(key, _merge_patch(body, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))
        else:
            del self.objects[key]

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        """Server-side apply of `spec.unschedulable`, of a node's conditions, or of a whole status: the operator applies
        nothing else."""
        before = await self.get(kind, body["metadata"]["name"])
        if subresource and kind.plural == "nodes":
            return self._apply_conditions(before, body, manager)
        if subresource:
            if body["metadata"]["uid"] != before["metadata"]["uid"]:
                raise Conflict("it is another one by now")
            key = kind.plural, "", body["metadata"]["name"]
            return self._store(key, {**before, subresource: copy.deepcopy(body[subresource])})
        other_entries = [m for m in before["metadata"].get("managedFields", []) if m["manager"] != manager]
        applied_spec = body.get("spec")
        entry = {"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
        before["metadata"]["managedFields"] = [*other_entries, entry] if applied_spec else other_entries
        spec = applied_spec or ({} if other_entries else {"unschedulable": None})
        return self._store((kind.plural, "", body["metadata"]["name"]), _merge_patch(before, {"spec": spec}))

    def _apply_conditions(self, node: Object, body: Object, manager: str) -> Object:
        """`manager` owns whole conditions, by their types; those of others stay."""
        entries = node["metadata"].get("managedFields", [])
        owned_fields = [
            entry["fieldsV1"]["f:status"]["f:conditions"] for entry in entries if entry["manager"] == manager
        ]
        owned_keys = [key for keys in owned_fields for key in keys]
        conditions = body.get("status", {}).get("conditions", [])
        keys: Object = {f'k:{{"type":"{condition["type"]}"}}': {} for condition in conditions}
        current = node.get("status", {}).get("conditions", [])
        other_conditions = [item for item in current if f'k:{{"type":"{item["type"]}"}}' not in (*owned_keys, *keys)]
        entry = {
            "manager": manager,
            "operation": "Apply",
            "subresource": "status",
            "fieldsV1": {"f:status": {"f:conditions": keys}},
        }
        other_entries = [item for item in entries if item["manager"] != manager]
        node["metadata"]["managedFields"] = [*other_entries, entry] if keys else other_entries
        node["status"] = {**node.get("status", {}), "conditions": [*other_conditions, *copy.deepcopy(conditions)]}
        return self._store(("nodes", "", node["metadata"]["name"]), node)


def _merge_patch(before: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        merged[name] = _merge_patch(merged.get(name), value)
        if value is None:
            del merged[name]
    return merged


def _matches_field(body: Object, pair: str) -> bool:
    path, _, value = pair.partition("=")
    return bool((_read_field(body, path.removesuffix("!")) == value) != path.endswith("!"))


def _read_field(body: Object, path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = value.get(name, {})
    return value
