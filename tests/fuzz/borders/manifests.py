"""What people and other programs write into the API server, as the operator reads it.

The API server's own checks are the simulation's (crds/): what they refuse does not come through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.fabric import Fabric
from pacekeeper_operator.api.node_history import NodeHistory, NodeHistoryStatus, NodeIncident, NodeIncidentKind
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.decide.nodes.node_history import count_incident_days, drop_old_entries, with_entry
from pacekeeper_operator.decide.nodes.quarantine_steps import Quarantine
from simulation.kubernetes.api.schema import load_schema
from testing.operators.observations import TEMPLATE

from ..border import Border, call_directly
from ..mutations import as_json, mutate_document

METADATA = {
    "name": "j",
    "namespace": "ns",
    "uid": "u1d2c3",
    "generation": 1,
    "resourceVersion": "7",
    "creationTimestamp": "2026-01-31T12:00:00Z",
}
JOB = {
    "template": TEMPLATE,
    "replicas": 4,
    "minReplicas": 2,
    "spares": 1,
    "nprocPerNode": 8,
    "suspend": False,
    "syncMode": "AsyncEDiT",
    "schedulingTimeout": "1m30s",
    "checkpoint": {"path": "/c", "everySteps": 7, "keep": 2, "volumeClaimName": "claim"},
    "detection": {"stragglerSlowdown": 2, "windowSteps": 16, "hangSeconds": 9},
    "remediation": {"mode": "Recommend", "allow": ["Rebalance"], "maxRestarts": 0, "restartWindow": "2h"},
    "runPolicy": {"activeDeadlineSeconds": 5, "ttlSecondsAfterFinished": 0, "cleanPodPolicy": "All"},
    "preflight": {"enabled": True, "timeout": "5m", "validFor": "24h"},
}
FABRIC = {
    "levels": [{"nodeLabel": "fabric.topograph.run/tier-0"}],
    "spines": 32,
    "uplink": {"capacity": "400G"},
    "exceptions": [{"leaf": "l7", "spine": "s3", "state": "Down"}],
    "linkQuery": "min by (leaf, spine) (switch_port_up)",
    "hops": {"10.98.1.3": "s1"},
    "pathControl": {"mode": "Probe", "ports": "20000-29999"},
}
SUSPICION = {"namespace": "ns", "incident": "i", "reason": "r", "at": "2026-01-31T12:00:00Z", "witness": "GpuSeries"}
CONDITION = {
    "type": "Quarantined",
    "status": "True",
    "reason": "Suspected",
    "message": "m",
    "lastTransitionTime": "2026-01-31T12:00:00Z",
}
QUARANTINE = {
    "reason": "XID 79",
    "nodeUID": "node-uid",
    "incidentRef": {"namespace": "ns", "name": "i"},
    "expiresAfter": "1h",
    "approved": False,
    "suspicions": [SUSPICION],
}
PROBE = {"pod": "p-1", "started": "2026-01-31T12:00:00Z", "finished": "2026-01-31T12:05:00Z", "passed": True}
INCIDENT_ENTRY = {"namespace": "ns", "name": "i", "kind": "Lost", "at": "2026-01-31T12:00:00Z", "resolvedByMove": True}
INCIDENT_COUNT = {"kind": "Lost", "count": 1, "firstAt": "2026-01-31T12:00:00Z", "lastAt": "2026-01-31T12:00:00Z"}
MEASUREMENTS = (
    b'{"core_seconds": 0.1, "memory_bytes_per_second": 1e9, "links": [{"peer": "n", "up": 1e9, "down": 1e9}]}'
)


class Refused(Exception):
    """By the API server."""


def parse_admitted(plural: str, parse: Callable[[Any], object]) -> Callable[[Any], object]:
    """Takes a whole object as a user writes it, and has the operator read what the API server makes of it."""

    def enter(body: object) -> object:
        try:
            written = orjson.loads(as_json(body))
        except ValueError as error:
            raise Refused("no JSON") from error
        if not isinstance(written, dict) or not isinstance(written.get("metadata"), dict):
            raise Refused("no object")
        metadata = METADATA | {k: v for k, v in written["metadata"].items() if k in ("labels", "annotations")}
        for key in ("labels", "annotations"):
            strings = metadata.get(key, {})
            if not isinstance(strings, dict) or not all(isinstance(value, str) for value in strings.values()):
                raise Refused(key)
        stored = load_schema(plural).prune(written | {"metadata": metadata})
        if causes := load_schema(plural).find_errors(stored) or load_schema(plural).find_broken_rules(stored):
            raise Refused(str(causes[0])[:1000])
        return parse(stored)

    return enter


def build_border(plural: str, spec: Any, parse: Callable[[Any], object], **more: Any) -> Border:
    document = {"apiVersion": "pacekeeper.dev/v1alpha1", "kind": "K", "metadata": {"labels": {}}, "spec": spec, **more}
    return Border(
        plural,
        lambda: [document],
        mutate_document,
        call_directly(parse_admitted(plural, parse)),
        (InputError, Refused),
        cases=300,
    )


def parse_quarantine(body: Any) -> object:
    """With what is derived of it."""
    quarantine = Quarantine.parse(body)
    return (
        quarantine,
        quarantine.is_suspicion,
        quarantine.last_conclusive_probe,
        quarantine.open_signs,
        quarantine.last_sign_at,
        quarantine.verdict,
    )


def parse_history(body: Any) -> object:
    """With what is derived and written of it, which the API server takes."""
    history = NodeHistory.parse(body)
    extended = with_entry(history, NodeIncident("ns", "new", NodeIncidentKind.LOST, 1.8e9, True))
    status = NodeHistoryStatus.from_incidents(drop_old_entries(extended, 1.8e9).incidents).to_patch()
    assert load_schema("nodehistories").find_errors(body | {"status": status}) == []
    return history, count_incident_days(extended, 1.8e9)


BORDERS = [
    build_border("trainingjobs", JOB, TrainingJob.parse),
    build_border("fabrics", FABRIC, Fabric.parse),
    build_border(
        "nodehistories",
        {"nodeUID": "node-uid"},
        parse_history,
        status={"incidents": [INCIDENT_ENTRY], "counts": [INCIDENT_COUNT]},
    ),
    build_border(
        "nodequarantines", QUARANTINE, parse_quarantine, status={"conditions": [CONDITION], "probes": [PROBE]}
    ),
]
