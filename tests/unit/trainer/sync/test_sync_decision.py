"""What follows from what the ranks have agreed on: numbers in, actions out."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper.sync.agreement import AgreementResult, Directives, RankReport
from pacekeeper.sync.due_queries import DueQuery
from pacekeeper.sync.progress import Progress
from pacekeeper.sync.sync_decision import RoundLimits, SyncDecision, decide_sync
from pacekeeper.sync.training_config import SampleSource, SyncActions, TrainingConfig
from pacekeeper_analysis.protocol.plan import SyncMode

NO_LIMITS, EMPTY_REPORT = RoundLimits(), RankReport()
SYNC, EDIT = SampleSource(SyncMode.SYNC), SampleSource(SyncMode.EDIT)
LEASED = SampleSource(SyncMode.ASYNC_EDIT, is_leased=True)
EVAL = frozenset({DueQuery("eval", 4)})


def decide_at_step_20(
    supplied: SampleSource = SYNC,
    limits: RoundLimits = NO_LIMITS,
    report: RankReport = EMPTY_REPORT,
    due: frozenset[DueQuery] = frozenset(),
    checkpoint_due: bool = False,
    snapshot_due: bool = False,
    **directives: Any,
) -> SyncDecision:
    progress = Progress(step=20, samples=160, answered_request=1, global_batch=8)
    agreed = AgreementResult(Directives(**directives), report)
    return decide_sync(
        agreed, progress, supplied, limits, checkpoint_due=checkpoint_due, snapshot_due=snapshot_due, due_queries=due
    )


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [
        ({}, SyncActions()),
        ({"report": RankReport(leaving=1)}, SyncActions(leave=True)),
        ({"suspend": True}, SyncActions(leave=True)),
        ({"limits": RoundLimits(samples=160)}, SyncActions(finish=True)),
        ({"limits": RoundLimits(samples=161)}, SyncActions()),
        ({"checkpoint_due": True}, SyncActions(checkpoint=True)),
        ({"checkpoint_request": 2}, SyncActions(checkpoint=True)),
        ({"checkpoint_request": 1}, SyncActions()),
        ({"snapshot_due": True}, SyncActions(snapshot=True)),
        ({"training_config": TrainingConfig(SyncMode.EDIT)}, SyncActions(switch=True)),
        (
            {"training_config": TrainingConfig(SyncMode.EDIT), "limits": RoundLimits(warmup_steps=20)},
            SyncActions(switch=True),
        ),
        ({"training_config": TrainingConfig(SyncMode.EDIT), "limits": RoundLimits(warmup_steps=21)}, SyncActions()),
        (
            {"training_config": TrainingConfig(SyncMode.EDIT), "limits": RoundLimits(samples=160)},
            SyncActions(finish=True),
        ),
        ({"supplied": EDIT}, SyncActions(switch=True)),
        ({"supplied": LEASED, "training_config": TrainingConfig(SyncMode.ASYNC_EDIT)}, SyncActions()),
        (
            {
                "supplied": LEASED,
                "training_config": TrainingConfig(SyncMode.ASYNC_EDIT),
                "report": RankReport(out_of_samples=1),
            },
            SyncActions(switch=True),
        ),
        (
            {
                "supplied": EDIT,
                "training_config": TrainingConfig(SyncMode.EDIT),
                "report": RankReport(out_of_samples=1),
            },
            SyncActions(),
        ),
    ],
)
def test_actions_follow_from_the_reports(arguments: dict[str, Any], actions: SyncActions) -> None:
    found = decide_at_step_20(**arguments)
    assert found.actions == actions
    assert found.needs_common_parameters == actions.has_any


def test_a_due_event_needs_the_common_parameters_unless_a_rank_cannot_query() -> None:
    local: dict[str, Any] = {"supplied": EDIT, "training_config": TrainingConfig(SyncMode.EDIT), "due": EVAL}
    decision = decide_at_step_20(**local)
    assert (decision.actions.has_any, decision.due_queries, decision.needs_common_parameters) == (False, EVAL, True)
    without_a_step = decide_at_step_20(**local, report=RankReport(out_of_samples=1))
    assert (without_a_step.due_queries, without_a_step.needs_common_parameters) == (frozenset(), False)
