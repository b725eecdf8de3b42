"""The custom resources' schemas, as far as tests of Python code need them."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from testing.kubernetes.chart import REPOSITORY

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def read_schema(plural: str) -> dict[str, Any]:
    """The OpenAPI schema's fields of a kind: `trainingjobs`, `incidents`, `nodequarantines` or `trainingjobstates`."""
    definition = yaml.safe_load((REPOSITORY / f"crds/{plural}.yaml").read_text())
    properties: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return properties


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server stores of `value`."""
    value = copy.deepcopy(value)
    if isinstance(value, dict):
        for name, property_schema in schema.get("properties", {}).items():
            if name not in value and "default" in property_schema:
                value[name] = copy.deepcopy(property_schema["default"])
            if name in value:
                value[name] = with_defaults(value[name], property_schema)
    return value


def find_schema_errors(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Where the API server would prune `value` or refuse its type."""
    if value is None:  # in a merge patch: the field is removed
        return []
    if "type" in schema and not isinstance(value, _TYPES[schema["type"]]):
        return [f"{path}: {value!r} is not of type {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is not one of {schema['enum']}"]
    if isinstance(value, list):
        return [
            error for i, item in enumerate(value) for error in find_schema_errors(item, schema["items"], f"{path}[{i}]")
        ]
    if not isinstance(value, dict):
        return []
    properties = schema.get("properties", {})
    missing = [f"{path}.{name}: is required" for name in schema.get("required", []) if value.get(name) is None]
    unknown = [f"{path}.{name}: is not in the schema" for name in value if name not in properties]
    nested = [
        error
        for name in value
        if name in properties
        for error in find_schema_errors(value[name], properties[name], f"{path}.{name}")
    ]
    return missing + unknown + nested
