"""Structural schemas of custom resources, from crds/: pruning, defaults, validation.

Parts that are the same as before are not looked at again: they were valid once, and stay (as with the real one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from .errors import FieldError
from .objects import Object, copy_value
from .rules import RULES_NOT_SIMULATED, CEL_RULES, CelFunction

CRD_FOLDER = Path(__file__).resolve().parent.parent.parent / "crds"

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_INTEGER_BOUNDS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_NO_PREVIOUS_VALUE = object()


@dataclass(frozen=True)
class CelValidation:
    """A CEL rule of a schema."""

    holds: CelFunction
    transition: bool  # it compares with what was before, and says nothing where there was nothing
    message: str
    field: str  # below the value that it stands at
    reason: str


class Schema:
    """Of one value and what is in it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.type: str = body.get("type", "")
        self.properties = {name: Schema(part) for name, part in body.get("properties", {}).items()}
        self.items = Schema(body["items"]) if "items" in body else None
        values = body.get("additionalProperties")
        self.values = Schema(values) if isinstance(values, dict) else None
        self.required: list[str] = body.get("required", [])
        self.keeps_unknown: bool = body.get("x-kubernetes-preserve-unknown-fields", False)
        self.default = body.get("default", _NO_PREVIOUS_VALUE)
        self.defaults = [name for name, part in self.properties.items() if part.default is not _NO_PREVIOUS_VALUE]
        self.unique: list[str] | None = _read_list_keys(body)
        self.rules = [_parse_validation(rule) for rule in body.get("x-kubernetes-validations", ()) if _is_simulated(rule)]
        self.int_or_string: bool = body.get("x-kubernetes-int-or-string", False)
        self._checks = _build_checks(body)
        self._is_leaf = not (self.properties or self.values or self.items)

    def prune(self, value: Any, unknown: list[str] | None = None, path: str = "") -> Any:
        """`value` with the defaults and without what the schema does not know. `unknown`: gets the paths of that."""
        if type(value) is dict:
            return self._prune_object(value, unknown, path)
        if type(value) is list and self.items is not None:
            items = [self.items.prune(item, unknown, f"{path}[{i}]") for i, item in enumerate(value)]
            return value if all(one is other for one, other in zip(items, value, strict=True)) else items
        return value

    def _prune_object(self, value: Object, unknown: list[str] | None, path: str) -> Object:
        if self._is_leaf:
            if self.keeps_unknown or self.int_or_string or not value:
                return value
            return self._drop_unknown(value, list(value), unknown, path)
        result = value
        for name, part in value.items():
            schema = self.properties.get(name) or self.values
            if schema is None:
                continue
            new = None if part is None else schema.prune(part, unknown, f"{path}.{name}" if path else name)
            if new is not part:
                result = dict(value) if result is value else result
                result[name] = new
        nulls = [name for name, part in result.items() if part is None and name in self.properties]
        if nulls:  # a field that may not be null is as if it were not there
            result = {name: part for name, part in result.items() if name not in nulls}
        if not self.keeps_unknown and self.values is None:
            result = self._drop_unknown(result, [name for name in result if name not in self.properties], unknown, path)
        for name in self.defaults:
            if name not in result:
                result = dict(result) if result is value else result
                schema = self.properties[name]
                result[name] = schema.prune(copy_value(schema.default))
        return result

    def _drop_unknown(self, value: Object, names: list[str], unknown: list[str] | None, path: str) -> Object:
        if not names:
            return value
        if unknown is not None:
            unknown.extend(f"{path}.{name}" if path else name for name in names)
        return {name: part for name, part in value.items() if name not in names}

    def find_errors(self, value: Any, before: Any = _NO_PREVIOUS_VALUE, path: str = "") -> list[FieldError]:
        """Why the API server would refuse `value` in the place of `before`, which was valid; rules aside."""
        if value is before or (before is not _NO_PREVIOUS_VALUE and value == before):
            return []
        if self.int_or_string:
            if type(value) not in (int, str):
                return [_build_type_error(path, "integer,string", value)]
        elif self.type and (
            not isinstance(value, _PYTHON_TYPES[self.type]) or (type(value) is bool) != (self.type == "boolean")
        ):
            return [_build_type_error(path, self.type, value)]
        found = [FieldError(path, words, reason) for check in self._checks for reason, words in check(value, path)]
        if type(value) is dict:
            return found + self._find_nested_errors(value, before if type(before) is dict else {}, path)
        if type(value) is list and self.items is not None:
            found += _find_duplicates(value, self.unique, path)
            old = self._index_previous_items(before)
            for i, item in enumerate(value):
                found += self.items.find_errors(item, old.get(self._get_item_key(item, i), _NO_PREVIOUS_VALUE), f"{path}[{i}]")
        return found

    def _find_nested_errors(self, value: Object, before: Object, path: str) -> list[FieldError]:
        found = []
        for name in self.required:
            if name not in value:
                found.append(FieldError(_join_path(path, name), "Required value", "FieldValueRequired"))
        for name, part in value.items():
            schema = self.properties.get(name) or self.values
            if schema is not None:
                found += schema.find_errors(part, before.get(name, _NO_PREVIOUS_VALUE), _join_path(path, name))
        return found

    def find_broken_rules(self, value: Any, before: Any = _NO_PREVIOUS_VALUE, path: str = "") -> list[FieldError]:
        """The same of the rules, for a value without other faults."""
        if value is before or (before is not _NO_PREVIOUS_VALUE and value == before):
            return []
        found = [_build_rule_error(rule, path, value) for rule in self.rules if not _is_satisfied(rule, value, before)]
        if type(value) is dict:
            old = before if type(before) is dict else {}
            for name, part in value.items():
                schema = self.properties.get(name) or self.values
                if schema is not None:
                    found += schema.find_broken_rules(part, old.get(name, _NO_PREVIOUS_VALUE), _join_path(path, name))
        elif type(value) is list and self.items is not None:
            items = self._index_previous_items(before)
            for i, item in enumerate(value):
                found += self.items.find_broken_rules(item, items.get(self._get_item_key(item, i), _NO_PREVIOUS_VALUE), f"{path}[{i}]")
        return found

    def _get_item_key(self, item: Any, place: int) -> object:
        """By what an item of a list is known again."""
        if self.unique and type(item) is dict:
            return tuple(str(item.get(name)) for name in self.unique)
        return item if self.unique is not None and type(item) is str else place

    def _index_previous_items(self, before: Any) -> dict[object, Any]:
        return {self._get_item_key(item, i): item for i, item in enumerate(before)} if type(before) is list else {}


@lru_cache
def load_schema(plural: str) -> Schema:
    """Of a custom resource. Its metadata are the API server's own business."""
    definition = yaml.load((CRD_FOLDER / f"{plural}.yaml").read_text(), _LOADER)
    body = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    body["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return Schema(body)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _read_list_keys(body: Mapping[str, Any]) -> list[str] | None:
    """Keys of a list whose items are known by them; none of them: the item itself; None: it may have doubles."""
    match body.get("x-kubernetes-list-type"):
        case "map":
            keys: list[str] = body["x-kubernetes-list-map-keys"]
            return keys
        case "set":
            return []
    return None


def _find_duplicates(items: list[Any], keys: list[str] | None, path: str) -> list[FieldError]:
    if keys is None:
        return []
    found = []
    seen = set[str]()
    for i, item in enumerate(items):
        if keys and type(item) is not dict:
            continue  # which is said where it is looked at
        key = {name: item.get(name) for name in keys} if keys else item
        known = json.dumps(key, sort_keys=True)
        if known in seen:
            found.append(FieldError(f"{path}[{i}]", f"Duplicate value: {_format_value(key)}", "FieldValueDuplicate"))
        seen.add(known)
    return found


def _parse_validation(rule: Mapping[str, Any]) -> CelValidation:
    text = " ".join(rule["rule"].split())
    reason = {"FieldValueForbidden": "FieldValueForbidden"}.get(rule.get("reason", ""), "FieldValueInvalid")
    return CelValidation(CEL_RULES[text], "oldSelf" in text, rule["message"], rule.get("fieldPath", ""), reason)


def _is_simulated(rule: Mapping[str, Any]) -> bool:
    return " ".join(rule["rule"].split()) not in RULES_NOT_SIMULATED


def _is_satisfied(rule: CelValidation, value: Any, before: Any) -> bool:
    if rule.transition and before is _NO_PREVIOUS_VALUE:
        return True
    return rule.holds(value, before)


def _build_rule_error(rule: CelValidation, path: str, value: Any) -> FieldError:
    words = "Forbidden" if rule.reason == "FieldValueForbidden" else f"Invalid value: {_format_value(value)}".rstrip()
    return FieldError(f"{path}{rule.field}".lstrip(".") or "<nil>", f"{words}: {rule.message}", rule.reason)


def _build_type_error(path: str, wanted: str, value: Any) -> FieldError:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    found = kinds.get(type(value), "null")
    text = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
    return FieldError(path, text, "FieldValueTypeInvalid")


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "" if isinstance(value, dict | list) else str(value).lower() if isinstance(value, bool) else str(value)


ValueCheck = Callable[[Any, str], list[tuple[str, str]]]
"""Of a value at a path: the reason and the words of what is wrong."""


def _build_checks(body: Mapping[str, Any]) -> list[ValueCheck]:
    """Those of `body` that concern one value alone."""
    found: list[ValueCheck] = []
    if "enum" in body:
        found.append(_build_enum_check(body["enum"]))
    if "minimum" in body:
        found.append(_build_minimum_check(body["minimum"], body.get("exclusiveMinimum", False)))
    if "maximum" in body:
        found.append(_build_maximum_check(body["maximum"]))
    for name, words in (("maxLength", "should be at most {} chars long"), ("maxItems", "must have at most {} items")):
        if name in body:
            found.append(_build_max_length_check(body[name], words, str if name == "maxLength" else list))
    if "maxProperties" in body:
        found.append(_build_max_length_check(body["maxProperties"], "must have at most {} properties", dict))
    if "minItems" in body:
        found.append(_build_min_length_check(body["minItems"]))
    if body.get("format") in _INTEGER_BOUNDS:
        found.append(_build_integer_check(body["format"]))
    if body.get("format") == "date-time":
        found.append(_check_date)
    return found


def _build_enum_check(values: list[Any]) -> ValueCheck:
    listed = ", ".join(f'"{value}"' for value in values)

    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if value in values:
            return []
        return [("FieldValueNotSupported", f"Unsupported value: {_format_value(value)}: supported values: {listed}")]

    return check


def _build_minimum_check(least: float, exclusive: bool) -> ValueCheck:
    words = f"should be greater than {'' if exclusive else 'or equal to '}{least:g}"

    def check(value: Any, path: str) -> list[tuple[str, str]]:
        good = value > least if exclusive else value >= least
        return [] if good else [("FieldValueInvalid", f"Invalid value: {value}: {path} in body {words}")]

    return check


def _build_maximum_check(most: float) -> ValueCheck:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if value <= most:
            return []
        return [
            ("FieldValueInvalid", f"Invalid value: {value}: {path} in body should be less than or equal to {most:g}")
        ]

    return check


def _build_max_length_check(most: int, words: str, of: type[str | list[Any] | Object]) -> ValueCheck:
    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if not isinstance(value, of) or len(value) <= most:
            return []
        if of is str:
            return [("FieldValueTooLong", f"Too long: may not be more than {most} bytes")]
        return [("FieldValueTooMany", f"Too many: {len(value)}: {words.format(most)}")]

    return check


def _build_min_length_check(least: int) -> ValueCheck:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if len(value) >= least:
            return []
        words = f"{path} in body should have at least {least} items"
        return [("FieldValueInvalid", f"Invalid value: {len(value)}: {words}")]

    return check


def _build_integer_check(name: str) -> ValueCheck:
    least, most = _INTEGER_BOUNDS[name]

    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if least <= value <= most:
            return []
        return [("FieldValueInvalid", f"Invalid value: {value}: {path} in body must be of type {name}")]

    return check


_DATE_PATTERN = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


@lru_cache(maxsize=4096)
def _is_date(text: str) -> bool:
    if not _DATE_PATTERN.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text[:19])
    except ValueError:
        return False
    return True


def _check_date(value: Any, path: str) -> list[tuple[str, str]]:
    if _is_date(value):
        return []
    shown = f'"{value}"'
    return [("FieldValueTypeInvalid", f"Invalid value: {shown}: {path} in body must be of type date-time: {shown}")]
