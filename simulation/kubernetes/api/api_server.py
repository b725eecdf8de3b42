"""The API server: objects, and all operations on them. `connection` simulates requests over the network.

Stored objects are shared: a reader must never change one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ports import SharedWorld
from . import admission, managed_fields
from .admission import Actor
from .api_faults import ApiFaults
from .changes import RESTORED, ObjectChange
from .errors import (
    PATCH_OPTIONS_KIND,
    ApiError,
    FieldError,
    build_already_exists,
    build_bad_request,
    build_conflict,
    build_forbidden,
    build_invalid,
    build_not_found,
)
from .garbage_collector import GarbageCollector
from .objects import (
    KINDS,
    Key,
    Object,
    ServedKind,
    apply_json_patch,
    apply_merge_patch,
    as_sent,
    format_timestamp,
    has_ended,
    parse_timestamp,
)
from .ports import OpenWatch
from .quota import QuotaController
from .requests import Request
from .tokens import PodTokens

_IDENTITY_FIELDS = ("apiVersion", "kind", "metadata")
MERGE_PATCH, JSON_PATCH, APPLY_PATCH = (
    "application/merge-patch+json",
    "application/json-patch+json",
    "application/apply-patch+yaml",
)
_SYSTEM_METADATA_FIELDS = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
    "managedFields",
)
"""Metadata that only the API server writes."""
_EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A write to an existing object."""

    verb: str  # update, patch, apply
    actor: Actor
    subresource: str
    dry_run: bool


@dataclass(frozen=True)
class Backup:
    """The content of an etcd backup."""

    version: int
    objects: dict[str, dict[Key, Object]]


class ApiServer:
    """All objects of a cluster."""

    def __init__(self, world: SharedWorld) -> None:
        self.faults = ApiFaults(restarts=self._restart)
        self.world = world
        self.tokens = PodTokens(world, self.get)
        self.random = world.create_random("api")
        self.version = 1000
        """resourceVersion of the last change."""
        self.history: dict[str, deque[ObjectChange]] = {plural: deque() for plural in KINDS}
        self.forgotten = dict.fromkeys(KINDS, self.version)
        """By kind: changes up to this version are no longer in `history`."""
        self.watches: list[OpenWatch] = []
        self._objects: dict[str, dict[Key, Object]] = {plural: {} for plural in KINDS}
        self._quotas = QuotaController(self)
        self._subscribers: list[Callable[[ObjectChange], None]] = [
            GarbageCollector(self).on_change,
            self._quotas.on_change,
        ]
        self._observers: list[Callable[[Request], None]] = []
        for name in ("default", "kube-system"):
            self.create("namespaces", {"metadata": {"name": name}})

    # For the world's own controllers: immediate, without the network and its faults.

    def get(self, plural: str, name: str, namespace: str = "") -> Object | None:
        return self._objects[plural].get((namespace, name))

    def list_all(self, plural: str, namespace: str = "") -> list[Object]:
        """Return the objects in the order of their creation; of all namespaces if none is given."""
        items = self._objects[plural]
        return [body for (ns, _), body in items.items() if ns == namespace] if namespace else list(items.values())

    def create(self, plural: str, body: Object, *, manager: str = "world", dry_run: bool = False) -> Object:
        return self.do_create(KINDS[plural], as_sent(body), Actor(manager, manager), dry_run=dry_run)

    def update(self, plural: str, body: Object, *, subresource: str = "", manager: str = "world") -> Object:
        """Replace an object: compare-and-swap if metadata.resourceVersion is given."""
        metadata = body["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        return self.do_update(KINDS[plural], key, as_sent(body), Actor(manager, manager), subresource)

    def patch(
        self,
        plural: str,
        name: str,
        namespace: str,
        patch: Object,
        *,
        subresource: str = "",
        manager: str = "world",
    ) -> Object:
        """Apply a merge patch.

        `subresource`: `status`, `binding` for a pod's spec.nodeName, `finalize` for a namespace's spec.finalizers, or
        `scale` for a job's spec.replicas.
        """
        actor = Actor(manager, manager)
        return self.do_patch(KINDS[plural], (namespace, name), as_sent(patch), actor, subresource, MERGE_PATCH)

    def delete(
        self,
        plural: str,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace: int | None = None,
        manager: str = "world",
        propagation: str = "Background",
    ) -> None:
        """Delete an object. Raises ApiError if it does not exist. `grace`: of pods, in seconds; None: their spec's."""
        actor = Actor(manager, manager)
        self.do_delete(KINDS[plural], (namespace, name), actor, uid=uid, grace=grace, propagation=propagation)

    def subscribe(self, call: Callable[[ObjectChange], None]) -> None:
        """Call back right after every change, before anything else happens."""
        self._subscribers.append(call)

    def add_observer(self, call: Callable[[Request], None]) -> None:
        """Call back for every request over the network: when it is sent, has taken effect, and is answered."""
        self._observers.append(call)

    def mint_token(self, pod: Object, audience: str = "pacekeeper", seconds: float = 3600.0) -> str:
        """Return a token of the pod's service account, as a kubelet projects it into a volume."""
        return self.tokens.mint_token(pod, audience, seconds)

    # Its state, for faults.

    def end_watches(self, place: str = "", plural: str = "", *, history_lost: bool = False) -> None:
        """End the watches of that place and kind ("": of all). `history_lost`: with 410, so that none can resume."""
        if history_lost:
            self._forget_history(plural)
        for watch in [w for w in self.watches if place in ("", w.place) and plural in ("", w.kind.plural)]:
            watch.end(history_lost=history_lost)

    def backup(self) -> Backup:
        """Return a backup of everything."""
        return Backup(self.version, {plural: dict(objects) for plural, objects in self._objects.items()})

    def restore(self, backup: Backup) -> None:
        """Restore a backup. Versions continue from there, and the server restarts."""
        old_objects, self._objects = (
            self._objects,
            {plural: dict(objects) for plural, objects in backup.objects.items()},
        )
        self.version = backup.version
        self._restart()
        for plural, objects in self._objects.items():
            removed = {key: body for key, body in old_objects[plural].items() if key not in objects}
            changes: list[tuple[str, Object, Object | None]] = [("DELETED", body, body) for body in removed.values()]
            for key, body in objects.items():
                old = old_objects[plural].get(key)
                if old is not None and old["metadata"]["uid"] != body["metadata"]["uid"]:
                    changes.append(("DELETED", old, old))
                    old = None
                if old is not body:
                    changes.append(("ADDED" if old is None else "MODIFIED", body, old))
            for type_, body, old in changes:
                change = ObjectChange(type_, plural, body, old, RESTORED, self._now(), "restore", self.version)
                for call in self._subscribers:
                    call(change)

    def call_later(self, bounds: tuple[float, float], call: Callable[..., object], *arguments: Any) -> None:
        """Call back within these seconds, or later if the server is unavailable, as its own controllers do."""
        self.world.call_after(self.random.uniform(*bounds), self._call_when_available, bounds, call, *arguments)

    def _call_when_available(self, bounds: tuple[float, float], call: Callable[..., object], *arguments: Any) -> None:
        if self.faults.is_unavailable:
            self.call_later(bounds, call, *arguments)
        else:
            call(*arguments)

    def _restart(self) -> None:
        """Restart the process: watches break, and the history is lost."""
        self._forget_history("")
        for watch in list(self.watches):
            watch.break_off()

    def _forget_history(self, plural: str) -> None:
        for name in [plural] if plural else list(KINDS):
            self.history[name].clear()
            self.forgotten[name] = self.version

    def notify_observers(self, request: Request) -> None:
        """Notify the observers of requests."""
        for call in self._observers:
            call(request)

    # Operations behind requests.

    def do_create(
        self,
        kind: ServedKind,
        body: Object,
        actor: Actor,
        *,
        dry_run: bool = False,
        strict: bool = False,
        verb: str = "create",
    ) -> Object:
        metadata = body.get("metadata") or {}
        name, namespace = metadata.get("name", ""), metadata.get("namespace", "") if kind.namespaced else ""
        admission.authorize_actor(kind, name, "create", actor)
        if kind.plural == "tokenreviews":
            return self.tokens.review_token(body)
        if metadata.get("resourceVersion"):
            raise ApiError(500, "", "resourceVersion should not be set on objects to be created")
        if not name:
            detail = "Required value: name or generateName is required"
            raise build_invalid(kind, "", [FieldError("metadata.name", detail, "FieldValueRequired")])
        body = admission.decode_body(kind, {**body, "apiVersion": kind.api_version, "kind": kind.name}, strict=strict)
        self._check_namespace(kind, namespace, name)
        if kind.plural == "pods":
            admission.check_references(kind, body)
        body = self._create_object(kind, body, namespace)
        admission.validate_object(kind, body, None)
        admission.enforce_policies(kind, body, None, actor)
        self._apply_denials(kind, name)
        if kind.plural == "pods":
            self._quotas.charge(kind, namespace, name, dry_run=dry_run)
        if (namespace, name) in self._objects[kind.plural]:
            raise build_already_exists(kind, name)
        if kind.tracks_managed_fields:
            field_manager = managed_fields.FieldManager(actor.manager, "Update")
            _add_managed_fields(
                body, managed_fields.update_managed_fields(None, body, field_manager, self._format_now())
            )
        if dry_run:
            return body
        return self._store_object("ADDED", kind, body, None, actor, verb)

    def do_update(
        self, kind: ServedKind, key: Key, body: Object, actor: Actor, subresource: str = "", *, dry_run: bool = False
    ) -> Object:
        metadata = body.get("metadata") or {}
        if metadata.get("name", key[1]) != key[1]:
            message = f"the name of the object ({metadata['name']}) does not match the name on the URL ({key[1]})"
            raise build_bad_request(message)
        old = self._objects[kind.plural].get(key)
        if old is None:
            if not kind.created_by_replacing:
                raise build_not_found(kind, key[1])
            new_metadata = {name: part for name, part in metadata.items() if name not in _SYSTEM_METADATA_FIELDS}
            new_metadata |= {"name": key[1], **({"namespace": key[0]} if key[0] else {})}
            return self.do_create(kind, {**body, "metadata": new_metadata}, actor, dry_run=dry_run, verb="update")
        version = metadata.get("resourceVersion", "")
        if not version and not kind.unconditional:
            cause = FieldError("metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
            error = build_invalid(kind, key[1], [cause])
            raise ApiError(422, "Invalid", error.message.replace(kind.qualified_name, kind.resource, 1), error.details)
        uid = metadata.get("uid", old["metadata"]["uid"])
        if uid != old["metadata"]["uid"]:
            raise build_conflict(kind, key[1], f"Precondition failed: UID in precondition: {uid}")
        body = {"apiVersion": kind.api_version, "kind": kind.name, **body, "metadata": metadata}
        return self._replace_object(kind, old, body, WriteRequest("update", actor, subresource, dry_run), version)

    def do_patch(  # noqa: PLR0913  # the parameters of a PATCH request of the Kubernetes API
        self,
        kind: ServedKind,
        key: Key,
        patch: Any,
        actor: Actor,
        subresource: str = "",
        style: str = MERGE_PATCH,
        *,
        force: bool = False,
        dry_run: bool = False,
    ) -> Object:
        if style == APPLY_PATCH:
            return self._apply_configuration(kind, key, patch, actor, subresource, force=force, dry_run=dry_run)
        old = self._objects[kind.plural].get(key)
        if old is None:
            raise build_not_found(kind, key[1])
        if style == JSON_PATCH:
            try:
                new = apply_json_patch(old, patch)
            except (ValueError, KeyError, IndexError):
                message = "the server rejected our request due to an error in our request"
                raise ApiError(422, "Invalid", message, {}) from None
        else:
            new = apply_merge_patch(old, patch)
        metadata = new["metadata"]
        if metadata.get("name") != key[1]:
            message = f"the name of the object ({metadata.get('name')}) does not match the name on the URL ({key[1]})"
            raise build_bad_request(message)
        uid = metadata.get("uid", old["metadata"]["uid"])
        if uid != old["metadata"]["uid"]:
            cause = FieldError("metadata.uid", f'Invalid value: "{uid}": field is immutable')
            raise build_invalid(kind, key[1], [cause])
        version = metadata.get("resourceVersion", "") if metadata is not old["metadata"] else ""
        return self._replace_object(kind, old, new, WriteRequest("patch", actor, subresource, dry_run), version)

    def do_delete(
        self,
        kind: ServedKind,
        key: Key,
        actor: Actor,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
        propagation: str = "Background",
    ) -> Object:
        """Delete an object. Return it if it still exists, or was a pod or custom resource; otherwise a Status."""
        admission.authorize_actor(kind, key[1], "delete", actor)
        old = self._objects[kind.plural].get(key)
        if old is None:
            raise build_not_found(kind, key[1])
        metadata = old["metadata"]
        if uid and uid != metadata["uid"]:
            detail = f"the UID in the precondition ({uid}) does not match the UID in record ({metadata['uid']})"
            detail = f"{detail}. The object might have been deleted and then recreated"
            raise build_conflict(kind, key[1], detail, resource=kind.qualified_name)
        if version and version != metadata["resourceVersion"]:
            detail = f"the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record"
            detail = f"{detail} ({metadata['resourceVersion']}). The object might have been modified"
            raise build_conflict(kind, key[1], detail, resource=kind.qualified_name)
        admission.enforce_policies(kind, None, old, actor)
        if kind.plural == "namespaces":
            return self._terminate_namespace(old, actor)
        finalizer = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(propagation, "")
        finalizers = metadata.get("finalizers", [])
        if finalizer and finalizer not in finalizers and "deletionTimestamp" not in metadata:
            finalizers = [*finalizers, finalizer]
        if kind.plural != "pods" and not finalizers:
            return self._remove_object(kind, old, actor)
        marked = self._mark_deleting(old, _compute_grace(old, grace) if kind.plural == "pods" else 0, finalizers)
        if marked is not old:
            marked = self._store_object("MODIFIED", kind, marked, old, actor, "delete")
        if marked["metadata"]["deletionGracePeriodSeconds"] or finalizers:
            return marked
        return self._remove_object(kind, marked, actor)

    # Internals.

    def _check_namespace(self, kind: ServedKind, namespace: str, name: str) -> None:
        """Check that the namespace accepts new objects. Raises ApiError if it does not."""
        if not kind.namespaced:
            return
        if not namespace:
            raise build_bad_request("an empty namespace may not be set during creation")
        existing = self._objects["namespaces"].get(("", namespace))
        if existing is None:
            raise build_not_found(KINDS["namespaces"], namespace)
        if "deletionTimestamp" in existing["metadata"]:
            detail = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = FieldError(
                "metadata.namespace", f"namespace {namespace} is being terminated", "NamespaceTerminating"
            )
            raise build_forbidden(kind, name, detail, [cause])

    def _create_object(self, kind: ServedKind, body: Object, namespace: str) -> Object:
        """Return the object with the metadata that the server sets."""
        given = {name: part for name, part in body["metadata"].items() if part not in _EMPTY_VALUES}
        metadata = {name: part for name, part in given.items() if name not in _SYSTEM_METADATA_FIELDS}
        metadata |= {"name": given["name"], **({"namespace": namespace} if namespace else {})}
        metadata |= {"uid": self._create_uid(), "creationTimestamp": self._format_now()}
        if kind.has_generation:
            metadata["generation"] = 1
        new = {**body, "metadata": metadata}
        if kind.plural == "pods":
            new["status"] = {"phase": "Pending"}
        elif kind.plural == "namespaces":
            new |= {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
            metadata["labels"] = {**metadata.get("labels", {}), "kubernetes.io/metadata.name": metadata["name"]}
        elif kind.custom and kind.has_status:
            new.pop("status", None)
            new = admission.decode_body(kind, new, strict=False)  # fills in the default of status
        return new

    def _apply_denials(self, kind: ServedKind, name: str) -> None:
        for denial in self.faults.denials:
            if denial.plural == kind.plural and name.startswith(denial.prefix):
                error = build_forbidden(kind, name, denial.message)
                message = error.message if denial.status == 403 else denial.message
                reason = {400: "BadRequest", 403: "Forbidden", 422: "Invalid"}.get(denial.status, "InternalError")
                raise ApiError(denial.status, reason, message)

    def _replace_object(
        self,
        kind: ServedKind,
        old: Object,
        new: Object,
        request: WriteRequest,
        version: str,
    ) -> Object:
        """Replace `old` by `new`, as far as this kind of write may change it."""
        name = old["metadata"]["name"]
        admission.authorize_actor(kind, name, request.verb, request.actor)
        if version and version != old["metadata"]["resourceVersion"]:
            raise build_conflict(kind, name)
        new = self._limit_to_subresource(kind, old, new, request.subresource)
        drops_ownership = kind.tracks_managed_fields and new["metadata"].get("managedFields") in ([], [{}])
        new = admission.decode_body(kind, new, strict=False)
        new = _merge_metadata(new, old)
        if new == old and not drops_ownership:
            return old
        if kind.has_generation and _select_generation_fields(kind, new) != _select_generation_fields(kind, old):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        if kind.tracks_managed_fields:
            field_manager = managed_fields.FieldManager(
                request.actor.manager, "Update", "status" if request.subresource == "status" else ""
            )
            _add_managed_fields(
                new,
                []
                if drops_ownership
                else managed_fields.update_managed_fields(old, new, field_manager, self._format_now()),
            )
        return self._finish_write(kind, old, new, request)

    def _finish_write(self, kind: ServedKind, old: Object, new: Object, request: WriteRequest) -> Object:
        if request.subresource not in ("status", "binding"):
            admission.enforce_policies(kind, new, old, request.actor)
        if request.subresource != "binding":
            admission.validate_object(kind, new, old)
        if request.dry_run:
            return new
        metadata = new["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            namespaced = kind.plural == "namespaces" and new["spec"].get("finalizers")
            graceful = kind.plural == "pods" and metadata["deletionGracePeriodSeconds"]
            if not namespaced and not graceful:
                self._remove_object(kind, old, request.actor)
                return new
        return self._store_object("MODIFIED", kind, new, old, request.actor, request.verb)

    def _limit_to_subresource(self, kind: ServedKind, old: Object, new: Object, subresource: str) -> Object:
        match subresource:
            case "":
                if kind.has_status and new.get("status") != old.get("status"):
                    new = {name: part for name, part in new.items() if name != "status"}
                    return {**new, "status": old["status"]} if "status" in old else new
                return new
            case "status" if kind.has_status:
                metadata = old["metadata"] if kind.custom else new["metadata"]
                new = {name: part for name, part in new.items() if name == "status"}
                return {**{name: part for name, part in old.items() if name != "status"}, **new, "metadata": metadata}
            case "binding" if kind.plural == "pods":
                node = new["spec"]["nodeName"]
                is_deleting = "deletionTimestamp" in old["metadata"]
                if is_deleting or old["spec"].get("nodeName"):
                    problem = "is being deleted" if is_deleting else "is already assigned to a node"
                    raise build_conflict(kind, old["metadata"]["name"], f"pod {old['metadata']['name']} {problem}")
                others = [item for item in old["status"].get("conditions", ()) if item["type"] != "PodScheduled"]
                placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._format_now()}
                status = {**old["status"], "conditions": [*others, placed]}
                return {**old, "spec": {**old["spec"], "nodeName": node}, "status": status}
            case "finalize" if kind.plural == "namespaces":
                return {**old, "spec": new.get("spec") or {}}
            case "scale" if kind.plural == "trainingjobs":
                return {**old, "spec": {**old["spec"], "replicas": new["spec"]["replicas"]}}
        raise ApiError(404, "NotFound", "the server could not find the requested resource", {})

    def _apply_configuration(
        self,
        kind: ServedKind,
        key: Key,
        configuration: Object,
        actor: Actor,
        subresource: str,
        *,
        force: bool,
        dry_run: bool,
    ) -> Object:
        name = key[1]
        if not actor.manager:
            message = "Required value: is required for apply patch"
            raise build_invalid(PATCH_OPTIONS_KIND, "", [FieldError("fieldManager", message, "FieldValueRequired")])
        old = self._objects[kind.plural].get(key)
        field_manager = managed_fields.FieldManager(actor.manager, "Apply", subresource)
        if subresource:
            configuration = {part: configuration[part] for part in _IDENTITY_FIELDS if part in configuration} | {
                subresource: configuration.get(subresource, {})
            }
        uid = configuration["metadata"].get("uid", "")
        version = configuration["metadata"].get("resourceVersion", "")
        if old is None and subresource:
            raise build_not_found(kind, name)
        if old is None:
            if uid:
                detail = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                raise build_conflict(kind, name, detail)
            metadata = {**configuration["metadata"], **({"namespace": key[0]} if key[0] else {})}
            new = self.do_create(kind, {**configuration, "metadata": metadata}, actor, dry_run=True)
            _add_managed_fields(
                new,
                managed_fields.build_managed_fields(
                    {"metadata": {}}, new, configuration, field_manager, self._format_now()
                ),
            )
            return new if dry_run else self._store_object("ADDED", kind, new, None, actor, "apply")
        if uid and uid != old["metadata"]["uid"]:
            raise build_invalid(kind, name, [FieldError("metadata.uid", f'Invalid value: "{uid}": field is immutable')])
        if version and version != old["metadata"]["resourceVersion"]:
            raise build_conflict(kind, name)
        admission.authorize_actor(kind, name, "patch", actor)
        new, conflicts = managed_fields.apply_configuration(old, configuration, field_manager)
        if conflicts and not force:
            raise _build_apply_conflict(conflicts, kind)
        new = admission.decode_body(kind, self._limit_to_subresource(kind, old, new, subresource), strict=False)
        new = _merge_metadata(new, old)
        owners = managed_fields.build_managed_fields(old, new, configuration, field_manager, self._format_now())
        if new == old and owners == old["metadata"].get("managedFields", []):
            return old
        if kind.has_generation and _select_generation_fields(kind, new) != _select_generation_fields(kind, old):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        _add_managed_fields(new, owners)
        return self._finish_write(kind, old, new, WriteRequest("apply", actor, subresource, dry_run))

    def _mark_deleting(self, old: Object, seconds: int, finalizers: list[str]) -> Object:
        """Return the object with a deletion grace period; `old` itself if it already has one as short."""
        metadata = old["metadata"]
        since = int(self.world.wall_time("api"))
        if "deletionTimestamp" in metadata:
            if seconds >= metadata["deletionGracePeriodSeconds"]:
                return old
            since = parse_timestamp(metadata["deletionTimestamp"]) - metadata["deletionGracePeriodSeconds"]
        elif "generation" in metadata:
            metadata = {**metadata, "generation": metadata["generation"] + 1}
        metadata = {
            **metadata,
            "deletionTimestamp": format_timestamp(since + seconds),
            "deletionGracePeriodSeconds": seconds,
        }
        return {**old, "metadata": {**metadata, "finalizers": finalizers} if finalizers else metadata}

    def _terminate_namespace(self, old: Object, actor: Actor) -> Object:
        """Mark the namespace. The world's controller empties it, and then removes its spec.finalizers."""
        if "deletionTimestamp" in old["metadata"]:
            return old
        marked = {**self._mark_deleting(old, 0, []), "status": {"phase": "Terminating"}}
        return self._store_object("MODIFIED", KINDS["namespaces"], marked, old, actor, "delete")

    def _remove_object(self, kind: ServedKind, old: Object, actor: Actor) -> Object:
        metadata = old["metadata"]
        del self._objects[kind.plural][metadata.get("namespace", ""), metadata["name"]]
        self.version += 1
        removed = {**old, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        self._publish_change(
            ObjectChange("DELETED", kind.plural, removed, old, actor.name, self._now(), "delete", self.version)
        )
        if kind.plural == "pods":
            return removed
        details = {"name": metadata["name"], "kind": kind.plural, "uid": metadata["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _store_object(
        self, type: str, kind: ServedKind, new: Object, old: Object | None, actor: Actor, verb: str
    ) -> Object:
        self.version += 1
        metadata = {**new["metadata"], "resourceVersion": str(self.version)}
        new = {**new, "metadata": metadata}
        key = (metadata.get("namespace", ""), metadata["name"])
        self._objects[kind.plural][key] = new
        self._publish_change(ObjectChange(type, kind.plural, new, old, actor.name, self._now(), verb, self.version))
        return new

    def _publish_change(self, change: ObjectChange) -> None:
        history = self.history[change.plural]
        history.append(change)
        while len(history) > self.faults.history:
            self.forgotten[change.plural] = history.popleft().version
        for watch in self.watches:
            if watch.kind.plural == change.plural:
                watch.on_change(change)
        for call in self._subscribers:
            call(change)

    def _now(self) -> float:
        return self.world.loop.time()

    def _format_now(self) -> str:
        return format_timestamp(int(self.world.wall_time("api")))

    def _create_uid(self) -> str:
        digits = f"{self.random.getrandbits(128):032x}"
        return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:]}"


def _merge_metadata(new: Object, old: Object) -> Object:
    """Merge metadata: system fields stay as in `old`. If nothing differs, return the same object."""
    old_metadata = old["metadata"]
    if new["metadata"] is old_metadata:
        return dict(new, metadata=dict(old_metadata)) if new is not old else old
    metadata = {
        name: part
        for name, part in new["metadata"].items()
        if part not in _EMPTY_VALUES and name not in _SYSTEM_METADATA_FIELDS
    }
    return {
        **new,
        "metadata": metadata | {name: old_metadata[name] for name in _SYSTEM_METADATA_FIELDS if name in old_metadata},
    }


def _add_managed_fields(body: Object, owners: list[Object]) -> None:
    """Add managed fields to a body that is not stored yet."""
    body["metadata"].pop("managedFields", None)
    if owners:
        body["metadata"]["managedFields"] = owners


def _select_generation_fields(kind: ServedKind, body: Object) -> object:
    """Return the part of an object whose changes count for metadata.generation."""
    if kind.has_status or not kind.custom:
        return body.get("spec")
    return {name: part for name, part in body.items() if name not in ("metadata", "status")}


def _compute_grace(pod: Object, requested: int | None) -> int:
    """Return the grace period in seconds; 0 for a pod without running containers."""
    if "deletionTimestamp" in pod["metadata"]:  # a repeated request without a grace period does not change it
        current: int = pod["metadata"]["deletionGracePeriodSeconds"]
        return current if requested is None else requested
    if not pod["spec"].get("nodeName") or has_ended(pod):
        return 0
    return int(pod["spec"]["terminationGracePeriodSeconds"]) if requested is None else requested


def _build_apply_conflict(conflicts: list[managed_fields.FieldConflict], kind: ServedKind) -> ApiError:
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{c.manager}"', "field": c.field}
        for c in conflicts
    ]
    messages = ", ".join(f"{cause['message']} using {kind.api_version}: {cause['field']}" for cause in causes)
    count = f"{len(causes)} conflict{'s' if len(causes) > 1 else ''}"
    return ApiError(409, "Conflict", f"Apply failed with {count}: {messages}", {"causes": causes})
