"""The operator's settings: one frozen dataclass, and the only place that reads the environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Self

from pacekeeper_analysis.errors import InputError

from .api.formats import parse_duration
from .api.training_job import RemediationMode
from .pods.injection import InjectionRules, parse_injection_rules
from .pods.network_policies import NetworkPolicyPeer, derive_peers_from_url, parse_peers
from .pods.node_health import (
    CONDITION_TYPE_PATTERN,
    DEFAULT_LEAVE_CONDITIONS,
    DEFAULT_LEAVE_TAINTS,
    KUBERNETES_CONDITIONS,
    NodeHealthRules,
)
from .pods.resources import SIDECAR_RESOURCES, Resources, parse_resources
from .pods.tolerations import Toleration, parse_tolerations
from .prometheus_options import Headers, Matchers, check_url, parse_headers, parse_matchers

MAX_RELEASE_PROBES = 5
"""A NodeQuarantine keeps its last ten probes, failed ones included."""


class WatchMode(StrEnum):
    """How the watch is injected."""

    OFF = "Off"
    POLICY = "Policy"  # by the API server
    WEBHOOK = "Webhook"  # by the operator


@dataclass(frozen=True)
class Settings:
    """The operator's settings. Durations are in seconds."""

    namespace: str = "pacekeeper-system"
    """The operator's namespace, with its Lease, its certificate authority, and the pause switch."""
    watch_namespaces: tuple[str, ...] = ()
    """The operator manages jobs in these namespaces only, and reads nothing of others. Empty: all namespaces."""
    identity: str = ""
    """Holder of the Lease: the operator's pod. A container that restarts in the same pod continues to lead at once."""
    service_name: str = "pacekeeper"
    """The Service in front of the endpoint for sidecars. The serving certificate contains its names."""
    address: str = ""
    """Address at which sidecars reach the endpoint, host:port. Empty: the Service's name and the port."""
    pod_ip: str = ""
    """IP address of this operator's pod, at which sidecars reach the leader without the Service.

    Empty: only by the Service.
    """
    tls_secret: str = ""
    """Secret in the operator's namespace with the endpoint's certificate. Empty: the operator has its own authority.

    The Secret holds `tls.crt`, `tls.key`, and the `ca.crt` that workers trust. The operator reads it again when it
    changes.
    """
    image: str = "pacekeeper:0.1.0"
    """The operator's own image, which probe pods run."""
    image_pull_policy: str = ""
    """Image pull policy of probe pods. Empty: the API server's default."""
    image_pull_secrets: str = ""
    """Image pull secrets of probe pods: names of Secrets in the operator's namespace, comma separated."""
    probe_runtime_class: str = ""
    """RuntimeClass of probe pods that check GPUs, for nodes whose default does not mount the driver into pods."""
    probe_tolerations: tuple[Toleration, ...] = ()
    """Tolerations of probe pods (a JSON list). Without them, a taint with the effect NoExecute would evict the pods."""
    sidecar_image: str = ""
    """Image of the sidecar. Empty: the image of the job's trainer, which contains Pacekeeper."""
    sidecar_pull_policy: str = ""
    sidecar_resources: Resources = field(default_factory=lambda: SIDECAR_RESOURCES)
    """Resource requests and limits of each worker's sidecar (a JSON object)."""

    port: int = 8443
    """Port of the HTTPS endpoint for sidecars."""
    liveness_port: int = 8080
    metrics_port: int = 9464

    prometheus_url: str = ""
    """URL of Prometheus. Empty: DCGM's GPU errors are not read, and conditions report that."""
    prometheus_credentials: str = ""
    """Mount path of the Secret with token, username, password, ca.crt, tls.crt, and tls.key. Empty: no credentials."""
    prometheus_headers: Headers = ()
    """Headers of each request to Prometheus (a JSON object)."""
    prometheus_matchers: Matchers = ()
    """Matchers that are added to each selector of the operator's own queries (a JSON list), such as `cluster="a"`."""
    dcgm_namespace: str = ""
    """Namespace of the platform's dcgm-exporter. Empty: no GPU series are read, since any tenant can create some."""
    dcgm_node_label: str = "Hostname"
    """Label of DCGM's metrics with the node's name, for scrapes that do not set `node`."""
    log_level: str = "INFO"
    sample_seconds: float = 2.0
    """Seconds between two Prometheus queries while a job runs."""

    mode: RemediationMode = RemediationMode.ACT
    """Upper limit of what any job may allow."""
    quarantine_mode: RemediationMode = RemediationMode.RECOMMEND
    quarantine_max_nodes: int = 5
    quarantine_max_share: float = 0.1
    """Quarantined nodes divided by all nodes. One node is always allowed."""
    breaker_nodes: int = 3
    """If this many nodes are blamed at once, the cause is the network or the power supply: no node is quarantined."""
    quarantine_conditions: tuple[str, ...] = ()
    """Node conditions (a type, or type=status) by which the platform itself has a node quarantined.

    The quarantine needs no blame by a job, and no failed probe.
    """
    repair_condition: str = ""
    """Type of the condition that a node has while it is quarantined, for repair systems. Empty: none."""
    quarantine_expires_after: float = 3600.0
    probe_timeout: float = 60.0
    release_probes: int = 3
    """Consecutive probes that must pass on a quarantined node before it is released."""
    paused: bool = False
    """Cluster-wide: decide and record, but apply no remedy. The ConfigMap `pacekeeper-pause` does the same at run time.
    """

    leave_cordoned: bool = True
    """Workers leave cordoned nodes before they are evicted, by a checkpoint and a warm spare."""
    leave_taints: tuple[str, ...] = DEFAULT_LEAVE_TAINTS
    """Workers also leave nodes with one of these taints: key, key=value, key=value:Effect."""
    leave_conditions: tuple[str, ...] = DEFAULT_LEAVE_CONDITIONS
    """Workers also leave nodes with one of these conditions: a type, or type=status."""

    link_probes_per_hour: int = 2
    """Maximum number of link measurements per job and hour. 0: never."""

    traffic_planning: bool = True
    """Whether flows may be assigned to planned routes, if a Fabric allows that. False: ranks are ordered, no more."""

    profiles_per_hour: int = 2
    """Maximum number of profile windows per job and hour that search for the cause of a slowdown. 0: only by hand."""

    jobsets_enabled: bool = False
    """Whether JobSets with `managedBy: pacekeeper.dev/operator` are run as TrainingJobs."""

    watch_enabled: bool = False
    """Whether jobs that others have created are watched: pods with the label `pacekeeper.dev/watched`."""
    watch_restart: bool = False
    """Whether the pod of a rank that blocks a watched job may be deleted, in namespaces with the label
    `pacekeeper.dev/watch-restart`."""
    watch_retention: float = 30 * 86400.0
    """Seconds for which a WatchedJob stays after the end of its job."""
    watch_team_label: str = ""
    """Label of namespaces that names the team of their jobs. Empty: none does."""

    watch_links: bool = False
    """Whether slow links of watched jobs are located, by the connections that their sidecars sample."""

    watch_profiles: bool = False
    """Whether watched ranks are asked for profile windows where an Incident names no function."""

    incident_retention: float = 30 * 86400.0
    incident_webhook: str = ""
    """Folder with the `url` that incidents are posted to, and optionally `token` and `ca.crt`. Empty: no webhook."""
    grace_after_start: float = 10.0
    """Seconds after the operator's start in which a silent worker is not a fault: it may not have reconnected yet."""
    lease_seconds: float = 6.0
    """Duration of the Lease. If the operator crashes, another one leads once the Lease has expired."""

    network_policies: bool = True
    """Whether each job gets a NetworkPolicy by which only its own workers can reach each other."""
    metrics_from: tuple[NetworkPolicyPeer, ...] = ()
    """Peers that may read workers' metrics in addition to the operator (JSON). Empty: derived from `prometheus_url`."""

    watch_mode: WatchMode = WatchMode.OFF
    """How the watch is injected into pods of other controllers."""
    watch_rules: InjectionRules | None = None
    """The watch: image, kinds of controllers, resources, namespaces (a JSON object). Needed unless it is off."""
    watch_pre_pull: bool = False
    """Whether a DaemonSet of the chart pulls the image of the watch: pods are watched once it has done so."""
    watch_port: int = 8444
    """Port of the webhook for the injection of the watch."""

    def __post_init__(self) -> None:
        if self.watch_mode is not WatchMode.OFF and self.watch_rules is None:
            raise InputError(f"PACEKEEPER_WATCH_RULES: PACEKEEPER_WATCH_MODE={self.watch_mode} needs them; set them")
        if not self.lease_seconds > 0:
            raise InputError(f"PACEKEEPER_LEASE_SECONDS: {self.lease_seconds} must be above 0, like 10s")
        if not 0 <= self.quarantine_max_share <= 1:
            raise InputError(
                f"PACEKEEPER_QUARANTINE_MAX_SHARE: {self.quarantine_max_share} must lie between 0 and 1, like 0.1"
            )
        if not 1 <= self.release_probes <= MAX_RELEASE_PROBES:
            raise InputError(
                f"PACEKEEPER_RELEASE_PROBES: {self.release_probes} must lie between 1 and {MAX_RELEASE_PROBES}"
            )
        _ = self.node_health, self.quarantine_node_health  # evaluated here because they check their input
        self._check_repair_condition()
        check_url(self.prometheus_url)
        if self.network_policies and not self.metrics_from:
            derive_peers_from_url(
                self.prometheus_url
            )  # fail now rather than at the first job, whose metrics would be missed

    def _check_repair_condition(self) -> None:
        """Raise InputError for an invalid condition type, or one that others set as well."""
        kind, name = self.repair_condition, "PACEKEEPER_REPAIR_CONDITION"
        if not kind:
            return
        if not CONDITION_TYPE_PATTERN.fullmatch(kind) or kind in KUBERNETES_CONDITIONS:
            raise InputError(f"{name}: {kind!r} must be a type of condition of its own, like PacekeeperFaulty")
        if kind in {text.partition("=")[0] for text in (*self.quarantine_conditions, *self.leave_conditions)}:
            raise InputError(
                f"{name}: {kind} is one of the conditions by which nodes are quarantined or left, so the operator "
                "would take its own condition for another's; choose another type, like PacekeeperFaulty"
            )

    @property
    def scrapers(self) -> tuple[NetworkPolicyPeer, ...]:
        return self.metrics_from or derive_peers_from_url(self.prometheus_url)

    @cached_property
    def node_health(self) -> NodeHealthRules:
        return NodeHealthRules(self.leave_cordoned, self.leave_taints, self.leave_conditions)

    @cached_property
    def quarantine_node_health(self) -> NodeHealthRules:
        return NodeHealthRules(cordons=False, taints=(), conditions=self.quarantine_conditions)

    @property
    def endpoint(self) -> str:
        host = self.address or f"{self.service_name}.{self.namespace}.svc:{self.port}"
        return f"https://{host}"

    @property
    def pod_endpoint(self) -> str:
        """Return the address of this operator pod for sidecars, address:port. Empty: sidecars use the Service."""
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.port}" if host else ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names and addresses by which the endpoint may be called."""
        names = [
            self.service_name,
            f"{self.service_name}.{self.namespace}",
            f"{self.service_name}.{self.namespace}.svc",
        ]
        given = [self.address.rsplit(":", 1)[0].strip("[]")] if self.address else []
        return (*given, *names, "localhost", "127.0.0.1")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read each field from PACEKEEPER_<FIELD>; durations as 90s, 5m, 1h30m. Raises InputError."""
        values: dict[str, object] = {"identity": environment.get("POD_NAME", socket.gethostname())}
        for item in fields(cls):
            variable = f"PACEKEEPER_{item.name.upper()}"
            empties = item.type == "tuple[str, ...]" and variable in environment  # an empty list, not the default
            if environment.get(variable) or empties:
                values[item.name] = _parse_setting(variable, environment[variable], str(item.type))
        return cls(**values)  # type: ignore[arg-type]  # the converters follow the fields' annotations


def _parse_setting(variable: str, text: str, annotation: str) -> object:
    try:
        match annotation:
            case "int":
                return int(text)
            case "float":
                return parse_duration(text) if text[-1].isalpha() else float(text)
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "RemediationMode":
                return RemediationMode(text)
            case "WatchMode":
                return WatchMode(text)
            case "InjectionRules | None":
                return parse_injection_rules(text)
            case "tuple[NetworkPolicyPeer, ...]":
                return parse_peers(text)
            case "tuple[Toleration, ...]":
                return parse_tolerations(text)
            case "Headers":
                return parse_headers(text)
            case "Matchers":
                return parse_matchers(text)
            case "Resources":
                return parse_resources(text)
            case "tuple[str, ...]":
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case _:
                return text
    except InputError as error:
        raise InputError(f"{variable}: {error}") from error
    except (ValueError, KeyError) as error:
        raise InputError(f"{variable}: {text!r} is not a valid {annotation}") from error
