"""Values of a family (faults, moments) from and to JSON: `kind` says which class, the other keys are its fields."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

Value = TypeVar("Value")


def to_json(value: Any) -> dict[str, Any]:
    """Fields that are as by default are left out."""
    content = {"kind": derive_kind(type(value))}
    for item in dataclasses.fields(value):
        held = getattr(value, item.name)
        if held != item.default:
            plain = not isinstance(held, Enum) or isinstance(held, str)
            content[item.name] = held if plain else held.name
    return content


def from_json(family: type[Value], content: Mapping[str, Any]) -> Value:
    """Raises ValueError where the family has no such kind, TypeError where the kind has no such field."""
    given = dict(content)
    name = given.pop("kind")
    known = find_members(family)
    if name not in known:
        raise ValueError(f"there is no {family.__name__.lower()} {name!r}; there are: {', '.join(known)}")
    cls = known[name]
    hints = typing.get_type_hints(cls)
    for key, value in given.items():
        hint = hints.get(key)
        if isinstance(hint, type) and issubclass(hint, Enum):
            given[key] = hint(value) if issubclass(hint, str) else hint[value]
    return cls(**given)


def derive_kind(cls: type[Any]) -> str:
    """`PodDeleted` → `pod-deleted`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def find_members(family: type[Value]) -> dict[str, type[Value]]:
    """All classes of a family that stand for something, by their kind."""
    found: dict[str, type[Value]] = {}
    for cls in family.__subclasses__():
        found |= find_members(cls)
        if "__abstract__" not in vars(cls):
            found[derive_kind(cls)] = cls
    return dict(sorted(found.items()))
