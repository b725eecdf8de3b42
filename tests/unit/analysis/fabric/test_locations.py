"""Labels of nodes → places."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.fabric.locations import locate_nodes
from pacekeeper_analysis.fabric.rank_order import TopologyLocation

TOPOGRAPH = "fabric.topograph.run/tier-"
NVIDIA = "network.topology.nvidia.com/"
ZONE = "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({f"{TOPOGRAPH}10": "core", f"{TOPOGRAPH}0": "leaf", f"{TOPOGRAPH}2": "spine"}, ("leaf", "spine", "core")),
        ({f"{NVIDIA}block": "b", f"{NVIDIA}spine": "s", f"{NVIDIA}datacenter": "d"}, ("b", "s", "d")),
        ({f"topology.k8s.aws/network-node-layer-{n}": f"nn-{n}" for n in (1, 2, 3)}, ("nn-3", "nn-2", "nn-1")),
        (
            {f"cloud.google.com/gce-topology-{tier}": tier for tier in ("host", "subblock", "block")},
            ("subblock", "block"),
        ),
        (
            {"oci.oraclecloud.com/host.rack_id": "r", "oci.oraclecloud.com/host.network_block_id": "n"},
            ("r", "n"),
        ),
        ({ZONE: "z"}, ("z",)),
        ({f"{TOPOGRAPH}x": "leaf", "app": "b"}, ()),
        ({}, ()),
    ],
)
def test_each_scheme_is_read_from_the_leaf_outward(labels: dict[str, str], place: TopologyLocation) -> None:
    assert locate_nodes({"n": labels}) == {"n": place}


def test_the_finer_scheme_goes_first_and_labels_that_a_fabric_names_before_it() -> None:
    node = {f"{TOPOGRAPH}0": "leaf", ZONE: "z", "rack": "r", "row": "w"}
    assert locate_nodes({"n": node}) == {"n": ("leaf",)}
    assert locate_nodes({"n": node}, ["rack", "row"]) == {"n": ("r", "w")}
    assert locate_nodes({"n": node}, ["no-node/has-it"]) == {"n": ("leaf",)}


def test_a_scheme_of_few_nodes_does_not_hide_the_places_of_the_others() -> None:
    labels = {name: {ZONE: name} for name in "abc"}
    labels["a"][f"{TOPOGRAPH}0"] = "leaf"
    assert locate_nodes(labels) == {name: (name,) for name in "abc"}
    labels["b"][f"{TOPOGRAPH}0"] = "leaf"
    assert locate_nodes(labels) == {"a": ("leaf",), "b": ("leaf",), "c": ()}, "half of them have it, so it counts"
    few = {"a": {f"{TOPOGRAPH}0": "leaf"}, "b": {}, "c": {}}
    assert locate_nodes(few) == {"a": ("leaf",), "b": (), "c": ()}, "no label is better"


def test_labels_that_a_fabric_names_count_however_few_nodes_have_them() -> None:
    labels = {"a": {"rack": "r", ZONE: "z"}, "b": {ZONE: "z"}, "c": {ZONE: "z"}}
    assert locate_nodes(labels, ["rack"]) == {"a": ("r",), "b": (), "c": ()}


def test_labels_of_two_schemes_are_not_mixed() -> None:
    found = locate_nodes(
        {"a": {f"{TOPOGRAPH}0": "l1", f"{TOPOGRAPH}1": "b"}, "b": {ZONE: "z"}, "c": {f"{TOPOGRAPH}1": "b"}}
    )
    assert found == {"a": ("l1", "b"), "b": (), "c": ("", "b")}
