"""Plan and state as operators up to 0.1 stored them: in a ConfigMap next to the job, which its tenant could write.

Only what concerns the job itself is trusted: its workers, what they do, and the progress. What it contains about nodes
is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import Plan

from .api.codec import camel_case, from_json
from .state.desired_state import Adaptation, DesiredState, Lifecycle, Placement, RestartBudget, State

LEGACY_FIELD_NAMES = {"total_restarts": "restartsTotal"}
"""Current field names → legacy field names."""
DROPPED_LEGACY_FIELDS = frozenset(
    {"template_rejected", "rejection", "investigation", "fruitless_investigation", "local_sgd", "mode_changes"}
)
"""Fields that are measured again."""


def convert_legacy_state(data: Mapping[str, str], job: str, now: float) -> DesiredState:
    """Return the desired state from a legacy ConfigMap. Raises InputError if it cannot be read."""
    try:
        plan = Plan.from_json(parse_json(data["plan.json"], "plan.json", finite=True))
        old = parse_json(data["state.json"], "state.json", finite=True)
        state = State(
            lifecycle=from_json(Lifecycle, _select_fields(Lifecycle, old), "state.json", {}),
            placement=from_json(Placement, _select_fields(Placement, old), "state.json", {}),
            budget=from_json(RestartBudget, _select_fields(RestartBudget, old), "state.json", {}),
            adaptation=from_json(Adaptation, _select_fields(Adaptation, old), "state.json", {}),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"ConfigMap {job}-plan of an earlier operator cannot be read ({error!r}); delete it, and the job's "
            "workers are replaced under a new plan"
        ) from error
    # What the pods show is read from them.
    workers = tuple(replace(worker, uid="", node="", starting_since=None) for worker in state.placement.workers)
    if any(not re.fullmatch(rf"{re.escape(job)}-w\d+-\d+", worker.name) for worker in workers):
        raise InputError(f"ConfigMap {job}-plan names workers that are not of job {job}; delete it")
    state = replace(state, placement=replace(state.placement, workers=workers))
    return DesiredState(replace(plan, version=max(plan.version + 1, int(now)), evidence_request=""), state)


def _select_fields(owner: type[Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `owner` in their current form. A number that was not known was 0 or -1 then."""
    selected = {}
    for item in fields(owner):
        value = old.get(LEGACY_FIELD_NAMES.get(item.name, camel_case(item.name)))
        is_unknown = item.default is None and value in (0, -1)
        if item.name not in DROPPED_LEGACY_FIELDS and value is not None and not is_unknown:
            selected[camel_case(item.name)] = value
    return selected
