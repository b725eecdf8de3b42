"""One pass over a job: from what there is to the plan and bookkeeping that shall be, and to what is to be done then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..effects import (
    RequestQuarantine,
    SyncWorkload,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    ApplyNetworkPolicy,
    CheckNodes,
    ValidateTemplate,
    WriteIncident,
)
from ..observation import Observation, Policy
from ..queues import WorkloadProgress
from ..state import DesiredState, Incident
from . import STEPS, avoiding, preflight, profile, workforce

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassResult:
    """What a pass has come to."""

    observation: Observation  # under the new draft
    failed_steps: tuple[str, ...] = ()  # steps that failed, and of what: a bug of ours, which costs their work only

    @property
    def desired(self) -> DesiredState:
        return self.observation.desired


def evaluate_job(observation: Observation, policy: Policy) -> PassResult:
    """Pure: the same observation leads to the same thought."""
    failures = []
    for name, step in STEPS:
        try:
            observation = observation.with_desired(step(observation, policy))
        except Exception as error:
            log.exception("job %s/%s: step %r failed", observation.job.namespace, observation.job.name, name)
            failures.append(f"{name}: {error!r}")
    return PassResult(observation, tuple(failures))


def list_effects(observation: Observation, policy: Policy, written: Mapping[str, Incident]) -> tuple[Effect, ...]:
    """What the draft, once it is written, asks for. `written`: incidents as they are in the cluster, by name."""
    return (
        *(RequestQuarantine(wanted) for wanted in observation.state.incidents.quarantines),  # before others come there
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
    if placement.template_accepted != generation and not observation.plan.members and not observation.state.life.is_over:
        yield ValidateTemplate(generation)


def _list_pod_effects(observation: Observation) -> Iterator[Effect]:
    for view in workforce.list_surplus_workers(observation):
        assert view.pod is not None
        yield DeletePod(view.name, view.pod.uid, view.record.force)
    for pod in observation.stray_pods:
        yield DeletePod(pod.name, pod.uid)
    missing = workforce.list_missing_workers(observation)
    if not missing:
        return
    avoid, gang = avoiding.list_avoided_nodes(observation), workforce.build_gang(observation)
    needed, unreliable = workforce.count_needed_workers(observation, missing), observation.cluster_view.unreliable_nodes
    for position, worker in enumerate(missing):
        trains = bool(observation.plan.members)
        spare = position >= needed if trains else worker.ordinal >= observation.job.spec.replicas
        # A job's first workers go where its topology wants them; only who comes later has a choice.
        yield CreatePod(worker, spare, avoid, unreliable if spare or trains else (), gang)


def _list_preflight_effects(observation: Observation) -> Iterator[Effect]:
    nodes, unmet = observation.cluster_view.nodes, preflight.list_unchecked_workers(observation)
    wanted = {(view.node, nodes[view.node].uid) for view in unmet if view.node in nodes}
    if wanted:
        made = max(view.pod.created_at for view in unmet if view.pod is not None)
        yield CheckNodes(tuple(sorted(wanted)), made)


def _build_queue_stage(observation: Observation) -> WorkloadProgress:
    life = observation.state.life
    return WorkloadProgress(
        pods_left=any(view.pod is not None and not view.pod.ended for view in observation.workers),
        ready=observation.training_since is not None,
        finished=(life.failed_message or "its ranks have finished") if life.is_over else "",
        failed=bool(life.failed_reason),
    )


def _list_deletion_effects(observation: Observation) -> Iterator[Effect]:
    """Delete a job whose time after its end is over."""
    life, ttl = observation.state.life, observation.job.spec.run_policy.ttl_seconds_after_finished
    if life.is_over and ttl is not None and observation.clock_agrees and observation.now >= life.stopped_at + ttl:
        yield DeleteJob(observation.job.uid)
