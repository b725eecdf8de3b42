"""Marks by which others want a node empty."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import TAINT_QUARANTINE
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.settings import Settings


def node(
    *taints: tuple[str, str, str], cordoned: bool = False, conditions: tuple[tuple[str, str, str], ...] = ()
) -> dict[str, Any]:
    told = [{"type": kind, "status": status, "reason": reason} for kind, status, reason in conditions]
    marks = [{"key": key, "value": value, "effect": effect} for key, value, effect in taints]
    return {"spec": {"unschedulable": cordoned, "taints": marks}, "status": {"conditions": told}}


HEALTHY = (("Ready", "True", "KubeletReady"), ("KernelDeadlock", "False", "KernelHasNoDeadlock"))
OURS = (TAINT_QUARANTINE, "", "NoSchedule")


class TestWhyEmpty:
    def test_a_node_on_which_nothing_is_marked_stays(self) -> None:
        assert NodeHealthRules().find_leave_reason(node(("gpu", "h100", "NoSchedule"), conditions=HEALTHY)) == ""
        assert NodeHealthRules().find_leave_reason({"metadata": {"name": "new"}}) == ""
        assert NodeHealthRules().find_leave_reason({"spec": {"taints": None}}) == ""

    def test_a_cordon(self) -> None:
        assert NodeHealthRules().find_leave_reason(node(cordoned=True)) == "it is cordoned"
        assert NodeHealthRules(cordons=False).find_leave_reason(node(cordoned=True)) == ""

    def test_our_own_quarantine_is_no_such_mark(self) -> None:
        assert NodeHealthRules().find_leave_reason(node(OURS, cordoned=True)) == ""
        autoscaler = ("ToBeDeletedByClusterAutoscaler", "1700000000", "NoSchedule")
        words = "taint ToBeDeletedByClusterAutoscaler=1700000000:NoSchedule"
        assert NodeHealthRules().find_leave_reason(node(OURS, autoscaler, cordoned=True)) == words

    @pytest.mark.parametrize(
        ("named", "fits"),
        [
            ("gpu", True),
            ("gpu=bad", True),
            ("gpu=bad:NoSchedule", True),
            ("gpu:NoSchedule", True),
            ("gpu=", False),
            ("gpu=good", False),
            ("gpu:NoExecute", False),
            ("gp", False),
        ],
    )
    def test_a_taint_by_key_value_and_effect(self, named: str, fits: bool) -> None:
        health = NodeHealthRules(taints=(named,))
        assert bool(health.find_leave_reason(node(("gpu", "bad", "NoSchedule")))) is fits

    @pytest.mark.parametrize(
        ("named", "words"),
        [
            ("GpuHealthy=False", "condition GpuHealthy is False (Xid79)"),
            ("GpuHealthy", ""),
            ("GpuHealthy=Unknown", ""),
            ("Gpu=False", ""),
        ],
    )
    def test_a_condition_by_type_and_status(self, named: str, words: str) -> None:
        assert (
            NodeHealthRules(conditions=(named,)).find_leave_reason(node(conditions=(("GpuHealthy", "False", "Xid79"),)))
            == words
        )

    def test_a_condition_is_true_where_no_status_is_named(self) -> None:
        found = NodeHealthRules().find_leave_reason(node(conditions=(("KernelDeadlock", "True", ""),)))
        assert found == "condition KernelDeadlock is True"


class TestSettings:
    def test_they_are_lists_and_may_be_empty(self) -> None:
        given = {"PACEKEEPER_LEAVE_TAINTS": "a=b:NoExecute, c", "PACEKEEPER_LEAVE_CONDITIONS": ""}
        settings = Settings.from_environment(given | {"PACEKEEPER_LEAVE_CORDONED": "false"})
        assert settings.node_health == NodeHealthRules(cordons=False, taints=("a=b:NoExecute", "c"), conditions=())
        assert Settings.from_environment({}).node_health == NodeHealthRules()

    @pytest.mark.parametrize(
        ("variable", "text", "words"),
        [
            ("TAINTS", "a b", "taint 'a b': write key, key=value or key=value:Effect"),
            ("TAINTS", "a:Never", "taint 'a:Never'"),
            ("CONDITIONS", "A=Maybe", "condition 'A=Maybe': write a type, or type=status"),
            (
                "CONDITIONS",
                "Ready=False",
                "condition Ready: a node that is not ready counts as lost in any case; leave it out",
            ),
        ],
    )
    def test_what_is_none_is_refused_with_the_remedy(self, variable: str, text: str, words: str) -> None:
        with pytest.raises(InputError, match=words.replace("(", r"\(")):
            Settings.from_environment({f"PACEKEEPER_LEAVE_{variable}": text})
