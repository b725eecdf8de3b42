"""JSON of the values of a class family (faults, triggers): `kind` names the class, the other keys are its fields."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

Value = TypeVar("Value")


def to_json(value: Any) -> dict[str, Any]:
    """Convert a value. Fields with default values are omitted."""
    content = {"kind": derive_kind(type(value))}
    for item in dataclasses.fields(value):
        field_value = getattr(value, item.name)
        if field_value != item.default:
            is_plain = not isinstance(field_value, Enum) or isinstance(field_value, str)
            content[item.name] = field_value if is_plain else field_value.name
    return content


def from_json(family: type[Value], content: Mapping[str, Any]) -> Value:
    """Parse a value. Raises ValueError for an unknown kind, TypeError for an unknown field."""
    arguments = dict(content)
    name = arguments.pop("kind")
    classes = find_members(family)
    if name not in classes:
        raise ValueError(f"there is no {family.__name__.lower()} {name!r}; there are: {', '.join(classes)}")
    cls = classes[name]
    hints = typing.get_type_hints(cls)
    for key, value in arguments.items():
        hint = hints.get(key)
        if isinstance(hint, type) and issubclass(hint, Enum):
            arguments[key] = hint(value) if issubclass(hint, str) else hint[value]
    return cls(**arguments)


def derive_kind(cls: type[Any]) -> str:
    """Derive a kind: `PodDeleted` → `pod-deleted`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def find_members(family: type[Value]) -> dict[str, type[Value]]:
    """Return all concrete classes of a family, by their kind."""
    members: dict[str, type[Value]] = {}
    for cls in family.__subclasses__():
        members |= find_members(cls)
        if "__abstract__" not in vars(cls):
            members[derive_kind(cls)] = cls
    return dict(sorted(members.items()))
