"""Placement of a job's pods, for tests and the demo."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def spread_over_nodes(job: str, nodes: Collection[str] = ()) -> dict[str, Any]:
    """Return fields of a pod's spec that put the job's pods on different nodes, among `nodes` if any are named."""
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"pacekeeper.dev/job": job}},
    }
    fields: dict[str, Any] = {"topologySpreadConstraints": [constraint]}
    if nodes:
        requirement = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
        fields["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return fields
