"""What the demo is held against: torchrun, with the same crash and the same hang at the same times of its training, or
as soon as it trains again.

The other faults are not made: after the hang it waits for its process group's time-out, half an hour by default.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from datetime import datetime
from functools import partial
from pathlib import Path

from demo import kube, report
from demo.faults import REPLICAS, TRAINER
from demo.report import Curve, Report
from testcluster import cluster, faults
from testcluster.settings import REPOSITORY
from testcluster.shell import say

NAMESPACE = "demo-torchrun"
MANIFEST = REPOSITORY / "demo/torchrun.yaml"
GLOBAL_BATCH = 64
POD = "gpt"
START_SECONDS = 300.0
STEADY_LINES = 5
"""Of the script, one each two steps: as many steps as the demo lets pass undisturbed."""
FAULTS = {"rank crash": (2, signal.SIGKILL), "rank hang": (1, signal.SIGSTOP)}
"""By what the demo calls them: the rank, and the signal to it."""
_STEP = re.compile(r"^(\S+) step (\d+): loss ")


def run(out: Path) -> Report:
    """Train for as long as the demo did whose report lies in `out`, and draw both into its picture."""
    told = report.read(out)
    begun, end = told.began, told.seconds
    made = {outcome.injected_at: FAULTS[outcome.fault] for outcome in told.outcomes if outcome.fault in FAULTS}
    if len(made) != len(FAULTS):
        raise kube.DemoError(f"{out}: its demo has not made all of {', '.join(FAULTS)}; run `make demo` first")
    cluster.up()
    try:
        kube.delete_namespace(NAMESPACE)
        kube.kubectl("create", "namespace", NAMESPACE)
        kube.kubectl("apply", "-n", NAMESPACE, "-f", str(MANIFEST))
        (first, _), *_ = kube.wait_for(steps, START_SECONDS, "torchrun's first steps")
        since = first
        for at, (rank, number) in sorted(made.items()):
            wait_until(first + at - begun)
            kube.wait_for(partial(steady, since), START_SECONDS, "torchrun trains again")
            since = time.time()
            faults.signal_process(faults.container_pids(NAMESPACE, POD, TRAINER)[-REPLICAS:][rank], number)
            say(f"{number.name} to rank {rank} of torchrun's")
        wait_until(first + end - begun)
        curve = throughput(steps(), first + end - begun)
    finally:
        kube.delete_namespace(NAMESPACE)
    beside = [(at - first + begun, value) for at, value in curve]
    (out / "throughput.svg").write_text(report.picture(told, beside))
    return told


def steady(since: float) -> bool:
    """Whether it has trained for some steps since then."""
    return sum(at > since for at, _ in steps()) >= STEADY_LINES


def steps() -> list[tuple[float, int]]:
    """(seconds since 1970, step) of the lines that the script has printed so far."""
    if kube.get("pods", POD, NAMESPACE)["status"]["phase"] == "Pending":
        return []
    found = map(_STEP.match, kube.kubectl("logs", POD, "-n", NAMESPACE, "--timestamps").splitlines())
    return sorted((datetime.fromisoformat(line[1]).timestamp(), int(line[2])) for line in found if line)


def throughput(steps: list[tuple[float, int]], end: float) -> Curve:
    """Samples a second between the lines, as a staircase: nothing from the last line on, and until a checkpoint's steps
    go on. Steps that are done again count as any others.

    steps: (seconds, step) in the order of time.
    """
    curve: list[tuple[float, float]] = []
    for (since, before), (at, step) in itertools.pairwise(steps):
        speed = GLOBAL_BATCH * max(0, step - before) / (at - since)
        curve += [(since, speed), (at, speed)]
    return [*curve, (steps[-1][0], 0.0), (end, 0.0)]


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
