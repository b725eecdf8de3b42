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
from demo.faults import REPLICAS, DEMO_TRAINER_CONTAINER
from demo.report import Curve, DemoReport
from testcluster import cluster, faults
from testcluster.settings import REPOSITORY
from testcluster.shell import log_progress

TORCHRUN_NAMESPACE = "demo-torchrun"
MANIFEST = REPOSITORY / "demo/torchrun.yaml"
GLOBAL_BATCH = 64
POD = "gpt"
START_SECONDS = 300.0
STEADY_LINES = 5
"""Of the script, one each two steps: as many steps as the demo lets pass undisturbed."""
TORCHRUN_FAULTS = {"rank crash": (2, signal.SIGKILL), "rank hang": (1, signal.SIGSTOP)}
"""By what the demo calls them: the rank, and the signal to it."""
_STEP = re.compile(r"^(\S+) step (\d+): loss ")


def run_torchrun_demo(out: Path) -> DemoReport:
    """Train for as long as the demo did whose report lies in `out`, and draw both into its picture."""
    told = report.read_report(out)
    begun, end = told.training_started_at, told.seconds
    made = {outcome.injected_at: TORCHRUN_FAULTS[outcome.fault] for outcome in told.outcomes if outcome.fault in TORCHRUN_FAULTS}
    if len(made) != len(TORCHRUN_FAULTS):
        raise kube.DemoError(f"{out}: its demo has not made all of {', '.join(TORCHRUN_FAULTS)}; run `make demo` first")
    cluster.bring_up()
    try:
        kube.delete_namespace(TORCHRUN_NAMESPACE)
        kube.run_kubectl("create", "namespace", TORCHRUN_NAMESPACE)
        kube.run_kubectl("apply", "-n", TORCHRUN_NAMESPACE, "-f", str(MANIFEST))
        (first, _), *_ = kube.wait_for(list_steps, START_SECONDS, "torchrun's first steps")
        since = first
        for at, (rank, number) in sorted(made.items()):
            wait_until(first + at - begun)
            kube.wait_for(partial(is_steady, since), START_SECONDS, "torchrun trains again")
            since = time.time()
            faults.signal_process(faults.list_container_pids(TORCHRUN_NAMESPACE, POD, DEMO_TRAINER_CONTAINER)[-REPLICAS:][rank], number)
            log_progress(f"{number.name} to rank {rank} of torchrun's")
        wait_until(first + end - begun)
        curve = compute_throughput(list_steps(), first + end - begun)
    finally:
        kube.delete_namespace(TORCHRUN_NAMESPACE)
    beside = [(at - first + begun, value) for at, value in curve]
    (out / "throughput.svg").write_text(report.draw_picture(told, beside))
    return told


def is_steady(since: float) -> bool:
    """Whether it has trained for some steps since then."""
    return sum(at > since for at, _ in list_steps()) >= STEADY_LINES


def list_steps() -> list[tuple[float, int]]:
    """(seconds since 1970, step) of the lines that the script has printed so far."""
    if kube.get_object("pods", POD, TORCHRUN_NAMESPACE)["status"]["phase"] == "Pending":
        return []
    found = map(_STEP.match, kube.run_kubectl("logs", POD, "-n", TORCHRUN_NAMESPACE, "--timestamps").splitlines())
    return sorted((datetime.fromisoformat(line[1]).timestamp(), int(line[2])) for line in found if line)


def compute_throughput(steps: list[tuple[float, int]], end: float) -> Curve:
    """Samples a second between the lines, as a staircase: nothing from the last line on, and until a checkpoint's steps
    go on. Steps that are done again count as any others.

    steps: (seconds, step) in the order of time.
    """
    curve: list[tuple[float, float]] = []
    for (since, before), (at, step) in itertools.pairwise(steps):
        speed = GLOBAL_BATCH * max(0, step - before) / (at - since)
        curve += [(since, speed), (at, speed)]
    return [*curve, (steps[-1][0], 0.0), (end, 0.0)]


def wait_until(time_: float) -> None:
    time.sleep(max(0.0, time_ - time.time()))
