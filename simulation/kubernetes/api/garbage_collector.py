"""The garbage collector: deletes objects that have lost all their owners, with a delay."""

from __future__ import annotations

from .changes import ObjectChange
from .objects import KINDS_BY_NAME, Key, Object
from .ports import ControllerApi

COLLECTOR_NAME = "garbage-collector"


class GarbageCollector:
    """Receives every change."""

    def __init__(self, api: ControllerApi) -> None:
        self._api = api
        self._dependents: dict[str, dict[tuple[str, Key], None]] = {}  # by the owner's uid

    def on_change(self, change: ObjectChange) -> None:
        """Record ownership, and schedule the collection of affected objects."""
        metadata, old_metadata = change.object["metadata"], change.previous["metadata"] if change.previous else {}
        key = (metadata.get("namespace", ""), metadata["name"])
        if change.type == "DELETED":
            self._forget_owners(change.plural, key, metadata.get("ownerReferences", ()))
            if metadata["uid"] in self._dependents:
                self._api.call_later(self._api.faults.collection_lag, self._collect_dependents, metadata["uid"])
            return
        owners, old_owners = metadata.get("ownerReferences", []), old_metadata.get("ownerReferences", [])
        if owners is not old_owners and owners != old_owners:
            self._forget_owners(change.plural, key, old_owners)
            for owner in owners:
                self._dependents.setdefault(owner["uid"], {})[change.plural, key] = None
            if any(self._find_owner(owner, key[0]) is None for owner in owners):
                self._api.call_later(
                    self._api.faults.collection_lag, self._collect_orphan, change.plural, key, metadata["uid"]
                )
        if "deletionTimestamp" in metadata and "deletionTimestamp" not in old_metadata:
            finalizers = metadata.get("finalizers", ())
            if "foregroundDeletion" in finalizers or "orphan" in finalizers:
                lag = self._api.faults.collection_lag
                self._api.call_later(lag, self._collect_in_foreground, change.plural, key, metadata["uid"])

    def _forget_owners(self, plural: str, key: Key, owners: list[Object]) -> None:
        for owner in owners:
            dependants = self._dependents.get(owner["uid"], {})
            dependants.pop((plural, key), None)
            if not dependants:
                self._dependents.pop(owner["uid"], None)

    def _find_owner(self, reference: Object, namespace: str) -> Object | None:
        """Return the owner if it exists."""
        kind = KINDS_BY_NAME.get((reference["apiVersion"].rpartition("/")[0], reference["kind"]))
        if kind is None:
            return None
        owner = self._api.get(kind.plural, reference["name"], namespace if kind.namespaced else "")
        return owner if owner is not None and owner["metadata"]["uid"] == reference["uid"] else None

    def _find_metadata(self, plural: str, key: Key, uid: str) -> Object | None:
        """Return the metadata of an object if it still exists with this UID."""
        body = self._api.get(plural, key[1], key[0])
        return body["metadata"] if body is not None and body["metadata"]["uid"] == uid else None

    def _collect_dependents(self, uid: str) -> None:
        """Collect all dependents of a deleted object."""
        for plural, key in list(self._dependents.get(uid, ())):
            body = self._api.get(plural, key[1], key[0])
            if body is not None:
                self._collect_orphan(plural, key, body["metadata"]["uid"])

    def _collect_orphan(self, plural: str, key: Key, uid: str) -> None:
        """Delete the object if none of its owners exists; otherwise remove references to deleted owners."""
        metadata = self._find_metadata(plural, key, uid)
        if metadata is None:
            return
        owners = metadata.get("ownerReferences", [])
        remaining = [owner for owner in owners if self._find_owner(owner, key[0]) is not None]
        if len(remaining) == len(owners):
            return
        if remaining:
            self._api.patch(
                plural, key[1], key[0], {"metadata": {"ownerReferences": remaining}}, manager=COLLECTOR_NAME
            )
        elif "deletionTimestamp" not in metadata:
            self._api.delete(plural, key[1], key[0], uid=uid, manager=COLLECTOR_NAME)

    def _collect_in_foreground(self, plural: str, key: Key, uid: str) -> None:
        """Delete or orphan the dependents of an object that waits for that, then remove its finalizer."""
        metadata = self._find_metadata(plural, key, uid)
        if metadata is None:
            return
        orphan = "orphan" in metadata.get("finalizers", ())
        for kind, (namespace, name) in list(self._dependents.get(uid, ())):
            body = self._api.get(kind, name, namespace)
            if body is None:
                continue
            dependent = body["metadata"]
            if orphan:
                remaining = [owner for owner in dependent["ownerReferences"] if owner["uid"] != uid] or None
                self._api.patch(
                    kind, name, namespace, {"metadata": {"ownerReferences": remaining}}, manager=COLLECTOR_NAME
                )
            elif "deletionTimestamp" not in dependent:
                self._api.delete(
                    kind, name, namespace, uid=dependent["uid"], manager=COLLECTOR_NAME, propagation="Foreground"
                )
        if self._blocks_owner_deletion(uid):
            self._api.call_later(self._api.faults.collection_lag, self._collect_in_foreground, plural, key, uid)
            return
        finalizer = "orphan" if orphan else "foregroundDeletion"
        rest = [name for name in metadata["finalizers"] if name != finalizer] or None
        self._api.patch(plural, key[1], key[0], {"metadata": {"finalizers": rest}}, manager=COLLECTOR_NAME)

    def _blocks_owner_deletion(self, uid: str) -> bool:
        """Return whether a dependent blocks its owner's foreground deletion."""
        for plural, key in self._dependents.get(uid, ()):
            body = self._api.get(plural, key[1], key[0])
            owners = body["metadata"].get("ownerReferences", ()) if body is not None else ()
            if any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in owners):
                return True
        return False
