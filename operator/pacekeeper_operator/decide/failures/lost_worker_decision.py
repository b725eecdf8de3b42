"""The decision about workers that one event has taken: one Decision, with one replacement for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...api.conditions import Reason
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...formatting import format_list
from ...state.cluster_view import WorkerView
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..stragglers.pricing import build_remedy_prices, build_replace_lost_option, choose_remedy_at_standstill

MAX_NAMED_LOST_WORKERS = 3
"""Workers that a message names. It counts the others."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that is lost, and why."""

    view: WorkerView
    cause: IncidentCause
    class_: IncidentClass
    reason: str
    first_sign: float  # seconds since the epoch
    still_trains: bool = False  # until it ends: it can take part in a checkpoint

    @property
    def disruption(self) -> bool:
        """Whether the loss was intended, so that it uses no restart of the budget."""
        return self.class_ is IncidentClass.DISRUPTION


def select_one_event(losses: Sequence[LostWorker]) -> tuple[LostWorker, ...]:
    """Return the first loss, and those with the same cause and class."""
    return tuple(loss for loss in losses if (loss.cause, loss.class_) == (losses[0].cause, losses[0].class_))


def decide_lost_workers(
    observation: Observation, policy: Policy, losses: Sequence[LostWorker], settles: tuple[str, ...] = ()
) -> Decision:
    """Replace all lost workers; `settles`: names of the faults that this settles.

    Without spares, their ranks wait for the new workers: there is no other remedy.
    """
    first = losses[0]
    choice = choose_remedy_at_standstill((build_replace_lost_option(observation, policy),))
    actions = _choose_actions(observation, policy, losses)
    ranks = _get_ranks(observation, first.view)
    messages = [loss.view.pod.exit_message for loss in losses if loss.view.pod is not None]
    return Decision(
        incident_key=IncidentKey(
            first.cause, observation.progress.round if observation.plan.members else 0, worker=first.view.name
        ),
        class_=first.class_,
        message=_describe_losses(observation, losses),
        first_sign=min(loss.first_sign for loss in losses),
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if not policy.find_refusal(Remedy.REPLACE_WORKER) else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        evidence=tuple(message for message in messages if message),
        rank=ranks[0] if ranks else None,
        worker=first.view.name,
        node=first.view.record.node or None,
        settled_faults=settles,
        live=not any(_get_ranks(observation, loss.view) for loss in losses),
        last_step=observation.progress.step,
    )


def _choose_actions(observation: Observation, policy: Policy, losses: Sequence[LostWorker]) -> tuple[Action, ...]:
    uses_restart = any(not loss.disruption and _get_ranks(observation, loss.view) for loss in losses)
    if uses_restart and observation.is_budget_spent(policy):
        return (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left: {_describe_losses(observation, losses)}"),)
    if policy.find_refusal(Remedy.REPLACE_WORKER):
        return ()
    return tuple(
        # One event costs one restart, regardless of how many workers it has taken.
        ReplaceWorker(
            loss.view.name, loss.reason, dead=not loss.still_trains, disruption=loss.disruption or loss is not losses[0]
        )
        for loss in losses
    )


def _describe_losses(observation: Observation, losses: Sequence[LostWorker]) -> str:
    if len(losses) == 1:
        return f"worker {_format_worker(observation, losses[0].view)} is lost: {losses[0].reason}"
    named = [f"{_format_worker(observation, loss.view)}: {loss.reason}" for loss in losses[:MAX_NAMED_LOST_WORKERS]]
    more = [f"and {len(losses) - MAX_NAMED_LOST_WORKERS} more"] if len(losses) > MAX_NAMED_LOST_WORKERS else []
    return f"{len(losses)} workers are lost: " + "; ".join([*named, *more])


def _format_worker(observation: Observation, view: WorkerView) -> str:
    ranks = format_list(_get_ranks(observation, view))
    return f"{view.name} ({f'rank {ranks}' if ranks else 'a spare'})"


def _get_ranks(observation: Observation, view: WorkerView) -> tuple[int, ...]:
    return next((member.ranks for member in observation.plan.members if member.worker == view.name), ())
