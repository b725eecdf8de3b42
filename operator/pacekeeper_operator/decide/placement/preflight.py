"""The check of nodes before ranks start on them (`spec.preflight`), and what is done about those that fail.

A job's first steps are its baseline, so a node that is slow from the start would distort it. Probe pods check the nodes
that have no recent result, while the workers there warm up. A spare's node is checked before the spare may take ranks.
"""

from __future__ import annotations

from dataclasses import replace

from ...api.node_quarantine import Witness
from ...api.training_job import PreflightSpec, Remedy
from ...state.cluster_view import WorkerView
from ...state.desired_state import AvoidedNode, DesiredState, QuarantineRequest
from ...state.effect_results import NodeCheck
from ...state.observation import Observation
from ...state.policy import Policy

MAX_AVOIDED_NODES = 64
UNKNOWN_CHECK_TTL_SECONDS = 600.0
"""Time after which an inconclusive check is repeated."""


def apply_preflight(observation: Observation, policy: Policy) -> DesiredState:
    """Give up workers on nodes that failed, and avoid those nodes as long as the job can be placed elsewhere."""
    desired, spec = observation.desired, observation.job.spec.preflight
    if not spec.enabled or desired.state.lifecycle.is_over:
        return desired
    desired = _update_tolerated_nodes(observation)
    for view in _list_waiting_workers(observation):
        check = get_node_check(observation, view)
        if (
            check is not None
            and check.passed is False
            and policy.applies_remedies
            and not _is_tolerated(desired, view.node)
        ):
            reason = f"{view.node} failed the preflight"
            desired = desired.with_worker(replace(view.record, leaving=reason, dead=True))
            desired = _avoid_node(observation.with_desired(desired), policy, view.node, check)
    return _update_start_time(observation.with_desired(desired))


def is_check_awaited(observation: Observation, view: WorkerView) -> bool:
    """Return whether the worker gets no ranks yet, since the check of its node is pending and has time left."""
    spec, started_at = observation.job.spec.preflight, observation.state.preflight.started_at
    late = started_at is not None and observation.now - started_at >= spec.timeout
    return spec.enabled and not late and get_node_check(observation, view) is None


def list_unchecked_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the workers without ranks whose nodes are to be checked now.

    Before the job's start, that is once all workers have their nodes, which are compared with each other.
    """
    job = observation.job
    if not job.spec.preflight.enabled or observation.state.lifecycle.is_over or job.spec.suspend:
        return ()
    waiting = _list_waiting_workers(observation)
    if not observation.plan.members and len(waiting) < job.spec.replicas:
        return ()
    return tuple(view for view in waiting if get_node_check(observation, view) is None)


def list_failed_nodes(observation: Observation) -> tuple[str, ...]:
    """Return the names of the nodes that the job's next pods must avoid."""
    return tuple(avoided.node for avoided in observation.state.preflight.avoided_nodes if not avoided.readmitted)


def get_node_check(observation: Observation, view: WorkerView) -> NodeCheck | None:
    """Return the check of the worker's node; None: there is none that is recent enough."""
    node = observation.cluster_view.nodes.get(view.node)
    check = None if node is None else observation.node_checks.get(node.uid)
    if check is None or view.pod is None:
        return None
    return check if is_check_valid(check, observation.job.spec.preflight, view.pod.created_at) else None


def is_check_valid(check: NodeCheck, spec: PreflightSpec, since: float) -> bool:
    """Return whether the check's result holds for a worker that was created at `since`."""
    return check.at >= since - (UNKNOWN_CHECK_TTL_SECONDS if check.passed is None else spec.valid_for)


def _list_waiting_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the workers that have a node and no ranks."""
    assigned = {member.worker for member in observation.plan.members}
    return tuple(view for view in observation.workers if view.usable and view.node and view.name not in assigned)


def _avoid_node(observation: Observation, policy: Policy, node: str, check: NodeCheck) -> DesiredState:
    """Return the state in which the node is avoided and suspected, with the operator's own probe as the witness."""
    desired, preflight = observation.desired, observation.state.preflight
    if any(avoided.node == node for avoided in preflight.avoided_nodes):
        return desired
    avoided = AvoidedNode(node, observation.now, check.message, attempts=observation.state.placement.attempts)
    desired = desired.with_preflight(avoided_nodes=(*preflight.avoided_nodes, avoided)[-MAX_AVOIDED_NODES:])
    if policy.find_refusal(Remedy.QUARANTINE_NODE):
        return desired
    uid, reason = observation.cluster_view.nodes[node].uid, f"before a job's start: {check.message}"
    sign_name = _build_sign_name(observation, node)
    request = QuarantineRequest(node, uid, reason, sign_name, Witness.PROBE, at=observation.now)
    others = [other for other in desired.state.incidents.quarantine_requests if other.incident != sign_name]
    return desired.with_incidents(quarantine_requests=(*others, request))


def _build_sign_name(observation: Observation, node: str) -> str:
    """Return the name of the suspicion in the NodeQuarantine. It is no Incident's: nothing has happened yet."""
    return f"{observation.job.name}-preflight-{node}"


def _is_tolerated(desired: DesiredState, node: str) -> bool:
    return any(avoided.node == node and avoided.readmitted for avoided in desired.state.preflight.avoided_nodes)


def _update_tolerated_nodes(observation: Observation) -> DesiredState:
    """Drop results that are too old, and tolerate failed nodes if the job cannot be placed without them.

    Slow training is better than none.
    """
    desired, state, spec = observation.desired, observation.state, observation.job.spec.preflight
    retained = tuple(
        replace(avoided, readmitted=True)
        if not observation.plan.members and state.placement.attempts > avoided.attempts
        else avoided
        for avoided in state.preflight.avoided_nodes
        if observation.now - avoided.at < spec.valid_for
    )
    return desired if retained == state.preflight.avoided_nodes else desired.with_preflight(avoided_nodes=retained)


def _update_start_time(observation: Observation) -> DesiredState:
    """Record since when checks are pending: the job waits for them for a limited time."""
    desired, started_at, is_pending = (
        observation.desired,
        observation.state.preflight.started_at,
        bool(list_unchecked_workers(observation)),
    )
    if is_pending == (started_at is not None):
        return desired
    return desired.with_preflight(started_at=observation.now if is_pending else None)
