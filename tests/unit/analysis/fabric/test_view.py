"""A Fabric as users see it: what is read of it, as a table, and the messages of rejected ones."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.fabric.text import render_text
from pacekeeper_analysis.fabric.view import FabricLink, FabricView, LinkState, list_leaves_and_spines

LINKS = (
    FabricLink("l1", "s1", 2, 1),
    FabricLink("l1", "s2", 1, 1, LinkState.SLOW),
    FabricLink("l2", "s1", 0, 0, LinkState.DOWN),
    FabricLink("l2", "s2", 1, 2),
)


def build_view(links: tuple[FabricLink, ...] = LINKS, **changes: Any) -> FabricView:
    leaves, spines = list_leaves_and_spines([FabricView("x", 1, links=links)])
    values = {
        "spines": len(spines),
        "leaves": len(leaves),
        "flows": 4,
        "max_load": 2,
        "lower_bound": 2,
        "dead_links": 1,
    } | changes
    return FabricView("pods", links=links, **values)


def build_body(**status: Any) -> dict[str, Any]:
    known = {"leaves": 1, "links": [{"leaf": "l1", "spine": "s1", "up": 1, "down": 0, "state": "Up"}]}
    return {"metadata": {"name": "pods"}, "spec": {"spines": 2, "planes": 2}, "status": known | status}


class TestReading:
    def test_missing_fields_are_unknown(self) -> None:
        found = FabricView.from_json({"metadata": {"name": "f"}, "spec": {"spines": 3}})
        assert found == FabricView("f", 3)
        assert not found.is_in_force
        assert FabricView.from_json(build_body()).spines == 4

    def test_loads_of_omitted_links_are_bounded(self) -> None:
        """The dead and the fullest ones are listed."""
        assert build_view().max_unlisted_load is None
        assert build_view(spines=3).max_unlisted_load == 1
        assert build_view(LINKS[2:3], leaves=2).max_unlisted_load == 2

    def test_names_are_in_the_order_of_their_numbers(self) -> None:
        links = tuple(
            FabricLink(leaf, f"s{n}", 0, 0) for n in (10, 9, 1) for leaf in ("row2/r1", "row10/r1", "row2/r10")
        )
        assert list_leaves_and_spines([build_view(links)]) == (["row2/r1", "row2/r10", "row10/r1"], ["s1", "s9", "s10"])

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (7, "metadata: must be an object"),
            ({"metadata": "f"}, "metadata: must be an object"),
            ({"metadata": {"name": "f"}}, "spec: spines must be given"),
            ({"metadata": {"name": "f"}, "spec": {"spines": 0}}, "spec.spines: 0 must be from 1"),
            ({"metadata": {}, "spec": {"spines": 1}}, "Fabric.name"),
            (build_body(maxLoad="7"), "Fabric.max_load: '7' must be a whole number"),
            (
                build_body(links=[{"leaf": "l", "spine": "s1", "up": -1, "down": 0}]),
                "Fabric.links[0].up: -1 must be from 0",
            ),
            (build_body(links=[{"leaf": "l", "spine": "s1", "down": 0}]), "Fabric.links[0]: up must be given"),
            (
                build_body(links=[{"leaf": "\x1b[2J", "spine": "s", "up": 0, "down": 0}]),
                "Fabric.links[0].leaf: must be 512",
            ),
            (
                build_body(links=[{"leaf": "l", "spine": "s", "up": 0, "down": 0, "state": "Odd"}]),
                "Fabric.links[0].state",
            ),
            (
                build_body(conditions=[{"type": "Planned", "status": "Maybe", "reason": "R"}]),
                "Fabric.conditions[0].status",
            ),
        ],
    )
    def test_an_invalid_fabric_is_rejected_by_the_name_of_its_field(self, wrong: object, message: str) -> None:
        with pytest.raises(InputError) as refused:
            FabricView.from_json(wrong)
        assert message in str(refused.value)


def build_conditioned_view(**condition: str) -> FabricView:
    return FabricView.from_json(
        build_body(conditions=[{"type": "Planned", "status": "False", "reason": "NoRoute"} | condition])
    )


class TestTable:
    def test_both_directions_of_each_link_are_shown(self) -> None:
        lines = render_text(build_view()).splitlines()
        assert lines[0] == "pods: 2 leaves × 2 spines · 4 flows · fullest link 2 · bound 2 · 1 dead link"
        rows = [line.split() for line in lines]
        assert ["up/down", "s1", "s2"] in rows
        assert ["l1", "2/1", "~1/1"] in rows
        assert ["l2", "×", "1/2"] in rows
        assert "not listed" not in lines[-1]

    def test_the_fuller_direction_is_shown_where_both_do_not_fit_and_blocks_where_that_does_not(self) -> None:
        links = tuple(FabricLink("l1", f"s{n}", 10, 12) for n in range(1, 9))
        assert ["l1", *["10/12"] * 8] in [line.split() for line in render_text(build_view(links), 100).splitlines()]
        narrow = render_text(build_view(links), 46).splitlines()
        assert ["l1", *["12"] * 8] in [line.split() for line in narrow]
        assert narrow[-1].endswith("in the fuller direction")
        narrower = [line.split() for line in render_text(build_view(links), 24).splitlines()]
        assert narrower.count(["l1", *["12"] * 4]) == 2
        assert ["s5", "s6", "s7", "s8"] in narrower

    def test_omitted_links_are_mentioned(self) -> None:
        lines = render_text(build_view((*LINKS, FabricLink("l3", "s3", 1, 1)))).splitlines()
        assert ["l3", "·", "·", "1/1"] in [line.split() for line in lines]
        assert lines[-1].endswith("· not listed, 1 at most")

    def test_without_a_plan_no_loads_are_shown(self) -> None:
        lines = render_text(build_view(max_load=None)).splitlines()
        assert ["l1", "up", "~"] in [line.split() for line in lines]
        assert "loads" not in lines[-1]
        assert "fullest link" not in lines[0]

    def test_flows_without_a_route_are_named(self) -> None:
        assert "Planned False, NoRoute: no way for a/b 1 → 0" in render_text(
            build_conditioned_view(message="no way for a/b 1 → 0")
        )
        assert "Planned True, AtLowerBound" in render_text(build_conditioned_view(status="True", reason="AtLowerBound"))
        assert "LinksResolved" not in render_text(
            build_conditioned_view(type="LinksResolved", status="True", reason="LinksConsistent")
        )

    def test_texts_of_others_do_not_control_the_terminal(self) -> None:
        assert "\x1b" not in render_text(build_conditioned_view(message="Prometheus: \x1b[2J\r gone"))

    def test_a_fabric_without_a_status_is_shown(self) -> None:
        assert render_text(FabricView("f", 3)).splitlines()[1:] == [
            "The operator has not processed it yet: is it running?"
        ]

    def test_long_names_keep_their_end(self) -> None:
        (row,) = [
            line
            for line in render_text(build_view((FabricLink("x" * 60 + "/rack7", "s1", 1, 1),))).splitlines()
            if "rack7" in line
        ]
        assert len(row) < 40
