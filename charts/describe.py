"""Puts the comments of values.yaml into the chart's schema, as descriptions, and into its README, as a table.

python charts/describe.py     # after a change of values.yaml or values.schema.json; a test sees to it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import yaml

CHART = File(__file__).resolve().parent / "pacekeeper"
VALUES, SCHEMA, README = CHART / "values.yaml", CHART / "values.schema.json", CHART / "README.md"
HEADING = "## Values\n"
"""In the README: what stands below it is made here."""

Path = tuple[str, ...]
Schema = dict[str, Any]


def main() -> int:
    comments = comments_of(VALUES.read_text())
    schema = add_descriptions(json.loads(SCHEMA.read_text()), comments)
    if missing := [
        ".".join(path) for path, _ in iterate_leaves(schema) if path not in comments and path != ("global",)
    ]:
        print(f"{VALUES}: without a comment above it: {', '.join(missing)}", file=sys.stderr)
        return 1
    SCHEMA.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    README.write_text(render_readme(README.read_text(), yaml.safe_load(VALUES.read_text()), schema, comments))
    return 0


def comments_of(text: str) -> dict[Path, str]:
    """What stands directly above each key of values.yaml, as one line."""
    lines = text.splitlines()
    found = {}
    for path, line in _iterate_keys(yaml.compose(text), ()):
        first = line
        while first > 0 and lines[first - 1].strip().startswith("#"):
            first -= 1
        if description := " ".join(above.strip().lstrip("# ") for above in lines[first:line]):
            found[path] = description
    return found


def _iterate_keys(node: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """(path, line from 0) of each key that has a line of its own."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line
            yield from _iterate_keys(value, (*path, key.value))


def iterate_leaves(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """All values that can be set, with their schemas: what is no group of others."""
    for name, part in schema["properties"].items():
        if "properties" in part:
            yield from iterate_leaves(part, (*path, name))
        else:
            yield (*path, name), part


def add_descriptions(schema: Schema, comments: dict[Path, str], path: Path = ()) -> Schema:
    """Return `schema` with each value's comment as its description, before its other keys."""
    parts = {
        name: add_descriptions(part, comments, (*path, name)) for name, part in schema.get("properties", {}).items()
    }
    made = schema | ({"properties": parts} if parts else {})
    return {"description": comments[path]} | made | {"description": comments[path]} if path in comments else made


def render_readme(text: str, values: Any, schema: Schema, comments: dict[Path, str]) -> str:
    """`text` with a table of all values below its heading of them."""
    written, _, _ = text.partition(HEADING)
    rows = "".join(_iterate_rows(values, schema, comments, ()))
    return f"{written}{HEADING}| value | takes | default | |\n|---|---|---|---|\n{rows}"


def _iterate_rows(values: Any, schema: Schema, comments: dict[Path, str], path: Path) -> Iterator[str]:
    for name, value in values.items():
        part, here = schema["properties"][name], (*path, name)
        description = comments.get(here, "").replace("|", r"\|")
        if "properties" in part:
            if description:
                yield f"| **{'.'.join(here)}** | | | {description} |\n"
            yield from _iterate_rows(value, part, comments, here)
        else:
            default = json.dumps(value, ensure_ascii=False)
            yield f"| `{'.'.join(here)}` | {_describe_type(part)} | `{default}` | {description} |\n"


_TYPE_DESCRIPTIONS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "array": "list",
    "object": "map",
}


def _describe_type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "type" in schema:
        return _TYPE_DESCRIPTIONS[schema["type"]]
    return (
        _TYPE_DESCRIPTIONS["number"] if "anyOf" in schema else _TYPE_DESCRIPTIONS["object"]
    )  # a number that may come as text, or a definition


if __name__ == "__main__":
    sys.exit(main())
