"""What the platform team and the shell hand on: environment variables, and pods' termination messages."""

from __future__ import annotations

from typing import Any

from pacekeeper_operator.decide.nodes.probe_measurements import read_measurements
from pacekeeper_operator.decide.nodes.quarantine_steps import ProbePod
from pacekeeper_operator.pods.injection import WATCH_RESOURCES, parse_injection_rules
from pacekeeper_operator.pods.network_policies import parse_peers
from pacekeeper_operator.pods.resources import SIDECAR_RESOURCES, parse_resources
from pacekeeper_operator.pods.tolerations import parse_tolerations
from pacekeeper_operator.prometheus_options import parse_headers, parse_matchers

from ..border import Border, Enter, call_directly
from ..mutations import mutate_text, to_bytes

TOLERATIONS = [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}]
HEADERS = {"X-Scope-OrgID": "training"}
MATCHERS = ['cluster="a"', 'region=~"eu.*"']
RULES = {
    "image": "pacekeeper.dev/trainer:dev",
    "pullPolicy": "Never",
    "kinds": ["Job"],
    "resources": dict(WATCH_RESOURCES),
    "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]},
}
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
MEASUREMENTS = {
    "core_seconds": 0.1,
    "cores": 8,
    "held_back": 0.1,
    "memory_bytes_per_second": 1e9,
    "links": [{"peer": "node-2", "ping": 1e-4, "up": 1e9, "down": 1e9}],
}


def read_as_text(read: Any) -> Enter:
    return lambda value: read(to_bytes(value).decode(errors="replace"))


def parse_probe(message: str) -> object:
    """Of a pod that has ended with this message: any message is shown."""
    state = {"terminated": {"exitCode": 0, "message": message}}
    pod = {"spec": {"nodeName": "n"}, "status": {"phase": "Succeeded", "containerStatuses": [{"state": state}]}}
    return ProbePod.parse(pod)


BORDERS = [
    Border("tolerations of probes", lambda: [TOLERATIONS], mutate_text, call_directly(read_as_text(parse_tolerations))),
    Border("Prometheus' headers", lambda: [HEADERS], mutate_text, call_directly(read_as_text(parse_headers))),
    Border("Prometheus' matchers", lambda: [MATCHERS], mutate_text, call_directly(read_as_text(parse_matchers))),
    Border("rules of the watch", lambda: [RULES], mutate_text, call_directly(read_as_text(parse_injection_rules))),
    Border("peers", lambda: [PEERS], mutate_text, call_directly(read_as_text(parse_peers))),
    Border(
        "the sidecar's resources",
        lambda: [SIDECAR_RESOURCES],
        mutate_text,
        call_directly(read_as_text(parse_resources)),
    ),
    Border(
        "figures of probes",
        lambda: [MEASUREMENTS, {"unfit": "no GPU"}],
        mutate_text,
        call_directly(read_as_text(read_measurements)),
    ),
    Border(
        "probe pods",
        lambda: [MEASUREMENTS, {"unfit": "no GPU"}],
        mutate_text,
        call_directly(read_as_text(parse_probe)),
        refusals=(),
    ),
]
