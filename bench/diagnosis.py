"""How often a diagnosis is right: recorded faults of real ranks, perturbed, and diagnosed by the operator's decisions.

    make bench NAME=diagnosis                  # records what is missing (about 50 minutes), diagnoses all of it
    QUICK=1 make bench NAME=diagnosis          # one recording of each fault, three copies, one day
    python -m bench.diagnosis --write          # the confidence of each kind of evidence goes into the product, too

Faults, recordings and copies: `scripts/diagnosis`. Needs root, iproute2 and control groups, as it gives each of four
hosts a network and a processor quota of its own; recordings are kept, and made again when the trainer changes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pacekeeper_analysis.failures import confidence
from testcluster.settings import REPOSITORY

from .scripts.diagnosis import replay
from .scripts.diagnosis.days import DAYS, Found, run_healthy_days
from .scripts.diagnosis.faults import PLACES, list_faults
from .scripts.diagnosis.perturb import COPIES
from .scripts.diagnosis.record import record_faults
from .scripts.diagnosis.replay import Key, Outcome, apply_succession_rule, compute_quantile
from .scripts.diagnosis.rules import RULES
from .scripts.diagnosis.sizes import Sizes, measure_sizes
from .scripts.diagnosis.thresholds import LeftOut, evaluate_left_out

MAX_SECONDS = 3600.0
CONFIDENCE_TABLE = REPOSITORY / "analysis/pacekeeper_analysis/failures/confidence.py"
TABLE_BEGIN, TABLE_END = "MEASURED_CONFIDENCE: Mapping", '"""Share of replayed faults'


def main(arguments: Sequence[str]) -> int:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("this bench needs root and iproute2", file=sys.stderr)
        return 77
    start, quick = time.monotonic(), os.environ.get("QUICK") == "1"
    places, copies, days = (1, 3, 1) if quick else (PLACES, COPIES, DAYS)
    record_faults(list_faults(), places)
    recorded_at = time.monotonic()
    outcomes = replay.replay_all_recordings(places, copies)
    replayed_at = time.monotonic()
    healthy_result = run_healthy_days(replay.load_healthy_recordings(places), days)
    _print_table(outcomes)
    shares = replay.count_right_verdicts(outcomes)
    _print_confidence(shares)
    if "--write" in arguments:
        _write_confidence_table(shares)
    days_done_at = time.monotonic()
    cross_validated = evaluate_left_out(places)
    seconds = {
        "recording": recorded_at - start,
        "replaying": replayed_at - recorded_at,
        "days": days_done_at - replayed_at,
        "leaving_out": time.monotonic() - days_done_at,
    }
    summary = _build_summary(outcomes, healthy_result, measure_sizes(places), cross_validated, seconds)
    print(json.dumps(summary))
    return 0 if all(summary["holds"].values()) else 1


def _build_summary(
    outcomes: Sequence[Outcome],
    healthy_result: Found,
    sizes: Sizes,
    cross_validated: LeftOut,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    answered = [outcome for outcome in outcomes if outcome.last is not None]
    named = [outcome for outcome in answered if outcome.last is not None and outcome.last.named]
    correct = [outcome for outcome in answered if outcome.last is not None and outcome.last.right]
    named_first = [outcome for outcome in outcomes if outcome.first is not None and outcome.first.named]
    precision, recall = len(named) / max(1, len(answered)), len(named) / max(1, len(outcomes))
    hang_seconds = [_get_answer_seconds(outcome) for outcome in outcomes if outcome.hangs]
    slow_seconds = [_get_answer_seconds(outcome) for outcome in outcomes if not outcome.hangs]
    days = healthy_result.seconds / 86_400
    wrong_share = replay.count_confident_and_wrong(outcomes) / len(outcomes)
    metrics = {
        "culprit_at_first_answer": len(named_first) / len(outcomes),
        "class": len(correct) / len(outcomes),
        "class_with_thresholds_of_other_faults": cross_validated.left_out,
        "wrong_and_confident": wrong_share,
        "precision": precision,
        "f1": 2 * precision * recall / max(1e-9, precision + recall),
        "hang_seconds_p90": compute_quantile(hang_seconds, 0.9),
        "slow_seconds_median": median(slow_seconds),
        "slow_seconds_p90": compute_quantile(slow_seconds, 0.9),
        "false_alarms_a_day": len(healthy_result.alarms) / days,
        "bytes_a_rank_and_window": sizes.pattern_bytes,
        "bytes_a_connection_and_second": sizes.connection_bytes,
    }
    goals = {
        "culprit_at_first_answer": (0.98, math.inf),
        "class": (0.95, math.inf),
        "class_with_thresholds_of_other_faults": (0.95, math.inf),
        "wrong_and_confident": (0.0, 0.01),
        "precision": (0.99, math.inf),
        "f1": (0.98, math.inf),
        "hang_seconds_p90": (0.0, 5.5),
        "slow_seconds_median": (0.0, 20.0),
        "slow_seconds_p90": (0.0, 30.0),
        "false_alarms_a_day": (0.0, 0.2),
        "bytes_a_rank_and_window": (0.0, 8192.0),
        "bytes_a_connection_and_second": (0.0, 50.0),
    }
    holds = {name: lowest <= metrics[name] <= highest for name, (lowest, highest) in goals.items()}
    return {
        "bench": "diagnosis",
        "copies": len(outcomes),
        "days": days,
        "figures": {name: _round_finite(value) for name, value in metrics.items()},
        "alarms": sorted(set(healthy_result.alarms)),
        "thresholds": vars(cross_validated),
        "naive": {name: _compute_naive_statistics(outcomes, name, healthy_result.naive[name] / days) for name in RULES},
        "seconds": dict(seconds),
        "commit": _describe_commit(),
        "holds": {**holds, "minutes": sum(seconds.values()) <= MAX_SECONDS},
    }


def _get_answer_seconds(outcome: Outcome) -> float:
    """To the first answer."""
    return math.inf if outcome.first is None else outcome.first.after


def _compute_naive_statistics(outcomes: Sequence[Outcome], rule: str, alarms_a_day: float) -> dict[str, float]:
    blamed, correct = (sum(outcome.naive[rule][index] for outcome in outcomes) for index in (0, 1))
    precision, recall = correct / max(1, blamed), correct / max(1, len(outcomes))
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1, "false_alarms_a_day": alarms_a_day}


def _round_finite(value: float) -> float | None:
    """JSON has no infinity: None is never."""
    return round(value, 4) if math.isfinite(value) else None


def _print_table(outcomes: Sequence[Outcome]) -> None:
    print(f"{'fault':30} {'first':>6} {'last':>6} {'class':>6} {'silent':>6} {'seconds':>8}  last message")
    for row in replay.build_table(outcomes):
        print(
            f"{row.fault:30} {row.first_named:6.0%} {row.last_named:6.0%} {row.classed:6.0%} {row.silent:6.0%} "
            f"{row.seconds:8.1f}  {row.last_verdicts}"
        )


def _print_confidence(shares: Mapping[Key, tuple[int, int]]) -> None:
    print("class and witnesses: right of verdicts")
    for (fault, kinds), (tried, right) in sorted(shares.items(), key=lambda item: (item[0][0], sorted(item[0][1]))):
        print(f"  {fault:14} {', '.join(sorted(kinds)):60} {right:5} of {tried:5}")


def _write_confidence_table(shares: Mapping[Key, tuple[int, int]]) -> None:
    """Into the product."""
    text = CONFIDENCE_TABLE.read_text()
    lines = [
        f'    ("{fault}", frozenset({{{", ".join(f"{kind!r}" for kind in sorted(kinds))}}})): '
        f"{apply_succession_rule(tried, right):.3f},\n"
        for (fault, kinds), (tried, right) in sorted(shares.items(), key=lambda item: (item[0][0], sorted(item[0][1])))
    ]
    start, end = text.index(TABLE_BEGIN), text.index(TABLE_END)
    table = "MEASURED_CONFIDENCE: Mapping[tuple[str, frozenset[str]], float] = {\n" + "".join(lines) + "}\n"
    CONFIDENCE_TABLE.write_text(text[:start] + table + text[end:])
    subprocess.run(["ruff", "format", "--quiet", str(CONFIDENCE_TABLE)], check=True)
    print(f"{len(lines)} kinds of evidence written; {len(confidence.MEASURED_CONFIDENCE)} were there before")


def _describe_commit() -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
