"""What follows from what the ranks have agreed on: numbers in, duties out."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper.modes.agreement import Agreed, Orders, Tally
from pacekeeper.modes.asking import Question
from pacekeeper.modes.conclusion import Conclusion, Limits, conclude
from pacekeeper.modes.course import Course, Duties, Supply
from pacekeeper.modes.progress import Progress
from pacekeeper_analysis.plan import SyncMode

NO_LIMITS, NOBODY_SAYS_ANYTHING = Limits(), Tally()
SYNC, EDIT = Supply(SyncMode.SYNC), Supply(SyncMode.EDIT)
LEASED = Supply(SyncMode.ASYNC_EDIT, leased=True)
EVAL = frozenset({Question("eval", 4)})


def at_step_20(
    supplied: Supply = SYNC,
    limits: Limits = NO_LIMITS,
    tally: Tally = NOBODY_SAYS_ANYTHING,
    due: frozenset[Question] = frozenset(),
    checkpoint_due: bool = False,
    snapshot_due: bool = False,
    **orders: Any,
) -> Conclusion:
    progress = Progress(step=20, samples=160, answered=1, global_batch=8)
    agreed = Agreed(Orders(**orders), tally)
    return conclude(
        agreed, progress, supplied, limits, checkpoint_due=checkpoint_due, snapshot_due=snapshot_due, due=due
    )


@pytest.mark.parametrize(
    ("arguments", "duties"),
    [
        ({}, Duties()),
        ({"tally": Tally(leaving=1)}, Duties(leave=True)),
        ({"suspend": True}, Duties(leave=True)),
        ({"limits": Limits(samples=160)}, Duties(finish=True)),
        ({"limits": Limits(samples=161)}, Duties()),
        ({"checkpoint_due": True}, Duties(checkpoint=True)),
        ({"checkpoint_request": 2}, Duties(checkpoint=True)),
        ({"checkpoint_request": 1}, Duties()),
        ({"snapshot_due": True}, Duties(snapshot=True)),
        ({"course": Course(SyncMode.EDIT)}, Duties(switch=True)),
        ({"course": Course(SyncMode.EDIT), "limits": Limits(warmup_steps=20)}, Duties(switch=True)),
        ({"course": Course(SyncMode.EDIT), "limits": Limits(warmup_steps=21)}, Duties()),
        ({"course": Course(SyncMode.EDIT), "limits": Limits(samples=160)}, Duties(finish=True)),
        ({"supplied": EDIT}, Duties(switch=True)),
        ({"supplied": LEASED, "course": Course(SyncMode.ASYNC_EDIT)}, Duties()),
        ({"supplied": LEASED, "course": Course(SyncMode.ASYNC_EDIT), "tally": Tally(done=1)}, Duties(switch=True)),
        ({"supplied": EDIT, "course": Course(SyncMode.EDIT), "tally": Tally(done=1)}, Duties()),
    ],
)
def test_duties(arguments: dict[str, Any], duties: Duties) -> None:
    found = at_step_20(**arguments)
    assert found.duties == duties
    assert found.needs_common_parameters == duties.any


def test_what_is_due_needs_the_common_parameters_unless_a_rank_cannot_ask() -> None:
    local: dict[str, Any] = {"supplied": EDIT, "course": Course(SyncMode.EDIT), "due": EVAL}
    asked = at_step_20(**local)
    assert (asked.duties.any, asked.due, asked.needs_common_parameters) == (False, EVAL, True)
    without_a_step = at_step_20(**local, tally=Tally(done=1))
    assert (without_a_step.due, without_a_step.needs_common_parameters) == (frozenset(), False)
