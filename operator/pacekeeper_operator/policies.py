"""Pure: the NetworkPolicy of each job, which keeps everybody but the job itself from its workers.

What it covers, and what not:
- Ingress only. A job's egress is its user's: storage, registries, data sets, DNS and the operator lie elsewhere in each
  cluster, and a rule that forgets one of them stops the training. Policies that users write for it stand beside ours.
- Policies add up. Who wants more in (a TensorBoard in a worker, say) writes a policy of his own that admits it.
- It keeps out other namespaces and other jobs. Who may create pods in the job's namespace may give them its label, and
  who may write policies there may admit anybody: a namespace is the tenant's, and the border runs around it.
- Pods with `hostNetwork` have their node's address: network plug-ins apply no policy to them, nor know them as peers.
- It needs a network plug-in that enforces policies; without one it is a declaration.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import abbreviate_value, parse_json

from .api import LABEL_JOB, METRICS_PORT, TrainingJob, Object
from .manifests import build_owner_reference

LABEL_NAMESPACE = "kubernetes.io/metadata.name"
"""The API server puts it on each namespace, with the namespace's name; nobody else can."""

NetworkPolicyPeer = Mapping[str, Any]
"""A NetworkPolicyPeer, as Kubernetes writes it: `podSelector`, `namespaceSelector` or `ipBlock`."""

_PEER_FIELDS = frozenset({"podSelector", "namespaceSelector", "ipBlock"})
_DROPPED_WHERE_EMPTY = frozenset({"matchLabels", "matchExpressions", "values", "except"})


def build_network_policy(job: TrainingJob, operator_namespace: str, scrapers: Sequence[NetworkPolicyPeer]) -> Object:
    """Workers are reached by workers of the same job; their metrics also by the operator and by `scrapers`.

    Among themselves workers may use any port: gloo and NCCL take free ones. What the kubelet asks on its own node needs
    no rule. The operator asks the metrics port whether a silent worker's host is still there.
    """
    workers = {"matchLabels": {LABEL_JOB: job.name}}
    # A number, not the port's name: plug-ins differ in whether they look for names among init containers.
    metrics = {"protocol": "TCP", "port": METRICS_PORT}
    readers = [_build_namespace_peer(operator_namespace), *map(_as_stored, scrapers)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": build_policy_name(job),
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": workers}]}, {"from": readers, "ports": [metrics]}],
        },
    }


def build_policy_name(job: TrainingJob) -> str:
    """Not the job's own name: that one is likely to be taken by a policy of the user's, which is not ours to change."""
    return f"pacekeeper-{job.name}"


def is_same_policy(found: Object, wanted: Object) -> bool:
    """Whether nothing need be written: `found` admits just whom `wanted` admits, and goes with the same job."""
    there, want = found["metadata"], wanted["metadata"]
    labelled = want["labels"].items() <= (there.get("labels") or {}).items()
    owned = all(owner in (there.get("ownerReferences") or []) for owner in want["ownerReferences"])
    return bool(labelled and owned and found.get("spec") == wanted["spec"])


def derive_peers_from_url(url: str) -> tuple[NetworkPolicyPeer, ...]:
    """Who scrapes, as far as the URL of Prometheus tells: its namespace, or its address.

    "" and a name without a namespace (the operator's own) need nobody. Raises InputError where the URL does not tell.
    """
    host = urlsplit(url).hostname or ""
    if address := _parse_address(host):
        return () if address.is_loopback else ({"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}},)
    match host.split("."):
        case [_]:
            return ()
        case [_, namespace] | [_, namespace, "svc", *_]:
            return (_build_namespace_peer(namespace),)
    raise InputError(
        f"PACEKEEPER_METRICS_FROM: {url} does not tell which pods scrape the workers; "
        f'name them, like [{{"namespaceSelector": {{"matchLabels": {{"{LABEL_NAMESPACE}": "monitoring"}}}}}}]'
    )


def parse_peers(text: str) -> tuple[NetworkPolicyPeer, ...]:
    """Peers from JSON, as the chart hands them on. Raises InputError."""
    try:
        peers = parse_json(text)
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not JSON: write a list of NetworkPolicy peers") from error
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        raise InputError(f"{abbreviate_value(text)} is not a list of NetworkPolicy peers; one that is empty admits nobody")
    if unknown := {field for peer in peers for field in peer} - _PEER_FIELDS:
        raise InputError(f"{abbreviate_value(', '.join(sorted(unknown)))}: a peer has only {', '.join(sorted(_PEER_FIELDS))}")
    return tuple(peers)


def _build_namespace_peer(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: name}}}


def _as_stored(value: Any) -> Any:
    """A peer as the API server gives it back, which leaves out what is empty: `same` compares with that."""
    if isinstance(value, Mapping):
        kept = {key: part for key, part in value.items() if part or key not in _DROPPED_WHERE_EMPTY}
        return {key: _as_stored(part) for key, part in kept.items()}
    return [_as_stored(part) for part in value] if isinstance(value, list) else value


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
