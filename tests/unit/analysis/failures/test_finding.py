"""Findings that are combined, and their confidence."""

import pytest

from pacekeeper_analysis.failures import confidence
from pacekeeper_analysis.failures.finding import (
    SIGNAL_KINDS_BY_STRENGTH,
    FaultClass,
    Finding,
    Signal,
    SignalKind,
    merge_findings,
)

TIMES = Finding(FaultClass.UNKNOWN, "rank 1", (Signal(SignalKind.TIMES, "1.5 x its peers"),))
PROBED = Finding(FaultClass.NETWORK, "link 0 -> 1", (Signal(SignalKind.PROBE, "slow on no other link"),), advice="look")
CODE = Finding(FaultClass.CODE, "train.py:slow", (Signal(SignalKind.PROFILE, "0.4 s a step"),))


def test_the_first_finding_is_unchanged() -> None:
    assert merge_findings(None, TIMES) == TIMES


@pytest.mark.parametrize("findings", [(TIMES, PROBED), (PROBED, TIMES), (CODE, PROBED), (PROBED, CODE)])
def test_the_stronger_signal_names_class_and_culprit_and_all_are_kept(findings: tuple[Finding, Finding]) -> None:
    both = merge_findings(*findings)
    assert (both.fault, both.culprit, both.advice) == (FaultClass.NETWORK, "link 0 -> 1", "look")
    assert both.signal_kinds == findings[0].signal_kinds | findings[1].signal_kinds


def test_the_newest_message_of_the_same_kind_counts() -> None:
    newer = Finding(FaultClass.DATA, "rank 2", (Signal(SignalKind.TIMES, "2 x its peers"),))
    assert merge_findings(TIMES, newer) == newer


def test_a_finding_without_a_culprit_clears_only_its_own_class() -> None:
    """A probe that finds all links well clears them; slow functions are reported nevertheless."""
    cleared = Finding(FaultClass.NETWORK, "", (Signal(SignalKind.PROBE, "all as fast as before"),))
    throttled = Finding(FaultClass.CONFIGURATION, "rank 2", (Signal(SignalKind.PROCESS, "a quota"),))
    for both in (merge_findings(cleared, throttled), merge_findings(throttled, cleared)):
        assert (both.fault, both.culprit) == (FaultClass.CONFIGURATION, "rank 2")
    link = Finding(FaultClass.NETWORK, "link 0 -> 1", (Signal(SignalKind.TRANSPORT, "slow"),))
    assert merge_findings(link, cleared).culprit == ""


def test_every_kind_of_signal_has_its_strength() -> None:
    assert sorted(SIGNAL_KINDS_BY_STRENGTH) == sorted(SignalKind)


def test_confidence_is_that_of_the_best_part_of_the_evidence_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {
        ("Network", frozenset({"Transport"})): 0.8,
        ("Network", frozenset({"Transport", "Probe"})): 0.97,
        ("Code", frozenset({"Behavior"})): 0.9,
    }
    monkeypatch.setattr(confidence, "MEASURED_CONFIDENCE", tried)
    assert confidence.estimate_confidence("Network", ["Transport", "Probe", "Times"]) == 0.97
    assert confidence.estimate_confidence("Network", ["Transport"]) == 0.8
    assert confidence.estimate_confidence("Network", ["Times"]) is None
    assert confidence.estimate_confidence("Data", ["Behavior"]) is None
    transport = Finding(FaultClass.NETWORK, "link", (Signal(SignalKind.TRANSPORT, "slow"),))
    assert merge_findings(transport, PROBED).confidence == 0.97
