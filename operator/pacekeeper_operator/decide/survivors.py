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
from ..state import DesiredState


def can_shrink(observation: Observation, policy: Policy, members: Sequence[Member]) -> bool:
    """Whether these go on at once, rather than stand still until the next worker is warm.

    Only where that is exact by the ranks' own word: they use the library, so the global batch stays; and they fill
    whole replicas (`most`). A young operator has not heard of all spares.
    """
    enough = len(members) >= max(1, observation.job.spec.effective_min_replicas)
    if not enough or not observation.replica_ranks or observation.operator_age <= policy.grace_after_start:
        return False
    return _is_change_worthwhile(observation, now=0, then=len(members), redone=_compute_redone_seconds(observation))


def can_grow(observation: Observation, members: Sequence[Member]) -> bool:
    """Whether workers that are warm join now: all of them are there, or it pays not to wait for the others."""
    now = len(observation.plan.members)
    if len(members) <= now:
        return True
    if not observation.state.placement.growth.allows(observation.now):
        return False
    return len(members) >= observation.job.spec.replicas or _is_change_worthwhile(observation, now=now, then=len(members))


def round_to_whole_replicas(observation: Observation, workers: int) -> int:
    """Of so many workers, the most that hold whole replicas; all where the ranks do not say how many that takes, or
    the job is complete."""
    unit = _count_replica_workers(observation)
    return workers if workers >= observation.job.spec.replicas else workers // unit * unit


def select_whole_replicas(observation: Observation, members: Sequence[Member]) -> list[Member]:
    """`most` of those who are left in their seats: those first whose replica has lost nobody."""
    unit = _count_replica_workers(observation)
    if unit == 1:
        return list(members)
    names, intact = {member.worker for member in members}, set[str]()
    for first in range(0, len(observation.plan.members), unit):
        replica = {member.worker for member in observation.plan.members[first : first + unit]}
        intact |= replica if replica <= names else set()
    return sorted(members, key=lambda member: member.worker not in intact)[: round_to_whole_replicas(observation, len(members))]


def record_shrink(draft: DesiredState, observation: Observation) -> DesiredState:
    """The draft of a round with fewer: after the next ones, growth waits, longer where they follow each other."""
    return draft.with_placement(growth=draft.state.placement.growth.with_change(observation.now))


def _count_replica_workers(observation: Observation) -> int:
    """The least number of workers whose ranks are whole replicas; 1 also: it is not known."""
    ranks, each = observation.replica_ranks, observation.job.spec.nproc_per_node
    return math.lcm(ranks, each) // each if ranks else 1


def _is_change_worthwhile(observation: Observation, now: int, then: int, redone: float = 0.0) -> bool:
    wait, wanted = _estimate_wait_seconds(observation), observation.job.spec.replicas
    return then * (wait - observation.restart_seconds) - wanted * redone > now * wait


def _estimate_wait_seconds(observation: Observation) -> float:
    """Seconds until the next worker that has no ranks is expected to be warm."""
    coming = [view for view in observation.workers if _is_coming(observation, view)]
    return min((_estimate_warm_up_seconds(observation, view.pod) for view in coming), default=_estimate_warm_up_seconds(observation, None))


def _is_coming(observation: Observation, view: WorkerView) -> bool:
    seated = view.name in observation.assigned
    return not seated and not view.warm and not view.record.leaving and (view.pod is None or view.alive)


def _estimate_warm_up_seconds(observation: Observation, pod: PodView | None) -> float:
    """Seconds until the worker of this pod is warm; None: there is none yet, and a seat may wait for it already."""
    vacant_since = observation.state.placement.vacant_since or observation.now
    since = vacant_since if pod is None else pod.created_at
    expected = observation.start_seconds
    if pod is not None and pod.unschedulable_message:  # it may take for ever: so long may a whole job wait for its place
        expected = observation.job.spec.scheduling_timeout
    age = max(0.0, observation.now - since)
    return expected - age if age < expected else age


def _compute_redone_seconds(observation: Observation) -> float:
    """Seconds of training that are lost by another number of ranks alone."""
    sharded = observation.replica_ranks > 1
    return observation.estimate_restart_cost(snapshots=False) - observation.estimate_restart_cost() if sharded else 0.0
