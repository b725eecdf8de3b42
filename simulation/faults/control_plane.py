"""Faults of the API server, its admission chain, and Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ..kubernetes.api.api_faults import Denial, OneShot, RequestOutcome, SlowWebhook
from ..prometheus import XID_BASELINE_SECONDS
from ..world import NAMESPACE
from .context import FaultContext
from .fault import Cost, Fault, HealCallback, JobFault


@dataclass(frozen=True)
class _ApiFault(Fault):
    """Sets one of the API server's own faults."""

    __abstract__: ClassVar = True

    def _set_api_fault(self, context: FaultContext, name: str, value: object) -> HealCallback:
        faults = context.world.api.faults
        default = getattr(type(faults)(), name)
        setattr(faults, name, value)
        return lambda: setattr(faults, name, default)


@dataclass(frozen=True)
class ApiIsDown(_ApiFault):
    """Connections to the API server are refused, or not answered."""

    silent: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "silent" if self.silent else "down", True)


@dataclass(frozen=True)
class ApiFails(_ApiFault):
    """A share of requests fails with 500, 503, or 429."""

    costs = (Cost.STATUS,)
    rate: float = 0.3

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "error_rate", self.rate)


@dataclass(frozen=True)
class AnswersAreLost(_ApiFault):
    """A share of writes takes effect without an answer."""

    costs = (Cost.STATUS,)
    rate: float = 0.15

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "lost_rate", self.rate)


@dataclass(frozen=True)
class WritesAreLate(_ApiFault):
    """A share of writes takes effect after the client has timed out."""

    costs = (Cost.STATUS,)
    rate: float = 0.1

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "late_rate", self.rate)


@dataclass(frozen=True)
class ApiIsSlow(_ApiFault):
    """Each request takes up to `max_seconds` longer."""

    costs = (Cost.STATUS,)
    max_seconds: float = 4.0

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "slow", (self.max_seconds / 4, self.max_seconds))


@dataclass(frozen=True)
class WatchesLag(_ApiFault):
    """Watch events are delayed by up to `max_seconds`."""

    max_seconds: float = 10.0

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "watch_lag", (self.max_seconds / 4, self.max_seconds))


@dataclass(frozen=True)
class HistoryIsShort(_ApiFault):
    """A watch that ends can rarely resume from where it was: the answer is 410."""

    def inject(self, context: FaultContext) -> HealCallback:
        return self._set_api_fault(context, "history", 1)


@dataclass(frozen=True)
class WatchesEnd(Fault):
    """All watches end once. `history_lost`: the events that they have missed are lost."""

    history_lost: bool = False

    def inject(self, context: FaultContext) -> None:
        context.log("all watches end" + (", and their history is lost" if self.history_lost else ""))
        context.world.api.end_watches(history_lost=self.history_lost)


@dataclass(frozen=True)
class NextRequest(Fault):
    """The outcome of the next request with this method ("": any) to a path that contains `part`."""

    method: str = ""
    part: str = ""
    outcome: RequestOutcome = RequestOutcome.REFUSED
    status: int = 500

    def inject(self, context: FaultContext) -> None:
        context.world.api.faults.one_shots.append(OneShot(self.method, self.part, self.outcome, self.status))


@dataclass(frozen=True)
class WriteConflicts(Fault):
    """The next `number` replacements of objects of one kind fail with a conflict."""

    plural: str = "trainingjobstates"
    number: int = 5

    def inject(self, context: FaultContext) -> None:
        shot = OneShot("PUT", f"/{self.plural}/", RequestOutcome.REFUSED, 409)
        context.world.api.faults.one_shots.extend([shot] * self.number)


@dataclass(frozen=True)
class EtcdIsRestored(Fault):
    """A backup is taken now, and restored when the fault ends: the API server loses everything since."""

    def inject(self, context: FaultContext) -> HealCallback:
        api = context.world.api
        backup = api.backup()

        def heal() -> None:
            context.log(f"etcd is restored from its backup: version {api.version} is followed by {backup.version}")
            api.restore(backup)

        return heal


@dataclass(frozen=True)
class WebhookIsSlow(JobFault):
    """The creation of a job's pods takes `seconds` longer."""

    seconds: float = 20.0

    def inject(self, context: FaultContext) -> HealCallback:
        hooks = context.world.api.faults.slow_webhooks
        hook = SlowWebhook("pods", f"{context.get_job_settings(self.job).name}-w", self.seconds)
        hooks.append(hook)
        return lambda: hooks.remove(hook)


@dataclass(frozen=True)
class PodsAreDenied(JobFault):
    """A policy denies the job's pods."""

    costs = (Cost.SPARES,)
    status: int = 403

    def inject(self, context: FaultContext) -> HealCallback:
        denials, name = context.world.api.faults.denials, f"{context.get_job_settings(self.job).name}-w"
        messages = {403: "admission webhook denied the request: no", 500: "failed calling webhook: no route to host"}
        messages[422] = "Pod is invalid: spec.containers[0].image: Required value"
        denial = Denial("pods", name, self.status, messages[self.status])
        denials.append(denial)
        return lambda: denials.remove(denial)


@dataclass(frozen=True)
class QuotaIsFull(Fault):
    """The namespace's quota has room for `free_pods` more pods."""

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

    DOWN = "down"  # connections are refused
    SILENT = "silent"  # no answer
    EMPTY = "empty"  # answers without series
    STALE = "stale"  # answers with old values


class WrongSeries(StrEnum):
    """What is wrong in series."""

    FOREIGN = "foreign"  # another job's steps with this job's labels
    GPU = "gpu"  # DCGM: an XID that did not occur
    UNKNOWN_NODE = "unknown-node"  # DCGM: nodes that do not exist


@dataclass(frozen=True)
class PrometheusFails(Fault):
    """Prometheus fails for all its clients."""

    how: PrometheusFailure = PrometheusFailure.DOWN

    def inject(self, context: FaultContext) -> HealCallback:
        prometheus = context.world.prometheus
        context.log(f"Prometheus is {self.how}")
        prometheus.failure = self.how
        return lambda: setattr(prometheus, "failure", "")


@dataclass(frozen=True)
class ExporterIsAway(Fault):
    """There are no GPU series of one node, by its position; `everywhere`: of all nodes."""

    at_least = XID_BASELINE_SECONDS
    node: int = 0
    everywhere: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        names = list(context.world.nodes)
        chosen = names if self.everywhere else [names[self.node % len(names)]]
        context.log(f"there are no GPU series of {', '.join(chosen)}")
        for name in chosen:
            context.world.prometheus.show_exporter(name, present=False)

        def heal() -> None:
            for name in chosen:
                context.world.prometheus.show_exporter(name, present=True)

        return heal


@dataclass(frozen=True)
class PrometheusIsWrong(Fault):
    """Some series are wrong."""

    series: WrongSeries = WrongSeries.FOREIGN

    def inject(self, context: FaultContext) -> HealCallback:
        prometheus = context.world.prometheus
        context.log(f"Prometheus has wrong series: {self.series}")
        prometheus.wrong_series = self.series
        return lambda: setattr(prometheus, "wrong_series", "")
