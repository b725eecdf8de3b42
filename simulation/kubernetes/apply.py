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

_KEYED: Mapping[Path, tuple[str, ...]] = {
    ("f:metadata", "f:ownerReferences"): ("uid",),
    ("f:status", "f:conditions"): ("type",),
    ("f:status", "f:addresses"): ("type",),
}
_SETS = (("f:metadata", "f:finalizers"), ("f:spec", "f:podCIDRs"))
_MAPS = ("f:labels", "f:annotations", "f:data", "f:binaryData", "f:capacity", "f:allocatable")
"""Who adds one owns it itself, besides what is in it."""
_NOBODYS = ("apiVersion", "kind")
_NOBODYS_METADATA = (
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
_MISSING = object()


@dataclass(frozen=True)
class Manager:
    """Who writes."""

    name: str
    operation: str  # Apply or Update
    subresource: str = ""


@dataclass(frozen=True)
class Conflict:
    """A field that somebody else owns with another value."""

    manager: str
    path: Path

    @property
    def field(self) -> str:
        """As messages name it."""
        return "".join(f".{part[2:]}" if part[0] == "f" else f"[{part[2:]}]" for part in self.path)


def updated(old: Object | None, new: Object, manager: Manager, time: str) -> list[Object]:
    """`new`'s managedFields, where `manager` makes it of `old`: it owns what it changes, and nobody else does. Of what
    nobody owns anything, it is not written down who changes it before somebody applies to it."""
    if old is not None and not old["metadata"].get("managedFields"):
        return []
    before = _fields(old, containers=True) if old else {}
    after = _fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _owners(old)
    for other in owners:
        owners[other] = {path for path in owners[other] if path in after and (path not in changed or other == manager)}
    if changed or manager in owners:
        owners[manager] = owners.get(manager, set()) | changed
    return _entries(owners, old, new, time, changed={manager} if changed else set())


def applied(old: Object, configuration: Object, manager: Manager) -> tuple[Object, list[Conflict]]:
    """`old` with what `manager` applies, and without what it applied before, names no longer, and nobody else owns.

    The second: whose fields that takes away. `owners_after` says who owns what then.
    """
    owners = _owners_before_applying(old)
    wanted = _fields(configuration, containers=False)
    before = _fields(old, containers=True)
    conflicts = [
        Conflict(other.name, path)
        for other, paths in owners.items()
        if other != manager
        for path in sorted(paths)
        if path in wanted and before.get(path, _MISSING) != wanted[path]
    ]
    new = _merged(old, {name: part for name, part in configuration.items() if name not in _NOBODYS}, ())
    kept = {path for other, paths in owners.items() if other != manager for path in paths}
    for path in sorted(owners.get(manager, ())):
        if path not in wanted and path not in kept:
            new = _without(new, path)
    return new, conflicts


def owners_after(old: Object, new: Object, configuration: Object, manager: Manager, time: str) -> list[Object]:
    """managedFields of `new`, which `applied` has made."""
    before, after = _fields(old, containers=True), _fields(new, containers=True)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _owners_before_applying(old)
    for other in owners:
        if other != manager:
            owners[other] = {path for path in owners[other] if path in after and path not in changed}
    mine = set(_fields(configuration, containers=False))
    fresh = mine != owners.get(manager, set()) or bool(changed)
    owners[manager] = mine
    return _entries(owners, old, new, time, changed={manager} if fresh else set())


def _owners(body: Object | None) -> dict[Manager, set[Path]]:
    entries = body["metadata"].get("managedFields", ()) if body else ()
    return {_manager(entry): set(_paths(entry["fieldsV1"], ())) for entry in entries}


def _owners_before_applying(body: Object) -> dict[Manager, set[Path]]:
    """The same; what nobody owns so far is a manager's that nobody is."""
    owners = _owners(body)
    fields = set(_fields(body, containers=True))
    return owners if owners or not fields else {Manager("before-first-apply", "Update"): fields}


def _manager(entry: Object) -> Manager:
    return Manager(entry["manager"], entry["operation"], entry.get("subresource", ""))


def _entries(
    owners: Mapping[Manager, Iterable[Path]],
    old: Object | None,
    new: Object,
    time: str,
    changed: Iterable[Manager],
) -> list[Object]:
    times = {_manager(entry): entry["time"] for entry in (old["metadata"].get("managedFields", ()) if old else ())}
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
            "fieldsV1": _tree(listed),
        }
        found.append({**entry, "subresource": manager.subresource} if manager.subresource else entry)
    return found


def _tree(paths: Iterable[Path]) -> Object:
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


def _paths(tree: Object, path: Path) -> Iterator[Path]:
    for name, part in tree.items():
        if name == ".":
            yield path
        elif part:
            yield from _paths(part, (*path, name))
        else:
            yield (*path, name)


def _fields(body: Object, *, containers: bool) -> dict[Path, Any]:
    """All that can be owned of an object, with its value. `containers`: maps themselves, too."""
    found: dict[Path, Any] = {}
    for name, part in body.items():
        if name in _NOBODYS:
            continue
        if name == "metadata":
            part = {key: value for key, value in part.items() if key not in _NOBODYS_METADATA}
        if part != {}:  # nobody owns a whole spec
            _collect(part, (f"f:{name}",), found, containers)
    return found


def _collect(value: Any, path: Path, found: dict[Path, Any], containers: bool) -> None:
    if type(value) is dict and value:
        if containers and path[-1] in _MAPS:
            found[path] = None
        for name, part in value.items():
            _collect(part, (*path, f"f:{name}"), found, containers)
    elif type(value) is list and path in _KEYED:
        for item in value:
            place = (*path, _key(item, _KEYED[path]))
            found[place] = None
            for name, part in item.items():
                _collect(part, (*place, f"f:{name}"), found, containers)
    elif type(value) is list and path in _SETS:
        for item in value:
            found[(*path, f"v:{json.dumps(item)}")] = None
    else:
        found[path] = value


def _key(item: Object, names: tuple[str, ...]) -> str:
    return "k:" + json.dumps({name: item[name] for name in names}, separators=(",", ":"))


def _merged(value: Any, applied: Any, path: Path) -> Any:
    if type(applied) is dict and type(value) is dict:
        result = dict(value)
        for name, part in applied.items():
            result[name] = _merged(value.get(name), part, (*path, f"f:{name}"))
        return result
    if type(applied) is list and type(value) is list:
        if path in _SETS:
            return value + [item for item in applied if item not in value]
        if path in _KEYED:
            return _merged_items(value, applied, path)
    return applied


def _merged_items(value: list[Any], applied: list[Any], path: Path) -> list[Any]:
    items = {_key(item, _KEYED[path]): item for item in value}
    for item in applied:
        key = _key(item, _KEYED[path])
        items[key] = _merged(items.get(key), item, (*path, key))
    return list(items.values())


def _without(value: Any, path: Path) -> Any:
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
            elif rest and (left := _without(item, rest)):
                items.append(left)
        return items
    if type(value) is not dict or name[2:] not in value:
        return value
    left = _without(value[name[2:]], rest) if rest else None
    if left or (left is not None and value[name[2:]] == left):
        return {**value, name[2:]: left}
    return {key: part for key, part in value.items() if key != name[2:]}
