"""What a run has reached of the operator: its checks, steps, effects and quarantine steps, and the words of its states.

The operator's own tables are looked into where they are called, once a process; nothing is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, get_args

from pacekeeper_operator import decide, effects
from pacekeeper_operator.api import IncidentCause, JobPhase, IncidentOutcome, QuarantinePhase, Remedy, QuarantineVerdict, Witness
from pacekeeper_operator.decide import node_steps, think
from pacekeeper_operator.decide.treat import DecisionCheck
from pacekeeper_operator.observation import Observation, Policy
from pacekeeper_operator.services import doing, quarantine, reconcile

_QUARANTINE_STEPS = [step for step in get_args(node_steps.QuarantineStep) if step is not node_steps.RequeueAfter]
_reached: set[str] = set()


@contextmanager
def count_coverage() -> Iterator[set[str]]:
    """What the operators of this process reach meanwhile."""
    _instrument_operator()
    _reached.clear()
    yield _reached


def list_coverage_targets() -> frozenset[str]:
    """What there is to be reached."""
    return frozenset(
        [
            *(f"check {_get_check_name(check)}" for check in decide.CHECKS),
            *(f"step {name}" for name, _ in decide.STEPS),
            *(f"effect {effect.__name__}" for effect in get_args(effects.Effect)),
            *(f"quarantine step {step.__name__}" for step in _QUARANTINE_STEPS),
            *(f"cause {word}" for word in IncidentCause),
            *(f"remedy {word}" for word in Remedy),
            *(f"outcome {word}" for word in IncidentOutcome),
            *(f"phase {word}" for word in JobPhase),
            *(f"quarantine {word}" for word in QuarantinePhase),
            *(f"verdict {word}" for word in QuarantineVerdict),
            *(f"witness {word}" for word in Witness if word is not Witness.NONE),
        ]
    )


@cache
def _instrument_operator() -> None:
    vars(think)["STEPS"] = tuple((name, _wrap_step(name, step)) for name, step in decide.STEPS)
    vars(reconcile)["carry_out"] = _wrap_call(doing.handle_effect, "effect", 2)
    vars(quarantine)["_carry_out"] = _wrap_call(quarantine._execute_step, "quarantine step", 1)


def _wrap_step(name: str, step: decide.DecisionStep) -> decide.DecisionStep:
    """It is reached where it changes the draft."""
    if isinstance(step, partial):
        step = partial(step.func, checks=tuple(_wrap_check(check) for check in decide.CHECKS))

    def looked_at(observation: Observation, policy: Policy) -> Any:
        draft = step(observation, policy)
        if draft is not observation.desired and draft != observation.desired:
            _reached.add(f"step {name}")
        return draft

    return looked_at


def _wrap_check(check: DecisionCheck) -> DecisionCheck:
    """It is reached where it finds something."""
    word = f"check {_get_check_name(check)}"

    @wraps(check)
    def looked_at(observation: Observation, policy: Policy) -> Any:
        found = check(observation, policy)
        if found is not None:
            _reached.add(word)
        return found

    return looked_at


def _wrap_call(call: Callable[..., Any], what: str, position: int) -> Callable[..., Any]:
    """`place`: of the argument whose class counts."""

    def looked_at(*arguments: Any) -> Any:
        _reached.add(f"{what} {type(arguments[position]).__name__}")
        return call(*arguments)

    return looked_at


def _get_check_name(check: DecisionCheck) -> str:
    return str(check.__module__).rpartition(".")[2]
