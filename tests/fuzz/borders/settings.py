"""What the platform team and the shell hand on: environment variables, and pods' last words."""

from __future__ import annotations

from typing import Any

from pacekeeper_operator.decide.node_figures import read_measurements
from pacekeeper_operator.decide.node_steps import ProbePod
from pacekeeper_operator.policies import parse_peers
from pacekeeper_operator.prometheus_options import parse_headers, parse_matchers
from pacekeeper_operator.resources import SIDECAR_RESOURCES, parse_resources
from pacekeeper_operator.tolerations import parse_tolerations

from ..border import Border, Enter, by
from ..mutations import text, written

TOLERATIONS = [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}]
HEADERS = {"X-Scope-OrgID": "training"}
MATCHERS = ['cluster="a"', 'region=~"eu.*"']
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
FIGURES = {
    "core_seconds": 0.1,
    "cores": 8,
    "held_back": 0.1,
    "memory_bytes_per_second": 1e9,
    "links": [{"peer": "node-2", "ping": 1e-4, "up": 1e9, "down": 1e9}],
}


def words(read: Any) -> Enter:
    return lambda value: read(written(value).decode(errors="replace"))


def probe(message: str) -> object:
    """Of a pod that has ended with these words: they are shown, whatever they are."""
    state = {"terminated": {"exitCode": 0, "message": message}}
    pod = {"spec": {"nodeName": "n"}, "status": {"phase": "Succeeded", "containerStatuses": [{"state": state}]}}
    return ProbePod.parse(pod)


BORDERS = [
    Border("tolerations of probes", lambda: [TOLERATIONS], text, by(words(parse_tolerations))),
    Border("Prometheus' headers", lambda: [HEADERS], text, by(words(parse_headers))),
    Border("Prometheus' matchers", lambda: [MATCHERS], text, by(words(parse_matchers))),
    Border("peers", lambda: [PEERS], text, by(words(parse_peers))),
    Border("the sidecar's resources", lambda: [SIDECAR_RESOURCES], text, by(words(parse_resources))),
    Border("figures of probes", lambda: [FIGURES, {"unfit": "no GPU"}], text, by(words(read_measurements))),
    Border("probe pods", lambda: [FIGURES, {"unfit": "no GPU"}], text, by(words(probe)), refusals=()),
]
