"""Locations of nodes in the network, from labels of clouds, of NVIDIA's topograph, or of a `Fabric`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .rank_order import TopologyLocation

TIER_LABEL = re.compile(r"fabric\.topograph\.run/tier-(\d+)")
"""Labels of any number of tiers. Tier 0 is the leaf."""
LABEL_SCHEMES: tuple[tuple[str, ...], ...] = (
    # Each from the leaf outward.
    tuple(f"network.topology.nvidia.com/{tier}" for tier in ("block", "spine", "datacenter")),
    tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (3, 2, 1)),
    # Its `host` is one machine, which has only one GPU node.
    tuple(f"cloud.google.com/gce-topology-{tier}" for tier in ("subblock", "block")),
    tuple(f"oci.oraclecloud.com/host.{tier}" for tier in ("rack_id", "network_block_id")),
    ("topology.kubernetes.io/zone",),
)
_KNOWN_LABELS = frozenset(name for scheme in LABEL_SCHEMES for name in scheme)


def locate_nodes(labels: Mapping[str, Mapping[str, str]], levels: Sequence[str] = ()) -> dict[str, TopologyLocation]:
    """Return the location of each node, from the `labels` of each node.

    `levels` are names of labels, from the leaf outward, with precedence over all others. One scheme applies to all
    nodes, because names of two schemes cannot be compared: `levels` if any node has them, else the first that half of
    the nodes have, else the first that any has. A node without its labels has no known location.
    """
    present_labels = frozenset[str]().union(*labels.values())
    if not present_labels:
        return dict.fromkeys(labels, ())
    present_schemes = [
        scheme
        for scheme in (_sort_tier_labels(present_labels), *LABEL_SCHEMES)
        if not present_labels.isdisjoint(scheme)
    ]
    common_schemes = [scheme for scheme in present_schemes if 2 * _count_labeled_nodes(labels, scheme) >= len(labels)]
    scheme = next(iter([*common_schemes, *present_schemes]), ()) if present_labels.isdisjoint(levels) else tuple(levels)
    return {
        node: _drop_empty_location([node_labels.get(name, "") for name in scheme])
        for node, node_labels in labels.items()
    }


def is_location_label(label: str) -> bool:
    """Return whether a label of this name may contain a node's location."""
    return label in _KNOWN_LABELS or TIER_LABEL.fullmatch(label) is not None


def _count_labeled_nodes(labels: Mapping[str, Mapping[str, str]], scheme: Sequence[str]) -> int:
    """Return the number of nodes that have a label of this scheme."""
    names = frozenset(scheme)
    return sum(not names.isdisjoint(node_labels) for node_labels in labels.values())


def _sort_tier_labels(labels: Iterable[str]) -> tuple[str, ...]:
    tiers = {match.group(): int(match[1]) for name in labels if (match := TIER_LABEL.fullmatch(name))}
    return tuple(sorted(tiers, key=lambda name: tiers[name]))


def _drop_empty_location(location: list[str]) -> TopologyLocation:
    return tuple(location) if any(location) else ()
