"""Objects as on the wire, and the kinds that the simulated API server serves.

Stored objects are never changed. A new version shares unchanged parts with the old one, so that "nothing has changed"
is often an identity check.
"""

from __future__ import annotations

import calendar
import marshal
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace ("": cluster-scoped) and name."""


@dataclass(frozen=True)
class ServedKind:
    """A kind of objects, and how the API server treats it."""

    plural: str
    name: str
    api_version: str = "v1"
    namespaced: bool = True
    has_status: bool = False
    """Whether status is a subresource: writes of the object then leave it unchanged."""
    has_generation: bool = False
    """Whether metadata.generation counts changes of the spec."""
    unconditional: bool = True
    """Whether a replacement needs no resourceVersion."""
    created_by_replacing: bool = False
    """Whether a replacement of an object that does not exist creates it."""
    custom: bool = False
    """Whether its schema is in crds/."""
    tracks_managed_fields: bool = False
    """Whether metadata.managedFields is maintained. For other kinds it is not read, and would cost time."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def path(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    @property
    def resource(self) -> str:
        """The name in messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_name(self) -> str:
        """The name in messages about invalid objects."""
        return f"{self.name}.{self.group}" if self.group else self.name


def _define_custom_kind(
    plural: str, name: str, *, namespaced: bool = True, status: bool = True, owners_of_fields: bool = False
) -> ServedKind:
    return ServedKind(
        plural,
        name,
        "pacekeeper.dev/v1alpha1",
        namespaced,
        status,
        has_generation=True,
        unconditional=False,
        custom=True,
        tracks_managed_fields=owners_of_fields,
    )


KINDS: dict[str, ServedKind] = {
    kind.plural: kind
    for kind in (
        ServedKind("pods", "Pod", has_status=True, has_generation=True),
        ServedKind("nodes", "Node", namespaced=False, has_status=True, tracks_managed_fields=True),
        ServedKind("namespaces", "Namespace", namespaced=False, has_status=True),
        ServedKind("configmaps", "ConfigMap", tracks_managed_fields=True),
        ServedKind("secrets", "Secret"),
        ServedKind("resourcequotas", "ResourceQuota", has_status=True),
        ServedKind("events", "Event", "events.k8s.io/v1", created_by_replacing=True),
        ServedKind("leases", "Lease", "coordination.k8s.io/v1", unconditional=False, created_by_replacing=True),
        ServedKind("tokenreviews", "TokenReview", "authentication.k8s.io/v1", namespaced=False),
        ServedKind("networkpolicies", "NetworkPolicy", "networking.k8s.io/v1", has_generation=True),
        _define_custom_kind("trainingjobs", "TrainingJob"),
        _define_custom_kind("trainingjobstates", "TrainingJobState", status=False),
        _define_custom_kind("incidents", "Incident"),
        _define_custom_kind("watchedjobs", "WatchedJob"),
        _define_custom_kind("profilewindows", "ProfileWindow", status=False),
        _define_custom_kind("fabrics", "Fabric", namespaced=False, owners_of_fields=True),
        _define_custom_kind("nodequarantines", "NodeQuarantine", namespaced=False),
        _define_custom_kind("nodehistories", "NodeHistory", namespaced=False),
        _define_custom_kind("nodeprobes", "NodeProbe", namespaced=False, status=False),
    )
}
KINDS_BY_NAME: dict[tuple[str, str], ServedKind] = {(kind.group, kind.name): kind for kind in KINDS.values()}


def as_sent(value: Any) -> Any:
    """Return `value` as it arrives at the other end of a connection: a copy in plain types.

    Raises ValueError for a number that JSON does not support, and TypeError for other types.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {str(name): as_sent(part) for name, part in value.items()}
    if kind is list or kind is tuple:
        return [as_sent(part) for part in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not JSON")
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): as_sent(part) for name, part in value.items()}
    raise TypeError(f"{kind.__name__} cannot be sent as JSON")


def copy_value(value: Any) -> Any:
    """Return a deep copy of a value in plain types."""
    return marshal.loads(marshal.dumps(value))


def estimate_json_bytes(value: Any) -> int:
    """Estimate the length as JSON. It is never less than half of it."""
    return len(marshal.dumps(value))


def apply_merge_patch(value: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396). Return the same object if nothing changes."""
    if type(patch) is not dict:
        return patch
    base: Object = value if type(value) is dict else {}
    result: Object | None = None if base is value else {}
    for name, part in patch.items():
        before = base.get(name)
        if part is None:
            if name in base:
                result = dict(base) if result is None else result
                del result[name]
            continue
        after = apply_merge_patch(before, part)
        if after is before or (name in base and after == before):
            continue
        result = dict(base) if result is None else result
        result[name] = after
    return base if result is None else result


def apply_json_patch(value: Any, operations: list[Object]) -> Any:
    """Apply a JSON patch (RFC 6902: add, remove, replace, test). Raises ValueError if an operation does not fit."""
    for operation in operations:
        names = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        value = _apply_json_operation(value, names, operation)
    return value


def _apply_json_operation(value: Any, names: list[str], operation: Object) -> Any:
    name, rest = names[0], names[1:]
    verb = operation["op"]
    if isinstance(value, list):
        items = list(value)
        if name == "-" and not rest and verb == "add":
            return [*items, operation["value"]]
        index = int(name)
        if rest:
            items[index] = _apply_json_operation(items[index], rest, operation)
        elif verb == "add":
            items.insert(index, operation["value"])
        elif index >= len(items):
            raise ValueError(f"there is no item {index}")
        elif verb == "remove":
            del items[index]
        elif verb == "replace":
            items[index] = operation["value"]
        elif items[index] != operation["value"]:
            raise ValueError(f"testing {operation['path']} failed")
        return items
    if not isinstance(value, dict) or (name not in value and (rest or verb in ("remove", "replace"))):
        raise ValueError(f"there is no {operation['path']}")
    if rest:
        return {**value, name: _apply_json_operation(value[name], rest, operation)}
    if verb == "remove":
        return {key: part for key, part in value.items() if key != name}
    if verb == "test":
        if value.get(name) != operation["value"]:
            raise ValueError(f"testing {operation['path']} failed")
        return value
    return {**value, name: operation["value"]}


def drop_nulls(value: Any) -> Any:
    """Drop fields that are null, as built-in kinds do. Return the same object if there are none."""
    if type(value) is dict:
        if any(part is None for part in value.values()):
            value = {name: part for name, part in value.items() if part is not None}
        parts = {name: drop_nulls(part) for name, part in value.items() if type(part) in (dict, list)}
        if any(part is not value[name] for name, part in parts.items()):
            return {**value, **parts}
        return value
    if type(value) is list:
        items = [drop_nulls(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


@lru_cache(maxsize=4096)
def format_timestamp(second: int) -> str:
    """Format a time in RFC 3339, as the API server does."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))


def parse_timestamp(text: str) -> int:
    """Parse a time in the same format."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def has_ended(pod: Object) -> bool:
    """Return whether all containers of the pod have ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


ObjectFilter = Callable[[Object], bool]


@lru_cache(maxsize=256)
def parse_label_selector(text: str) -> ObjectFilter:
    """Build a filter from a label selector. Raises ValueError."""
    return _match_all([_parse_label_requirement(part.strip()) for part in _split_requirements(text)])


def _split_requirements(text: str) -> list[str]:
    """Split at commas outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _parse_label_requirement(text: str) -> ObjectFilter:
    for operator, negated in ((" notin ", True), (" in ", False)):
        if operator in text:
            name, _, items = text.partition(operator)
            values = [value.strip() for value in items.strip().strip("()").split(",")]
            return _match_label(name.strip(), values, negated)
    for operator, negated in (("!=", True), ("==", False), ("=", False)):
        if operator in text:
            name, _, value = text.partition(operator)
            return _match_label(name.strip(), [value.strip()], negated)
    if text.startswith("!"):
        absent = text[1:].strip()
        return lambda body: absent not in (body["metadata"].get("labels") or {})
    return lambda body: text in (body["metadata"].get("labels") or {})


def _match_label(name: str, values: list[str], negated: bool) -> ObjectFilter:
    def matches(body: Object) -> bool:
        value = (body["metadata"].get("labels") or {}).get(name)
        return (value in values) != negated

    return matches


_FIELD_READERS: Mapping[str, Callable[[Object], Any]] = {
    "metadata.name": lambda body: body["metadata"]["name"],
    "metadata.namespace": lambda body: body["metadata"].get("namespace", ""),
    "spec.nodeName": lambda body: body["spec"].get("nodeName", ""),
    "status.phase": lambda body: body.get("status", {}).get("phase", ""),
}


@lru_cache(maxsize=256)
def parse_field_selector(text: str, plural: str) -> ObjectFilter:
    """Build a filter from a field selector. Raises ValueError for a field that the kind does not support."""
    filters = []
    for part in text.split(","):
        name, _, value = part.partition("!=" if "!=" in part else "=")
        name, value = name.strip(), value.lstrip("=").strip()
        if name not in _FIELD_READERS or (plural != "pods" and not name.startswith("metadata.")):
            raise ValueError(f"field label not supported: {name}")
        filters.append(_match_field(_FIELD_READERS[name], value, "!=" in part))
    return _match_all(filters)


def _match_field(read: Callable[[Object], Any], value: str, negated: bool) -> ObjectFilter:
    return lambda body: (read(body) == value) != negated


def _match_all(matches: list[ObjectFilter]) -> ObjectFilter:
    if len(matches) == 1:
        return matches[0]
    return lambda body: all(match(body) for match in matches)
