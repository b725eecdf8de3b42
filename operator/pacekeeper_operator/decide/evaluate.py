"""One pass over a job: from an observation to the desired state, and from that to the effects to carry out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pacekeeper_analysis.protocol.plan import Stop

from ..pods.queues import WorkloadProgress
from ..state.desired_state import DesiredState, Incident
from ..state.observation import Observation
from ..state.policy import Policy
from . import STEPS
from .effects import (
    ApplyNetworkPolicy,
    CheckNodes,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    RequestQuarantine,
    SyncWorkload,
    ValidateTemplate,
    WriteIncident,
)
from .placement import avoided_nodes, checkpoint_server, preflight, workforce
from .stragglers import profile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassResult:
    """The result of one pass."""

    observation: Observation  # with the new desired state
    failed_steps: tuple[str, ...] = ()  # "<step>: <error>" of each step that raised: a bug, which loses only its work

    @property
    def desired(self) -> DesiredState:
        return self.observation.desired


def evaluate_job(observation: Observation, policy: Policy) -> PassResult:
    """Run all steps over `observation`. Pure: the same arguments give the same result."""
    failures = []
    for name, step in STEPS:
        try:
            observation = observation.with_desired(step(observation, policy))
        except Exception as error:
            log.exception("job %s/%s: step %r failed", observation.job.namespace, observation.job.name, name)
            failures.append(f"{name}: {error!r}")
    return PassResult(observation, tuple(failures))


def list_effects(observation: Observation, policy: Policy, written: Mapping[str, Incident]) -> tuple[Effect, ...]:
    """Return the effects to carry out once the desired state is written.

    `written`: the incidents as they are in the cluster, by name.
    """
    return (
        # First, so that no pod is placed on these nodes.
        *(RequestQuarantine(request) for request in observation.state.incidents.quarantine_requests),
        *_list_template_effects(observation),
        *_list_pod_effects(observation),
        *_list_preflight_effects(observation),
        *profile.list_profile_effects(observation),
        *(
            WriteIncident(incident, written.get(incident.name))
            for incident in observation.state.incidents.current
            if written.get(incident.name) != incident
        ),
        *([ApplyNetworkPolicy(observation.job.generation)] if policy.applies_network_policy else []),
        *([SyncWorkload(_build_queue_stage(observation))] if observation.job.queue else []),
        *_list_deletion_effects(observation),
    )


def _list_template_effects(observation: Observation) -> Iterator[Effect]:
    placement, generation = observation.state.placement, observation.job.generation
    if (
        placement.template_accepted != generation
        and not observation.plan.members
        and not observation.state.lifecycle.is_over
    ):
        yield ValidateTemplate(generation)


def _list_pod_effects(observation: Observation) -> Iterator[Effect]:
    for view in workforce.list_surplus_workers(observation):
        assert view.pod is not None
        yield DeletePod(view.name, view.pod.uid, view.record.force)
    for pod in observation.stray_pods:
        yield DeletePod(pod.name, pod.uid)
    if (server_effect := checkpoint_server.choose_server_effect(observation)) is not None:
        yield server_effect
    missing = workforce.list_missing_workers(observation)
    if not missing:
        return
    avoid, gang = avoided_nodes.list_avoided_nodes(observation), workforce.build_gang(observation)
    needed, unreliable = workforce.count_needed_workers(observation, missing), observation.cluster_view.unreliable_nodes
    trains = bool(observation.plan.members)
    spares = [
        position >= needed if trains else worker.ordinal >= observation.job.spec.replicas
        for position, worker in enumerate(missing)
    ]
    for worker, spare, pod_set in zip(missing, spares, workforce.assign_pod_sets(observation, spares), strict=True):
        # A job's first workers go where its topology places them; only later ones may avoid unreliable nodes.
        yield CreatePod(worker, spare, avoid, unreliable if spare or trains else (), gang, pod_set)


def _list_preflight_effects(observation: Observation) -> Iterator[Effect]:
    nodes, unchecked = observation.cluster_view.nodes, preflight.list_unchecked_workers(observation)
    to_check = {(view.node, nodes[view.node].uid) for view in unchecked if view.node in nodes}
    if to_check:
        created_at = max(view.pod.created_at for view in unchecked if view.pod is not None)
        yield CheckNodes(tuple(sorted(to_check)), created_at)


def _build_queue_stage(observation: Observation) -> WorkloadProgress:
    lifecycle = observation.state.lifecycle
    return WorkloadProgress(
        pods_left=any(view.pod is not None and not view.pod.ended for view in observation.workers),
        ready=observation.progress.training_since is not None
        or observation.plan.stop is Stop.FINISH
        or workforce.runs_completely(observation),
        finished=(lifecycle.failed_message or "its ranks have finished") if lifecycle.is_over else "",
        failed=bool(lifecycle.failed_reason),
    )


def _list_deletion_effects(observation: Observation) -> Iterator[Effect]:
    """Delete a job whose `ttlSecondsAfterFinished` is over."""
    lifecycle, ttl = observation.state.lifecycle, observation.job.spec.run_policy.ttl_seconds_after_finished
    if (
        lifecycle.is_over
        and ttl is not None
        and observation.clock_agrees
        and lifecycle.stopped_at is not None
        and observation.now >= lifecycle.stopped_at + ttl
    ):
        yield DeleteJob(observation.job.uid)
