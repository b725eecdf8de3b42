"""Fabric: the leaf-spine network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.fabric.view import FabricLink as FabricLink
from pacekeeper_analysis.fabric.view import LinkState as LinkState

from .codec import from_json, to_json
from .conditions import CONDITION_TIMES, ConditionStatus
from .formats import format_time, parse_ports, parse_rate, parse_time


class PathControl(StrEnum):
    """The method that moves flows to their planned routes."""

    OFF = "Off"  # none: ranks are only ordered
    PROBE = "Probe"  # by source ports whose routes probes have found
    REROLL = "Reroll"  # by other source ports for slow pairs, kept if they are better


@dataclass(frozen=True)
class LevelSpec:
    node_label: str


@dataclass(frozen=True)
class UplinkSpec:
    """The links from each leaf to each spine, and back."""

    capacity: float = 400e9  # bits a second of one cable
    parallel: int = 1  # number of parallel cables


@dataclass(frozen=True)
class LinkException:
    """A link that differs from the others."""

    leaf: str
    spine: str
    state: LinkState = LinkState.DOWN
    capacity: float = 0.0  # bits a second, where it is slow


@dataclass(frozen=True)
class PathControlSpec:
    mode: PathControl = PathControl.OFF
    ports: tuple[int, int] = (20000, 29999)  # first and last


@dataclass(frozen=True)
class FabricSpec:
    """A description of the network between the nodes."""

    spines: int  # in each plane
    planes: int = 1
    levels: tuple[LevelSpec, ...] = ()  # from the leaf outward
    uplink: UplinkSpec = field(default_factory=UplinkSpec)
    exceptions: tuple[LinkException, ...] = ()
    link_query: str = ""  # PromQL
    hops: Mapping[str, str] = field(default_factory=dict)  # address → spine
    path_control: PathControlSpec = field(default_factory=PathControlSpec)

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Parse a Fabric's spec.

        Raises InputError that names the field.
        """
        if "spines" not in spec:
            raise InputError("spec.spines: is missing; give the number of spines of each plane")
        return from_json(cls, spec, "spec", {"capacity": parse_rate, "ports": parse_ports, "hops": dict})


@dataclass(frozen=True)
class FabricStatus:
    observed_generation: int | None = None
    leaves: int | None = None
    flows: int | None = None
    max_load: int | None = None
    lower_bound: int | None = None
    dead_links: int | None = None
    moved_flows: int | None = None
    links: tuple[FabricLink, ...] = ()
    conditions: tuple[ConditionStatus, ...] = ()

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", dict.fromkeys(CONDITION_TIMES, parse_time))

    def to_json(self) -> dict[str, Any]:
        return to_json(self, dict.fromkeys(CONDITION_TIMES, format_time))


@dataclass(frozen=True)
class Fabric:
    """A Fabric object. `parse_error` is why its spec cannot be read; "" if it can."""

    name: str
    uid: str
    generation: int
    created_at: float | None
    spec: FabricSpec
    status: FabricStatus = field(default_factory=FabricStatus)
    parse_error: str = ""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a whole Fabric object.

        This never raises: if the spec cannot be read, `parse_error` gives the reason.
        """
        metadata, parse_error = body["metadata"], ""
        try:
            spec = FabricSpec.parse(body.get("spec") or {})
        except InputError as error:
            spec, parse_error = FabricSpec(spines=1), str(error)
        try:
            status = FabricStatus.parse(body.get("status") or {})
        except InputError:
            status = FabricStatus()  # it is written again
        created_at = parse_time(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None
        generation = metadata.get("generation", 0)
        return cls(metadata["name"], metadata["uid"], generation, created_at, spec, status, parse_error)
