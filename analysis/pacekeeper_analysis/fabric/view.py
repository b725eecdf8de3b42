"""A Fabric as its status describes it, the basis of all output for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from ..errors import InputError
from ..protocol.decoding import MaxLength, OneOf, Truncated, Within, read_dataclass


class LinkState(StrEnum):
    """The state of a link of a Fabric."""

    UP = "Up"
    SLOW = "Slow"
    DOWN = "Down"


@dataclass(frozen=True)
class FabricLink:
    """The planned loads between a leaf and a spine, in units of the lightest flow."""

    leaf: Annotated[str, MaxLength(512)]
    spine: Annotated[str, MaxLength(5)]
    up: Annotated[int, Within(0)]
    down: Annotated[int, Within(0)]
    state: LinkState = LinkState.UP

    @property
    def load(self) -> int:
        """The load of its fuller direction."""
        return max(self.up, self.down)


@dataclass(frozen=True)
class FabricViewCondition:
    type: Annotated[str, MaxLength(316)]
    status: Annotated[str, OneOf(frozenset({"True", "False", "Unknown"}))]
    reason: Annotated[str, MaxLength(1024)]
    message: Annotated[str, Truncated(32768)] = ""


@dataclass(frozen=True)
class FabricView:
    name: Annotated[str, MaxLength(253)]
    spines: Annotated[int, Within(1)]  # of all planes
    leaves: Annotated[int, Within(0)] = 0
    flows: Annotated[int, Within(0)] = 0
    max_load: Annotated[int | None, Within(0)] = None  # None: no routes are planned
    lower_bound: Annotated[int | None, Within(0)] = None
    dead_links: Annotated[int, Within(0)] = 0
    links: Annotated[tuple[FabricLink, ...], MaxLength(2**18)] = ()  # if incomplete, dead and full ones come first
    conditions: Annotated[tuple[FabricViewCondition, ...], MaxLength(16)] = ()
    unit: Annotated[str, MaxLength(40)] = "units of the lightest flow"  # of loads; measured loads have another

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Read an object as the API server writes it. Raises InputError, which names the field."""
        metadata, spec, status = (_get_section(body, name) for name in ("metadata", "spec", "status"))
        fabric_spec = read_dataclass(_FabricSpec, spec, "spec")
        status_fields = {name: status[key] for name, key in _STATUS_KEYS.items() if status.get(key) is not None}
        return read_dataclass(
            cls,
            {"name": metadata.get("name"), "spines": fabric_spec.spines * fabric_spec.planes, **status_fields},
            "Fabric",
        )

    @property
    def is_in_force(self) -> bool:
        return any(condition.type == "InForce" and condition.status == "True" for condition in self.conditions)

    @property
    def max_unlisted_load(self) -> int | None:
        """Upper limit of the load of links that are not listed. None if all are listed."""
        if len(self.links) >= self.leaves * self.spines:
            return None
        return min((link.load for link in self.links if link.state is not LinkState.DOWN), default=self.max_load or 0)

    @property
    def summary(self) -> str:
        """One line without the name."""
        parts = [_format_count(self.flows, "flow")]
        if self.max_load is not None:
            parts.append(f"fullest link {self.max_load}")
        if self.lower_bound is not None:
            parts.append(f"bound {self.lower_bound}")
        return " · ".join((*parts, _format_count(self.dead_links, "dead link")))


def list_leaves_and_spines(views: Iterable[FabricView]) -> tuple[list[str], list[str]]:
    """Return the names in all links of the views, s2 before s10."""
    links = [link for view in views for link in view.links]
    leaves, spines = {link.leaf for link in links}, {link.spine for link in links}
    return sorted(leaves, key=_build_natural_sort_key), sorted(spines, key=_build_natural_sort_key)


@dataclass(frozen=True)
class _FabricSpec:
    spines: Annotated[int, Within(1, 1024)]  # of each plane
    planes: Annotated[int, Within(1, 2)] = 1


_STATUS_KEYS = {name: name for name in ("leaves", "flows", "links", "conditions")} | {
    "max_load": "maxLoad",
    "lower_bound": "lowerBound",
    "dead_links": "deadLinks",
}
"""Key in the status, by field."""


def _get_section(body: object, name: str) -> Mapping[str, Any]:
    section = body.get(name) or {} if isinstance(body, Mapping) else None
    if not isinstance(section, Mapping):
        raise InputError(f"{name}: must be an object; is this a Fabric, as `kubectl get fabrics -o json` writes it?")
    return section


def _build_natural_sort_key(name: str) -> list[str | int]:
    parts = re.split(r"([0-9]+)", name)  # text and numbers in turn
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
