"""Whether nodes are looked at before ranks start on them (`spec.preflight`), and what follows for those that fail.

A job's first steps are its baseline: a node that is slow from the start would be the measure of all others. So probe
pods look at the nodes that no job has met lately, while the workers there warm up; a spare's before it may take ranks.
"""

from __future__ import annotations

from dataclasses import replace

from ..api import PreflightSpec, Remedy, Witness
from ..observation import NodeCheck, Observation, Policy, WorkerView
from ..state import AvoidedNode, DesiredState, QuarantineRequest

MAX_AVOIDED_NODES = 64
UNKNOWN_CHECK_TTL_SECONDS = 600.0
"""What could not be found out is asked again after so long."""


def apply_preflight(observation: Observation, policy: Policy) -> DesiredState:
    """Workers on nodes that failed are given up, and those nodes avoided, as long as there are others to be had."""
    draft, spec = observation.desired, observation.job.spec.preflight
    if not spec.enabled or draft.state.life.is_over:
        return draft
    draft = _update_tolerated_nodes(observation)
    for view in _list_waiting_workers(observation):
        check = get_node_check(observation, view)
        if check is not None and check.passed is False and policy.applies_remedies and not _is_tolerated(draft, view.node):
            words = f"{view.node} failed the preflight"
            draft = draft.with_worker(replace(view.record, leaving=words, dead=True))
            draft = _avoid_node(observation.with_desired(draft), policy, view.node, check)
    return _update_start_time(observation.with_desired(draft))


def is_check_awaited(observation: Observation, view: WorkerView) -> bool:
    """It gets no ranks yet: its node is being looked at, and there is time left for it."""
    spec, began = observation.job.spec.preflight, observation.state.preflight.began
    late = bool(began) and observation.now - began >= spec.timeout
    return spec.enabled and not late and get_node_check(observation, view) is None


def list_unchecked_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Workers without ranks whose nodes are to be looked at now. Before the job's start, once all have their nodes:
    those are held against one another."""
    job = observation.job
    if not job.spec.preflight.enabled or observation.state.life.is_over or job.spec.suspend:
        return ()
    waiting = _list_waiting_workers(observation)
    if not observation.plan.members and len(waiting) < job.spec.replicas:
        return ()
    return tuple(view for view in waiting if get_node_check(observation, view) is None)


def list_failed_nodes(observation: Observation) -> tuple[str, ...]:
    """Names of the nodes on which the job's next pods are not to be."""
    return tuple(one.node for one in observation.state.preflight.avoided if not one.tolerated)


def get_node_check(observation: Observation, view: WorkerView) -> NodeCheck | None:
    """What is known of the node that the worker is on; None: nothing, or nothing that is recent enough."""
    node = observation.cluster_view.nodes.get(view.node)
    check = None if node is None else observation.node_checks.get(node.uid)
    if check is None or view.pod is None:
        return None
    return check if is_check_valid(check, observation.job.spec.preflight, view.pod.created_at) else None


def is_check_valid(check: NodeCheck, spec: PreflightSpec, since: float) -> bool:
    """Whether what was found then holds for a worker that was made at `since`."""
    return check.at >= since - (UNKNOWN_CHECK_TTL_SECONDS if check.passed is None else spec.valid_for)


def _list_waiting_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Workers that have a node, and no ranks."""
    seated = {member.worker for member in observation.plan.members}
    return tuple(view for view in observation.workers if view.usable and view.node and view.name not in seated)


def _avoid_node(observation: Observation, policy: Policy, node: str, check: NodeCheck) -> DesiredState:
    """The node is suspected: the operator's own probe is the witness."""
    draft, preflight = observation.desired, observation.state.preflight
    if any(one.node == node for one in preflight.avoided):
        return draft
    one = AvoidedNode(node, observation.now, check.message, attempts=observation.state.placement.attempts)
    draft = draft.with_preflight(avoided=(*preflight.avoided, one)[-MAX_AVOIDED_NODES:])
    if policy.find_refusal(Remedy.QUARANTINE_NODE):
        return draft
    uid, reason = observation.cluster_view.nodes[node].uid, f"before a job's start: {check.message}"
    sign = _build_sign_name(observation, node)
    wanted = QuarantineRequest(node, uid, reason, sign, Witness.PROBE, at=observation.now)
    others = [other for other in draft.state.incidents.quarantines if other.incident != sign]
    return draft.with_incidents(quarantines=(*others, wanted))


def _build_sign_name(observation: Observation, node: str) -> str:
    """Under which the suspicion stands in the NodeQuarantine; it is no Incident's, since nothing has happened yet."""
    return f"{observation.job.name}-preflight-{node}"


def _is_tolerated(draft: DesiredState, node: str) -> bool:
    return any(one.node == node and one.tolerated for one in draft.state.preflight.avoided)


def _update_tolerated_nodes(observation: Observation) -> DesiredState:
    """What is too old is forgotten. Where the job finds no room without the nodes that failed, it takes them: slow is
    better than not at all."""
    draft, state, spec = observation.desired, observation.state, observation.job.spec.preflight
    kept = tuple(
        replace(one, tolerated=True)
        if not observation.plan.members and state.placement.attempts > one.attempts
        else one
        for one in state.preflight.avoided
        if observation.now - one.at < spec.valid_for
    )
    return draft if kept == state.preflight.avoided else draft.with_preflight(avoided=kept)


def _update_start_time(observation: Observation) -> DesiredState:
    """Since when nodes are being looked at: the job waits for so long at most."""
    draft, began, looking = observation.desired, observation.state.preflight.began, bool(list_unchecked_workers(observation))
    if looking == bool(began):
        return draft
    return draft.with_preflight(began=observation.now if looking else 0.0)
