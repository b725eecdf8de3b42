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

from .errors import Cause
from .objects import Object, copied
from .rules import NOT_SIMULATED, RULES, Rule

CRDS = Path(__file__).resolve().parent.parent.parent / "crds"

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_BOUNDS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_MISSING = object()


@dataclass(frozen=True)
class Validation:
    """A CEL rule of a schema."""

    holds: Rule
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
        self.default = body.get("default", _MISSING)
        self.defaults = [name for name, part in self.properties.items() if part.default is not _MISSING]
        self.unique: list[str] | None = _unique(body)
        self.rules = [_validation(rule) for rule in body.get("x-kubernetes-validations", ()) if _simulated(rule)]
        self.int_or_string: bool = body.get("x-kubernetes-int-or-string", False)
        self._checks = _checks(body)
        self._plain = not (self.properties or self.values or self.items)

    def pruned(self, value: Any, unknown: list[str] | None = None, path: str = "") -> Any:
        """`value` with the defaults and without what the schema does not know. `unknown`: gets the paths of that."""
        if type(value) is dict:
            return self._pruned_object(value, unknown, path)
        if type(value) is list and self.items is not None:
            items = [self.items.pruned(item, unknown, f"{path}[{i}]") for i, item in enumerate(value)]
            return value if all(one is other for one, other in zip(items, value, strict=True)) else items
        return value

    def _pruned_object(self, value: Object, unknown: list[str] | None, path: str) -> Object:
        if self._plain:
            if self.keeps_unknown or self.int_or_string or not value:
                return value
            return self._without(value, list(value), unknown, path)
        result = value
        for name, part in value.items():
            schema = self.properties.get(name) or self.values
            if schema is None:
                continue
            new = None if part is None else schema.pruned(part, unknown, f"{path}.{name}" if path else name)
            if new is not part:
                result = dict(value) if result is value else result
                result[name] = new
        nulls = [name for name, part in result.items() if part is None and name in self.properties]
        if nulls:  # a field that may not be null is as if it were not there
            result = {name: part for name, part in result.items() if name not in nulls}
        if not self.keeps_unknown and self.values is None:
            result = self._without(result, [name for name in result if name not in self.properties], unknown, path)
        for name in self.defaults:
            if name not in result:
                result = dict(result) if result is value else result
                schema = self.properties[name]
                result[name] = schema.pruned(copied(schema.default))
        return result

    def _without(self, value: Object, names: list[str], unknown: list[str] | None, path: str) -> Object:
        if not names:
            return value
        if unknown is not None:
            unknown.extend(f"{path}.{name}" if path else name for name in names)
        return {name: part for name, part in value.items() if name not in names}

    def causes(self, value: Any, before: Any = _MISSING, path: str = "") -> list[Cause]:
        """Why the API server would refuse `value` in the place of `before`, which was valid; rules aside."""
        if value is before or (before is not _MISSING and value == before):
            return []
        if self.int_or_string:
            if type(value) not in (int, str):
                return [_wrong_type(path, "integer,string", value)]
        elif self.type and (
            not isinstance(value, _TYPES[self.type]) or (type(value) is bool) != (self.type == "boolean")
        ):
            return [_wrong_type(path, self.type, value)]
        found = [Cause(path, words, reason) for check in self._checks for reason, words in check(value, path)]
        if type(value) is dict:
            return found + self._causes_inside(value, before if type(before) is dict else {}, path)
        if type(value) is list and self.items is not None:
            found += _duplicates(value, self.unique, path)
            old = self._items_before(before)
            for i, item in enumerate(value):
                found += self.items.causes(item, old.get(self._key(item, i), _MISSING), f"{path}[{i}]")
        return found

    def _causes_inside(self, value: Object, before: Object, path: str) -> list[Cause]:
        found = []
        for name in self.required:
            if name not in value:
                found.append(Cause(_at(path, name), "Required value", "FieldValueRequired"))
        for name, part in value.items():
            schema = self.properties.get(name) or self.values
            if schema is not None:
                found += schema.causes(part, before.get(name, _MISSING), _at(path, name))
        return found

    def broken_rules(self, value: Any, before: Any = _MISSING, path: str = "") -> list[Cause]:
        """The same of the rules, for a value without other faults."""
        if value is before or (before is not _MISSING and value == before):
            return []
        found = [_broken(rule, path, value) for rule in self.rules if not _holds(rule, value, before)]
        if type(value) is dict:
            old = before if type(before) is dict else {}
            for name, part in value.items():
                schema = self.properties.get(name) or self.values
                if schema is not None:
                    found += schema.broken_rules(part, old.get(name, _MISSING), _at(path, name))
        elif type(value) is list and self.items is not None:
            items = self._items_before(before)
            for i, item in enumerate(value):
                found += self.items.broken_rules(item, items.get(self._key(item, i), _MISSING), f"{path}[{i}]")
        return found

    def _key(self, item: Any, place: int) -> object:
        """By what an item of a list is known again."""
        if self.unique and type(item) is dict:
            return tuple(str(item.get(name)) for name in self.unique)
        return item if self.unique is not None and type(item) is str else place

    def _items_before(self, before: Any) -> dict[object, Any]:
        return {self._key(item, i): item for i, item in enumerate(before)} if type(before) is list else {}


@lru_cache
def schema(plural: str) -> Schema:
    """Of a custom resource. Its metadata are the API server's own business."""
    definition = yaml.load((CRDS / f"{plural}.yaml").read_text(), _LOADER)
    body = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    body["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return Schema(body)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unique(body: Mapping[str, Any]) -> list[str] | None:
    """Keys of a list whose items are known by them; none of them: the item itself; None: it may have doubles."""
    match body.get("x-kubernetes-list-type"):
        case "map":
            keys: list[str] = body["x-kubernetes-list-map-keys"]
            return keys
        case "set":
            return []
    return None


def _duplicates(items: list[Any], keys: list[str] | None, path: str) -> list[Cause]:
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
            found.append(Cause(f"{path}[{i}]", f"Duplicate value: {_shown(key)}", "FieldValueDuplicate"))
        seen.add(known)
    return found


def _validation(rule: Mapping[str, Any]) -> Validation:
    text = " ".join(rule["rule"].split())
    reason = {"FieldValueForbidden": "FieldValueForbidden"}.get(rule.get("reason", ""), "FieldValueInvalid")
    return Validation(RULES[text], "oldSelf" in text, rule["message"], rule.get("fieldPath", ""), reason)


def _simulated(rule: Mapping[str, Any]) -> bool:
    return " ".join(rule["rule"].split()) not in NOT_SIMULATED


def _holds(rule: Validation, value: Any, before: Any) -> bool:
    if rule.transition and before is _MISSING:
        return True
    return rule.holds(value, before)


def _broken(rule: Validation, path: str, value: Any) -> Cause:
    words = "Forbidden" if rule.reason == "FieldValueForbidden" else f"Invalid value: {_shown(value)}".rstrip()
    return Cause(f"{path}{rule.field}".lstrip(".") or "<nil>", f"{words}: {rule.message}", rule.reason)


def _wrong_type(path: str, wanted: str, value: Any) -> Cause:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    found = kinds.get(type(value), "null")
    text = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
    return Cause(path, text, "FieldValueTypeInvalid")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "" if isinstance(value, dict | list) else str(value).lower() if isinstance(value, bool) else str(value)


Check = Callable[[Any, str], list[tuple[str, str]]]
"""Of a value at a path: the reason and the words of what is wrong."""


def _checks(body: Mapping[str, Any]) -> list[Check]:
    """Those of `body` that concern one value alone."""
    found: list[Check] = []
    if "enum" in body:
        found.append(_enumerated(body["enum"]))
    if "minimum" in body:
        found.append(_at_least(body["minimum"], body.get("exclusiveMinimum", False)))
    if "maximum" in body:
        found.append(_at_most(body["maximum"]))
    for name, words in (("maxLength", "should be at most {} chars long"), ("maxItems", "must have at most {} items")):
        if name in body:
            found.append(_not_longer(body[name], words, str if name == "maxLength" else list))
    if "maxProperties" in body:
        found.append(_not_longer(body["maxProperties"], "must have at most {} properties", dict))
    if "minItems" in body:
        found.append(_not_shorter(body["minItems"]))
    if body.get("format") in _BOUNDS:
        found.append(_whole(body["format"]))
    if body.get("format") == "date-time":
        found.append(_a_date)
    return found


def _enumerated(values: list[Any]) -> Check:
    listed = ", ".join(f'"{value}"' for value in values)

    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if value in values:
            return []
        return [("FieldValueNotSupported", f"Unsupported value: {_shown(value)}: supported values: {listed}")]

    return check


def _at_least(least: float, exclusive: bool) -> Check:
    words = f"should be greater than {'' if exclusive else 'or equal to '}{least:g}"

    def check(value: Any, path: str) -> list[tuple[str, str]]:
        good = value > least if exclusive else value >= least
        return [] if good else [("FieldValueInvalid", f"Invalid value: {value}: {path} in body {words}")]

    return check


def _at_most(most: float) -> Check:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if value <= most:
            return []
        return [
            ("FieldValueInvalid", f"Invalid value: {value}: {path} in body should be less than or equal to {most:g}")
        ]

    return check


def _not_longer(most: int, words: str, of: type[str | list[Any] | Object]) -> Check:
    def check(value: Any, _: str) -> list[tuple[str, str]]:
        if not isinstance(value, of) or len(value) <= most:
            return []
        if of is str:
            return [("FieldValueTooLong", f"Too long: may not be more than {most} bytes")]
        return [("FieldValueTooMany", f"Too many: {len(value)}: {words.format(most)}")]

    return check


def _not_shorter(least: int) -> Check:
    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if len(value) >= least:
            return []
        words = f"{path} in body should have at least {least} items"
        return [("FieldValueInvalid", f"Invalid value: {len(value)}: {words}")]

    return check


def _whole(name: str) -> Check:
    least, most = _BOUNDS[name]

    def check(value: Any, path: str) -> list[tuple[str, str]]:
        if least <= value <= most:
            return []
        return [("FieldValueInvalid", f"Invalid value: {value}: {path} in body must be of type {name}")]

    return check


_DATE = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


@lru_cache(maxsize=4096)
def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text[:19])
    except ValueError:
        return False
    return True


def _a_date(value: Any, path: str) -> list[tuple[str, str]]:
    if _is_date(value):
        return []
    shown = f'"{value}"'
    return [("FieldValueTypeInvalid", f"Invalid value: {shown}: {path} in body must be of type date-time: {shown}")]
