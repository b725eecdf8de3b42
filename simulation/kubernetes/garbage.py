"""The garbage collector: what has lost all its owners goes, too, a while later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .objects import KINDS_BY_NAME, Key, Object

if TYPE_CHECKING:
    from .api_server import ApiServer, ObjectChange

COLLECTOR_NAME = "garbage-collector"


class GarbageCollector:
    """Told of every change."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._dependents: dict[str, dict[tuple[str, Key], None]] = {}  # by the owner's uid

    def on_change(self, change: ObjectChange) -> None:
        """Remembers who depends on whom, and looks after those that it concerns a while later."""
        metadata, before = change.object["metadata"], change.previous["metadata"] if change.previous else {}
        place = (metadata.get("namespace", ""), metadata["name"])
        if change.type == "DELETED":
            self._forget_owners(change.plural, place, metadata.get("ownerReferences", ()))
            if metadata["uid"] in self._dependents:
                self._api.call_later(self._api.faults.collection_lag, self._collect_dependents, metadata["uid"])
            return
        owners, known = metadata.get("ownerReferences", []), before.get("ownerReferences", [])
        if owners is not known and owners != known:
            self._forget_owners(change.plural, place, known)
            for owner in owners:
                self._dependents.setdefault(owner["uid"], {})[change.plural, place] = None
            if any(self._find_owner(owner, place[0]) is None for owner in owners):
                self._api.call_later(self._api.faults.collection_lag, self._collect_orphan, change.plural, place, metadata["uid"])
        if "deletionTimestamp" in metadata and "deletionTimestamp" not in before:
            finalizers = metadata.get("finalizers", ())
            if "foregroundDeletion" in finalizers or "orphan" in finalizers:
                lag = self._api.faults.collection_lag
                self._api.call_later(lag, self._collect_in_foreground, change.plural, place, metadata["uid"])

    def _forget_owners(self, plural: str, place: Key, owners: list[Object]) -> None:
        for owner in owners:
            dependants = self._dependents.get(owner["uid"], {})
            dependants.pop((plural, place), None)
            if not dependants:
                self._dependents.pop(owner["uid"], None)

    def _find_owner(self, reference: Object, namespace: str) -> Object | None:
        """The owner, where it is there."""
        kind = KINDS_BY_NAME.get((reference["apiVersion"].rpartition("/")[0], reference["kind"]))
        if kind is None:
            return None
        found = self._api.get(kind.plural, reference["name"], namespace if kind.namespaced else "")
        return found if found is not None and found["metadata"]["uid"] == reference["uid"] else None

    def _find_metadata(self, plural: str, place: Key, uid: str) -> Object | None:
        """The metadata of the object, where it is still the same one."""
        body = self._api.get(plural, place[1], place[0])
        return body["metadata"] if body is not None and body["metadata"]["uid"] == uid else None

    def _collect_dependents(self, uid: str) -> None:
        """All dependants of what is gone."""
        for plural, place in list(self._dependents.get(uid, ())):
            body = self._api.get(plural, place[1], place[0])
            if body is not None:
                self._collect_orphan(plural, place, body["metadata"]["uid"])

    def _collect_orphan(self, plural: str, place: Key, uid: str) -> None:
        """Deletes it where none of its owners is left; otherwise it forgets those that are gone."""
        metadata = self._find_metadata(plural, place, uid)
        if metadata is None:
            return
        owners = metadata.get("ownerReferences", [])
        left = [owner for owner in owners if self._find_owner(owner, place[0]) is not None]
        if len(left) == len(owners):
            return
        if left:
            self._api.patch(plural, place[1], place[0], {"metadata": {"ownerReferences": left}}, manager=COLLECTOR_NAME)
        elif "deletionTimestamp" not in metadata:
            self._api.delete(plural, place[1], place[0], uid=uid, manager=COLLECTOR_NAME)

    def _collect_in_foreground(self, plural: str, place: Key, uid: str) -> None:
        """Deletes the dependants of what waits for that, or sets them free; then it goes itself."""
        metadata = self._find_metadata(plural, place, uid)
        if metadata is None:
            return
        orphan = "orphan" in metadata.get("finalizers", ())
        for kind, (namespace, name) in list(self._dependents.get(uid, ())):
            body = self._api.get(kind, name, namespace)
            if body is None:
                continue
            found = body["metadata"]
            if orphan:
                left = [owner for owner in found["ownerReferences"] if owner["uid"] != uid] or None
                self._api.patch(kind, name, namespace, {"metadata": {"ownerReferences": left}}, manager=COLLECTOR_NAME)
            elif "deletionTimestamp" not in found:
                self._api.delete(kind, name, namespace, uid=found["uid"], manager=COLLECTOR_NAME, propagation="Foreground")
        if self._blocks_owner_deletion(uid):
            self._api.call_later(self._api.faults.collection_lag, self._collect_in_foreground, plural, place, uid)
            return
        done = "orphan" if orphan else "foregroundDeletion"
        rest = [name for name in metadata["finalizers"] if name != done] or None
        self._api.patch(plural, place[1], place[0], {"metadata": {"finalizers": rest}}, manager=COLLECTOR_NAME)

    def _blocks_owner_deletion(self, uid: str) -> bool:
        """Whether a dependant holds up its owner's deletion in the foreground."""
        for plural, place in self._dependents.get(uid, ()):
            body = self._api.get(plural, place[1], place[0])
            owners = body["metadata"].get("ownerReferences", ()) if body is not None else ()
            if any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in owners):
                return True
        return False
