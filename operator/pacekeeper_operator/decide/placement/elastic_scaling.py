"""Elastic scaling: whether a job goes on with fewer workers while others start, and when these join.

A worker is lost, no spare is warm, and the next worker is warm in `wait` seconds. The round in which it joins costs a
restart in any case. A round that is begun now costs one more. It trains with `after` workers for the rest of the wait,
instead of the `before` workers that train without it (0: the job stands still). It is begun if that trains more:

    after · (wait − restart) − wanted · redone  >  before · wait

Both sides are in seconds of one worker's training. The global batch stays the same, so the job's speed is proportional
to the number of workers.

* `restart`: as measured last in this job.
* `wait`: the time that the job's last worker took from its pod's creation until it was warm, less what has passed. A
  worker that is late is expected to take as long again.
* `redone`: what all workers train again. Shards in memory are of no use to another number of ranks, so that the state
  comes from the volume.

If workers are lost soon after others were, the job waits longer each time before the next one joins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pacekeeper_analysis.protocol.plan import Member

from ...state.cluster_view import PodView, WorkerView
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.restart_estimates import SavedState


def can_shrink(observation: Observation, policy: Policy, members: Sequence[Member]) -> bool:
    """Return whether these members go on at once, rather than stand still until the next worker is warm.

    They do only if that is exact by the ranks' reports. The script must use the library, so that the global batch
    stays. The members must fill whole replicas (`select_whole_replicas`). A young operator may lack reports of some
    spares.
    """
    enough = len(members) >= max(1, observation.job.spec.effective_min_replicas)
    is_exact = observation.progress.replica_ranks is not None
    if not enough or not is_exact or observation.operator_age <= policy.grace_after_start:
        return False
    return _is_change_worthwhile(observation, before=0, after=len(members), redone=_compute_redone_seconds(observation))


def can_grow(observation: Observation, members: Sequence[Member]) -> bool:
    """Return whether warm workers join now: all of them are there, or it pays not to wait for the others."""
    before = len(observation.plan.members)
    if len(members) <= before:
        return True
    if not observation.state.placement.growth.allows(observation.now):
        return False
    return len(members) >= observation.job.spec.replicas or _is_change_worthwhile(
        observation, before=before, after=len(members)
    )


def round_to_whole_replicas(observation: Observation, workers: int) -> int:
    """Return the most of this number of workers that hold whole replicas.

    It is all of them if the ranks do not report the size of a replica, or the job is complete.
    """
    unit = _count_replica_workers(observation)
    return workers if workers >= observation.job.spec.replicas else workers // unit * unit


def select_whole_replicas(observation: Observation, members: Sequence[Member]) -> list[Member]:
    """Return the remaining members that fill whole replicas, first those whose replica is complete."""
    unit = _count_replica_workers(observation)
    if unit == 1:
        return list(members)
    names, intact = {member.worker for member in members}, set[str]()
    for first in range(0, len(observation.plan.members), unit):
        replica = {member.worker for member in observation.plan.members[first : first + unit]}
        intact |= replica if replica <= names else set()
    return sorted(members, key=lambda member: member.worker not in intact)[
        : round_to_whole_replicas(observation, len(members))
    ]


def record_shrink(desired: DesiredState, observation: Observation) -> DesiredState:
    """Return the state of a round with fewer members, after which growth waits: longer where they follow each other."""
    return desired.with_placement(growth=desired.state.placement.growth.with_change(observation.now))


def _count_replica_workers(observation: Observation) -> int:
    """Return the least number of workers whose ranks are whole replicas; 1 if that is not known."""
    ranks, per_worker = observation.progress.replica_ranks, observation.job.spec.nproc_per_node
    return 1 if ranks is None else math.lcm(ranks, per_worker) // per_worker


def _is_change_worthwhile(observation: Observation, before: int, after: int, redone: float = 0.0) -> bool:
    wait, wanted = _estimate_wait_seconds(observation), observation.job.spec.replicas
    return after * (wait - observation.restarts.restart_seconds) - wanted * redone > before * wait


def _estimate_wait_seconds(observation: Observation) -> float:
    """Return the seconds until the next worker without ranks is expected to be warm."""
    coming = [view for view in observation.workers if _is_coming(observation, view)]
    return min(
        (_estimate_warm_up_seconds(observation, view.pod) for view in coming),
        default=_estimate_warm_up_seconds(observation, None),
    )


def _is_coming(observation: Observation, view: WorkerView) -> bool:
    is_assigned = view.name in observation.assigned
    return not is_assigned and not view.warm and not view.record.leaving and (view.pod is None or view.alive)


def _estimate_warm_up_seconds(observation: Observation, pod: PodView | None) -> float:
    """Return the seconds until the worker of this pod is warm.

    None: it has no pod yet, and its ranks may have been vacant for some time.
    """
    since = observation.state.placement.vacant_since if pod is None else pod.created_at
    expected = observation.restarts.start_seconds
    if pod is not None and pod.unschedulable_message:
        # It may never start: use the limit for placing a whole job.
        expected = observation.job.spec.scheduling_timeout
    age = 0.0 if since is None else max(0.0, observation.now - since)
    return expected - age if age < expected else age


def _compute_redone_seconds(observation: Observation) -> float:
    """Return the seconds of training that only a change of the number of ranks costs."""
    if (observation.progress.replica_ranks or 1) <= 1:
        return 0.0
    return observation.restarts.estimate_cost(state=SavedState.CHECKPOINT) - observation.restarts.estimate_cost()
