"""What becomes of workers that one event has taken: one decision, with one replacement for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..api import IncidentCause, IncidentClass, Reason, Remedy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, Policy, WorkerView
from ..subject import IncidentKey
from ..words import format_list
from .pricing import choose_remedy_at_standstill, build_replace_lost_option, build_remedy_prices

MAX_NAMED_LOST_WORKERS = 3
"""Workers that a message names; the others are counted."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that is lost, and how."""

    view: WorkerView
    cause: IncidentCause
    class_: IncidentClass
    reason: str
    first_sign: float  # seconds since the epoch
    still_trains: bool = False  # for a moment still: it can take part in a checkpoint

    @property
    def disruption(self) -> bool:
        """Somebody wanted it: it burns no budget."""
        return self.class_ is IncidentClass.DISRUPTION


def select_one_event(losses: Sequence[LostWorker]) -> tuple[LostWorker, ...]:
    """The first, and those that are lost for the same kind of reason."""
    return tuple(loss for loss in losses if (loss.cause, loss.class_) == (losses[0].cause, losses[0].class_))


def decide_lost_workers(observation: Observation, policy: Policy, losses: Sequence[LostWorker], settles: tuple[str, ...] = ()) -> Decision:
    """Replace them all. Without spares their ranks wait for the workers that are made in their place: there is no
    other remedy."""
    first = losses[0]
    choice = choose_remedy_at_standstill((build_replace_lost_option(observation, policy),))
    actions = _choose_actions(observation, policy, losses)
    ranks = _get_ranks(observation, first.view)
    messages = [loss.view.pod.exit_message for loss in losses if loss.view.pod is not None]
    return Decision(
        incident_key=IncidentKey(first.cause, observation.round if observation.plan.members else 0, worker=first.view.name),
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
        last_step=observation.step,
    )


def _choose_actions(observation: Observation, policy: Policy, losses: Sequence[LostWorker]) -> tuple[Action, ...]:
    counts = any(not loss.disruption and _get_ranks(observation, loss.view) for loss in losses)
    if counts and observation.is_budget_spent(policy):
        return (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left: {_describe_losses(observation, losses)}"),)
    if policy.find_refusal(Remedy.REPLACE_WORKER):
        return ()
    return tuple(
        # One event costs one restart, however many workers it has taken.
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
