"""The comparison for the demo: torchrun, with the same crash and the same hang at the same times of its training.

If torchrun does not train at that time, the fault is injected as soon as it trains again. The other faults are not
injected: after the hang, torchrun waits for its process group's timeout, half an hour by default.
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
from demo.faults import DEMO_TRAINER_CONTAINER, REPLICAS
from demo.report import Curve, DemoReport
from testcluster import cluster, faults
from testcluster.settings import REPOSITORY
from testcluster.shell import log_progress

TORCHRUN_NAMESPACE = "demo-torchrun"
MANIFEST = REPOSITORY / "demo/torchrun.yaml"
GLOBAL_BATCH = 256
POD = "gpt"
START_SECONDS = 300.0
STEADY_LINES = 5
"""Lines of the script, one per two steps: as many steps as the demo requires to be undisturbed."""
TORCHRUN_FAULTS = {"rank crash": (2, signal.SIGKILL), "rank hang": (1, signal.SIGSTOP)}
"""By the demo's name of the fault: the rank, and the signal to it."""
_STEP = re.compile(r"^(\S+) step (\d+): loss ")


def run_torchrun_demo(out: Path) -> DemoReport:
    """Train for as long as the demo whose report is in `out`, and draw both into its picture."""
    demo_report = report.read_report(out)
    training_started, end = demo_report.training_started_at, demo_report.seconds
    injections = {
        outcome.injected_at: TORCHRUN_FAULTS[outcome.fault]
        for outcome in demo_report.outcomes
        if outcome.fault in TORCHRUN_FAULTS
    }
    if len(injections) != len(TORCHRUN_FAULTS):
        raise kube.DemoError(
            f"{out}: its demo has not injected all of {', '.join(TORCHRUN_FAULTS)}; run `make demo` first"
        )
    cluster.bring_up()
    try:
        kube.delete_namespace(TORCHRUN_NAMESPACE)
        kube.run_kubectl("create", "namespace", TORCHRUN_NAMESPACE)
        kube.run_kubectl("apply", "-n", TORCHRUN_NAMESPACE, "-f", str(MANIFEST))
        (first_step_at, _), *_ = kube.wait_for(list_steps, START_SECONDS, "torchrun's first steps")
        disturbed_at = first_step_at
        for seconds, (rank, signum) in sorted(injections.items()):
            wait_until(first_step_at + seconds - training_started)
            kube.wait_for(partial(is_steady, disturbed_at), START_SECONDS, "torchrun trains again")
            disturbed_at = time.time()
            faults.signal_process(
                faults.list_container_pids(TORCHRUN_NAMESPACE, POD, DEMO_TRAINER_CONTAINER)[-REPLICAS:][rank], signum
            )
            log_progress(f"{signum.name} to rank {rank} of torchrun's")
        wait_until(first_step_at + end - training_started)
        curve = compute_throughput(list_steps(), first_step_at + end - training_started)
    finally:
        kube.delete_namespace(TORCHRUN_NAMESPACE)
    reference = [(seconds - first_step_at + training_started, value) for seconds, value in curve]
    (out / "throughput.svg").write_text(report.draw_picture(demo_report, reference))
    return demo_report


def is_steady(since: float) -> bool:
    """Return whether it has trained for some steps since then."""
    return sum(timestamp > since for timestamp, _ in list_steps()) >= STEADY_LINES


def list_steps() -> list[tuple[float, int]]:
    """Return (seconds since 1970, step) of the lines that the script has printed so far."""
    if kube.get_object("pods", POD, TORCHRUN_NAMESPACE)["status"]["phase"] == "Pending":
        return []
    matches = map(_STEP.match, kube.run_kubectl("logs", POD, "-n", TORCHRUN_NAMESPACE, "--timestamps").splitlines())
    return sorted((datetime.fromisoformat(match[1]).timestamp(), int(match[2])) for match in matches if match)


def compute_throughput(steps: list[tuple[float, int]], end: float) -> Curve:
    """Compute the samples per second between the lines, as a step function.

    It is 0 after the last line, and until training continues from a checkpoint's step. Repeated steps count. `steps`:
    (seconds, step) in order of time.
    """
    curve: list[tuple[float, float]] = []
    for (start, previous_step), (stop, step) in itertools.pairwise(steps):
        speed = GLOBAL_BATCH * max(0, step - previous_step) / (stop - start)
        curve += [(start, speed), (stop, speed)]
    return [*curve, (steps[-1][0], 0.0), (end, 0.0)]


def wait_until(timestamp: float) -> None:
    time.sleep(max(0.0, timestamp - time.time()))
