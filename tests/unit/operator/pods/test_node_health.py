"""Marks by which others request that workers leave a node."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import TAINT_QUARANTINE
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.settings import Settings


def build_node(
    *taints: tuple[str, str, str], cordoned: bool = False, conditions: tuple[tuple[str, str, str], ...] = ()
) -> dict[str, Any]:
    statuses = [{"type": kind, "status": status, "reason": reason} for kind, status, reason in conditions]
    taint_list = [{"key": key, "value": value, "effect": effect} for key, value, effect in taints]
    return {"spec": {"unschedulable": cordoned, "taints": taint_list}, "status": {"conditions": statuses}}


HEALTHY = (("Ready", "True", "KubeletReady"), ("KernelDeadlock", "False", "KernelHasNoDeadlock"))
QUARANTINE = (TAINT_QUARANTINE, "", "NoSchedule")


class TestLeaveReason:
    def test_a_node_without_marks_stays(self) -> None:
        assert NodeHealthRules().find_leave_reason(build_node(("gpu", "h100", "NoSchedule"), conditions=HEALTHY)) == ""
        assert NodeHealthRules().find_leave_reason({"metadata": {"name": "new"}}) == ""
        assert NodeHealthRules().find_leave_reason({"spec": {"taints": None}}) == ""

    def test_a_cordon_is_a_reason_to_leave(self) -> None:
        assert NodeHealthRules().find_leave_reason(build_node(cordoned=True)) == "it is cordoned"
        assert NodeHealthRules(cordons=False).find_leave_reason(build_node(cordoned=True)) == ""

    def test_the_own_quarantine_is_no_reason_to_leave(self) -> None:
        assert NodeHealthRules().find_leave_reason(build_node(QUARANTINE, cordoned=True)) == ""
        autoscaler = ("ToBeDeletedByClusterAutoscaler", "1700000000", "NoSchedule")
        message = "taint ToBeDeletedByClusterAutoscaler=1700000000:NoSchedule"
        assert NodeHealthRules().find_leave_reason(build_node(QUARANTINE, autoscaler, cordoned=True)) == message

    @pytest.mark.parametrize(
        ("setting", "fits"),
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
    def test_a_taint_matches_by_key_value_and_effect(self, setting: str, fits: bool) -> None:
        health = NodeHealthRules(taints=(setting,))
        assert bool(health.find_leave_reason(build_node(("gpu", "bad", "NoSchedule")))) is fits

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("GpuHealthy=False", "condition GpuHealthy is False (Xid79)"),
            ("GpuHealthy", ""),
            ("GpuHealthy=Unknown", ""),
            ("Gpu=False", ""),
        ],
    )
    def test_a_condition_matches_by_type_and_status(self, setting: str, message: str) -> None:
        assert (
            NodeHealthRules(conditions=(setting,)).find_leave_reason(
                build_node(conditions=(("GpuHealthy", "False", "Xid79"),))
            )
            == message
        )

    def test_a_condition_without_a_status_matches_true(self) -> None:
        found = NodeHealthRules().find_leave_reason(build_node(conditions=(("KernelDeadlock", "True", ""),)))
        assert found == "condition KernelDeadlock is True"


class TestSettings:
    def test_settings_are_lists_that_may_be_empty(self) -> None:
        given = {"PACEKEEPER_LEAVE_TAINTS": "a=b:NoExecute, c", "PACEKEEPER_LEAVE_CONDITIONS": ""}
        settings = Settings.from_environment(given | {"PACEKEEPER_LEAVE_CORDONED": "false"})
        assert settings.node_health == NodeHealthRules(cordons=False, taints=("a=b:NoExecute", "c"), conditions=())
        assert Settings.from_environment({}).node_health == NodeHealthRules()

    @pytest.mark.parametrize(
        ("variable", "text", "message"),
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
    def test_an_invalid_setting_is_refused_with_the_remedy(self, variable: str, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message.replace("(", r"\(")):
            Settings.from_environment({f"PACEKEEPER_LEAVE_{variable}": text})
