"""The parts of a recovery's time add up to it, for any reports of the workers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.reports import Heartbeat, ReachedStage, RoundStart, StartStage
from pacekeeper_operator.api.incident import Restart
from pacekeeper_operator.decide.lifecycle.restart_breakdown import break_down_restart


def build_heartbeat(*reached: float, first_rank: int = 0, **start: Any) -> Heartbeat:
    """Build the heartbeat of a worker whose ranks reach the stages after these seconds; `first_rank` is the last."""
    stages = zip(StartStage, reached, strict=False)
    reached_stages = tuple(ReachedStage(stage, seconds, first_rank) for stage, seconds in stages)
    return Heartbeat("w", start=RoundStart(stages=reached_stages, **start))


def map_parts(restart: Restart | None) -> dict[str, float]:
    assert restart is not None
    return {part.name: round(part.seconds, 6) for part in restart.parts}


def test_a_part_lasts_until_the_last_rank_has_completed_it() -> None:
    first = build_heartbeat(0.5, 0.9, 1.0, 4.0, 5.0, teardown_seconds=0.3, origin="MEMORY")
    second = build_heartbeat(0.7, 0.8, 1.5, 2.0, 5.2, first_rank=1, teardown_seconds=1.3, origin="PEER")
    found = break_down_restart(10.0, [first, second], ranks=2)
    assert map_parts(found) == {
        "Teardown": 1.3,
        "Wait": 3.5,
        "Process": 0.7,
        "Communicators": 0.2,
        "Script": 0.6,
        "Load": 2.5,
        "FirstStep": 1.2,
    }
    assert found is not None
    assert [part.rank for part in found.parts] == [None, None, 1, 0, 1, 0, 1]
    assert (found.restored_from, found.longest) == ("Peer", "Wait")
    assert sum(part.seconds for part in found.parts) == pytest.approx(10.0)
    assert break_down_restart(7.0, [first, second], ranks=2) != found
    assert break_down_restart(7.0, [first, second], ranks=2).longest == "Load (rank 0)"  # type: ignore[union-attr]  # it is not None


def test_a_stage_that_no_worker_reports_belongs_to_the_next_part() -> None:
    unmanaged = Heartbeat("w", start=RoundStart(stages=(ReachedStage(StartStage.FIRST_STEP, 2.0, 0),)))
    found = break_down_restart(5.0, [unmanaged], ranks=1)
    assert map_parts(found) == {"Teardown": 0.0, "Wait": 3.0, "FirstStep": 2.0}
    assert found is not None
    assert found.restored_from is None
    assert break_down_restart(5.0, [Heartbeat("w")], ranks=1) is None, "an older sidecar"
    assert break_down_restart(5.0, [], ranks=1) is None
    both = break_down_restart(5.0, [Heartbeat("v"), build_heartbeat(1.0, 1.1, 1.2, 1.3, 2.0)], ranks=2)
    assert map_parts(both)["Process"] == 1.0, "only workers that report stages count"


@pytest.mark.parametrize(
    "hostile",
    [
        build_heartbeat(9.0, 3.0, 1e12, 0.0, 2.0, teardown_seconds=1e12),
        build_heartbeat(0.0, 0.0, 0.0, 0.0, 1e12, first_rank=2**40),
        build_heartbeat(1.0, 1.0, 1.0, 1.0, 0.0, teardown_seconds=4.0),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, -3.0, 5.0, 1e6])
def test_the_parts_add_up_for_any_report_of_a_worker(hostile: Heartbeat, seconds: float) -> None:
    found = break_down_restart(seconds, [hostile, build_heartbeat(0.1, 0.2, 0.3, 0.4, 0.5)], ranks=2)
    assert found is not None
    assert all(part.seconds >= 0 and (part.rank is None or part.rank < 2) for part in found.parts)
    assert sum(part.seconds for part in found.parts) == pytest.approx(max(0.0, seconds))


@pytest.mark.parametrize(
    ("start", "field"),
    [
        ({"stages": [{"stage": "Load", "seconds": math.nan, "rank": 0}]}, r"start.stages\[0\].seconds"),
        ({"stages": [{"stage": "Load", "seconds": -1.0, "rank": 0}]}, r"start.stages\[0\].seconds"),
        ({"stages": [{"stage": "Lunch", "seconds": 1.0, "rank": 0}]}, r"start.stages\[0\].stage"),
        ({"stages": [{"stage": "Load", "seconds": 1.0, "rank": 0}] * 6}, "start.stages"),
        ({"teardown_seconds": math.inf}, "teardown_seconds"),
        ({"origin": "Mars"}, "origin"),
    ],
)
def test_an_invalid_report_is_refused_and_the_error_names_the_field(start: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        Heartbeat.from_json({"start": start})


def test_a_heartbeat_survives_a_round_trip_through_json() -> None:
    heartbeat = build_heartbeat(0.5, 0.9, 1.0, 4.0, 5.0, teardown_seconds=0.3, origin="CHECKPOINT")
    assert Heartbeat.from_json(json.loads(json.dumps(heartbeat.to_json()))) == heartbeat
