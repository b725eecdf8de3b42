"""Triggers of faults: a time, or an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import JobPhase

from ..kubernetes.api.changes import ObjectChange
from .context import FaultContext

InjectCallback = Callable[[], None]


@dataclass(frozen=True)
class Trigger:
    """Fires once, or never."""

    __abstract__: ClassVar = True

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        """Call `inject` when the trigger fires, before anything else happens."""
        raise NotImplementedError


@dataclass(frozen=True)
class AtTime(Trigger):
    """Fires at a virtual time, in seconds since the start."""

    seconds: float

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        context.world.call_after(self.seconds, inject)


@dataclass(frozen=True)
class AfterFault(Trigger):
    """Fires `seconds` after another injection of the schedule, by its position."""

    injection: int
    seconds: float = 0.0

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        context.call_after_injection(self.injection, lambda: context.world.call_after(self.seconds, inject))


@dataclass(frozen=True)
class _CountedTrigger(Trigger):
    """Fires `delay` seconds after the n-th occurrence of an event, counted from 1."""

    __abstract__: ClassVar = True
    number: int = 1
    delay: float = 0.0

    def _build_counter(self, context: FaultContext, inject: InjectCallback) -> Callable[[], None]:
        occurrences = 0

        def happened() -> None:
            nonlocal occurrences
            occurrences += 1
            if occurrences == self.number and self.delay:
                context.world.call_after(self.delay, inject)
            elif occurrences == self.number:
                inject()

        return happened


@dataclass(frozen=True)
class BeforeWrite(_CountedTrigger):
    """Before the operator's n-th write, or the n-th of a kind.

    The write does not take effect if the operator is killed.
    """

    plural: str = ""

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count = self._build_counter(context, inject)
        context.call_before_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class AfterWrite(_CountedTrigger):
    """After the operator's n-th write, or the n-th of a kind, has taken effect, before the operator gets the answer."""

    plural: str = ""

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count = self._build_counter(context, inject)
        context.call_after_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class RankExits(_CountedTrigger):
    """A rank has exited, and its launcher has not noticed yet."""

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count = self._build_counter(context, inject)
        context.world.trainings.on_rank_exit.append(lambda _rank: count())


@dataclass(frozen=True)
class WorkerExits(_CountedTrigger):
    """A worker's trainer has exited, and its kubelet has not reported it yet."""

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count = self._build_counter(context, inject)
        context.world.trainings.on_exit.append(lambda _worker: count())


@dataclass(frozen=True)
class PhaseBegins(_CountedTrigger):
    """A job's phase changes to this one."""

    phase: JobPhase = JobPhase.RUNNING
    job: int = 0

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count, name = self._build_counter(context, inject), context.get_job_settings(self.job).name

        def changed(change: ObjectChange) -> None:
            new_phase, old_phase = self._get_phase(change.object), self._get_phase(change.previous or {})
            if change.object["metadata"]["name"] == name and new_phase == self.phase and old_phase != self.phase:
                count()

        context.watch_kind("trainingjobs", changed)

    @staticmethod
    def _get_phase(body: dict[str, object]) -> object:
        status = body.get("status")
        return status.get("phase") if isinstance(status, dict) else None


@dataclass(frozen=True)
class IncidentOpens(_CountedTrigger):
    """An incident of this cause opens; "": of any cause."""

    cause: IncidentCause | str = ""

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count = self._build_counter(context, inject)

        def changed(change: ObjectChange) -> None:
            if change.type == "ADDED" and self.cause in ("", change.object["spec"]["cause"]):
                count()

        context.watch_kind("incidents", changed)


@dataclass(frozen=True)
class RoundGathers(_CountedTrigger):
    """The plan has new members, or a new membership: a rendezvous follows."""

    job: int = 0

    def arm(self, context: FaultContext, inject: InjectCallback) -> None:
        count, name = self._build_counter(context, inject), context.get_job_settings(self.job).name

        def changed(change: ObjectChange) -> None:
            if change.object["metadata"]["name"] != name or change.type == "DELETED":
                return
            old_membership = change.previous["plan"]["membership"] if change.previous is not None else 0
            if change.object["plan"]["membership"] > old_membership:
                count()

        context.watch_kind("trainingjobstates", changed)
