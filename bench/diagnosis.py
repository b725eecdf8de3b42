"""How often a diagnosis is right: recorded faults of real ranks, perturbed and judged by the operator's own decisions.

    make bench NAME=diagnosis                  # records what is not recorded yet (about 50 minutes), judges all of it
    QUICK=1 make bench NAME=diagnosis          # one recording of each fault, three copies, one day
    python -m bench.diagnosis --write          # the confidence of each kind of evidence goes into the product, too

Faults, recordings and copies: `scripts/diagnosis`. Needs root, iproute2 and control groups, as it gives each of four
hosts a network and a processor quota of its own; recordings are kept, and made anew when the trainer changes.
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

from pacekeeper_analysis.diagnose import confidence
from testcluster.settings import REPOSITORY

from .scripts.diagnosis import replay
from .scripts.diagnosis.days import DAYS, Found, healthy_days
from .scripts.diagnosis.faults import PLACES, catalogue
from .scripts.diagnosis.perturb import COPIES
from .scripts.diagnosis.record import record
from .scripts.diagnosis.replay import Key, Outcome, quantile, succession
from .scripts.diagnosis.rules import RULES
from .scripts.diagnosis.sizes import Sizes, sizes
from .scripts.diagnosis.thresholds import LeftOut, left_out

MOST_SECONDS = 3600.0
TABLE = REPOSITORY / "analysis/pacekeeper_analysis/diagnose/confidence.py"
BEGIN, END = "MEASURED: Mapping", '"""By class of fault'


def main(arguments: Sequence[str]) -> int:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("this bench needs root and iproute2", file=sys.stderr)
        return 77
    began, quick = time.monotonic(), os.environ.get("QUICK") == "1"
    places, copies, days = (1, 3, 1) if quick else (PLACES, COPIES, DAYS)
    record(catalogue(), places)
    recorded = time.monotonic()
    found = replay.outcomes(places, copies)
    replayed = time.monotonic()
    healthy = healthy_days(replay.healthy(places), days)
    _print_table(found)
    shares = replay.measured(found)
    _print_confidence(shares)
    if "--write" in arguments:
        _write(shares)
    lived = time.monotonic()
    others = left_out(places)
    seconds = {
        "recording": recorded - began,
        "replaying": replayed - recorded,
        "days": lived - replayed,
        "leaving_out": time.monotonic() - lived,
    }
    summary = _summary(found, healthy, sizes(places), others, seconds)
    print(json.dumps(summary))
    return 0 if all(summary["holds"].values()) else 1


def _summary(
    found: Sequence[Outcome], healthy: Found, told: Sizes, others: LeftOut, seconds: Mapping[str, float]
) -> dict[str, Any]:
    given = [outcome for outcome in found if outcome.last is not None]
    named = [outcome for outcome in given if outcome.last is not None and outcome.last.named]
    right = [outcome for outcome in given if outcome.last is not None and outcome.last.right]
    first = [outcome for outcome in found if outcome.first is not None and outcome.first.named]
    precision, recall = len(named) / max(1, len(given)), len(named) / max(1, len(found))
    hangs = [_seconds(outcome) for outcome in found if outcome.hangs]
    slow = [_seconds(outcome) for outcome in found if not outcome.hangs]
    days = healthy.seconds / 86_400
    wrong = replay.confident_and_wrong(found) / len(found)
    figures = {
        "culprit_at_first_answer": len(first) / len(found),
        "class": len(right) / len(found),
        "class_with_thresholds_of_other_faults": others.left_out,
        "wrong_and_confident": wrong,
        "precision": precision,
        "f1": 2 * precision * recall / max(1e-9, precision + recall),
        "hang_seconds_p90": quantile(hangs, 0.9),
        "slow_seconds_median": median(slow),
        "slow_seconds_p90": quantile(slow, 0.9),
        "false_alarms_a_day": len(healthy.alarms) / days,
        "bytes_a_rank_and_window": told.pattern_bytes,
        "bytes_a_connection_and_second": told.connection_bytes,
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
    holds = {name: least <= figures[name] <= most for name, (least, most) in goals.items()}
    return {
        "bench": "diagnosis",
        "copies": len(found),
        "days": days,
        "figures": {name: _finite(value) for name, value in figures.items()},
        "alarms": sorted(set(healthy.alarms)),
        "thresholds": vars(others),
        "naive": {name: _naive(found, name, healthy.naive[name] / days) for name in RULES},
        "seconds": dict(seconds),
        "commit": _commit(),
        "holds": {**holds, "minutes": sum(seconds.values()) <= MOST_SECONDS},
    }


def _seconds(outcome: Outcome) -> float:
    """To the first answer."""
    return math.inf if outcome.first is None else outcome.first.after


def _naive(found: Sequence[Outcome], rule: str, alarms_a_day: float) -> dict[str, float]:
    blamed, right = (sum(outcome.naive[rule][at] for outcome in found) for at in (0, 1))
    precision, recall = right / max(1, blamed), right / max(1, len(found))
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1, "false_alarms_a_day": alarms_a_day}


def _finite(value: float) -> float | None:
    """JSON has no infinity: None is never."""
    return round(value, 4) if math.isfinite(value) else None


def _print_table(found: Sequence[Outcome]) -> None:
    print(f"{'fault':30} {'first':>6} {'last':>6} {'class':>6} {'silent':>6} {'seconds':>8}  what was said last")
    for row in replay.table(found):
        print(
            f"{row.fault:30} {row.first_named:6.0%} {row.last_named:6.0%} {row.classed:6.0%} {row.silent:6.0%} "
            f"{row.seconds:8.1f}  {row.last_verdicts}"
        )


def _print_confidence(shares: Mapping[Key, tuple[int, int]]) -> None:
    print("class and witnesses: right of verdicts")
    for (fault, kinds), (tried, right) in sorted(shares.items(), key=lambda item: (item[0][0], sorted(item[0][1]))):
        print(f"  {fault:14} {', '.join(sorted(kinds)):60} {right:5} of {tried:5}")


def _write(shares: Mapping[Key, tuple[int, int]]) -> None:
    """Into the product."""
    text = TABLE.read_text()
    lines = [
        f'    ("{fault}", frozenset({{{", ".join(f"{kind!r}" for kind in sorted(kinds))}}})): '
        f"{succession(tried, right):.3f},\n"
        for (fault, kinds), (tried, right) in sorted(shares.items(), key=lambda item: (item[0][0], sorted(item[0][1])))
    ]
    start, end = text.index(BEGIN), text.index(END)
    table = "MEASURED: Mapping[tuple[str, frozenset[str]], float] = {\n" + "".join(lines) + "}\n"
    TABLE.write_text(text[:start] + table + text[end:])
    subprocess.run(["ruff", "format", "--quiet", str(TABLE)], check=True)
    print(f"{len(lines)} kinds of evidence written; {len(confidence.MEASURED_CONFIDENCE)} were there before")


def _commit() -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
