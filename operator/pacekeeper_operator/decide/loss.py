"""What becomes of workers that one event has taken: one decision, with one replacement for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..api import Cause, Class, Reason, Remedy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, Policy, WorkerView
from ..subject import Subject
from ..words import listed
from .pricing import choose_at_standstill, replace_lost_option, written

MOST_NAMED = 3
"""Workers that a message names; the others are counted."""


@dataclass(frozen=True)
class Loss:
    """A worker that is lost, and how."""

    view: WorkerView
    cause: Cause
    class_: Class
    words: str
    first_sign: float  # seconds since the epoch
    trains: bool = False  # for a moment still: it can take part in a checkpoint

    @property
    def disruption(self) -> bool:
        """Somebody wanted it: it burns no budget."""
        return self.class_ is Class.DISRUPTION


def of_one_event(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """The first, and those that are lost for the same kind of reason."""
    return tuple(loss for loss in losses if (loss.cause, loss.class_) == (losses[0].cause, losses[0].class_))


def decide(observation: Observation, policy: Policy, losses: Sequence[Loss], settles: tuple[str, ...] = ()) -> Decision:
    """Replace them all. Without spares their ranks wait for the workers that are made in their place: there is no
    other remedy."""
    first = losses[0]
    choice = choose_at_standstill((replace_lost_option(observation, policy),))
    actions = _actions(observation, policy, losses)
    ranks = _ranks(observation, first.view)
    messages = [loss.view.pod.exit_message for loss in losses if loss.view.pod is not None]
    return Decision(
        subject=Subject(first.cause, observation.round if observation.plan.members else 0, worker=first.view.name),
        class_=first.class_,
        message=_say(observation, losses),
        first_sign=min(loss.first_sign for loss in losses),
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if not policy.refusal(Remedy.REPLACE_WORKER) else None,
        remedies=written(choice.prices, choice.chosen),
        evidence=tuple(message for message in messages if message),
        rank=ranks[0] if ranks else None,
        worker=first.view.name,
        node=first.view.record.node or None,
        settles=settles,
        live=not any(_ranks(observation, loss.view) for loss in losses),
        last_step=observation.step,
    )


def _actions(observation: Observation, policy: Policy, losses: Sequence[Loss]) -> tuple[Action, ...]:
    counts = any(not loss.disruption and _ranks(observation, loss.view) for loss in losses)
    if counts and observation.budget_is_spent(policy):
        return (FailJob(Reason.RESTART_BUDGET_SPENT, f"no restart is left: {_say(observation, losses)}"),)
    if policy.refusal(Remedy.REPLACE_WORKER):
        return ()
    return tuple(
        # One event costs one restart, however many workers it has taken.
        ReplaceWorker(
            loss.view.name, loss.words, dead=not loss.trains, disruption=loss.disruption or loss is not losses[0]
        )
        for loss in losses
    )


def _say(observation: Observation, losses: Sequence[Loss]) -> str:
    if len(losses) == 1:
        return f"worker {_name(observation, losses[0].view)} is lost: {losses[0].words}"
    named = [f"{_name(observation, loss.view)}: {loss.words}" for loss in losses[:MOST_NAMED]]
    more = [f"and {len(losses) - MOST_NAMED} more"] if len(losses) > MOST_NAMED else []
    return f"{len(losses)} workers are lost: " + "; ".join([*named, *more])


def _name(observation: Observation, view: WorkerView) -> str:
    ranks = listed(_ranks(observation, view))
    return f"{view.name} ({f'rank {ranks}' if ranks else 'a spare'})"


def _ranks(observation: Observation, view: WorkerView) -> tuple[int, ...]:
    return next((member.ranks for member in observation.plan.members if member.worker == view.name), ())
