"""The operator's settings: one frozen dataclass, and the only place that reads the environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Self

from pacekeeper_analysis.errors import InputError

from .api import RemediationMode, parse_duration
from .node_health import CONDITION_TYPE_PATTERN, DEFAULT_LEAVE_CONDITIONS, KUBERNETES_CONDITIONS, DEFAULT_LEAVE_TAINTS, NodeHealthRules
from .policies import NetworkPolicyPeer, parse_peers, derive_peers_from_url
from .prometheus_options import Headers, Matchers, check_url, parse_headers, parse_matchers
from .resources import SIDECAR_RESOURCES, Resources, parse_resources
from .tolerations import Toleration, parse_tolerations

MAX_RELEASE_PROBES = 5
"""A NodeQuarantine keeps its last ten probes, those in vain among them."""


@dataclass(frozen=True)
class Settings:
    """Durations are seconds."""

    namespace: str = "pacekeeper-system"
    """Where the operator runs: its Lease, its certificate authority and the pause switch are there."""
    watch_namespaces: tuple[str, ...] = ()
    """Jobs are kept in these namespaces only, and nothing of others is seen; empty: in all."""
    identity: str = ""
    """Holder of the Lease: the operator's pod. A container that restarts in the same pod leads on at once."""
    service_name: str = "pacekeeper"
    """The Service in front of the endpoint for sidecars; its names stand in the serving certificate."""
    address: str = ""
    """Where sidecars reach the endpoint, host:port; "": the Service's name and the port."""
    pod_ip: str = ""
    """Of this operator's pod: where sidecars reach it while it leads, past the Service; "": by the Service only."""
    tls_secret: str = ""
    """Secret of the operator's namespace with the endpoint's tls.crt and tls.key, and the ca.crt that workers are to
    trust; read anew when it changes. "": the operator keeps an authority of its own."""
    image: str = "pacekeeper:0.1.0"
    """The operator's own image, which probe pods run."""
    image_pull_policy: str = ""
    """Of probe pods; "": the API server's default."""
    image_pull_secrets: str = ""
    """Of probe pods: names of Secrets in the operator's namespace, comma separated."""
    probe_runtime_class: str = ""
    """RuntimeClass of probe pods that look at GPUs, where the nodes' default does not bring the driver into pods."""
    probe_tolerations: tuple[Toleration, ...] = ()
    """Of probe pods (a JSON list): a taint with the effect NoExecute would else end them."""
    sidecar_image: str = ""
    """Image of the sidecar; "": that of the job's trainer, which has Pacekeeper in it."""
    sidecar_pull_policy: str = ""
    sidecar_resources: Resources = field(default_factory=lambda: SIDECAR_RESOURCES)
    """What the sidecar of each worker asks for and gets at most (a JSON object)."""

    port: int = 8443
    """HTTPS endpoint for sidecars."""
    liveness_port: int = 8080
    metrics_port: int = 9464

    prometheus_url: str = ""
    """Empty: DCGM's GPU errors are not seen, and conditions say so."""
    prometheus_credentials: str = ""
    """Folder where the Secret with token, username, password, ca.crt, tls.crt and tls.key is mounted; "": none."""
    prometheus_headers: Headers = ()
    """Sent with each question to Prometheus (a JSON object)."""
    prometheus_matchers: Matchers = ()
    """Put into every selector of the operator's own queries (a JSON list), like `cluster="a"`."""
    dcgm_namespace: str = ""
    """Where the platform's dcgm-exporter runs; "": no GPU series are read, since anybody can make some."""
    dcgm_node_label: str = "Hostname"
    """Label of DCGM's metrics that holds the node's name where the scrape does not set `node`."""
    log_level: str = "INFO"
    sample_seconds: float = 2.0
    """How often Prometheus is asked while a job runs."""

    mode: RemediationMode = RemediationMode.ACT
    """The most that any job may allow."""
    quarantine_mode: RemediationMode = RemediationMode.RECOMMEND
    quarantine_max_nodes: int = 5
    quarantine_max_share: float = 0.1
    """Quarantined nodes over all nodes; one node is always allowed."""
    breaker_nodes: int = 3
    """So many nodes that are blamed at once are a network's or a power's fault, not theirs: no quarantines."""
    quarantine_conditions: tuple[str, ...] = ()
    """A node with one of these conditions (a type, or type=status) is quarantined on the platform's own word: no job
    has to blame it, and no probe has to agree."""
    repair_condition: str = ""
    """Type of the condition that a node has while it is quarantined, for whoever repairs nodes; "": none."""
    quarantine_expires_after: float = 3600.0
    probe_timeout: float = 60.0
    release_probes: int = 3
    """So many probes in a row must pass on a quarantined node before it is released."""
    paused: bool = False
    """Cluster-wide: decide and write down, but apply no remedy. The ConfigMap `pacekeeper-pause` does it live."""

    leave_cordoned: bool = True
    """Workers leave cordoned nodes, by a checkpoint and a warm spare, before they are evicted."""
    leave_taints: tuple[str, ...] = DEFAULT_LEAVE_TAINTS
    """The same of nodes with one of these taints: key, key=value, key=value:Effect."""
    leave_conditions: tuple[str, ...] = DEFAULT_LEAVE_CONDITIONS
    """The same of nodes with one of these conditions: a type, or type=status."""

    link_probes_an_hour: int = 2
    """Of one job: how often its launchers are asked to measure their links, at most. 0: never."""

    traffic_planning: bool = True
    """Whether flows may be put on planned ways, as far as a Fabric says so; False: ranks are ordered, no more."""

    profiles_an_hour: int = 2
    """Of one job: how often its ranks look into themselves for what slows them down, at most. 0: by hand only."""

    incident_retention: float = 30 * 86400.0
    incident_webhook: str = ""
    """Folder with the `url` that incidents are posted to, and where it needs them `token` and `ca.crt`; "": none is."""
    grace_after_start: float = 10.0
    """For so long after the operator's start silence means nothing: a worker may not have found the new one yet."""
    lease_seconds: float = 6.0
    """Of the right to act: an operator that dies is followed when it is over."""

    network_policies: bool = True
    """Each job gets a NetworkPolicy: nobody but its own workers reaches them."""
    metrics_from: tuple[NetworkPolicyPeer, ...] = ()
    """Who reads workers' metrics besides the operator (JSON); empty: whom `prometheus_url` names."""

    def __post_init__(self) -> None:
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
        _ = self.node_health, self.quarantine_node_health  # their own checks
        self._check_repair_condition()
        check_url(self.prometheus_url)
        if self.network_policies and not self.metrics_from:
            derive_peers_from_url(self.prometheus_url)  # now rather than at the first job, whose metrics would be missed

    def _check_repair_condition(self) -> None:
        """Raises InputError for a type that is none, or that somebody else has a say in."""
        kind, name = self.repair_condition, "PACEKEEPER_REPAIR_CONDITION"
        if not kind:
            return
        if not CONDITION_TYPE_PATTERN.fullmatch(kind) or kind in KUBERNETES_CONDITIONS:
            raise InputError(f"{name}: {kind!r} must be a type of condition of its own, like PacekeeperFaulty")
        if kind in {text.partition("=")[0] for text in (*self.quarantine_conditions, *self.leave_conditions)}:
            raise InputError(
                f"{name}: {kind} is one of the conditions by which nodes are quarantined or left, so the operator "
                "would take its own word for somebody else's; choose another type, like PacekeeperFaulty"
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
        """Where sidecars reach this very operator, address:port; "": they do not."""
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.port}" if host else ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names and addresses by which the endpoint may be called."""
        names = [
            self.service_name,
            f"{self.service_name}.{self.namespace}",
            f"{self.service_name}.{self.namespace}.svc",
        ]
        given = [self.address.rsplit(":", 1)[0].strip("[]")] if self.address else []
        return (*given, *names, "localhost", "127.0.0.1")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Every field may be set as PACEKEEPER_<FIELD>; durations as 90s, 5m, 1h30m. Raises InputError."""
        values: dict[str, object] = {"identity": environment.get("POD_NAME", socket.gethostname())}
        for item in fields(cls):
            variable = f"PACEKEEPER_{item.name.upper()}"
            empties = item.type == "tuple[str, ...]" and variable in environment  # none of them, whatever the default
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
            case "Mode":
                return RemediationMode(text)
            case "tuple[Peer, ...]":
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
