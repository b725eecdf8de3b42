"""Structural schemas of custom resources, from crds/: pruning, defaults, validation.

Unchanged parts are not validated again: they were valid before, and stay so (as in the real API server).
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

from .cel_rules import CEL_RULES, RULES_NOT_SIMULATED, CelFunction
from .errors import FieldError
from .objects import Object, copy_value

CRD_FOLDER = Path(__file__).resolve().parents[3] / "crds"

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
    transition: bool  # it compares with the previous value, and does not apply without one
    message: str
    field: str  # path below the value with the rule
    reason: str


class Schema:
    """The schema of a value and its parts."""

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
        self.rules = [
            _parse_validation(rule) for rule in body.get("x-kubernetes-validations", ()) if _is_simulated(rule)
        ]
        self.int_or_string: bool = body.get("x-kubernetes-int-or-string", False)
        self._checks = _build_checks(body)
        self._is_leaf = not (self.properties or self.values or self.items)

    def prune(self, value: Any, unknown: list[str] | None = None, path: str = "") -> Any:
        """Return `value` with defaults and without unknown fields. `unknown`: receives their paths."""
        if type(value) is dict:
            return self._prune_object(value, unknown, path)
        if type(value) is list and self.items is not None:
            items = [self.items.prune(item, unknown, f"{path}[{i}]") for i, item in enumerate(value)]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
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
        if nulls:  # null in a field that is not nullable counts as absent
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

    def find_errors(self, value: Any, previous: Any = _NO_PREVIOUS_VALUE, path: str = "") -> list[FieldError]:
        """Return why `value` cannot replace `previous`, which was valid. CEL rules are excluded."""
        if value is previous or (previous is not _NO_PREVIOUS_VALUE and value == previous):
            return []
        if self.int_or_string:
            if type(value) not in (int, str):
                return [_build_type_error(path, "integer,string", value)]
        elif self.type and (
            not isinstance(value, _PYTHON_TYPES[self.type]) or (type(value) is bool) != (self.type == "boolean")
        ):
            return [_build_type_error(path, self.type, value)]
        errors = [FieldError(path, message, reason) for check in self._checks for reason, message in check(value, path)]
        if type(value) is dict:
            return errors + self._find_nested_errors(value, previous if type(previous) is dict else {}, path)
        if type(value) is list and self.items is not None:
            errors += _find_duplicates(value, self.unique, path)
            previous_items = self._index_previous_items(previous)
            for i, item in enumerate(value):
                errors += self.items.find_errors(
                    item, previous_items.get(self._get_item_key(item, i), _NO_PREVIOUS_VALUE), f"{path}[{i}]"
                )
        return errors

    def _find_nested_errors(self, value: Object, previous: Object, path: str) -> list[FieldError]:
        errors = []
        for name in self.required:
            if name not in value:
                errors.append(FieldError(_join_path(path, name), "Required value", "FieldValueRequired"))
        for name, part in value.items():
            schema = self.properties.get(name) or self.values
            if schema is not None:
                errors += schema.find_errors(part, previous.get(name, _NO_PREVIOUS_VALUE), _join_path(path, name))
        return errors

    def find_broken_rules(self, value: Any, previous: Any = _NO_PREVIOUS_VALUE, path: str = "") -> list[FieldError]:
        """Return the broken CEL rules of a value that has no other errors."""
        if value is previous or (previous is not _NO_PREVIOUS_VALUE and value == previous):
            return []
        errors = [
            _build_rule_error(rule, path, value) for rule in self.rules if not _is_satisfied(rule, value, previous)
        ]
        if type(value) is dict:
            previous_parts = previous if type(previous) is dict else {}
            for name, part in value.items():
                schema = self.properties.get(name) or self.values
                if schema is not None:
                    errors += schema.find_broken_rules(
                        part, previous_parts.get(name, _NO_PREVIOUS_VALUE), _join_path(path, name)
                    )
        elif type(value) is list and self.items is not None:
            previous_items = self._index_previous_items(previous)
            for i, item in enumerate(value):
                errors += self.items.find_broken_rules(
                    item, previous_items.get(self._get_item_key(item, i), _NO_PREVIOUS_VALUE), f"{path}[{i}]"
                )
        return errors

    def _get_item_key(self, item: Any, index: int) -> object:
        """Return the key by which an item of a list is identified."""
        if self.unique and type(item) is dict:
            return tuple(str(item.get(name)) for name in self.unique)
        return item if self.unique is not None and type(item) is str else index

    def _index_previous_items(self, previous: Any) -> dict[object, Any]:
        return {self._get_item_key(item, i): item for i, item in enumerate(previous)} if type(previous) is list else {}


@lru_cache
def load_schema(plural: str) -> Schema:
    """Load the schema of a custom resource. Metadata is left to the API server."""
    definition = yaml.load((CRD_FOLDER / f"{plural}.yaml").read_text(), _LOADER)
    body = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    body["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return Schema(body)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _read_list_keys(body: Mapping[str, Any]) -> list[str] | None:
    """Return the keys of a keyed list; []: the items are a set; None: duplicates are allowed."""
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
    errors = []
    seen = set[str]()
    for i, item in enumerate(items):
        if keys and type(item) is not dict:
            continue  # reported by the item's own check
        key = {name: item.get(name) for name in keys} if keys else item
        serialized = json.dumps(key, sort_keys=True)
        if serialized in seen:
            errors.append(FieldError(f"{path}[{i}]", f"Duplicate value: {_format_value(key)}", "FieldValueDuplicate"))
        seen.add(serialized)
    return errors


def _parse_validation(rule: Mapping[str, Any]) -> CelValidation:
    text = " ".join(rule["rule"].split())
    reason = {"FieldValueForbidden": "FieldValueForbidden"}.get(rule.get("reason", ""), "FieldValueInvalid")
    return CelValidation(CEL_RULES[text], "oldSelf" in text, rule["message"], rule.get("fieldPath", ""), reason)


def _is_simulated(rule: Mapping[str, Any]) -> bool:
    return " ".join(rule["rule"].split()) not in RULES_NOT_SIMULATED


def _is_satisfied(rule: CelValidation, value: Any, previous: Any) -> bool:
    if rule.transition and previous is _NO_PREVIOUS_VALUE:
        return True
    return rule.holds(value, previous)


def _build_rule_error(rule: CelValidation, path: str, value: Any) -> FieldError:
    prefix = "Forbidden" if rule.reason == "FieldValueForbidden" else f"Invalid value: {_format_value(value)}".rstrip()
    return FieldError(f"{path}{rule.field}".lstrip(".") or "<nil>", f"{prefix}: {rule.message}", rule.reason)


def _build_type_error(path: str, expected: str, value: Any) -> FieldError:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    actual = kinds.get(type(value), "null")
    text = f'Invalid value: "{actual}": {path} in body must be of type {expected}: "{actual}"'
    return FieldError(path, text, "FieldValueTypeInvalid")


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "" if isinstance(value, dict | list) else str(value).lower() if isinstance(value, bool) else str(value)


ValueCheck = Callable[[Any, str], list[tuple[str, str]]]
"""Checks a value at a path. Returns reason and message of each error."""


def _build_checks(body: Mapping[str, Any]) -> list[ValueCheck]:
    """Build the checks of a single value."""
    checks: list[ValueCheck] = []
    if "enum" in body:
        checks.append(_build_enum_check(body["enum"]))
    if "minimum" in body:
        checks.append(_build_minimum_check(body["minimum"], body.get("exclusiveMinimum", False)))
    if "maximum" in body:
        checks.append(_build_maximum_check(body["maximum"]))
    for name, template in (
        ("maxLength", "should be at most {} chars long"),
        ("maxItems", "must have at most {} items"),
    ):
        if name in body:
            checks.append(_build_max_length_check(body[name], template, str if name == "maxLength" else list))
    if "maxProperties" in body:
        checks.append(_build_max_length_check(body["maxProperties"], "must have at most {} properties", dict))
    if "minItems" in body:
        checks.append(_build_min_length_check(body["minItems"]))
    if body.get("format") in _INTEGER_BOUNDS:
        checks.append(_build_integer_check(body["format"]))
    if body.get("format") == "date-time":
        checks.append(_check_date)
    return checks


def _build_enum_check(values: list[Any]) -> ValueCheck:
    supported = ", ".join(f'"{value}"' for value in values)

    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if value in values:
            return []
        return [("FieldValueNotSupported", f"Unsupported value: {_format_value(value)}: supported values: {supported}")]

    return check


def _build_minimum_check(least: float, exclusive: bool) -> ValueCheck:
    requirement = f"should be greater than {'' if exclusive else 'or equal to '}{least:g}"

    def check(value: Any, path: str) -> list[tuple[str, str]]:
        is_valid = value > least if exclusive else value >= least
        return [] if is_valid else [("FieldValueInvalid", f"Invalid value: {value}: {path} in body {requirement}")]

    return check


def _build_maximum_check(most: float) -> ValueCheck:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if value <= most:
            return []
        return [
            ("FieldValueInvalid", f"Invalid value: {value}: {path} in body should be less than or equal to {most:g}")
        ]

    return check


def _build_max_length_check(most: int, template: str, kind: type[str | list[Any] | Object]) -> ValueCheck:
    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if not isinstance(value, kind) or len(value) <= most:
            return []
        if kind is str:
            return [("FieldValueTooLong", f"Too long: may not be more than {most} bytes")]
        return [("FieldValueTooMany", f"Too many: {len(value)}: {template.format(most)}")]

    return check


def _build_min_length_check(least: int) -> ValueCheck:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if len(value) >= least:
            return []
        message = f"{path} in body should have at least {least} items"
        return [("FieldValueInvalid", f"Invalid value: {len(value)}: {message}")]

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
    quoted = f'"{value}"'
    return [("FieldValueTypeInvalid", f"Invalid value: {quoted}: {path} in body must be of type date-time: {quoted}")]
