"""Whether a pod fits on a node, as the scheduler decides it. Pure.

Not simulated: topology spread constraints, preferred node affinity, volumes, priorities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

_QUANTITY_UNITS = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_REPELLING_EFFECTS = ("NoSchedule", "NoExecute")


def find_obstacle(pod: PodNeeds, node: NodeOffer, nodes: Mapping[str, NodeOffer]) -> str:
    """Return why the pod cannot be placed on the node, in the scheduler's words; "": it can."""
    if node.unschedulable and not _is_tolerated(_CORDON_TAINT, pod.tolerations):
        return "node(s) were unschedulable"
    for taint in node.taints:
        if taint["effect"] in _REPELLING_EFFECTS and not _is_tolerated(taint, pod.tolerations):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not _is_selected(pod, node):
        return "node(s) didn't match Pod's node affinity/selector"
    if resource := find_short_resource(pod, node):
        return f"Insufficient {resource}" if resource != "pods" else "Too many pods"
    if any(pod.ports & placed.ports for placed in node.pods.values()):
        return "node(s) didn't have free ports for the requested pod ports"
    if not all(any(term.matches(placed) for placed in _list_domain_pods(node, term, nodes)) for term in pod.affinity):
        return "node(s) didn't match pod affinity rules"
    if any(term.matches(placed) for term in pod.anti_affinity for placed in _list_domain_pods(node, term, nodes)):
        return "node(s) didn't match pod anti-affinity rules"
    # Anti-affinity of pods that run on nodes also keeps new pods away.
    if any(term.matches(pod) for offer in nodes.values() for term in offer.list_conflicting_pods(node)):
        return "node(s) didn't satisfy existing pods anti-affinity rules"
    return ""


def score_preferences(pod: PodNeeds, node: NodeOffer, nodes: Mapping[str, NodeOffer]) -> float:
    """Return how well the node meets the pod's preferences. Higher is better."""
    return sum(
        weight * sum(term.matches(placed) for placed in _list_domain_pods(node, term, nodes))
        for weight, term in pod.preferences
    )


def find_short_resource(pod: PodNeeds, node: NodeOffer) -> str:
    """Return the resource of which the node has too little; "": none."""
    if len(node.pods) >= node.capacity.get("pods", float("inf")):
        return "pods"
    for name, amount in pod.resources.items():
        if amount > node.capacity.get(name, 0.0) - node.used.get(name, 0.0) + 1e-9:
            return name
    return ""


def compute_toleration_seconds(taint: Object, tolerations: Sequence[Object]) -> float | None:
    """Return for how long the taint is tolerated: math.inf is permanently; None: it is not."""
    limits = [item.get("tolerationSeconds") for item in tolerations if _matches_taint(item, taint)]
    if not limits:
        return None
    return min((float(seconds) for seconds in limits if seconds is not None), default=float("inf"))


@dataclass(frozen=True, eq=False)
class PodTerm:
    """Pods with these labels, in these namespaces, within a topology domain."""

    labels: Mapping[str, str]
    expressions: Sequence[Object]
    namespaces: Sequence[str]
    topology: str  # a node label

    @classmethod
    def parse(cls, term: Object, namespace: str) -> PodTerm:
        selector = term.get("labelSelector") or {}
        return cls(
            selector.get("matchLabels") or {},
            selector.get("matchExpressions") or (),
            term.get("namespaces") or (namespace,),
            term["topologyKey"],
        )

    def matches(self, pod: PodNeeds) -> bool:
        return (
            pod.namespace in self.namespaces
            and all(pod.labels.get(key) == value for key, value in self.labels.items())
            and all(_matches_expression(item, pod.labels) for item in self.expressions)
        )


@dataclass(frozen=True, eq=False)
class PodNeeds:
    """A pod's scheduling requirements, parsed once."""

    uid: str
    namespace: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    ports: frozenset[int]  # on the node's own network
    tolerations: Sequence[Object]
    selector: Mapping[str, str]
    node_terms: Sequence[Object] | None  # alternatives; None: any node
    affinity: tuple[PodTerm, ...]
    anti_affinity: tuple[PodTerm, ...]
    preferences: tuple[tuple[float, PodTerm], ...]  # negative weight: avoid

    @classmethod
    def parse(cls, pod: Object) -> PodNeeds:
        metadata, spec = pod["metadata"], pod["spec"]
        namespace, affinity = metadata["namespace"], spec.get("affinity") or {}
        pod_affinity, pod_anti_affinity = affinity.get("podAffinity") or {}, affinity.get("podAntiAffinity") or {}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = ((affinity.get("nodeAffinity") or {}).get(required) or {}).get("nodeSelectorTerms")
        return cls(
            uid=metadata["uid"],
            namespace=namespace,
            labels=metadata.get("labels") or {},
            resources=_sum_requests(spec),
            ports=frozenset(_iterate_host_ports(spec)),
            tolerations=spec.get("tolerations") or (),
            selector=spec.get("nodeSelector") or {},
            node_terms=terms,
            affinity=tuple(PodTerm.parse(term, namespace) for term in pod_affinity.get(required) or ()),
            anti_affinity=tuple(PodTerm.parse(term, namespace) for term in pod_anti_affinity.get(required) or ()),
            preferences=(
                *_iterate_preferences(pod_affinity, 1.0, namespace),
                *_iterate_preferences(pod_anti_affinity, -1.0, namespace),
            ),
        )


class NodeOffer:
    """A node's resources and properties, and the pods on it."""

    def __init__(self, node: Object, pods: Mapping[str, PodNeeds] | None = None) -> None:
        metadata, spec = node["metadata"], node.get("spec") or {}
        self.name: str = metadata["name"]
        self.labels: Mapping[str, str] = metadata.get("labels") or {}
        self.unschedulable = bool(spec.get("unschedulable"))
        self.taints: Sequence[Object] = spec.get("taints") or ()
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        self.capacity = {name: parse_quantity(value) for name, value in allocatable.items()}
        self.used: dict[str, float] = {}
        self.pods: dict[str, PodNeeds] = {}
        for pod in (pods or {}).values():
            self.add(pod)

    def add(self, pod: PodNeeds) -> None:
        if pod.uid not in self.pods:
            self.pods[pod.uid] = pod
            for name, amount in pod.resources.items():
                self.used[name] = self.used.get(name, 0.0) + amount

    def remove(self, uid: str) -> bool:
        """Remove a pod. Return whether it was there."""
        pod = self.pods.pop(uid, None)
        for name, amount in pod.resources.items() if pod is not None else ():
            self.used[name] -= amount
        return pod is not None

    def list_conflicting_pods(self, node: NodeOffer) -> Iterator[PodTerm]:
        """Yield the terms with which pods here exclude other pods at `node`."""
        for pod in self.pods.values():
            for term in pod.anti_affinity:
                if _is_same_domain(self, node, term.topology):
                    yield term


def parse_quantity(value: object) -> float:
    """Parse a Kubernetes quantity: 250m, 64Mi, 8."""
    text = str(value)
    unit = text.lstrip("0123456789.+-")
    return float(text.removesuffix(unit)) * (_QUANTITY_UNITS[unit] if unit else 1.0)


_CORDON_TAINT = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def _is_tolerated(taint: Object, tolerations: Sequence[Object]) -> bool:
    return any(_matches_taint(item, taint) for item in tolerations)


def _matches_taint(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")


def _is_selected(pod: PodNeeds, node: NodeOffer) -> bool:
    if any(node.labels.get(key) != value for key, value in pod.selector.items()):
        return False
    return pod.node_terms is None or any(_matches_term(term, node) for term in pod.node_terms)


def _matches_term(term: Object, node: NodeOffer) -> bool:
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not labels and not fields:
        return False  # an empty term selects nothing
    return all(_matches_expression(item, node.labels) for item in labels) and all(
        _matches_expression(item, {"metadata.name": node.name}) for item in fields
    )


def _matches_expression(expression: Object, values: Mapping[str, str]) -> bool:
    key: str = expression["key"]
    expected: Sequence[str] = expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return values.get(key) in expected
        case "NotIn":
            return values.get(key) not in expected
        case "Exists":
            return key in values
        case "DoesNotExist":
            return key not in values
        case "Gt":
            return key in values and int(values[key]) > int(expected[0])
        case "Lt":
            return key in values and int(values[key]) < int(expected[0])
        case operator:
            raise ValueError(f"a selector's operator {operator!r} is unknown")


def _list_domain_pods(node: NodeOffer, term: PodTerm, nodes: Mapping[str, NodeOffer]) -> Iterable[PodNeeds]:
    """Return the pods in the node's topology domain."""
    if term.topology == "kubernetes.io/hostname":
        return node.pods.values()
    return (
        pod for offer in nodes.values() if _is_same_domain(node, offer, term.topology) for pod in offer.pods.values()
    )


def _is_same_domain(node: NodeOffer, other: NodeOffer, topology: str) -> bool:
    return node is other or (topology in node.labels and node.labels[topology] == other.labels.get(topology))


def _iterate_preferences(affinity: Object, sign: float, namespace: str) -> Iterator[tuple[float, PodTerm]]:
    for preference in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ():
        yield sign * preference["weight"], PodTerm.parse(preference["podAffinityTerm"], namespace)


def _sum_requests(spec: Object) -> dict[str, float]:
    """Sum the requests of all containers that run together. Earlier init containers may need more."""
    init_containers: Sequence[Object] = spec.get("initContainers") or ()
    sidecars = [container for container in init_containers if container.get("restartPolicy") == "Always"]
    total: dict[str, float] = {}
    for container in [*spec["containers"], *sidecars]:
        for name, amount in _read_requests(container).items():
            total[name] = total.get(name, 0.0) + amount
    for container in init_containers:
        for name, amount in _read_requests(container).items():
            total[name] = max(total.get(name, 0.0), amount)
    return total


def _read_requests(container: Object) -> dict[str, float]:
    resources = container.get("resources") or {}
    return {
        name: parse_quantity(v) for name, v in {**resources.get("limits", {}), **resources.get("requests", {})}.items()
    }


def _iterate_host_ports(spec: Object) -> Iterator[int]:
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        for port in container.get("ports") or ():
            if spec.get("hostNetwork") or port.get("hostPort"):
                yield port.get("hostPort") or port["containerPort"]
