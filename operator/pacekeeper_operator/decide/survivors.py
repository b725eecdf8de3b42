"""Whether a job goes on with fewer workers while others start, and when it takes in those that have started.

A worker is lost, no spare is warm, and the next worker is so in `wait` seconds. Whatever is done, the round that takes
it in costs a restart then. A round that is begun now, with `then` of the workers in place of the `now` that train (0:
the job stands still), costs one more, and trains by `then` workers for what is left of the wait. It is begun where more
is trained so:

    then · (wait − restart) − wanted · redone  >  now · wait

in seconds of one worker's training; the global batch stays the same, so the job's pace goes by the number of workers.
`restart`: as measured last in this job. `wait`: as long as its last worker took from its pod's creation until it was
warm, less what has passed; one that is late is expected to take as long again. `redone`: what all of them train again
because shards in memory are of no use to another number of ranks, and the state comes from the volume.

Where workers are lost soon after others were, each time the job waits longer before it takes the next one in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pacekeeper_analysis.plan import Member

from ..observation import Observation, PodView, Policy, WorkerView
from ..state import Draft


def can_go_on(observation: Observation, policy: Policy, seats: Sequence[Member]) -> bool:
    """Whether these go on at once, rather than stand still until the next worker is warm.

    Only where that is exact by the ranks' own word: they use the library, so the global batch stays; and they fill
    whole replicas (`most`). A young operator has not heard of all spares.
    """
    enough = len(seats) >= max(1, observation.job.spec.fewest_replicas)
    if not enough or not observation.replica_ranks or observation.operator_age <= policy.grace_after_start:
        return False
    return _is_better(observation, now=0, then=len(seats), redone=_redone(observation))


def may_grow(observation: Observation, seats: Sequence[Member]) -> bool:
    """Whether workers that are warm join now: all of them are there, or it pays not to wait for the others."""
    now = len(observation.plan.members)
    if len(seats) <= now:
        return True
    if not observation.state.placement.growth.allows(observation.now):
        return False
    return len(seats) >= observation.job.spec.replicas or _is_better(observation, now=now, then=len(seats))


def most(observation: Observation, workers: int) -> int:
    """Of so many workers, the most that hold whole replicas; all where the ranks do not say how many that takes, or
    the job is complete."""
    unit = _workers_of_replicas(observation)
    return workers if workers >= observation.job.spec.replicas else workers // unit * unit


def of_whole_replicas(observation: Observation, seats: Sequence[Member]) -> list[Member]:
    """`most` of those who are left in their seats: those first whose replica has lost nobody."""
    unit = _workers_of_replicas(observation)
    if unit == 1:
        return list(seats)
    names, intact = {member.worker for member in seats}, set[str]()
    for first in range(0, len(observation.plan.members), unit):
        replica = {member.worker for member in observation.plan.members[first : first + unit]}
        intact |= replica if replica <= names else set()
    return sorted(seats, key=lambda member: member.worker not in intact)[: most(observation, len(seats))]


def gone_on(draft: Draft, observation: Observation) -> Draft:
    """The draft of a round with fewer: after the next ones, growth waits, longer where they follow each other."""
    return draft.with_placement(growth=draft.state.placement.growth.changed(observation.now))


def _workers_of_replicas(observation: Observation) -> int:
    """The least number of workers whose ranks are whole replicas; 1 also: it is not known."""
    ranks, each = observation.replica_ranks, observation.job.spec.nproc_per_node
    return math.lcm(ranks, each) // each if ranks else 1


def _is_better(observation: Observation, now: int, then: int, redone: float = 0.0) -> bool:
    wait, wanted = _wait(observation), observation.job.spec.replicas
    return then * (wait - observation.restart_seconds) - wanted * redone > now * wait


def _wait(observation: Observation) -> float:
    """Seconds until the next worker that has no ranks is expected to be warm."""
    coming = [view for view in observation.workers if _is_coming(observation, view)]
    return min((_left(observation, view.pod) for view in coming), default=_left(observation, None))


def _is_coming(observation: Observation, view: WorkerView) -> bool:
    seated = view.name in observation.seated
    return not seated and not view.warm and not view.record.leaving and (view.pod is None or view.alive)


def _left(observation: Observation, pod: PodView | None) -> float:
    """Seconds until the worker of this pod is warm; None: there is none yet, and a seat may wait for it already."""
    vacant_since = observation.state.placement.vacant_since or observation.now
    since = vacant_since if pod is None else pod.created_at
    expected = observation.start_seconds
    if pod is not None and pod.unschedulable:  # it may take for ever: so long may a whole job wait for its place
        expected = observation.job.spec.scheduling_timeout
    age = max(0.0, observation.now - since)
    return expected - age if age < expected else age


def _redone(observation: Observation) -> float:
    """Seconds of training that are lost by another number of ranks alone."""
    sharded = observation.replica_ranks > 1
    return observation.restart_cost(snapshots=False) - observation.restart_cost() if sharded else 0.0
