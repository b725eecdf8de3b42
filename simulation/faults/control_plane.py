"""What goes wrong with the API server and what stands before it, and with Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from ..kubernetes.faults import Denial, RequestOutcome, OneShot, SlowWebhook
from ..prometheus import XID_BASELINE_SECONDS
from ..world import NAMESPACE
from .fault import Cost, Fault, HealCallback, JobFault

if TYPE_CHECKING:
    from .scene import FaultContext


@dataclass(frozen=True)
class _ApiFault(Fault):
    """Sets one of the API server's own faults."""

    __abstract__: ClassVar = True

    def _set_api_fault(self, context: FaultContext, name: str, value: object) -> HealCallback:
        faults = context.world.api.faults
        before = getattr(type(faults)(), name)
        setattr(faults, name, value)
        return lambda: setattr(faults, name, before)


@dataclass(frozen=True)
class ApiIsDown(_ApiFault):
    """Refused, or silent."""

    silent: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "silent" if self.silent else "down", True)


@dataclass(frozen=True)
class ApiFails(_ApiFault):
    """This share of requests, with 500, 503 and 429."""

    costs = (Cost.STATUS,)
    rate: float = 0.3

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "error_rate", self.rate)


@dataclass(frozen=True)
class AnswersAreLost(_ApiFault):
    """This share of writes takes effect without an answer."""

    costs = (Cost.STATUS,)
    rate: float = 0.15

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "lost_rate", self.rate)


@dataclass(frozen=True)
class WritesAreLate(_ApiFault):
    """This share of writes takes effect after its sender has given up."""

    costs = (Cost.STATUS,)
    rate: float = 0.1

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "late_rate", self.rate)


@dataclass(frozen=True)
class ApiIsSlow(_ApiFault):
    """Each request takes up to so many seconds longer."""

    costs = (Cost.STATUS,)
    max_seconds: float = 4.0

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "slow", (self.max_seconds / 4, self.max_seconds))


@dataclass(frozen=True)
class WatchesLag(_ApiFault):
    """By up to so many seconds."""

    max_seconds: float = 10.0

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "watch_lag", (self.max_seconds / 4, self.max_seconds))


@dataclass(frozen=True)
class HistoryIsShort(_ApiFault):
    """A stream that ends can hardly go on from where it was: 410."""

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "history", 1)


@dataclass(frozen=True)
class WatchesEnd(Fault):
    """All of them, once; with `gone` what they have missed is lost."""

    history_lost: bool = False

    def inject(self, context: FaultContext) -> None:
        context.log("all watches end" + (", and their past is lost" if self.history_lost else ""))
        context.world.api.end_watches(history_lost=self.history_lost)


@dataclass(frozen=True)
class NextRequest(Fault):
    """What becomes of the next one of this method ("": any) to a path with `part` in it."""

    method: str = ""
    part: str = ""
    outcome: RequestOutcome = RequestOutcome.REFUSED
    status: int = 500

    def inject(self, context: FaultContext) -> None:
        context.world.api.faults.one_shots.append(OneShot(self.method, self.part, self.outcome, self.status))


@dataclass(frozen=True)
class WriteConflicts(Fault):
    """The next so many replacements of one kind meet somebody faster."""

    plural: str = "trainingjobstates"
    number: int = 5

    def inject(self, context: FaultContext) -> None:
        shot = OneShot("PUT", f"/{self.plural}/", RequestOutcome.REFUSED, 409)
        context.world.api.faults.one_shots.extend([shot] * self.number)


@dataclass(frozen=True)
class EtcdIsRestored(Fault):
    """From a backup that is taken now: when it is over, the API server knows nothing of what has happened since."""

    def strike(self, scene: FaultContext) -> HealCallback:
        api = scene.world.api
        backup = api.backup()

        def heal() -> None:
            scene.log(f"etcd is restored from its backup: version {api.version} is followed by {backup.version}")
            api.restore(backup)

        return heal


@dataclass(frozen=True)
class WebhookIsSlow(JobFault):
    """Creations of a job's pods take so much longer."""

    seconds: float = 20.0

    def inject(self, context: FaultContext) -> HealCallback:
        hooks = context.world.api.faults.slow_webhooks
        hook = SlowWebhook("pods", f"{context.get_job_settings(self.job).name}-w", self.seconds)
        hooks.append(hook)
        return lambda: hooks.remove(hook)


@dataclass(frozen=True)
class PodsAreDenied(JobFault):
    """By a policy: no pod of the job can be made."""

    costs = (Cost.SPARES,)
    status: int = 403

    def inject(self, context: FaultContext) -> HealCallback:
        denials, name = context.world.api.faults.denials, f"{context.get_job_settings(self.job).name}-w"
        words = {403: "admission webhook denied the request: no", 500: "failed calling webhook: no route to host"}
        words[422] = "Pod is invalid: spec.containers[0].image: Required value"
        denial = Denial("pods", name, self.status, words[self.status])
        denials.append(denial)
        return lambda: denials.remove(denial)


@dataclass(frozen=True)
class QuotaIsFull(Fault):
    """The namespace has room for so many pods more."""

    costs = (Cost.SPARES,)
    free_pods: int = 0

    def inject(self, context: FaultContext) -> HealCallback:
        api = context.world.api
        pods = len(api.list_all("pods", NAMESPACE)) + self.free_pods
        context.log(f"the quota allows {pods} pods")
        body = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "pods", "namespace": NAMESPACE},
            "spec": {"hard": {"pods": str(pods)}},
        }
        if api.get("resourcequotas", "pods", NAMESPACE) is not None:
            api.delete("resourcequotas", "pods", NAMESPACE)
        api.create("resourcequotas", body)

        def heal() -> None:
            if api.get("resourcequotas", "pods", NAMESPACE) is not None:
                api.delete("resourcequotas", "pods", NAMESPACE)

        return heal


class PrometheusFailure(StrEnum):
    """How Prometheus fails."""

    DOWN = "down"  # nobody listens
    SILENT = "silent"  # no answer
    EMPTY = "empty"  # answers without a series
    STALE = "stale"  # the same figures again and again


class WrongSeries(StrEnum):
    """What series say that is not so."""

    FOREIGN = "foreign"  # another job's steps under this one's labels
    GPU = "gpu"  # DCGM: an XID where there is none
    UNKNOWN_NODE = "unknown-node"  # DCGM: of nodes that do not exist


@dataclass(frozen=True)
class PrometheusFails(Fault):
    """For everybody."""

    how: PrometheusFailure = PrometheusFailure.DOWN

    def inject(self, context: FaultContext) -> HealCallback:
        prometheus = context.world.prometheus
        context.log(f"Prometheus is {self.how}")
        prometheus.failure = self.how
        return lambda: setattr(prometheus, "silence", "")


@dataclass(frozen=True)
class ExporterIsAway(Fault):
    """There are no series of the GPUs of one node, by its place, or with `everywhere` of all nodes."""

    at_least = XID_BASELINE_SECONDS
    node: int = 0
    everywhere: bool = False

    def strike(self, scene: FaultContext) -> HealCallback:
        names = list(scene.world.nodes)
        chosen = names if self.everywhere else [names[self.node % len(names)]]
        scene.log(f"there are no GPU series of {', '.join(chosen)}")
        for name in chosen:
            scene.world.prometheus.show_exporter(name, there=False)

        def heal() -> None:
            for name in chosen:
                scene.world.prometheus.show_exporter(name, there=True)

        return heal


@dataclass(frozen=True)
class PrometheusIsWrong(Fault):
    """In some series."""

    series: WrongSeries = WrongSeries.FOREIGN

    def inject(self, context: FaultContext) -> HealCallback:
        prometheus = context.world.prometheus
        context.log(f"Prometheus lies: {self.series}")
        prometheus.wrong_series = self.series
        return lambda: setattr(prometheus, "lie", "")
