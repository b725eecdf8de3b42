"""A probe of a link: its turns, and the verdict on every pattern of answers."""

from __future__ import annotations

from collections import Counter

import pytest

from pacekeeper_analysis.network.link_probe import (
    LinkProbeVerdict,
    ProbeParty,
    estimate_probe_seconds,
    evaluate_probe,
    plan_probe,
)
from pacekeeper_analysis.protocol.reports import LinkProbe

S, D = ProbeParty("s", "10.0.0.1:1"), ProbeParty("d", "10.0.0.2:1")
OTHERS = [ProbeParty(name, f"10.0.1.{i}:1") for i, name in enumerate("xyzw")]
FAST, SLOW = 400e6, 100e6
PING = 0.0004


def build_answers(
    slow: set[tuple[str, str]], others: int = 2, rate: float = SLOW, failed: str = "", ping: float = PING
) -> dict[str, list[LinkProbe]]:
    """What the launchers measure where these pairs are slow."""
    probe = plan_probe("p", S, D, OTHERS[:others])
    return {
        source: [
            LinkProbe(target.worker, None if failed else rate, None if failed else ping, failed=failed)
            if (source, target.worker) in slow
            else LinkProbe(target.worker, FAST, PING)
            for target in targets
        ]
        for source, targets in zip(probe.sources, probe.targets, strict=True)
    }


class TestLayout:
    @pytest.mark.parametrize("others", range(5))
    def test_pairs_of_one_turn_have_no_worker_in_common(self, others: int) -> None:
        probe = plan_probe("p", S, D, OTHERS[:others])
        for slot in range(int(estimate_probe_seconds(probe))):
            taking_part = Counter(
                name
                for source, targets in zip(probe.sources, probe.targets, strict=True)
                for target in targets
                if target.slot == slot
                for name in (source, target.worker)
            )
            assert max(taking_part.values(), default=1) == 1
        assert probe.targets[0][0].worker == "d"

    def test_the_pair_both_ends_with_others_and_controls_are_probed(self) -> None:
        probe = plan_probe("p", S, D, OTHERS)
        probed = {
            (source, target.worker)
            for source, targets in zip(probe.sources, probe.targets, strict=True)
            for target in targets
        }
        assert {("s", "d"), ("s", "x"), ("s", "y"), ("x", "d"), ("y", "d"), ("d", "s")} <= probed
        assert {("x", "y"), ("y", "x"), ("z", "w"), ("w", "z")} <= probed
        assert estimate_probe_seconds(probe) == 4

    def test_a_job_without_other_workers_is_inconclusive(self) -> None:
        probe = plan_probe("p", S, D, [])
        assert probe.sources == ("s", "d")
        assert evaluate_probe(build_answers(set(), others=0), "s", "d").verdict is LinkProbeVerdict.INCONCLUSIVE


class TestJudge:
    @pytest.mark.parametrize("others", [1, 2, 3, 4])
    @pytest.mark.parametrize(
        ("slow", "verdict"),
        [
            (set(), LinkProbeVerdict.NOTHING),
            ({("s", "d")}, LinkProbeVerdict.LINK),
            ({("s", "d"), ("s", "x"), ("s", "y")}, LinkProbeVerdict.SENDER),
            ({("s", "d"), ("x", "d"), ("y", "d")}, LinkProbeVerdict.RECEIVER),
            ({("s", "d"), ("s", "x"), ("s", "y"), ("x", "d"), ("y", "d")}, LinkProbeVerdict.INCONCLUSIVE),
            ({("d", "s")}, LinkProbeVerdict.REVERSED),
            ({("d", "s"), ("d", "x"), ("d", "y")}, LinkProbeVerdict.REVERSED),
            ({("s", "x"), ("d", "x"), ("y", "x")}, LinkProbeVerdict.NOTHING),
            ({("d", "s"), ("d", "x"), ("d", "y"), ("x", "s"), ("y", "s")}, LinkProbeVerdict.REVERSED),
            ({("s", "d"), ("d", "s")}, LinkProbeVerdict.LINK),
            ({("s", "x")}, LinkProbeVerdict.NOTHING),
        ],
    )
    def test_the_slow_part_is_found(self, slow: set[tuple[str, str]], verdict: LinkProbeVerdict, others: int) -> None:
        evaluation = evaluate_probe(build_answers(slow, others), "s", "d")
        assert evaluation.verdict is verdict, evaluation.message

    def test_delayed_acknowledgments_do_not_hide_the_slow_reverse_direction_of_three(self) -> None:
        given = build_answers({("d", "s"), ("d", "x"), ("s", "d")}, others=1)
        assert evaluate_probe(given, "s", "d").verdict is LinkProbeVerdict.REVERSED

    def test_a_contradiction_is_no_verdict(self) -> None:
        assert (
            evaluate_probe(build_answers({("s", "d"), ("s", "x")}), "s", "d").verdict is LinkProbeVerdict.INCONCLUSIVE
        )

    def test_a_failed_transfer_is_slow(self) -> None:
        evaluation = evaluate_probe(build_answers({("s", "d")}, failed="timed out"), "s", "d")
        assert evaluation.verdict is LinkProbeVerdict.LINK
        assert "s → d failed (timed out)" in evaluation.message

    def test_long_pings_are_slow_too_but_not_those_of_a_busy_processor(self) -> None:
        assert (
            evaluate_probe(build_answers({("s", "d")}, rate=FAST, ping=0.02), "s", "d").verdict is LinkProbeVerdict.LINK
        )
        assert (
            evaluate_probe(build_answers({("s", "d")}, rate=FAST, ping=4 * PING), "s", "d").verdict
            is LinkProbeVerdict.NOTHING
        )

    def test_a_little_slower_is_like_the_controls_where_the_suspect_is_much_slower(self) -> None:
        given = build_answers({("s", "d")}, rate=FAST / 40)
        given["s"][1] = LinkProbe("x", FAST / 2, PING)
        assert evaluate_probe(given, "s", "d").verdict is LinkProbeVerdict.LINK

    def test_transfers_limited_by_the_launchers_themselves_are_not_compared(self) -> None:
        given = build_answers(set())
        given = {w: [LinkProbe(p.target, 6e9, PING) for p in probes] for w, probes in given.items()}
        given["s"][0] = LinkProbe("d", 1.2e9, PING)
        assert evaluate_probe(given, "s", "d").verdict is LinkProbeVerdict.NOTHING

    @pytest.mark.parametrize("silent", [{"s"}, {"x", "y", "d"}])
    def test_without_the_suspect_or_any_control_there_is_no_verdict(self, silent: set[str]) -> None:
        given = {worker: probes for worker, probes in build_answers({("s", "d")}).items() if worker not in silent}
        assert evaluate_probe(given, "s", "d").verdict is LinkProbeVerdict.INCONCLUSIVE

    def test_controls_that_all_fail_give_no_verdict(self) -> None:
        given = {
            w: [LinkProbe(p.target, failed="no secret") for p in probes] for w, probes in build_answers(set()).items()
        }
        assert evaluate_probe(given, "s", "d").verdict is LinkProbeVerdict.INCONCLUSIVE
