"""Reads a dataclass from untrusted data: each value has its field's type and is within its bounds.

The bounds are annotations of the field: `step: Annotated[int, Within(-1)]`. The sender may be broken or hostile, so
these functions raise no error other than InputError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InputError

Record = TypeVar("Record")
_Bounds = tuple[object, ...]
_Reader = Callable[[object, str], Any]
"""Reads a value, given the value and its path in the data."""


MAX_QUOTED_CHARACTERS = 60
"""Upper limit of characters of a value in a message."""


@dataclass(frozen=True)
class Within:
    """A number from `low` to `high`."""

    low: float = -(2.0**63)
    high: float = 2.0**53


@dataclass(frozen=True)
class MaxLength:
    """A name of at most `count` printable characters, or a list of at most `count` items."""

    count: int


@dataclass(frozen=True)
class Truncated:
    """Text for people.

    Text over `count` characters is cut off at the front, because the end is the most informative.
    """

    count: int


@dataclass(frozen=True)
class OneOf:
    """One of these strings."""

    values: frozenset[str]


def read_dataclass(cls: type[Record], data: object, path: str = "") -> Record:
    """Read a `cls` from `data`. Raises InputError, which names the field.

    `path` is the position of `data` in the message, for errors: `windows[3]`. "" means the whole message. Fields that
    `cls` does not have are ignored, so that versions may differ.
    """
    path = path or cls.__name__
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be an object, not {abbreviate_value(data)}")
    readers = _build_readers(cls)  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
    missing = [name for name in _list_required_fields(cls) if name not in data]  # type: ignore[arg-type]  # as above
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} must be given")
    return cls(**{name: reader(data[name], f"{path}.{name}") for name, reader in readers.items() if name in data})


def parse_json(text: str | bytes, name: str = "this", *, finite: bool = False) -> Any:
    """Parse JSON in UTF-8. Raises InputError.

    The error means that the text is not JSON, is nested too deeply, or has a number of thousands of digits. `name`
    names the data in errors. With `finite`, NaN and infinities are rejected: Python writes them, but JSON has none.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, parse_constant=_reject_constant if finite else None)
    except RecursionError as error:
        raise InputError(f"{name}: is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{name}: is not JSON: {str(error)[:80]}") from error


def read_tuple(
    read_item: Callable[[object, str], Record], data: object, path: str, max_items: int = 2**31
) -> tuple[Record, ...]:
    """Read a list, each item with `read_item`. Raises InputError."""
    if not isinstance(data, (list, tuple)):
        raise InputError(f"{path}: must be a list, not {abbreviate_value(data)}")
    if len(data) > max_items:
        raise InputError(f"{path}: {len(data)} items are more than the limit of {max_items}")
    return tuple(read_item(element, f"{path}[{position}]") for position, element in enumerate(data))


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


@cache
def _build_readers(cls: type[Any]) -> dict[str, _Reader]:
    """Return a reader for each field by name, so that the types are inspected once per class."""
    return {name: _build_reader(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


@cache
def _list_required_fields(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING)


def _build_reader(hint: Any, bounds: _Bounds = ()) -> _Reader:
    """Return a reader of values of this type. The reader raises InputError."""
    if get_origin(hint) is Annotated:
        inner, *extra = get_args(hint)
        return _build_reader(inner, (*bounds, *extra))
    if get_origin(hint) in (Union, UnionType):  # a value, or null
        (reader,) = (_build_reader(option, bounds) for option in get_args(hint) if option is not NoneType)
        return lambda value, path: None if value is None else reader(value, path)
    if get_origin(hint) is tuple:
        max_items = next((bound.count for bound in bounds if isinstance(bound, MaxLength)), 0)
        read_item = _build_reader(get_args(hint)[0])
        return lambda value, path: read_tuple(read_item, value, path, max_items)
    if get_origin(hint) is dict:
        read_value = _build_reader(get_args(hint)[1])
        return lambda value, path: _read_mapping(read_value, value, path)
    if is_dataclass(hint):
        return lambda value, path: read_dataclass(hint, value, path)  # type: ignore[arg-type]  # it is a class: hints are
    if issubclass(hint, StrEnum):
        choices = frozenset(hint)
        return lambda value, path: hint(_read_choice(value, path, choices))
    if issubclass(hint, IntEnum):
        numbers = frozenset(hint)
        return lambda value, path: hint(_read_enum_number(value, path, numbers))
    if hint is bool:
        return _read_bool
    if hint is str:
        return lambda value, path: _read_text(value, path, bounds)
    limits = next((bound for bound in bounds if isinstance(bound, Within)), Within())
    read_number = {int: _read_int, float: _read_float}[hint]
    return lambda value, path: read_number(value, path, limits)


def _read_mapping(read_value: _Reader, data: object, path: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be an object, not {abbreviate_value(data)}")
    return {key: read_value(value, f"{path}.{abbreviate_value(key)}") for key, value in data.items()}


def _read_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be true or false")
    return value


def _read_int(value: object, path: str, limits: Within) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a whole number")
    _check_range(value, path, limits)
    return value


def _read_float(value: object, path: str, limits: Within) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a number")
    _check_range(value, path, limits)
    return float(value)


def _check_range(value: float, path: str, limits: Within) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{path}: {value} must be finite")
    if not limits.low <= value <= limits.high:
        raise InputError(f"{path}: {abbreviate_value(value)} must be from {limits.low:g} to {limits.high:g}")


def _read_text(value: object, path: str, bounds: _Bounds) -> str:
    if not isinstance(value, str):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a string")
    for bound in bounds:
        match bound:
            case OneOf():
                return _read_choice(value, path, bound.values)
            case Truncated():
                return value[-bound.count :].encode(errors="replace").decode()  # half a surrogate pair is not text
            case MaxLength() if len(value) > bound.count or not (value.isprintable() and _is_encodable(value)):
                raise InputError(
                    f"{path}: must be {bound.count} printable characters at most, not {abbreviate_value(value)}"
                )
    return value


def _read_enum_number(value: object, path: str, numbers: frozenset[int]) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in numbers:
        raise InputError(f"{path}: {abbreviate_value(value)} is not one of {', '.join(map(str, sorted(numbers)))}")
    return value


def _is_encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_choice(value: object, path: str, choices: frozenset[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(sorted(choice or '""' for choice in choices))
        raise InputError(
            f"{path}: {abbreviate_value(value)} is not one of {allowed}; do sidecar and operator have the same version?"
        )
    return str(value)


def abbreviate_value(value: object) -> str:
    """Return a short form of any value for messages. Some integers are too long to print."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        return f"this {type(value).__name__}"
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[: MAX_QUOTED_CHARACTERS - 3]}…"
