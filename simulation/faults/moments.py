"""When a fault comes: at a time, or when something happens that has no time of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pacekeeper_operator.api import IncidentCause, JobPhase

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from .scene import FaultContext

InjectCallback = Callable[[], None]


@dataclass(frozen=True)
class Trigger:
    """Comes once, or never."""

    __abstract__: ClassVar = True

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        """`strike` is called when it has come, before anything else happens."""
        raise NotImplementedError


@dataclass(frozen=True)
class AtTime(Trigger):
    """Virtual seconds since the start."""

    seconds: float

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        context.world.call_after(self.seconds, strike)


@dataclass(frozen=True)
class AfterFault(Trigger):
    """So many seconds after another stroke of the schedule, by its place there."""

    injection: int
    seconds: float = 0.0

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        context.call_after_injection(self.injection, lambda: context.world.call_after(self.seconds, strike))


@dataclass(frozen=True)
class _CountedTrigger(Trigger):
    """The n-th time that something happens, counted from 1, and so many seconds later."""

    __abstract__: ClassVar = True
    number: int = 1
    delay: float = 0.0

    def _build_counter(self, context: FaultContext, strike: InjectCallback) -> Callable[[], None]:
        seen = 0

        def happened() -> None:
            nonlocal seen
            seen += 1
            if seen == self.number and self.delay:
                context.world.call_after(self.delay, strike)
            elif seen == self.number:
                strike()

        return happened


@dataclass(frozen=True)
class BeforeWrite(_CountedTrigger):
    """The operator is about to send its n-th write, or the n-th of a kind: it does not take effect any more if the
    operator is killed."""

    plural: str = ""

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count = self._build_counter(context, strike)
        context.call_before_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class AfterWrite(_CountedTrigger):
    """The operator's n-th write, or the n-th of a kind, has just taken effect; the operator does not know it yet."""

    plural: str = ""

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count = self._build_counter(context, strike)
        context.call_after_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class RankExits(_CountedTrigger):
    """A rank has ended, and its launcher has not noticed yet."""

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count = self._build_counter(context, strike)
        context.world.trainings.on_rank_exit.append(lambda _rank: count())


@dataclass(frozen=True)
class WorkerExits(_CountedTrigger):
    """A worker's trainer has ended, and its kubelet has not told yet."""

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count = self._build_counter(context, strike)
        context.world.trainings.on_exit.append(lambda _worker: count())


@dataclass(frozen=True)
class PhaseBegins(_CountedTrigger):
    """A job's phase becomes this one."""

    phase: JobPhase = JobPhase.RUNNING
    job: int = 0

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count, name = self._build_counter(context, strike), context.get_job_settings(self.job).name

        def changed(change: ObjectChange) -> None:
            now, before = self._get_phase(change.object), self._get_phase(change.previous or {})
            if change.object["metadata"]["name"] == name and now == self.phase and before != self.phase:
                count()

        context.watch_kind("trainingjobs", changed)

    @staticmethod
    def _get_phase(body: dict[str, object]) -> object:
        status = body.get("status")
        return status.get("phase") if isinstance(status, dict) else None


@dataclass(frozen=True)
class IncidentOpens(_CountedTrigger):
    """Of this cause; "": of any."""

    cause: IncidentCause | str = ""

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count = self._build_counter(context, strike)

        def changed(change: ObjectChange) -> None:
            if change.type == "ADDED" and self.cause in ("", change.object["spec"]["cause"]):
                count()

        context.watch_kind("incidents", changed)


@dataclass(frozen=True)
class RoundGathers(_CountedTrigger):
    """The plan names other members, or the same ones anew: they are about to meet."""

    job: int = 0

    def arm(self, context: FaultContext, strike: InjectCallback) -> None:
        count, name = self._build_counter(context, strike), context.get_job_settings(self.job).name

        def changed(change: ObjectChange) -> None:
            if change.object["metadata"]["name"] != name or change.type == "DELETED":
                return
            before = change.previous["plan"]["membership"] if change.previous is not None else 0
            if change.object["plan"]["membership"] > before:
                count()

        context.watch_kind("trainingjobstates", changed)
