"""Pure: what NetworkPolicies mean for each pod, and the nftables rules of a node that make it so.

Understood: pod and namespace selectors, ipBlock, ports by number, range or name, both directions. Left out: names of
ports in egress rules (they are the other pod's), and IPv6, which the test cluster has none of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, collapse_addresses
from typing import Any

Object = Mapping[str, Any]

TABLE = "network-policies"
ANYWHERE = IPv4Network("0.0.0.0/0")
INGRESS, EGRESS = "Ingress", "Egress"
_MAX_COMMENT_CHARACTERS = 120  # nft takes 128 bytes


@dataclass(frozen=True)
class PolicyWorld:
    """What decides: objects as the API server gives them."""

    pods: Sequence[Object]
    namespaces: Sequence[Object]
    policies: Sequence[Object]


@dataclass(frozen=True)
class FirewallPorts:
    """From `first` to `last`, both included; protocol in nft's words."""

    protocol: str
    first: int = 0
    last: int = 65535


@dataclass(frozen=True)
class OpenRoute:
    """Whoever is in one of these networks may connect to these ports; None: to all."""

    networks: tuple[IPv4Network, ...]
    ports: tuple[FirewallPorts, ...] | None


def list_open_routes(pod: Object, direction: str, world: PolicyWorld) -> list[OpenRoute] | None:
    """What is open to (Ingress) or from (Egress) the pod; None: everything, since no policy has selected it."""
    selecting = [policy for policy in world.policies if _is_selected(policy, pod, direction)]
    return [way for policy in selecting for way in _list_policy_routes(policy, direction, pod, world)] if selecting else None


def is_admitted(open_routes: Iterable[OpenRoute] | None, address: str, port: int, protocol: str = "tcp") -> bool:
    """Whether a connection with the other side's `address` may be made."""
    other = IPv4Network(address)
    return open_routes is None or any(
        any(other.subnet_of(network) for network in way.networks)
        and (way.ports is None or any(p.protocol == protocol and p.first <= port <= p.last for p in way.ports))
        for way in open_routes
    )


def build_ruleset(node: str, world: PolicyWorld) -> str:
    """What `nft -f` makes of the node's table, in one transaction; the same text for the same meaning."""
    lines = [f"table ip {TABLE}", f"delete table ip {TABLE}", f"table ip {TABLE} {{"]
    jumps = []
    pods = [pod for pod in world.pods if pod["spec"].get("nodeName") == node and get_pod_address(pod)]
    for pod in sorted(pods, key=get_pod_address):
        for direction, own in ((EGRESS, "saddr"), (INGRESS, "daddr")):
            if (found := list_open_routes(pod, direction, world)) is not None:
                name = f"{direction.lower()}-{get_pod_address(pod)}"
                lines += [f"chain {name} {{", *_build_chain(pod, direction, found), "}"]
                jumps.append(f"ip {own} {get_pod_address(pod)} jump {name}")
    # Behind kube-proxy's chains, so that a service's address has become a pod's. What the node itself sends to its pods
    # is not forwarded and passes, as it must: the kubelet's probes.
    hook = "type filter hook forward priority 10; policy accept;"
    return "\n".join([*lines, "chain forward {", hook, "ct state established,related accept", *jumps, "}", "}", ""])


def get_pod_address(pod: Object) -> str:
    """ "": it has none of its own (now)."""
    status = pod.get("status", {})
    gone = status.get("phase") in ("Succeeded", "Failed")  # its address may be another's by now
    return "" if gone or pod["spec"].get("hostNetwork") else str(status.get("podIP") or "")


def matches_selector(selector: Object, labels: Mapping[str, str]) -> bool:
    """A LabelSelector; an empty one matches everything."""
    wanted = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    return wanted.items() <= labels.items() and all(_is_satisfied(expression, labels) for expression in expressions)


def _is_satisfied(expression: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


def _is_selected(policy: Object, pod: Object, direction: str) -> bool:
    spec = policy["spec"]
    directions = spec.get("policyTypes") or [INGRESS, *([EGRESS] if "egress" in spec else [])]
    return (
        direction in directions
        and policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
        and matches_selector(spec.get("podSelector") or {}, _get_labels(pod))
    )


def _list_policy_routes(policy: Object, direction: str, pod: Object, world: PolicyWorld) -> Iterator[OpenRoute]:
    peers_field = "from" if direction == INGRESS else "to"
    for rule in policy["spec"].get(direction.lower()) or ():
        peers, wanted = rule.get(peers_field), rule.get("ports")
        networks = [n for peer in peers for n in _list_networks(peer, policy, world)] if peers else [ANYWHERE]
        named = _collect_port_names(pod) if direction == INGRESS else {}
        ports = tuple(p for entry in wanted for p in _list_ports(entry, named)) if wanted else None
        yield OpenRoute(tuple(collapse_addresses(networks)), ports)


def _list_networks(peer: Object, policy: Object, world: PolicyWorld) -> Iterable[IPv4Network]:
    if block := peer.get("ipBlock"):
        return _subtract_networks(IPv4Network(block["cidr"]), [IPv4Network(cidr) for cidr in block.get("except") or ()])
    if (selector := peer.get("namespaceSelector")) is None:
        namespaces = {policy["metadata"]["namespace"]}
    else:
        namespaces = {n["metadata"]["name"] for n in world.namespaces if matches_selector(selector, _get_labels(n))}
    pods = [pod for pod in world.pods if pod["metadata"]["namespace"] in namespaces and get_pod_address(pod)]
    return [IPv4Network(get_pod_address(pod)) for pod in pods if matches_selector(peer.get("podSelector") or {}, _get_labels(pod))]


def _subtract_networks(network: IPv4Network, holes: Sequence[IPv4Network]) -> list[IPv4Network]:
    left = [network]
    for hole in holes:
        parts = [[part] if not hole.subnet_of(part) else list(part.address_exclude(hole)) for part in left]
        left = [part for some in parts for part in some]
    return left


def _list_ports(entry: Object, named: Mapping[tuple[str, str], int]) -> list[FirewallPorts]:
    protocol, port = str(entry.get("protocol", "TCP")).lower(), entry.get("port")
    if port is None:
        return [FirewallPorts(protocol)]
    number = port if isinstance(port, int) else named.get((protocol, port))
    return [] if number is None else [FirewallPorts(protocol, number, entry.get("endPort", number))]


def _collect_port_names(pod: Object) -> dict[tuple[str, str], int]:
    """(protocol, name) → number, of all containers that run together: native sidecars are init containers."""
    spec = pod["spec"]
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    ports = [p for c in [*spec["containers"], *sidecars] for p in c.get("ports") or () if "name" in p]
    return {(port.get("protocol", "TCP").lower(), port["name"]): port["containerPort"] for port in ports}


def _build_chain(pod: Object, direction: str, open_routes: Sequence[OpenRoute]) -> Iterator[str]:
    """What is open returns to the chain before, since the other side's policies are asked, too."""
    other = "saddr" if direction == INGRESS else "daddr"
    yield f"ip {other} {get_pod_address(pod)} return"  # nothing keeps a pod from itself, by way of a service
    for networks, ports in sorted({(_format_set(way.networks), way.ports) for way in open_routes if way.networks}, key=str):
        if ports is None:
            yield f"ip {other} {networks} return"
        for port in ports or ():
            yield f"ip {other} {networks} {port.protocol} dport {port.first}-{port.last} return"
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    yield f'counter drop comment "{name[:_MAX_COMMENT_CHARACTERS]}"'


def _format_set(networks: Sequence[IPv4Network]) -> str:
    return "{ " + ", ".join(map(str, networks)) + " }"


def _get_labels(found: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = found["metadata"].get("labels") or {}
    return labels
