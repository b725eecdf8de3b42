"""The checkpoint server that a job is to have: a pod that exists while workers may need the claim that it mounts.

It is never a reason to end the job. The ranks train on from their snapshots while it is missing.
"""

from __future__ import annotations

import hashlib

from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, Stop

from ...pods.checkpoint_server import build_checkpoint_server_name
from ...state.cluster_view import PodView
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from ..effects import CreateCheckpointServer, DeletePod
from . import workforce


def update_checkpoint_server(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state whose plan has the server's secret, and the newest address of its pod.

    The last address stays while there is no pod: a client proves nothing to another pod at that address.
    """
    desired, pod = observation.desired, observation.checkpoint_server
    current = desired.plan.checkpoint_server
    if not observation.job.spec.checkpoint.uses_server:
        return desired if current is None else desired.with_plan(checkpoint_server=None)
    secret = current.secret if current is not None else _create_secret(observation)
    is_reachable = pod is not None and pod.address and not pod.ended
    address = pod.address if pod is not None and is_reachable else current.address if current is not None else ""
    wanted = CheckpointEndpoint(secret, address)
    return desired if wanted == current else desired.with_plan(checkpoint_server=wanted)


def choose_server_effect(observation: Observation) -> CreateCheckpointServer | DeletePod | None:
    """Return what is to be done about the server's pod now; None: nothing, or what has begun is awaited."""
    pod, server = observation.checkpoint_server, observation.plan.checkpoint_server
    is_needed = _needs_server(observation)
    if pod is None:
        if not is_needed or server is None:
            return None
        return CreateCheckpointServer(build_checkpoint_server_name(observation.job, server.secret))
    if pod.deleting:
        force = workforce.is_end_unconfirmed(observation, pod)
        return DeletePod(pod.name, pod.uid, force=True) if force else None
    if is_needed and not _is_lost(observation, pod):
        return None
    return DeletePod(pod.name, pod.uid)


def explain_missing_server(observation: Observation) -> str:
    """Return why the server does not serve, as far as its pod shows it; "": it does, or none is needed."""
    pod = observation.checkpoint_server
    if not _needs_server(observation) or (pod is not None and pod.phase == "Running" and not pod.waiting_reason):
        return ""
    if pod is None:
        return "its pod does not exist yet"
    name = pod.name
    if pod.unschedulable_message:
        return f"pod {name} cannot be scheduled: {pod.unschedulable_message}"
    if pod.waiting_reason:
        return f"pod {name} does not start: {pod.waiting_reason} {pod.waiting_message}".rstrip()
    claim = observation.job.spec.checkpoint.volume_claim_name
    place = f" on {pod.node}" if pod.node else ""
    return (
        f"pod {name} has not started{place}: `kubectl describe pod {name}` shows what it waits for. If claim {claim} "
        "is still attached to a node that is lost, taint that node node.kubernetes.io/out-of-service"
    )


def _needs_server(observation: Observation) -> bool:
    """Return whether a worker may read or write checkpoints, or is about to.

    A worker that leaves does so until its containers have ended.
    """
    job = observation.job
    if not job.spec.checkpoint.uses_server:
        return False
    if any(view.pod is not None and view.pod.node and not view.pod.ended for view in observation.workers):
        return True
    is_ending = observation.state.lifecycle.is_over or job.spec.suspend or observation.plan.stop is not Stop.NO
    return bool(observation.state.placement.workers) and not is_ending


def _is_lost(observation: Observation, pod: PodView) -> bool:
    """Return whether the pod will not serve again: it has failed, as an evicted pod has, or its node is lost.

    A pod that fails at once, since its kubelet refuses it, is replaced once a minute at most.
    """
    age = observation.now - pod.created_at
    failed = pod.phase in ("Succeeded", "Failed")
    if failed and observation.clock_agrees and age < workforce.UNPLACED_POD_SECONDS:
        return False
    return failed or workforce.is_node_lost(observation, pod)


def _create_secret(observation: Observation) -> str:
    return hashlib.sha256(f"{observation.nonce}/checkpoint server".encode()).hexdigest()
