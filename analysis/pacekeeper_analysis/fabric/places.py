"""Where nodes are in the network, by the labels that clouds, NVIDIA's topograph or a `Fabric` put on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .order import TopologyLocation

TIER_LABEL = re.compile(r"fabric\.topograph\.run/tier-(\d+)")
"""Any number of them; 0 is the leaf."""
LABEL_SCHEMES: tuple[tuple[str, ...], ...] = (
    # Each from the leaf outward.
    tuple(f"network.topology.nvidia.com/{tier}" for tier in ("block", "spine", "datacenter")),
    tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (3, 2, 1)),
    # Its `host` is one machine, on which a GPU node is alone.
    tuple(f"cloud.google.com/gce-topology-{tier}" for tier in ("subblock", "block")),
    tuple(f"oci.oraclecloud.com/host.{tier}" for tier in ("rack_id", "network_block_id")),
    ("topology.kubernetes.io/zone",),
)
_KNOWN_LABELS = frozenset(name for scheme in LABEL_SCHEMES for name in scheme)


def locate_nodes(labels: Mapping[str, Mapping[str, str]], levels: Sequence[str] = ()) -> dict[str, TopologyLocation]:
    """By node. `labels`: of each node. `levels`: names of labels, from the leaf outward, that go before all others.

    One scheme for all nodes, since names of two schemes cannot be compared: `levels` where any node has them, else the
    first that half of the nodes have, else the first that any has. A node without its labels is in no known place.
    """
    there = frozenset[str]().union(*labels.values())
    if not there:
        return dict.fromkeys(labels, ())
    known = [scheme for scheme in (_sort_tier_labels(there), *LABEL_SCHEMES) if not there.isdisjoint(scheme)]
    common = [scheme for scheme in known if 2 * _count_labeled_nodes(labels, scheme) >= len(labels)]
    scheme = next(iter([*common, *known]), ()) if there.isdisjoint(levels) else tuple(levels)
    return {node: _drop_empty_location([of.get(name, "") for name in scheme]) for node, of in labels.items()}


def is_location_label(label: str) -> bool:
    """Whether a label of this name may say where its node is."""
    return label in _KNOWN_LABELS or TIER_LABEL.fullmatch(label) is not None


def _count_labeled_nodes(labels: Mapping[str, Mapping[str, str]], scheme: Sequence[str]) -> int:
    """Nodes that have a label of this scheme."""
    names = frozenset(scheme)
    return sum(not names.isdisjoint(of) for of in labels.values())


def _sort_tier_labels(labels: Iterable[str]) -> tuple[str, ...]:
    found = {match.group(): int(match[1]) for name in labels if (match := TIER_LABEL.fullmatch(name))}
    return tuple(sorted(found, key=lambda name: found[name]))


def _drop_empty_location(place: list[str]) -> TopologyLocation:
    return tuple(place) if any(place) else ()
