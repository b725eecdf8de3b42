"""An upgrade loses and refuses nothing that is stored; a rollback removes only new fields."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from testing.kubernetes.definitions import (
    CURRENT,
    PREVIOUS,
    WIDER,
    find_narrowed,
    read_definitions,
    read_served_schemas,
)

OLD, NEW = read_definitions(PREVIOUS), read_definitions(CURRENT)


@pytest.mark.parametrize("name", OLD)
def test_an_upgrade_narrows_nothing(name: str) -> None:
    old, new = read_served_schemas(OLD[name]), read_served_schemas(NEW[name])
    assert old.keys() <= new.keys(), "a version that clients use is served on"
    assert [fault for version in old for fault in find_narrowed(old[version], new[version])] == []
    assert OLD[name]["spec"]["scope"] == NEW[name]["spec"]["scope"]
    assert OLD[name]["spec"]["names"] == NEW[name]["spec"]["names"]


@pytest.mark.parametrize("name", OLD)
def test_a_rollback_removes_only_new_fields(name: str) -> None:
    """A value that the older version does not define passes as long as it is unchanged (Kubernetes' ratcheting)."""
    old, new = read_served_schemas(OLD[name]), read_served_schemas(NEW[name])
    found = [fault for version in old for fault in find_narrowed(new[version], old[version])]
    assert [fault for fault in found if not fault.endswith((": is gone", ": takes fewer values"))] == []


def test_no_kind_is_removed() -> None:
    assert OLD.keys() <= NEW.keys()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["a"],
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 5},
        "b": {"type": "array", "items": {"type": "string", "enum": ["x", "y"], "maxLength": 3}},
        "c": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda new: new["properties"].pop("c"), ".c: is gone"),
        (lambda new: new["properties"]["a"].update(type="string"), ".a: is of another type"),
        (lambda new: new["properties"]["a"].update(minimum=2), ".a: has narrower bounds"),
        (lambda new: new["properties"]["a"].update(maximum=4), ".a: has narrower bounds"),
        (lambda new: new["properties"]["c"].update(maxProperties=4), ".c: has narrower bounds"),
        (lambda new: new["properties"]["b"]["items"].update(enum=["x"]), ".b[]: takes fewer values"),
        (lambda new: new["properties"]["a"].update(enum=[1, 2]), ".a: takes fewer values"),
        (lambda new: new["properties"]["b"]["items"].update(pattern="x"), ".b[]: has another pattern"),
        (lambda new: new["properties"]["c"]["additionalProperties"].update(type="integer"), ".c[]: is of another type"),
        (lambda new: new.update(required=["a", "b"]), ".b: is required"),
        (lambda new: new.update({"x-kubernetes-validations": [{"rule": "self.a > 1"}]}), ": has a new rule"),
    ],
)
def test_a_narrower_schema_is_found(change: Callable[[Any], None], fault: str) -> None:
    new = copy.deepcopy(SCHEMA)
    change(new)
    assert list(find_narrowed(SCHEMA, new)) == [fault]


def test_a_wider_rule_narrows_only_the_rollback() -> None:
    for pair in WIDER.items():
        old, new = ({**SCHEMA, "x-kubernetes-validations": [{"rule": rule}]} for rule in pair)
        assert list(find_narrowed(old, new)) == []
        assert list(find_narrowed(new, old)) == [": takes fewer values"]


def test_a_wider_schema_is_not_reported() -> None:
    new = copy.deepcopy(SCHEMA)
    new["properties"] |= {"d": {"type": "string", "default": "z"}, "e": {"type": "object"}}
    new["properties"]["a"] |= {"minimum": 0, "maximum": 9}
    new["properties"]["b"]["items"] = {"type": "string", "enum": ["x", "y", "z"]}
    new["required"] = ["a", "d"]
    assert list(find_narrowed(SCHEMA, new)) == []
