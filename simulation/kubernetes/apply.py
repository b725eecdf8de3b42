"""Who owns which field of an object: metadata.managedFields, and server-side apply.

Fields are paths as in fieldsV1: ("f:spec", "f:unschedulable"); an item of a list that is known by its keys is
'k:{"type":"Ready"}'. A list that is not in `_KEYED` or `_SETS` is owned as a whole, as is a map in `_WHOLE`.
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
"""Who adds one owns it itself, besides what is in it."""
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
    """Who writes."""

    name: str
    operation: str  # Apply or Update
    subresource: str = ""


@dataclass(frozen=True)
class FieldConflict:
    """A field that somebody else owns with another value."""

    manager: str
    path: Path

    @property
    def field(self) -> str:
        """As messages name it."""
        return "".join(f".{part[2:]}" if part[0] == "f" else f"[{part[2:]}]" for part in self.path)


def update_managed_fields(old: Object | None, new: Object, manager: FieldManager, time: str) -> list[Object]:
    """`new`'s managedFields, where `manager` makes it of `old`: it owns what it changes, and nobody else does. Of what
    nobody owns anything, it is not written down who changes it before somebody applies to it."""
    if old is not None and not old["metadata"].get("managedFields"):
        return []
    before = _collect_fields(old, containers=True) if old else {}
    after = _collect_fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _read_owners(old)
    for other in owners:
        owners[other] = {path for path in owners[other] if path in after and (path not in changed or other == manager)}
    if changed or manager in owners:
        owners[manager] = owners.get(manager, set()) | changed
    return _build_entries(owners, old, new, time, changed={manager} if changed else set())


def apply_configuration(old: Object, configuration: Object, manager: FieldManager) -> tuple[Object, list[FieldConflict]]:
    """`old` with what `manager` applies, and without what it applied before, names no longer, and nobody else owns.

    The second: whose fields that takes away. `build_managed_fields` says who owns what then.
    """
    owners = _read_owners_before_apply(old)
    wanted = _collect_fields(configuration, containers=False)
    before = _collect_fields(old, containers=True)
    conflicts = [
        FieldConflict(other.name, path)
        for other, paths in owners.items()
        if other != manager
        for path in sorted(paths)
        if path in wanted and before.get(path, _ABSENT_FIELD) != wanted[path]
    ]
    new = _merge_value(old, {name: part for name, part in configuration.items() if name not in _UNOWNED_FIELDS}, ())
    kept = {path for other, paths in owners.items() if other != manager for path in paths}
    for path in sorted(owners.get(manager, ())):
        if path not in wanted and path not in kept:
            new = _remove_field(new, path)
    return new, conflicts


def build_managed_fields(old: Object, new: Object, configuration: Object, manager: FieldManager, time: str) -> list[Object]:
    """managedFields of `new`, which `applied` has made."""
    before, after = _collect_fields(old, containers=True), _collect_fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _read_owners_before_apply(old)
    for other in owners:
        if other != manager:
            owners[other] = {path for path in owners[other] if path in after and path not in changed}
    mine = set(_collect_fields(configuration, containers=False))
    fresh = mine != owners.get(manager, set()) or bool(changed)
    owners[manager] = mine
    return _build_entries(owners, old, new, time, changed={manager} if fresh else set())


def _read_owners(body: Object | None) -> dict[FieldManager, set[Path]]:
    entries = body["metadata"].get("managedFields", ()) if body else ()
    return {_parse_manager(entry): set(_iterate_paths(entry["fieldsV1"], ())) for entry in entries}


def _read_owners_before_apply(body: Object) -> dict[FieldManager, set[Path]]:
    """The same; what nobody owns so far is a manager's that nobody is."""
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
    times = {_parse_manager(entry): entry["time"] for entry in (old["metadata"].get("managedFields", ()) if old else ())}
    found = []
    for manager, paths in owners.items():
        listed = sorted(paths)
        if not listed:
            continue
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": new["apiVersion"],
            "time": time if manager in changed else times.get(manager, time),
            "fieldsType": "FieldsV1",
            "fieldsV1": _build_field_tree(listed),
        }
        found.append({**entry, "subresource": manager.subresource} if manager.subresource else entry)
    return found


def _build_field_tree(paths: Iterable[Path]) -> Object:
    tree: Object = {}
    listed = list(paths)
    for path in listed:
        part = tree
        for name in path:
            part = part.setdefault(name, {})
    for path in listed:
        part = tree
        for name in path:
            part = part[name]
        if part:  # owned itself, besides what is in it
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
    """All that can be owned of an object, with its value. `containers`: maps themselves, too."""
    found: dict[Path, Any] = {}
    for name, part in body.items():
        if name in _UNOWNED_FIELDS:
            continue
        if name == "metadata":
            part = {key: value for key, value in part.items() if key not in _UNOWNED_METADATA_FIELDS}
        if part != {}:  # nobody owns a whole spec
            _collect_values(part, (f"f:{name}",), found, containers)
    return found


def _collect_values(value: Any, path: Path, found: dict[Path, Any], containers: bool) -> None:
    if type(value) is dict and value:
        if containers and path[-1] in _OWNED_MAPS:
            found[path] = None
        for name, part in value.items():
            _collect_values(part, (*path, f"f:{name}"), found, containers)
    elif type(value) is list and path in _KEYED_LISTS:
        for item in value:
            place = (*path, _build_item_key(item, _KEYED_LISTS[path]))
            found[place] = None
            for name, part in item.items():
                _collect_values(part, (*place, f"f:{name}"), found, containers)
    elif type(value) is list and path in _SET_LISTS:
        for item in value:
            found[(*path, f"v:{json.dumps(item)}")] = None
    else:
        found[path] = value


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
    """`value` without the field; containers that it leaves empty go with it."""
    name, rest = path[0], path[1:]
    if type(value) is list:
        if name.startswith("v:"):
            return [item for item in value if json.dumps(item) != name[2:]]
        key: Object = json.loads(name[2:])
        items = []
        for item in value:
            if not all(item.get(field) == part for field, part in key.items()):
                items.append(item)
            elif rest and (left := _remove_field(item, rest)):
                items.append(left)
        return items
    if type(value) is not dict or name[2:] not in value:
        return value
    left = _remove_field(value[name[2:]], rest) if rest else None
    if left or (left is not None and value[name[2:]] == left):
        return {**value, name[2:]: left}
    return {key: part for key, part in value.items() if key != name[2:]}
