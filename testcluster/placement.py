"""Where a job's pods run, for tests and the demo."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def spread_over_nodes(job: str, nodes: Collection[str] = ()) -> dict[str, Any]:
    """Fields of a pod's spec: the job's pods run on different nodes; on some of `nodes`, where any are named."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"pacekeeper.dev/job": job}},
    }
    fields: dict[str, Any] = {"topologySpreadConstraints": [spread]}
    if nodes:
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
        fields["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return fields
