"""What a recovery's time went to: the parts of a restart, as the job's workers tell them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pacekeeper_analysis.records import StateOrigin
from pacekeeper_analysis.reports import Heartbeat, StartStage

from ..api import Restart, RestartPart, RestartPartName

_STAGE_TO_PART = {
    StartStage.DEVICE: RestartPartName.PROCESS,
    StartStage.COMMUNICATORS: RestartPartName.COMMUNICATORS,
    StartStage.SCRIPT: RestartPartName.SCRIPT,
    StartStage.LOAD: RestartPartName.LOAD,
    StartStage.FIRST_STEP: RestartPartName.FIRST_STEP,
}


def break_down_restart(seconds: float, heartbeats: Sequence[Heartbeat], ranks: int) -> Restart | None:
    """What `seconds` of recovery went to, by the members' heartbeats after the first step; None: nobody tells.

    A stage is reached when the last rank of all has reached it, and a part lasts from stage to stage, so that the parts
    add up to the recovery whatever workers claim: nobody's word makes it longer. Each worker counts from its own
    launcher's start of the round, which all hear of at once; their clocks are not compared.

    ranks: of the job; who is none of them is not named.
    """
    reached: dict[StartStage, tuple[float, int]] = {}
    for told in (one for beat in heartbeats for one in beat.start):
        reached[told.stage] = max(reached.get(told.stage, (0.0, told.rank)), (told.seconds, told.rank))
    if StartStage.FIRST_STEP not in reached:
        return None
    seconds = max(0.0, seconds)
    started = min(seconds, reached[StartStage.FIRST_STEP][0])
    teardown = min(seconds - started, max(beat.teardown_seconds for beat in heartbeats))
    moments = [(stage, min(started, reached[stage][0]), reached[stage][1]) for stage in StartStage if stage in reached]
    ends = [0.0]
    for _, at, _ in moments:
        ends.append(max(ends[-1], at))
    parts = (
        RestartPart(RestartPartName.TEARDOWN, teardown),
        RestartPart(RestartPartName.WAIT, seconds - started - teardown),
        *(
            RestartPart(_STAGE_TO_PART[stage], after - before, rank if rank < ranks else None)
            for (stage, _, rank), (before, after) in zip(moments, pairwise(ends), strict=True)
        ),
    )
    longest = max(parts, key=lambda part: part.seconds)
    who = "" if longest.rank is None else f" (rank {longest.rank})"
    return Restart(parts, _find_state_origin(heartbeats), f"{longest.name}{who}")


def _find_state_origin(heartbeats: Sequence[Heartbeat]) -> str | None:
    """The farthest that any member tells of, in a word for people; None: none does."""
    found = max((StateOrigin[beat.origin] for beat in heartbeats), default=StateOrigin.UNKNOWN)
    return None if found is StateOrigin.UNKNOWN else found.name.capitalize()
