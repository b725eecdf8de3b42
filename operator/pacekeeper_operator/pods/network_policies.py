"""The NetworkPolicy of each job, which admits only the job itself to its workers. Pure.

What it covers, and what not:
- Ingress only. A job's egress is up to its user: storage, registries, data sets, DNS, and the operator lie elsewhere in
each cluster, and a rule that forgets one of them stops the training. Users may write additional policies for it.
- Policies add up. A user who wants more traffic admitted (a TensorBoard in a worker, say) writes another policy.
- It keeps out other namespaces and other jobs. A user who may create pods in the job's namespace may give them its
label, and one who may write policies there may admit any traffic: the namespace is the tenant's boundary.
- Pods with `hostNetwork` have their node's address: network plug-ins apply no policy to them, and do not match them as
peers.
- It needs a network plug-in that enforces policies; without one it is only a declaration.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json
from pacekeeper_analysis.protocol.plan import CHECKPOINT_SERVER_PORT

from ..api.names import LABEL_JOB, METRICS_PORT, Object
from ..api.training_job import TrainingJob
from .manifests import build_owner_reference, uses_host_network

LABEL_NAMESPACE = "kubernetes.io/metadata.name"
"""Label of each namespace with the namespace's name. Only the API server can set it."""

NetworkPolicyPeer = Mapping[str, Any]
"""A NetworkPolicyPeer of Kubernetes: `podSelector`, `namespaceSelector`, or `ipBlock`."""

_PEER_FIELDS = frozenset({"podSelector", "namespaceSelector", "ipBlock"})
_DROPPED_WHERE_EMPTY = frozenset({"matchLabels", "matchExpressions", "values", "except"})


def build_network_policy(job: TrainingJob, operator_namespace: str, scrapers: Sequence[NetworkPolicyPeer]) -> Object:
    """Build the policy: workers of the same job reach the workers, and the operator and `scrapers` reach their metrics.

    Workers may use any port among themselves, as gloo and NCCL take free ones. Probes by the kubelet of the same node
    need no rule. The operator connects to the metrics port to check whether a silent worker is still reachable.
    """
    workers = {"matchLabels": {LABEL_JOB: job.name}}
    # A number, not the port's name: plug-ins differ in whether they resolve names of ports of init containers.
    metrics = {"protocol": "TCP", "port": METRICS_PORT}
    # Workers with their nodes' addresses are matched by no selector. The checkpoint server authenticates its callers.
    serves_nodes = job.spec.checkpoint.uses_server and uses_host_network(job)
    server = {"ports": [{"protocol": "TCP", "port": CHECKPOINT_SERVER_PORT}]}
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
            "ingress": [{"from": [{"podSelector": workers}]}, {"from": readers, "ports": [metrics]}]
            + ([server] if serves_nodes else []),
        },
    }


def build_policy_name(job: TrainingJob) -> str:
    """Return the policy's name.

    The job's own name is likely taken by a policy of the user, which is not ours to change.
    """
    return f"pacekeeper-{job.name}"


def is_same_policy(existing: Object, wanted: Object) -> bool:
    """Return whether no update is needed: `existing` has the rules, labels, and owners of `wanted`."""
    metadata, wanted_metadata = existing["metadata"], wanted["metadata"]
    labeled = wanted_metadata["labels"].items() <= (metadata.get("labels") or {}).items()
    owned = all(owner in (metadata.get("ownerReferences") or []) for owner in wanted_metadata["ownerReferences"])
    return bool(labeled and owned and existing.get("spec") == wanted["spec"])


def derive_peers_from_url(url: str) -> tuple[NetworkPolicyPeer, ...]:
    """Return the peer that scrapes, as the URL of Prometheus shows it: its namespace, or its address.

    "" and a name without a namespace (the operator's own) need no peer. Raises InputError if the URL does not show it.
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
        f"PACEKEEPER_METRICS_FROM: {url} does not show which pods scrape the workers; "
        f'name them, like [{{"namespaceSelector": {{"matchLabels": {{"{LABEL_NAMESPACE}": "monitoring"}}}}}}]'
    )


def parse_peers(text: str) -> tuple[NetworkPolicyPeer, ...]:
    """Parse peers from JSON, as the chart passes them.

    Raises InputError.
    """
    try:
        peers = parse_json(text)
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not JSON: write a list of NetworkPolicy peers") from error
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        raise InputError(f"{abbreviate_value(text)} is not a list of NetworkPolicy peers; an empty peer admits nothing")
    if unknown := {field for peer in peers for field in peer} - _PEER_FIELDS:
        raise InputError(
            f"{abbreviate_value(', '.join(sorted(unknown)))}: a peer has only {', '.join(sorted(_PEER_FIELDS))}"
        )
    return tuple(peers)


def _build_namespace_peer(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: name}}}


def _as_stored(value: Any) -> Any:
    """Return a peer as the API server returns it, without empty fields. `is_same_policy` compares with that."""
    if isinstance(value, Mapping):
        filtered = {key: part for key, part in value.items() if part or key not in _DROPPED_WHERE_EMPTY}
        return {key: _as_stored(part) for key, part in filtered.items()}
    return [_as_stored(part) for part in value] if isinstance(value, list) else value


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
