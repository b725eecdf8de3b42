"""Writes a dataclass as JSON values. `decoding` reads it."""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import Any


def to_record(value: Any, leave_out: Container[str] = ()) -> dict[str, Any]:
    """Return a dataclass as an object, without the fields named in `leave_out`."""
    names = (name for name in value.__dataclass_fields__ if name not in leave_out)
    return {name: _to_jsonable(getattr(value, name)) for name in names}


def _to_jsonable(value: Any) -> Any:
    """Return tuples as lists, records as objects, and enumerations as strings: what is written equals what is read."""
    if value is None or type(value) in _JSON_SCALAR_TYPES:
        return value
    if isinstance(value, (list, tuple)):
        return [_to_jsonable(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else to_record(value)


_JSON_SCALAR_TYPES = frozenset({str, int, float, bool})
