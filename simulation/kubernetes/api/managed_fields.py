"""Field ownership: metadata.managedFields, and server-side apply.

Fields are paths as in fieldsV1: ("f:spec", "f:unschedulable"). An item of a keyed list is 'k:{"type":"Ready"}'. A list
that is not in `_KEYED_LISTS` or `_SET_LISTS` is owned as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .objects import Object

Path = tuple[str, ...]

_KEYED_LISTS: Mapping[Path, tuple[str, ...]] = {
    ("f:metadata", "f:ownerReferences"): ("uid",),
    ("f:status", "f:conditions"): ("type",),
    ("f:status", "f:addresses"): ("type",),
}
_SET_LISTS = (("f:metadata", "f:finalizers"), ("f:spec", "f:podCIDRs"))
_OWNED_MAPS = ("f:labels", "f:annotations", "f:data", "f:binaryData", "f:capacity", "f:allocatable")
"""Maps that are owned themselves, in addition to their items."""
_UNOWNED_FIELDS = ("apiVersion", "kind")
_UNOWNED_METADATA_FIELDS = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "managedFields",
    "resourceVersion",
)
_ABSENT_FIELD = object()


@dataclass(frozen=True)
class FieldManager:
    """The writer of fields."""

    name: str
    operation: str  # Apply or Update
    subresource: str = ""


@dataclass(frozen=True)
class FieldConflict:
    """A field that another manager owns with another value."""

    manager: str
    path: Path

    @property
    def field(self) -> str:
        """The field as messages name it."""
        return "".join(f".{part[2:]}" if part[0] == "f" else f"[{part[2:]}]" for part in self.path)


def update_managed_fields(old: Object | None, new: Object, manager: FieldManager, time: str) -> list[Object]:
    """Return the managedFields of `new` after an update of `old` by `manager`.

    The manager becomes the only owner of the fields that it changes. An object without managed fields gets none before
    the first apply.
    """
    if old is not None and not old["metadata"].get("managedFields"):
        return []
    before = _collect_fields(old, containers=True) if old else {}
    after = _collect_fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _read_owners(old)
    for owner in owners:
        owners[owner] = {path for path in owners[owner] if path in after and (path not in changed or owner == manager)}
    if changed or manager in owners:
        owners[manager] = owners.get(manager, set()) | changed
    return _build_entries(owners, old, new, time, changed={manager} if changed else set())


def apply_configuration(
    old: Object, configuration: Object, manager: FieldManager
) -> tuple[Object, list[FieldConflict]]:
    """Apply a configuration. Return the new object, and the conflicts with other managers.

    Fields that `manager` applied before, no longer names, and shares with no other manager are removed.
    `build_managed_fields` computes the ownership of the result.
    """
    owners = _read_owners_before_apply(old)
    applied = _collect_fields(configuration, containers=False)
    before = _collect_fields(old, containers=True)
    conflicts = [
        FieldConflict(owner.name, path)
        for owner, paths in owners.items()
        if owner != manager
        for path in sorted(paths)
        if path in applied and before.get(path, _ABSENT_FIELD) != applied[path]
    ]
    new = _merge_value(old, {name: part for name, part in configuration.items() if name not in _UNOWNED_FIELDS}, ())
    retained = {path for owner, paths in owners.items() if owner != manager for path in paths}
    for path in sorted(owners.get(manager, ())):
        if path not in applied and path not in retained:
            new = _remove_field(new, path)
    return new, conflicts


def build_managed_fields(
    old: Object, new: Object, configuration: Object, manager: FieldManager, time: str
) -> list[Object]:
    """Return the managedFields of `new`, the result of `apply_configuration`."""
    before, after = _collect_fields(old, containers=True), _collect_fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _read_owners_before_apply(old)
    for owner in owners:
        if owner != manager:
            owners[owner] = {path for path in owners[owner] if path in after and path not in changed}
    applied = set(_collect_fields(configuration, containers=False))
    is_changed = applied != owners.get(manager, set()) or bool(changed)
    owners[manager] = applied
    return _build_entries(owners, old, new, time, changed={manager} if is_changed else set())


def _read_owners(body: Object | None) -> dict[FieldManager, set[Path]]:
    entries = body["metadata"].get("managedFields", ()) if body else ()
    return {_parse_manager(entry): set(_iterate_paths(entry["fieldsV1"], ())) for entry in entries}


def _read_owners_before_apply(body: Object) -> dict[FieldManager, set[Path]]:
    """Return the owners. Without any, the fields belong to the manager "before-first-apply"."""
    owners = _read_owners(body)
    fields = set(_collect_fields(body, containers=True))
    return owners if owners or not fields else {FieldManager("before-first-apply", "Update"): fields}


def _parse_manager(entry: Object) -> FieldManager:
    return FieldManager(entry["manager"], entry["operation"], entry.get("subresource", ""))


def _build_entries(
    owners: Mapping[FieldManager, Iterable[Path]],
    old: Object | None,
    new: Object,
    time: str,
    changed: Iterable[FieldManager],
) -> list[Object]:
    times = {
        _parse_manager(entry): entry["time"] for entry in (old["metadata"].get("managedFields", ()) if old else ())
    }
    entries = []
    for manager, paths in owners.items():
        sorted_paths = sorted(paths)
        if not sorted_paths:
            continue
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": new["apiVersion"],
            "time": time if manager in changed else times.get(manager, time),
            "fieldsType": "FieldsV1",
            "fieldsV1": _build_field_tree(sorted_paths),
        }
        entries.append({**entry, "subresource": manager.subresource} if manager.subresource else entry)
    return entries


def _build_field_tree(paths: Iterable[Path]) -> Object:
    tree: Object = {}
    path_list = list(paths)
    for path in path_list:
        part = tree
        for name in path:
            part = part.setdefault(name, {})
    for path in path_list:
        part = tree
        for name in path:
            part = part[name]
        if part:  # owned itself, in addition to what is in it
            part["."] = {}
    return tree


def _iterate_paths(tree: Object, path: Path) -> Iterator[Path]:
    for name, part in tree.items():
        if name == ".":
            yield path
        elif part:
            yield from _iterate_paths(part, (*path, name))
        else:
            yield (*path, name)


def _collect_fields(body: Object, *, containers: bool) -> dict[Path, Any]:
    """Return all fields of an object that can be owned, with their values.

    `containers`: include the maps themselves.
    """
    fields: dict[Path, Any] = {}
    for name, part in body.items():
        if name in _UNOWNED_FIELDS:
            continue
        if name == "metadata":
            part = {key: value for key, value in part.items() if key not in _UNOWNED_METADATA_FIELDS}
        if part != {}:  # a whole spec is never owned
            _collect_values(part, (f"f:{name}",), fields, containers)
    return fields


def _collect_values(value: Any, path: Path, fields: dict[Path, Any], containers: bool) -> None:
    if type(value) is dict and value:
        if containers and path[-1] in _OWNED_MAPS:
            fields[path] = None
        for name, part in value.items():
            _collect_values(part, (*path, f"f:{name}"), fields, containers)
    elif type(value) is list and path in _KEYED_LISTS:
        for item in value:
            item_path = (*path, _build_item_key(item, _KEYED_LISTS[path]))
            fields[item_path] = None
            for name, part in item.items():
                _collect_values(part, (*item_path, f"f:{name}"), fields, containers)
    elif type(value) is list and path in _SET_LISTS:
        for item in value:
            fields[(*path, f"v:{json.dumps(item)}")] = None
    else:
        fields[path] = value


def _build_item_key(item: Object, names: tuple[str, ...]) -> str:
    return "k:" + json.dumps({name: item[name] for name in names}, separators=(",", ":"))


def _merge_value(value: Any, applied: Any, path: Path) -> Any:
    if type(applied) is dict and type(value) is dict:
        result = dict(value)
        for name, part in applied.items():
            result[name] = _merge_value(value.get(name), part, (*path, f"f:{name}"))
        return result
    if type(applied) is list and type(value) is list:
        if path in _SET_LISTS:
            return value + [item for item in applied if item not in value]
        if path in _KEYED_LISTS:
            return _merge_items(value, applied, path)
    return applied


def _merge_items(value: list[Any], applied: list[Any], path: Path) -> list[Any]:
    items = {_build_item_key(item, _KEYED_LISTS[path]): item for item in value}
    for item in applied:
        key = _build_item_key(item, _KEYED_LISTS[path])
        items[key] = _merge_value(items.get(key), item, (*path, key))
    return list(items.values())


def _remove_field(value: Any, path: Path) -> Any:
    """Return `value` without the field, and without containers that this leaves empty."""
    name, rest = path[0], path[1:]
    if type(value) is list:
        if name.startswith("v:"):
            return [item for item in value if json.dumps(item) != name[2:]]
        key: Object = json.loads(name[2:])
        items = []
        for item in value:
            if not all(item.get(field) == part for field, part in key.items()):
                items.append(item)
            elif rest and (remaining := _remove_field(item, rest)):
                items.append(remaining)
        return items
    if type(value) is not dict or name[2:] not in value:
        return value
    remaining = _remove_field(value[name[2:]], rest) if rest else None
    if remaining or (remaining is not None and value[name[2:]] == remaining):
        return {**value, name[2:]: remaining}
    return {key: part for key, part in value.items() if key != name[2:]}
