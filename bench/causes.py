"""How often the root cause of a slowdown is named rightly, on synthetic jobs whose fault is known."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from pacekeeper_analysis.whatif import analyze_window, build_window_from_trace
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.synthetic_faults import generate_jobs

JOB_COUNT = 600


def main() -> None:
    """Prints the confusion matrix; the last line of the output is the summary as JSON."""
    start = time.monotonic()
    confusion: Counter[tuple[SlowdownCause, SlowdownCause]] = Counter()
    for number, case in enumerate(generate_jobs(JOB_COUNT, seed=42), start=1):
        confusion[case.cause, diagnose_cause(analyze_window(build_window_from_trace(case.build_trace()))).cause] += 1
        if number % 100 == 0:
            print(f"{number} of {JOB_COUNT} jobs, {time.monotonic() - start:.1f} s", file=sys.stderr)
    print(format_confusion(confusion))
    correct = sum(count for (cause, diagnosed), count in confusion.items() if cause is diagnosed)
    blamed_healthy = sum(
        count
        for (cause, diagnosed), count in confusion.items()
        if cause is SlowdownCause.NONE and diagnosed is not SlowdownCause.NONE
    )
    print(
        json.dumps(
            {
                "bench": "causes",
                "jobs": JOB_COUNT,
                "top_1": correct / JOB_COUNT,
                "healthy_jobs_blamed": blamed_healthy,
                "confusion": {
                    cause: {diagnosed: confusion[cause, diagnosed] for diagnosed in SlowdownCause}
                    for cause in SlowdownCause
                },
                "seconds": time.monotonic() - start,
            }
        )
    )


def format_confusion(confusion: Counter[tuple[SlowdownCause, SlowdownCause]]) -> str:
    """The confusion matrix: a row for each true cause, a column for each cause found."""
    width = max(len(cause) for cause in SlowdownCause)
    lines = [" " * width + "  found: " + "  ".join(SlowdownCause)]
    for cause in SlowdownCause:
        cells = "  ".join(f"{confusion[cause, diagnosed]:>{len(diagnosed)}}" for diagnosed in SlowdownCause)
        lines.append(f"{cause:<{width}}         {cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
