"""Plan and bookkeeping as operators up to 0.1 kept them: a ConfigMap beside the job, which its tenant could write.

So only what concerns the job itself is believed: who its workers are, what they are to do, how far it has come. Words
about nodes are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Plan
from pacekeeper_analysis.reading import parse_json

from .codec import camel_case, from_json
from .state import Adaptation, RestartBudget, DesiredState, Lifecycle, Placement, State

LEGACY_FIELD_NAMES = {"total": "restartsTotal", "in_membership": "membershipRestarts"}
"""Fields of today → their names of then."""
DROPPED_LEGACY_FIELDS = frozenset({"template_rejected", "rejection", "suspicion", "vain", "local_sgd", "mode_changes"})
"""Fields that are learnt anew."""


def convert_legacy_state(data: Mapping[str, str], job: str, now: float) -> DesiredState:
    """Raises InputError where the ConfigMap cannot be read."""
    try:
        plan = Plan.from_json(parse_json(data["plan.json"], "plan.json", finite=True))
        old = parse_json(data["state.json"], "state.json", finite=True)
        state = State(
            life=from_json(Lifecycle, _select_fields(Lifecycle, old), "state.json", {}),
            placement=from_json(Placement, _select_fields(Placement, old), "state.json", {}),
            budget=from_json(RestartBudget, _select_fields(RestartBudget, old), "state.json", {}),
            adaptation=from_json(Adaptation, _select_fields(Adaptation, old), "state.json", {}),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"ConfigMap {job}-plan of an operator before this one cannot be read ({error!r}); delete it, and the job's "
            "workers are replaced under a new plan"
        ) from error
    workers = tuple(replace(worker, uid="", node="") for worker in state.placement.workers)  # pods say it
    if any(not re.fullmatch(rf"{re.escape(job)}-w\d+-\d+", worker.name) for worker in workers):
        raise InputError(f"ConfigMap {job}-plan names workers that are not of job {job}; delete it")
    state = replace(state, placement=replace(state.placement, workers=workers))
    return DesiredState(replace(plan, version=max(plan.version + 1, int(now)), evidence_request=""), state)


def _select_fields(owner: type[Any], old: Mapping[str, Any]) -> dict[str, Any]:
    keys = {f.name: LEGACY_FIELD_NAMES.get(f.name, camel_case(f.name)) for f in fields(owner) if f.name not in DROPPED_LEGACY_FIELDS}
    return {camel_case(name): old[key] for name, key in keys.items() if key in old}
