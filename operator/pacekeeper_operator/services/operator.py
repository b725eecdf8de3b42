"""The running operator: what its services, its loops, and its handlers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import kopf

from ..api.training_job import RemediationMode
from ..async_runtime import OperatorRuntime
from ..endpoint.token_review import PodIdentity
from ..kube.client import Cluster
from ..kube.server_clock import ServerClock
from ..observe.job_cache import JobRegistry
from ..observe.prometheus import PrometheusClient
from ..pods.manifests import Installation
from ..settings import Settings
from ..state.network import NetworkState
from .node_history import NodeHistories
from .node_registry import NodeRegistry
from .shared.managed_jobsets import ManagedJobSets
from .shared.passes import PassScheduler
from .shared.probe_claims import ProbeClaims
from .shared.prometheus_poller import PrometheusPoller
from .shared.watched_stores import WatchedStores
from .watched_jobs import WatchedJobs
from .webhook import Webhook

PAUSE_UNKNOWN = "it is not known yet whether remedies are paused"


@dataclass
class Operator:
    """The shared state of the running operator, in parts."""

    settings: Settings
    cluster: Cluster
    jobs: JobRegistry
    installation: Installation
    prometheus_client: InitVar[PrometheusClient]
    runtime: OperatorRuntime = field(default_factory=OperatorRuntime)
    is_leader: Callable[[], bool] = lambda: True
    """Whether this operator holds the Lease, as far as it can know."""
    node_cluster: InitVar[Cluster | None] = None
    """A separate connection for holding nodes, ahead of other work for jobs; None: the same connection."""
    webhook: Webhook | None = None
    """Where Incidents are posted in addition to the cluster."""
    paused: str = PAUSE_UNKNOWN
    last_tick_at: float | None = None  # last run of `periodic_tasks`, by the monotonic clock
    network: NetworkState | None = None  # as of the last pass of services.fabrics
    clock: ServerClock = field(init=False)
    probe_claims: ProbeClaims = field(init=False)
    node_registry: NodeRegistry = field(init=False)
    passes: PassScheduler = field(init=False)
    stores: WatchedStores = field(init=False)
    prometheus: PrometheusPoller = field(init=False)
    node_histories: NodeHistories = field(init=False)
    watched: WatchedJobs = field(init=False)
    jobsets: ManagedJobSets = field(init=False)

    def __post_init__(self, prometheus_client: PrometheusClient, node_cluster: Cluster | None) -> None:
        runtime = self.runtime
        self.clock = ServerClock(runtime)
        self.cluster.on_server_date = self.clock.record_date
        self.probe_claims = ProbeClaims(runtime)
        self.node_registry = NodeRegistry(node_cluster or self.cluster, runtime, self.settings)
        self.passes = PassScheduler(runtime, self.node_registry.priority_gate, self.is_leader)
        self.stores = WatchedStores(
            self.settings, self.cluster, runtime, self.jobs, self.node_registry, self.passes, self.is_leader
        )
        self.prometheus = PrometheusPoller(prometheus_client, runtime, self.jobs, self.stores.pods, self.passes)
        self.node_histories = NodeHistories(self.cluster, runtime, self.clock, self.stores.nodes)
        self.watched = WatchedJobs(self.settings, self.cluster, runtime, JobRegistry(self.jobs.started_at))
        self.jobsets = ManagedJobSets(self.settings, self.cluster, runtime)
        self.prometheus.has_watched_jobs = self.watched.has_jobs
        self.prometheus.wake_watched_jobs = self.watched.wake_jobs_on_nodes

    def require_leadership(self) -> None:
        """Raise kopf.TemporaryError if another operator may be acting."""
        if not self.is_leader():
            raise kopf.TemporaryError("the Lease is not held: another operator may be acting", delay=1)

    def is_pod_alive(self, identity: PodIdentity) -> bool:
        """Return whether that very pod, of any job, is known to exist and not to terminate."""
        return self.stores.is_pod_alive(identity) or self.watched.is_pod_alive(identity)

    @property
    def acts(self) -> bool:
        """Return whether the platform allows remedies to be applied."""
        return self.settings.mode is RemediationMode.ACT and not self.paused

    def start_leading(self) -> None:
        """Start to lead: what the watches reported while it stood by must be confirmed by lists."""
        self.jobs.started_at = self.watched.jobs.started_at = self.runtime.now()
        self.stores.invalidate()

    def on_serving_changed(self, serves: bool) -> None:
        """Handle a change of whether this operator serves sidecars.

        If it does, they need a while to connect. If it does not, another operator may write.
        """
        if serves:
            self.jobs.started_at = self.watched.jobs.started_at = self.runtime.now()
        else:
            self.stores.listed_states = {}
