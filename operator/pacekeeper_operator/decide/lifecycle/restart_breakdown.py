"""The time of a recovery broken down into the parts of a restart, as the job's workers report them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pacekeeper_analysis.protocol.reports import Heartbeat, StartStage
from pacekeeper_rank.records import StateOrigin

from ...api.incident import Restart, RestartPart, RestartPartName

_STAGE_TO_PART = {
    StartStage.DEVICE: RestartPartName.PROCESS,
    StartStage.COMMUNICATORS: RestartPartName.COMMUNICATORS,
    StartStage.SCRIPT: RestartPartName.SCRIPT,
    StartStage.LOAD: RestartPartName.LOAD,
    StartStage.FIRST_STEP: RestartPartName.FIRST_STEP,
}


def break_down_restart(seconds: float, heartbeats: Sequence[Heartbeat], ranks: int) -> Restart | None:
    """Return the parts of `seconds` of recovery, from the members' heartbeats after the first step; None: not reported.

    A stage is reached when the last rank has reached it, and a part lasts from one stage to the next. So the parts
    always add up to `seconds`: no worker's report can make the recovery longer. Each worker counts from its own
    launcher's start of the round, which all launchers learn of at the same time. Clocks are not compared.

    `ranks`: the number of the job's ranks. A reported rank outside of it is not named.
    """
    reached: dict[StartStage, tuple[float, int]] = {}
    for report in (entry for heartbeat in heartbeats for entry in heartbeat.start.stages):
        reached[report.stage] = max(reached.get(report.stage, (0.0, report.rank)), (report.seconds, report.rank))
    if StartStage.FIRST_STEP not in reached:
        return None
    seconds = max(0.0, seconds)
    started = min(seconds, reached[StartStage.FIRST_STEP][0])
    teardown = min(seconds - started, max(heartbeat.start.teardown_seconds for heartbeat in heartbeats))
    moments = [(stage, min(started, reached[stage][0]), reached[stage][1]) for stage in StartStage if stage in reached]
    ends = [0.0]
    for _, at, _ in moments:
        ends.append(max(ends[-1], at))
    parts = (
        RestartPart(RestartPartName.TEARDOWN, teardown),
        RestartPart(RestartPartName.WAIT, seconds - started - teardown),
        *(
            RestartPart(_STAGE_TO_PART[stage], end - begin, rank if rank < ranks else None)
            for (stage, _, rank), (begin, end) in zip(moments, pairwise(ends), strict=True)
        ),
    )
    longest = max(parts, key=lambda part: part.seconds)
    suffix = "" if longest.rank is None else f" (rank {longest.rank})"
    return Restart(parts, find_state_origin(heartbeats), f"{longest.name}{suffix}")


def find_state_origin(heartbeats: Sequence[Heartbeat]) -> str | None:
    """Return the farthest origin of the state that a member reports, as a word for users; None: none reports one."""
    origin = max((StateOrigin[heartbeat.start.origin] for heartbeat in heartbeats), default=StateOrigin.UNKNOWN)
    return None if origin is StateOrigin.UNKNOWN else origin.name.capitalize()
