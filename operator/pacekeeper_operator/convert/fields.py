"""The fields of a source object. A conversion takes them one by one, so that it can name those that are left."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pacekeeper_analysis.protocol.decoding import abbreviate_value

from ..api.names import Object
from .draft import ConversionRefused, Draft

Value = TypeVar("Value")

_TYPE_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
}


class SourceFields:
    """An object of the source, without the fields that were taken. `path` is where it is, for messages."""

    def __init__(self, body: object, path: str) -> None:
        self.path = path
        self._body: Object = copy.deepcopy(check_type(body, dict, path))

    def get_path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Take a field of any type; None if it is absent."""
        return self._body.pop(name, None)

    def take_object(self, name: str) -> Object:
        """Take an object; {} if it is absent."""
        return check_type(self._take_or(name, {}), dict, self.get_path(name))

    def take_list(self, name: str) -> list[Any]:
        """Take a list; [] if it is absent."""
        return check_type(self._take_or(name, []), list, self.get_path(name))

    def take_text(self, name: str) -> str:
        """Take a text; "" if it is absent."""
        return check_type(self._take_or(name, ""), str, self.get_path(name))

    def take_flag(self, name: str) -> bool:
        """Take a boolean; False if it is absent."""
        return check_type(self._take_or(name, False), bool, self.get_path(name))

    def take_number(self, name: str, minimum: int = 0) -> int | None:
        """Take a whole number; None if it is absent."""
        value = self._body.pop(name, None)
        if value is None:
            return None
        number = check_type(value, int, self.get_path(name))
        if number < minimum:
            raise ConversionRefused(f"{self.get_path(name)}: {number} must be {minimum} or more")
        return number

    def take_fields(self, name: str) -> SourceFields:
        """Take an object, whose own fields are then taken from the result."""
        return SourceFields(self._take_or(name, {}), self.get_path(name))

    def note_rest(
        self, draft: Draft, text: str = "Pacekeeper does not have this field; check whether you need it"
    ) -> None:
        """Note all fields that were not taken."""
        fields = [self.get_path(name) for name, value in self._body.items() if not is_empty(value)]
        if fields:
            draft.note_no_counterpart(text, *fields)
        self._body = {}

    def _take_or(self, name: str, default: Any) -> Any:
        value = self._body.pop(name, None)
        return default if value is None else value


def is_empty(value: object) -> bool:
    """Return whether a value says the same as an absent field."""
    return value is None or value in ({}, [])


def check_type(value: Any, expected: type[Value], path: str) -> Value:
    """Return the value.

    Raises ConversionRefused if it is of another type. A boolean is no whole number.
    """
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ConversionRefused(f"{path}: {abbreviate_value(value)} must be {_TYPE_NAMES[expected]}")
    return value
