"""Routes of a job's flows, as its plan names them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pacekeeper_analysis.protocol.plan import Plan

from .network import PortRange, RankPair

TRIED_ROUTE_TTL_SECONDS = 1800.0
"""Time for which a route that was no better is not tried again, and the earlier routes can be restored."""
_SPINE_PATTERN = re.compile(r"s([1-9]\d{0,3})", re.ASCII)


def get_planned_routes(plan: Plan) -> Mapping[RankPair, int]:
    """Return the routes that the plan names, by pair of ranks."""
    paths = plan.paths.wanted if plan.paths is not None else ()
    routes = ((path.source, path.destination, parse_spine_name(path.spine)) for path in paths)
    return {(source, destination): route for source, destination, route in routes if route is not None}


def get_route_fingerprints(plan: Plan) -> Mapping[RankPair, int]:
    """Return the fingerprint of what each route was chosen among, where that was not all."""
    paths = plan.paths.wanted if plan.paths is not None else ()
    return {
        (path.source, path.destination): path.live_spines_fingerprint for path in paths if path.live_spines_fingerprint
    }


def get_port_range(plan: Plan) -> PortRange | None:
    return None if plan.paths is None else (plan.paths.first_port, plan.paths.last_port)


def format_spine_name(route: int) -> str:
    """Return the name of a spine. Spines are numbered through all planes, from s1 on."""
    return f"s{route + 1}"


def parse_spine_name(spine: str) -> int | None:
    """Return the route of a spine's name; None: it is no spine's name."""
    match = _SPINE_PATTERN.fullmatch(spine)
    return None if match is None else int(match[1]) - 1
