"""A Fabric as its status tells of it: what people are shown is made of this."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from ..errors import InputError
from ..reading import Truncated, MaxLength, OneOf, Within, read_dataclass


class LinkState(StrEnum):
    """Of a link of a Fabric."""

    UP = "Up"
    SLOW = "Slow"
    DOWN = "Down"


@dataclass(frozen=True)
class FabricLink:
    """Loads between a leaf and a spine: as they are planned, in units of the lightest flow."""

    leaf: Annotated[str, MaxLength(512)]
    spine: Annotated[str, MaxLength(5)]
    up: Annotated[int, Within(0)]
    down: Annotated[int, Within(0)]
    state: LinkState = LinkState.UP

    @property
    def load(self) -> int:
        """In its fuller direction."""
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
    max_load: Annotated[int | None, Within(0)] = None  # None: no ways are planned
    bound: Annotated[int | None, Within(0)] = None
    dead: Annotated[int, Within(0)] = 0  # links
    links: Annotated[tuple[FabricLink, ...], MaxLength(2**18)] = ()  # dead and full ones first, where some are left out
    conditions: Annotated[tuple[FabricViewCondition, ...], MaxLength(16)] = ()
    unit: Annotated[str, MaxLength(40)] = "units of the lightest flow"  # of loads; measured ones have another

    @classmethod
    def from_json(cls, body: object) -> Self:
        """As the API server writes it. Raises InputError that names the field."""
        metadata, spec, status = (_get_section(body, name) for name in ("metadata", "spec", "status"))
        built = read_dataclass(_FabricSpec, spec, "spec")
        told = {name: status[key] for name, key in _STATUS_KEYS.items() if status.get(key) is not None}
        return read_dataclass(cls, {"name": metadata.get("name"), "spines": built.spines * built.planes, **told}, "Fabric")

    @property
    def is_in_force(self) -> bool:
        return any(one.type == "InForce" and one.status == "True" for one in self.conditions)

    @property
    def max_unlisted_load(self) -> int | None:
        """What links that are not listed carry at most; None: all are listed."""
        if len(self.links) >= self.leaves * self.spines:
            return None
        return min((link.load for link in self.links if link.state is not LinkState.DOWN), default=self.max_load or 0)

    @property
    def summary(self) -> str:
        """In one line, without its name."""
        found = [_format_count(self.flows, "flow")]
        if self.max_load is not None:
            found.append(f"fullest link {self.max_load}")
        if self.bound is not None:
            found.append(f"bound {self.bound}")
        return " · ".join((*found, _format_count(self.dead, "dead link")))


def list_leaves_and_spines(views: Iterable[FabricView]) -> tuple[list[str], list[str]]:
    """Of all links that they list, s2 before s10."""
    links = [link for view in views for link in view.links]
    leaves, spines = {link.leaf for link in links}, {link.spine for link in links}
    return sorted(leaves, key=_build_natural_sort_key), sorted(spines, key=_build_natural_sort_key)


@dataclass(frozen=True)
class _FabricSpec:
    spines: Annotated[int, Within(1, 1024)]  # of each plane
    planes: Annotated[int, Within(1, 2)] = 1


_STATUS_KEYS = {name: name for name in ("leaves", "flows", "bound", "dead", "links", "conditions")} | {"max_load": "maxLoad"}
"""Field → key in the status."""


def _get_section(body: object, name: str) -> Mapping[str, Any]:
    part = body.get(name) or {} if isinstance(body, Mapping) else None
    if not isinstance(part, Mapping):
        raise InputError(f"{name}: must be an object; is this a Fabric, as `kubectl get fabrics -o json` writes it?")
    return part


def _build_natural_sort_key(name: str) -> list[str | int]:
    parts = re.split(r"([0-9]+)", name)  # text and numbers by turns
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _format_count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
