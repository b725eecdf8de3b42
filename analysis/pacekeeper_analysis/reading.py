"""Reads a dataclass from what somebody else has sent: every value has its field's type and keeps within its bounds.

The bounds stand at the field, as annotations: `step: Annotated[int, Within(-1)]`. Whoever sent it may be broken or
hostile, so nothing but InputError comes out of here.
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

from .errors import InputError

Record = TypeVar("Record")
_Bounds = tuple[object, ...]
_Reader = Callable[[object, str], Any]
"""From a value, and where it stands."""


@dataclass(frozen=True)
class Within:
    """A number from `low` to `high`."""

    low: float = -(2.0**63)
    high: float = 2.0**53


@dataclass(frozen=True)
class MaxLength:
    """A name of so many characters at most, all of them printable; or a list of so many items."""

    count: int


@dataclass(frozen=True)
class Truncated:
    """Words for people: more than `count` characters are cut off at the front, since the end says most."""

    count: int


@dataclass(frozen=True)
class OneOf:
    """One of these words."""

    words: frozenset[str]


def read_dataclass(cls: type[Record], data: object, path: str = "") -> Record:
    """`path` is where `data` stands in what was sent, for messages: `windows[3]`; "": it is all of it.

    Fields that `cls` does not know are left out, so that versions may differ. Raises InputError that names the field.
    """
    path = path or cls.__name__
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be an object, not {abbreviate_value(data)}")
    readers = _build_readers(cls)  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
    missing = [name for name in _list_required_fields(cls) if name not in data]  # type: ignore[arg-type]  # as above
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} must be given")
    return cls(**{name: reader(data[name], f"{path}.{name}") for name, reader in readers.items() if name in data})


def parse_json(text: str | bytes, what: str = "this", *, finite: bool = False) -> Any:
    """What JSON says in UTF-8. `what` it is, for messages. `finite`: NaN and infinities, which Python writes and JSON
    does not have, are refused.

    Raises InputError where it is none, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        words = text.decode() if isinstance(text, bytes) else text
        return json.loads(words, parse_constant=_reject_constant if finite else None)
    except RecursionError as error:
        raise InputError(f"{what}: is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{what}: is not JSON: {str(error)[:80]}") from error


def read_tuple(
    item: Callable[[object, str], Record], data: object, path: str, longest: int = 2**31
) -> tuple[Record, ...]:
    """A list, each of whose items `item` reads. Raises InputError."""
    if not isinstance(data, (list, tuple)):
        raise InputError(f"{path}: must be a list, not {abbreviate_value(data)}")
    if len(data) > longest:
        raise InputError(f"{path}: {len(data)} items are more than the {longest} that are taken")
    return tuple(item(element, f"{path}[{position}]") for position, element in enumerate(data))


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


@cache
def _build_readers(cls: type[Any]) -> dict[str, _Reader]:
    """Of its fields, by name: what their types ask for is looked up once."""
    return {name: _build_reader(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


@cache
def _list_required_fields(cls: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING)


def _build_reader(hint: Any, bounds: _Bounds = ()) -> _Reader:
    """Of values of this type; it raises InputError."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return _build_reader(inner, (*bounds, *more))
    if get_origin(hint) in (Union, UnionType):  # a value, or null
        (given,) = (_build_reader(each, bounds) for each in get_args(hint) if each is not NoneType)
        return lambda value, path: None if value is None else given(value, path)
    if get_origin(hint) is tuple:
        longest = next((bound.count for bound in bounds if isinstance(bound, MaxLength)), 0)
        item = _build_reader(get_args(hint)[0])
        return lambda value, path: read_tuple(item, value, path, longest)
    if get_origin(hint) is dict:
        value_of = _build_reader(get_args(hint)[1])
        return lambda value, path: _read_mapping(value_of, value, path)
    if is_dataclass(hint):
        return lambda value, path: read_dataclass(hint, value, path)  # type: ignore[arg-type]  # it is a class: hints are
    if issubclass(hint, StrEnum):
        words = frozenset(hint)
        return lambda value, path: hint(_read_choice(value, path, words))
    if issubclass(hint, IntEnum):
        numbers = frozenset(hint)
        return lambda value, path: hint(_read_enum_number(value, path, numbers))
    if hint is bool:
        return _read_bool
    if hint is str:
        return lambda value, path: _read_text(value, path, bounds)
    within = next((bound for bound in bounds if isinstance(bound, Within)), Within())
    number = {int: _read_int, float: _read_float}[hint]
    return lambda value, path: number(value, path, within)


def _read_mapping(item: _Reader, data: object, path: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be an object, not {abbreviate_value(data)}")
    return {key: item(value, f"{path}.{abbreviate_value(key)}") for key, value in data.items()}


def _read_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be true or false")
    return value


def _read_int(value: object, path: str, within: Within) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a whole number")
    _check_range(value, path, within)
    return value


def _read_float(value: object, path: str, within: Within) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a number")
    _check_range(value, path, within)
    return float(value)


def _check_range(value: float, path: str, within: Within) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{path}: {value} must be finite")
    if not within.low <= value <= within.high:
        raise InputError(f"{path}: {abbreviate_value(value)} must be from {within.low:g} to {within.high:g}")


def _read_text(value: object, path: str, bounds: _Bounds) -> str:
    if not isinstance(value, str):
        raise InputError(f"{path}: {abbreviate_value(value)} must be a string")
    for bound in bounds:
        match bound:
            case OneOf():
                return _read_choice(value, path, bound.words)
            case Truncated():
                return value[-bound.count :].encode(errors="replace").decode()  # half a surrogate pair is no text
            case MaxLength() if len(value) > bound.count or not (value.isprintable() and _is_encodable(value)):
                raise InputError(f"{path}: must be {bound.count} printable characters at most, not {abbreviate_value(value)}")
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


def _read_choice(value: object, path: str, words: frozenset[str]) -> str:
    if not isinstance(value, str) or value not in words:
        known = ", ".join(sorted(word or '""' for word in words))
        raise InputError(
            f"{path}: {abbreviate_value(value)} is not one of {known}; do sidecar and operator have the same version?"
        )
    return str(value)


def abbreviate_value(value: object) -> str:
    """For messages, whatever it is: some integers are too long to be written down."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        return f"this {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"
