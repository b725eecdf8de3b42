"""The test cluster's data network, as its nodes and its `Fabric` have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper_analysis.fabric.view import LinkState
from pacekeeper_operator.api.fabric import FabricSpec, PathControl
from testcluster import fabric, faults
from testcluster.cables import CableEnd
from testcluster.settings import ClusterNode
from testcluster.shell import ClusterError


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's memory of its own."""
    path = tmp_path / "fabric.json"
    monkeypatch.setattr(fabric, "_LAYOUT_FILE", path)
    return path


def test_nodes_that_are_added_move_nobody() -> None:
    assert [fabric.get_leaf(f"node-{index}") for index in range(1, 8)] == ["l1", "l2", "l3", "l1", "l2", "l3", "l1"]


def test_without_a_fabric_there_is_nothing_to_break() -> None:
    assert fabric.list_cables(ClusterNode(1)) == []
    with pytest.raises(ClusterError, match="up --fabric 1"):
        faults.cut_uplink("l1", "s1")


@pytest.mark.parametrize("ports", [1, 2])
def test_a_node_has_a_cable_into_each_plane(record: Path, ports: int) -> None:
    record.write_text(f'{{"nodes": 6, "ports": {ports}, "rate": ""}}')
    cables = fabric.list_cables(ClusterNode(5))
    assert [cable.near for cable in cables] == [CableEnd("pacekeeper-node-5", f"fab{plane}") for plane in range(ports)]
    assert [cable.far for cable in cables] == [CableEnd(f"pacekeeper-fabric-l{1 + 3 * p}", "to5") for p in range(ports)]


def test_links_are_called_as_in_the_fabric(record: Path) -> None:
    record.write_text('{"nodes": 6, "ports": 2, "rate": ""}')
    assert fabric.parse_link("l3", "s6") == (2, 5)
    for leaf, spine in (("l4", "s1"), ("l1", "s7"), ("l1", "s0"), ("0", "0")):
        with pytest.raises(ValueError, match=f"no link {leaf}–{spine}; the last one is l3–s6"):
            fabric.parse_link(leaf, spine)


@pytest.mark.parametrize("rate", ["fast", "50", "0mbit", "50 mbit", "-1mbit", "1.5gbit", "50kbit"])
def test_a_rate_that_is_none_is_refused(record: Path, rate: str) -> None:
    record.write_text('{"nodes": 6, "ports": 1, "rate": ""}')
    with pytest.raises(ValueError, match="give one like 50mbit"):
        faults.slow_uplink("l1", "s1", rate)
    with pytest.raises(ValueError, match="give one like 50mbit"):
        faults.shape_uplinks(rate)


def test_the_operator_understands_what_is_printed(record: Path) -> None:
    record.write_text('{"nodes": 6, "ports": 2, "rate": "50mbit"}')
    slow = {"leaf": "l1", "spine": "s4", "state": "Slow", "capacity": "10M"}
    spec = FabricSpec.parse(fabric.build_fabric_object(fabric.get_network(), "50M", [slow])["spec"])
    assert (spec.planes, spec.spines, spec.uplink.capacity) == (2, 3, 50e6)
    assert [(one.leaf, one.spine, one.state, one.capacity) for one in spec.exceptions] == [
        ("l1", "s4", LinkState.SLOW, 10e6)
    ]
    assert spec.levels[0].node_label == fabric.LABEL
    assert spec.path_control.mode is PathControl.PROBE
    assert sorted(spec.hops.values()) == sorted(f"s{spine}" for spine in range(1, 7) for _ in range(3))
    assert spec.hops["10.98.2.11"] == "s6"
