"""Pure: the meaning of NetworkPolicies for each pod, and a node's nftables rules that implement it.

Supported: pod and namespace selectors, ipBlock, ports by number, range, or name, both directions. Not supported: port
names in egress rules (they belong to the other pod), and IPv6, which the test cluster does not have.
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
_MAX_COMMENT_CHARACTERS = 120  # nft accepts 128 bytes


@dataclass(frozen=True)
class PolicyWorld:
    """The objects that decide, as the API server returns them."""

    pods: Sequence[Object]
    namespaces: Sequence[Object]
    policies: Sequence[Object]


@dataclass(frozen=True)
class FirewallPorts:
    """Ports from `first` to `last`, inclusive. `protocol`: in nft's format."""

    protocol: str
    first: int = 0
    last: int = 65535


@dataclass(frozen=True)
class OpenRoute:
    """Networks that may connect to these ports; None: to all ports."""

    networks: tuple[IPv4Network, ...]
    ports: tuple[FirewallPorts, ...] | None


def list_open_routes(pod: Object, direction: str, world: PolicyWorld) -> list[OpenRoute] | None:
    """Return what may connect to (Ingress) or from (Egress) the pod; None: everything, as no policy selects it."""
    selecting = [policy for policy in world.policies if _is_selected(policy, pod, direction)]
    return (
        [route for policy in selecting for route in _list_policy_routes(policy, direction, pod, world)]
        if selecting
        else None
    )


def is_admitted(open_routes: Iterable[OpenRoute] | None, address: str, port: int, protocol: str = "tcp") -> bool:
    """Return whether a connection with the other side's `address` is allowed."""
    peer = IPv4Network(address)
    return open_routes is None or any(
        any(peer.subnet_of(network) for network in route.networks)
        and (route.ports is None or any(p.protocol == protocol and p.first <= port <= p.last for p in route.ports))
        for route in open_routes
    )


def build_ruleset(node: str, world: PolicyWorld) -> str:
    """Build the input of `nft -f` that replaces the node's table atomically. The same rules give the same text."""
    lines = [f"table ip {TABLE}", f"delete table ip {TABLE}", f"table ip {TABLE} {{"]
    jumps = []
    pods = [pod for pod in world.pods if pod["spec"].get("nodeName") == node and get_pod_address(pod)]
    for pod in sorted(pods, key=get_pod_address):
        for direction, address_field in ((EGRESS, "saddr"), (INGRESS, "daddr")):
            if (routes := list_open_routes(pod, direction, world)) is not None:
                name = f"{direction.lower()}-{get_pod_address(pod)}"
                lines += [f"chain {name} {{", *_build_chain(pod, direction, routes), "}"]
                jumps.append(f"ip {address_field} {get_pod_address(pod)} jump {name}")
    # After kube-proxy's chains, which replace a service's address by a pod's. Traffic of the node itself to its pods,
    # such as the kubelet's probes, is not forwarded, and passes.
    hook = "type filter hook forward priority 10; policy accept;"
    return "\n".join([*lines, "chain forward {", hook, "ct state established,related accept", *jumps, "}", "}", ""])


def get_pod_address(pod: Object) -> str:
    """Return the pod's own address; "": it has none (at present)."""
    status = pod.get("status", {})
    has_ended = status.get("phase") in ("Succeeded", "Failed")  # its address may be another pod's by now
    return "" if has_ended or pod["spec"].get("hostNetwork") else str(status.get("podIP") or "")


def matches_selector(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector matches. An empty one matches everything."""
    required = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    return required.items() <= labels.items() and all(_is_satisfied(expression, labels) for expression in expressions)


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
        peers, port_entries = rule.get(peers_field), rule.get("ports")
        networks = [n for peer in peers for n in _list_networks(peer, policy, world)] if peers else [ANYWHERE]
        named_ports = _collect_port_names(pod) if direction == INGRESS else {}
        ports = tuple(p for entry in port_entries for p in _list_ports(entry, named_ports)) if port_entries else None
        yield OpenRoute(tuple(collapse_addresses(networks)), ports)


def _list_networks(peer: Object, policy: Object, world: PolicyWorld) -> Iterable[IPv4Network]:
    if block := peer.get("ipBlock"):
        return _subtract_networks(IPv4Network(block["cidr"]), [IPv4Network(cidr) for cidr in block.get("except") or ()])
    if (selector := peer.get("namespaceSelector")) is None:
        namespaces = {policy["metadata"]["namespace"]}
    else:
        namespaces = {n["metadata"]["name"] for n in world.namespaces if matches_selector(selector, _get_labels(n))}
    pods = [pod for pod in world.pods if pod["metadata"]["namespace"] in namespaces and get_pod_address(pod)]
    return [
        IPv4Network(get_pod_address(pod))
        for pod in pods
        if matches_selector(peer.get("podSelector") or {}, _get_labels(pod))
    ]


def _subtract_networks(network: IPv4Network, holes: Sequence[IPv4Network]) -> list[IPv4Network]:
    remaining = [network]
    for hole in holes:
        pieces = [[part] if not hole.subnet_of(part) else list(part.address_exclude(hole)) for part in remaining]
        remaining = [part for piece in pieces for part in piece]
    return remaining


def _list_ports(entry: Object, named_ports: Mapping[tuple[str, str], int]) -> list[FirewallPorts]:
    protocol, port = str(entry.get("protocol", "TCP")).lower(), entry.get("port")
    if port is None:
        return [FirewallPorts(protocol)]
    number = port if isinstance(port, int) else named_ports.get((protocol, port))
    return [] if number is None else [FirewallPorts(protocol, number, entry.get("endPort", number))]


def _collect_port_names(pod: Object) -> dict[tuple[str, str], int]:
    """Map (protocol, name) to the number, of all containers that run together. Native sidecars are init containers."""
    spec = pod["spec"]
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    ports = [p for c in [*spec["containers"], *sidecars] for p in c.get("ports") or () if "name" in p]
    return {(port.get("protocol", "TCP").lower(), port["name"]): port["containerPort"] for port in ports}


def _build_chain(pod: Object, direction: str, open_routes: Sequence[OpenRoute]) -> Iterator[str]:
    """Yield the rules. Allowed traffic returns to the previous chain: the other side's policies apply, too."""
    address_field = "saddr" if direction == INGRESS else "daddr"
    yield f"ip {address_field} {get_pod_address(pod)} return"  # a pod always reaches itself through a service
    for networks, ports in sorted(
        {(_format_set(route.networks), route.ports) for route in open_routes if route.networks}, key=str
    ):
        if ports is None:
            yield f"ip {address_field} {networks} return"
        for port in ports or ():
            yield f"ip {address_field} {networks} {port.protocol} dport {port.first}-{port.last} return"
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    yield f'counter drop comment "{name[:_MAX_COMMENT_CHARACTERS]}"'


def _format_set(networks: Sequence[IPv4Network]) -> str:
    return "{ " + ", ".join(map(str, networks)) + " }"


def _get_labels(body: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels
