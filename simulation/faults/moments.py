"""When a fault comes: at a time, or when something happens that has no time of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pacekeeper_operator.api import Cause, JobPhase

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from .scene import Scene

Strike = Callable[[], None]


@dataclass(frozen=True)
class Moment:
    """Comes once, or never."""

    __abstract__: ClassVar = True

    def arm(self, scene: Scene, strike: Strike) -> None:
        """`strike` is called when it has come, before anything else happens."""
        raise NotImplementedError


@dataclass(frozen=True)
class At(Moment):
    """Virtual seconds since the start."""

    seconds: float

    def arm(self, scene: Scene, strike: Strike) -> None:
        scene.world.after(self.seconds, strike)


@dataclass(frozen=True)
class AfterFault(Moment):
    """So many seconds after another stroke of the schedule, by its place there."""

    stroke: int
    seconds: float = 0.0

    def arm(self, scene: Scene, strike: Strike) -> None:
        scene.after_stroke(self.stroke, lambda: scene.world.after(self.seconds, strike))


@dataclass(frozen=True)
class _Counted(Moment):
    """The n-th time that something happens, counted from 1, and so many seconds later."""

    __abstract__: ClassVar = True
    number: int = 1
    later: float = 0.0

    def _counter(self, scene: Scene, strike: Strike) -> Callable[[], None]:
        seen = 0

        def happened() -> None:
            nonlocal seen
            seen += 1
            if seen == self.number and self.later:
                scene.world.after(self.later, strike)
            elif seen == self.number:
                strike()

        return happened


@dataclass(frozen=True)
class BeforeWrite(_Counted):
    """The operator is about to send its n-th write, or the n-th of a kind: it does not take effect any more if the
    operator is killed."""

    plural: str = ""

    def arm(self, scene: Scene, strike: Strike) -> None:
        count = self._counter(scene, strike)
        scene.before_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class AfterWrite(_Counted):
    """The operator's n-th write, or the n-th of a kind, has just taken effect; the operator does not know it yet."""

    plural: str = ""

    def arm(self, scene: Scene, strike: Strike) -> None:
        count = self._counter(scene, strike)
        scene.after_write(lambda plural: count() if self.plural in ("", plural) else None)


@dataclass(frozen=True)
class RankExits(_Counted):
    """A rank has ended, and its launcher has not noticed yet."""

    def arm(self, scene: Scene, strike: Strike) -> None:
        count = self._counter(scene, strike)
        scene.world.trainings.on_rank_exit.append(lambda _rank: count())


@dataclass(frozen=True)
class WorkerExits(_Counted):
    """A worker's trainer has ended, and its kubelet has not told yet."""

    def arm(self, scene: Scene, strike: Strike) -> None:
        count = self._counter(scene, strike)
        scene.world.trainings.on_exit.append(lambda _worker: count())


@dataclass(frozen=True)
class PhaseBegins(_Counted):
    """A job's phase becomes this one."""

    phase: JobPhase = JobPhase.RUNNING
    job: int = 0

    def arm(self, scene: Scene, strike: Strike) -> None:
        count, name = self._counter(scene, strike), scene.settings(self.job).name

        def changed(change: Change) -> None:
            now, before = self._phase(change.object), self._phase(change.before or {})
            if change.object["metadata"]["name"] == name and now == self.phase and before != self.phase:
                count()

        scene.watch("trainingjobs", changed)

    @staticmethod
    def _phase(body: dict[str, object]) -> object:
        status = body.get("status")
        return status.get("phase") if isinstance(status, dict) else None


@dataclass(frozen=True)
class IncidentOpens(_Counted):
    """Of this cause; "": of any."""

    cause: Cause | str = ""

    def arm(self, scene: Scene, strike: Strike) -> None:
        count = self._counter(scene, strike)

        def changed(change: Change) -> None:
            if change.type == "ADDED" and self.cause in ("", change.object["spec"]["cause"]):
                count()

        scene.watch("incidents", changed)


@dataclass(frozen=True)
class RoundGathers(_Counted):
    """The plan names other members, or the same ones anew: they are about to meet."""

    job: int = 0

    def arm(self, scene: Scene, strike: Strike) -> None:
        count, name = self._counter(scene, strike), scene.settings(self.job).name

        def changed(change: Change) -> None:
            if change.object["metadata"]["name"] != name or change.type == "DELETED":
                return
            before = change.before["plan"]["membership"] if change.before is not None else 0
            if change.object["plan"]["membership"] > before:
                count()

        scene.watch("trainingjobstates", changed)
