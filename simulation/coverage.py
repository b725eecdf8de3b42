"""Which parts of the operator a run has reached: checks, steps, effects, quarantine steps, and values of its states.

The operator's own tables are wrapped where they are called, once per process. There is no tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, get_args

from pacekeeper_operator import decide
from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineVerdict, Witness
from pacekeeper_operator.api.training_job import JobPhase, Remedy
from pacekeeper_operator.decide import effects, evaluate
from pacekeeper_operator.decide.check_runner import DecisionCheck
from pacekeeper_operator.decide.nodes import quarantine_steps
from pacekeeper_operator.runtime import effect_handlers, reconcile
from pacekeeper_operator.services import quarantine
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy

_QUARANTINE_STEPS = [
    step for step in get_args(quarantine_steps.QuarantineStep) if step is not quarantine_steps.RequeueAfter
]
_reached: set[str] = set()


@contextmanager
def count_coverage() -> Iterator[set[str]]:
    """Yield the set of what this process's operators reach inside of the block."""
    _instrument_operator()
    _reached.clear()
    yield _reached


def list_coverage_targets() -> frozenset[str]:
    """Return everything that can be reached."""
    return frozenset(
        [
            *(f"check {_get_check_name(check)}" for check in decide.CHECKS),
            *(f"step {name}" for name, _ in decide.STEPS),
            *(f"effect {effect.__name__}" for effect in get_args(effects.Effect)),
            *(f"quarantine step {step.__name__}" for step in _QUARANTINE_STEPS),
            *(f"cause {value}" for value in IncidentCause),
            *(f"remedy {value}" for value in Remedy),
            *(f"outcome {value}" for value in IncidentOutcome),
            *(f"phase {value}" for value in JobPhase),
            *(f"quarantine {value}" for value in QuarantinePhase),
            *(f"verdict {value}" for value in QuarantineVerdict),
            *(f"witness {value}" for value in Witness if value is not Witness.NONE),
        ]
    )


@cache
def _instrument_operator() -> None:
    vars(evaluate)["STEPS"] = tuple((name, _wrap_step(name, step)) for name, step in decide.STEPS)
    vars(reconcile)["handle_effect"] = _wrap_call(effect_handlers.handle_effect, "effect", 2)
    vars(quarantine)["_execute_step"] = _wrap_call(quarantine._execute_step, "quarantine step", 1)


def _wrap_step(name: str, step: decide.DecisionStep) -> decide.DecisionStep:
    """Wrap a step. It is reached if it changes the desired state."""
    if isinstance(step, partial):
        step = partial(step.func, checks=tuple(_wrap_check(check) for check in decide.CHECKS))

    def looked_at(observation: Observation, policy: Policy) -> Any:
        desired = step(observation, policy)
        if desired is not observation.desired and desired != observation.desired:
            _reached.add(f"step {name}")
        return desired

    return looked_at


def _wrap_check(check: DecisionCheck) -> DecisionCheck:
    """Wrap a check. It is reached if it finds something."""
    target = f"check {_get_check_name(check)}"

    @wraps(check)
    def looked_at(observation: Observation, policy: Policy) -> Any:
        finding = check(observation, policy)
        if finding is not None:
            _reached.add(target)
        return finding

    return looked_at


def _wrap_call(call: Callable[..., Any], kind: str, position: int) -> Callable[..., Any]:
    """Wrap a function. `position`: of the argument whose class is counted."""

    def looked_at(*arguments: Any) -> Any:
        _reached.add(f"{kind} {type(arguments[position]).__name__}")
        return call(*arguments)

    return looked_at


def _get_check_name(check: DecisionCheck) -> str:
    return str(check.__module__).rpartition(".")[2]
