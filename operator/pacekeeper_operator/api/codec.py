"""Conversion between frozen dataclasses and the JSON of custom resources: snake_case here, camelCase there.

Nested dataclasses, tuples of them, and enums are converted by the annotations of the fields. Other conversions
(durations, times) come from a table of converters by field name, which holds on all levels.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from typing import Any, TypeVar

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, abbreviate_value

Converters = Mapping[str, Callable[[Any], Any]]
Record = TypeVar("Record")
_SCALAR_TYPES = frozenset({str, int, float, bool})
_Writer = Callable[[Any, Converters], dict[str, Any]]


def from_json(cls: type[Record], data: Mapping[str, Any], path: str, converters: Converters) -> Record:
    """Build a `cls` from `data`. Absent and null fields take their default.

    `path` is where `data` stands, for messages, like `spec.checkpoint`. Raises InputError that names the field.
    """
    field_hints = list_field_hints(cls)  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
    values: dict[str, Any] = {}
    for name, key, hint in field_hints:
        value = data.get(key)
        if value is not None:
            values[name] = _read_value(hint, value, f"{path}.{key}", converters, converters.get(name))
    for name, limit in _map_item_limits(cls).items():  # type: ignore[arg-type]  # as above
        if len(values.get(name, ())) > limit:
            raise InputError(f"{path}.{camel_case(name)}: has more than {limit} items")
    try:
        return cls(**values)
    except TypeError as error:
        missing = [camel_case(name) for name in _list_required_fields(cls) if name not in values]
        raise InputError(f"{path}: {', '.join(missing)} must be given") from error


def to_json(record: Any, converters: Converters) -> dict[str, Any]:
    """Return the JSON object of a dataclass, without the fields that are None."""
    return {key: value for key, value in _iterate_fields(record, converters, to_json) if value is not None}


def to_patch(record: Any, converters: Converters) -> dict[str, Any]:
    """Return a merge patch: a field that is None is null, which removes it.

    Lists are replaced as a whole, without nulls.
    """
    return dict(_iterate_fields(record, converters, to_patch))


@cache
def camel_case(name: str) -> str:
    """Convert a field's name: `class_` → `class`, `node_uid` → `nodeUID`, `job_ref` → `jobRef`."""
    first, *rest = name.rstrip("_").split("_")
    return first + "".join("UID" if word == "uid" else word.capitalize() for word in rest)


@cache
def list_field_hints(cls: type[Any]) -> tuple[tuple[str, str, Any], ...]:
    """Return (field, key, annotation) of each field."""
    return tuple((name, camel_case(name), hint) for name, hint in typing.get_type_hints(cls).items())


@cache
def _map_item_limits(cls: type[Any]) -> Mapping[str, int]:
    """Return the maximum number of items of each list that has one (`MaxLength`), as in the messages of workers."""
    return {
        name: bound.count
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        if typing.get_origin(hint) is typing.Annotated and typing.get_origin(hint.__origin__) is tuple
        for bound in hint.__metadata__
        if isinstance(bound, MaxLength)
    }


class _Shape(Enum):
    """The shape of the values of an annotation."""

    TUPLE = auto()
    MAPPING = auto()
    RECORD = auto()
    ENUM = auto()
    OTHER = auto()


@cache
def _classify_hint(hint: Any) -> tuple[_Shape, Any]:
    """Return the shape of an annotation, and the annotation itself, or that of the items of a tuple or a mapping."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return _Shape.TUPLE, typing.get_args(hint)[0]
    if typing.get_origin(hint) is Mapping:
        return _Shape.MAPPING, typing.get_args(hint)[1]
    if is_dataclass(hint):
        return _Shape.RECORD, hint
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Shape.ENUM, hint
    return _Shape.OTHER, hint


def _list_required_fields(cls: type[Any]) -> list[str]:
    """Return the names of the fields that have no default."""
    return [item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING]


def _read_value(hint: Any, value: Any, path: str, converters: Converters, convert: Callable[[Any], Any] | None) -> Any:
    if convert is not None:
        try:
            return convert(value)
        except (InputError, TypeError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error
    shape, hint = _classify_hint(hint)
    if shape is _Shape.TUPLE:
        if not isinstance(value, list):
            raise InputError(f"{path}: must be a list, not {abbreviate_value(value)}")
        return tuple(_read_value(hint, element, f"{path}[{i}]", converters, None) for i, element in enumerate(value))
    if shape is _Shape.MAPPING:
        if not isinstance(value, Mapping):
            raise InputError(f"{path}: must be an object, not {abbreviate_value(value)}")
        return {
            key: _read_value(hint, item, f"{path}.{abbreviate_value(key)}", converters, None)
            for key, item in value.items()
        }
    if shape is _Shape.RECORD:
        if not isinstance(value, Mapping):
            raise InputError(f"{path}: must be an object, not {abbreviate_value(value)}")
        return from_json(hint, value, path, converters)
    if shape is _Shape.ENUM:
        try:
            return hint(value)
        except ValueError as error:
            raise InputError(f"{path}: {abbreviate_value(value)} is not one of {', '.join(hint)}") from error
    if hint is float and type(value) is int:
        return float(value)
    if hint in _SCALAR_TYPES and type(value) is not hint:
        raise InputError(f"{path}: {abbreviate_value(value)} must be of type {hint.__name__}")
    return value


def _iterate_fields(record: Any, converters: Converters, write_nested: _Writer) -> Iterator[tuple[str, Any]]:
    for name in _list_field_names(type(record)):  # type: ignore[arg-type]  # as above
        value = getattr(record, name)
        yield (
            camel_case(name),
            None if value is None else _write_value(value, converters, converters.get(name), write_nested),
        )


@cache
def _list_field_names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))


def _write_value(
    value: Any, converters: Converters, convert: Callable[[Any], Any] | None, write_nested: _Writer
) -> Any:
    if convert is not None:
        return convert(value)
    if type(value) in _SCALAR_TYPES:
        return value
    if isinstance(value, tuple):
        return [_write_value(item, converters, None, to_json) for item in value]
    if is_dataclass(value):
        return write_nested(value, converters)
    return str(value) if isinstance(value, StrEnum) else value
