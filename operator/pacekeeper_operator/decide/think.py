"""One pass over a job: from what there is to the plan and bookkeeping that shall be, and to what is to be done then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..effects import (
    AskForQuarantine,
    AttendQueue,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    GuardNetwork,
    LookAtNodes,
    TryTemplate,
    WriteIncident,
)
from ..observation import Observation, Policy
from ..queues import Stage
from ..state import Draft, Incident
from . import STEPS, avoiding, preflight, profile, workforce

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Thought:
    """What a pass has come to."""

    observation: Observation  # under the new draft
    failures: tuple[str, ...] = ()  # steps that failed, and of what: a bug of ours, which costs their work only

    @property
    def draft(self) -> Draft:
        return self.observation.draft


def think(observation: Observation, policy: Policy) -> Thought:
    """Pure: the same observation leads to the same thought."""
    failures = []
    for name, step in STEPS:
        try:
            observation = observation.with_draft(step(observation, policy))
        except Exception as error:
            log.exception("job %s/%s: step %r failed", observation.job.namespace, observation.job.name, name)
            failures.append(f"{name}: {error!r}")
    return Thought(observation, tuple(failures))


def effects(observation: Observation, policy: Policy, written: Mapping[str, Incident]) -> tuple[Effect, ...]:
    """What the draft, once it is written, asks for. `written`: incidents as they are in the cluster, by name."""
    return (
        *(AskForQuarantine(wanted) for wanted in observation.state.incidents.quarantines),  # before others come there
        *_template(observation),
        *_pods(observation),
        *_preflight(observation),
        *profile.errands(observation),
        *(
            WriteIncident(incident, written.get(incident.name))
            for incident in observation.state.incidents.current
            if written.get(incident.name) != incident
        ),
        *([GuardNetwork(observation.job.generation)] if policy.guards_network else []),
        *([AttendQueue(_stage(observation))] if observation.job.queue else []),
        *_end(observation),
    )


def _template(observation: Observation) -> Iterator[Effect]:
    placement, generation = observation.state.placement, observation.job.generation
    if placement.template_accepted != generation and not observation.plan.members and not observation.state.life.over:
        yield TryTemplate(generation)


def _pods(observation: Observation) -> Iterator[Effect]:
    for view in workforce.surplus(observation):
        assert view.pod is not None
        yield DeletePod(view.name, view.pod.uid, view.record.force)
    for pod in observation.strays:
        yield DeletePod(pod.name, pod.uid)
    missing = workforce.missing(observation)
    if not missing:
        return
    avoid, gang = avoiding.nodes(observation), workforce.gang(observation)
    needed, unreliable = workforce.needed(observation, missing), observation.surroundings.unreliable_nodes
    for position, worker in enumerate(missing):
        trains = bool(observation.plan.members)
        spare = position >= needed if trains else worker.ordinal >= observation.job.spec.replicas
        # A job's first workers go where its topology wants them; only who comes later has a choice.
        yield CreatePod(worker, spare, avoid, unreliable if spare or trains else (), gang)


def _preflight(observation: Observation) -> Iterator[Effect]:
    nodes, unmet = observation.surroundings.nodes, preflight.unmet(observation)
    wanted = {(view.node, nodes[view.node].uid) for view in unmet if view.node in nodes}
    if wanted:
        made = max(view.pod.created_at for view in unmet if view.pod is not None)
        yield LookAtNodes(tuple(sorted(wanted)), made)


def _stage(observation: Observation) -> Stage:
    life = observation.state.life
    return Stage(
        pods_left=any(view.pod is not None and not view.pod.ended for view in observation.workers),
        ready=observation.training_since is not None,
        finished=(life.failed_message or "its ranks have finished") if life.over else "",
        failed=bool(life.failed_reason),
    )


def _end(observation: Observation) -> Iterator[Effect]:
    """Delete a job whose time after its end is over."""
    life, ttl = observation.state.life, observation.job.spec.run_policy.ttl_seconds_after_finished
    if life.over and ttl is not None and observation.clock_agrees and observation.now >= life.stopped_at + ttl:
        yield DeleteJob(observation.job.uid)
