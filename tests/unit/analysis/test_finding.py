"""Verdicts that are put together, and how sure they are."""

import pytest

from pacekeeper_analysis.diagnose import confidence
from pacekeeper_analysis.diagnose.finding import STRENGTH, FaultClass, Finding, Witness, WitnessKind, join

TIMES = Finding(FaultClass.UNKNOWN, "rank 1", (Witness(WitnessKind.TIMES, "1.5 x its peers"),))
PROBED = Finding(
    FaultClass.NETWORK, "link 0 -> 1", (Witness(WitnessKind.PROBE, "slow on no other link"),), advice="look"
)
CODE = Finding(FaultClass.CODE, "train.py:slow", (Witness(WitnessKind.BEHAVIOUR, "0.4 s a step"),))


def test_the_first_word_stands_by_itself() -> None:
    assert join(None, TIMES) == TIMES


@pytest.mark.parametrize("findings", [(TIMES, PROBED), (PROBED, TIMES), (CODE, PROBED), (PROBED, CODE)])
def test_the_stronger_witness_names_class_and_culprit_and_all_are_kept(findings: tuple[Finding, Finding]) -> None:
    both = join(*findings)
    assert (both.fault, both.culprit, both.advice) == (FaultClass.NETWORK, "link 0 -> 1", "look")
    assert both.kinds == findings[0].kinds | findings[1].kinds


def test_of_the_same_kind_the_newest_words_count() -> None:
    newer = Finding(FaultClass.DATA, "rank 2", (Witness(WitnessKind.TIMES, "2 x its peers"),))
    assert join(TIMES, newer) == newer


def test_who_names_nobody_clears_its_own_class_alone() -> None:
    """A probe that finds all links well clears them; whose functions are slow is told all the same."""
    cleared = Finding(FaultClass.NETWORK, "", (Witness(WitnessKind.PROBE, "all as fast as ever"),))
    throttled = Finding(FaultClass.CONFIGURATION, "rank 2", (Witness(WitnessKind.PROCESS, "a quota"),))
    for both in (join(cleared, throttled), join(throttled, cleared)):
        assert (both.fault, both.culprit) == (FaultClass.CONFIGURATION, "rank 2")
    link = Finding(FaultClass.NETWORK, "link 0 -> 1", (Witness(WitnessKind.TRANSPORT, "slow"),))
    assert join(link, cleared).culprit == ""


def test_every_kind_of_witness_has_its_strength() -> None:
    assert sorted(STRENGTH) == sorted(WitnessKind)


def test_confidence_is_that_of_the_best_part_of_the_evidence_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {
        ("Network", frozenset({"Transport"})): 0.8,
        ("Network", frozenset({"Transport", "Probe"})): 0.97,
        ("Code", frozenset({"Behaviour"})): 0.9,
    }
    monkeypatch.setattr(confidence, "MEASURED", tried)
    assert confidence.confidence("Network", ["Transport", "Probe", "Times"]) == 0.97
    assert confidence.confidence("Network", ["Transport"]) == 0.8
    assert confidence.confidence("Network", ["Times"]) is None
    assert confidence.confidence("Data", ["Behaviour"]) is None
    transport = Finding(FaultClass.NETWORK, "link", (Witness(WitnessKind.TRANSPORT, "slow"),))
    assert join(transport, PROBED).confidence == 0.97
