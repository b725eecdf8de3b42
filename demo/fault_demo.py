"""The demo, from the empty machine to the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import job, kube
from demo.faults import REPLICAS, DemoFault, FaultRelief, list_faults
from demo.job import DemoJobStatus
from demo.report import THROUGHPUT_TITLE, DemoReport, FaultOutcome, write_report
from demo.view import DemoView
from testcluster import cluster, release
from testcluster.settings import REPOSITORY

PRICE_FIELDS = {
    "predicted_cost_s": "predictedCost",
    "measured_cost_s": "measuredCost",
    "predicted_gain_s": "predictedGain",
    "measured_gain_s": "measuredGain",
}
"""Fields of the report, and of an Incident's status."""
STEADY_SECONDS = 300.0  # importing torch on five nodes takes a loaded machine a minute
COMPLETE_SECONDS = 900.0
_SHARE, _STEP, _LOSS, _OWN_WORK = (
    job.build_series_selector(f"pacekeeper_rank_{what}")
    for what in ("share", "step_seconds", "loss", "compute_seconds")
)


def run_fault_demo(out: Path, only: Sequence[str] | None = None) -> DemoReport:
    """Start everything, inject the faults one after the other, wait for the job's end, and write the report to `out`.

    `only`: inject only the faults whose name contains one of these strings.
    """
    cluster.bring_up()
    faults = [fault for fault in list_faults() if only is None or any(word in fault.name for word in only)]
    with DemoView(len(faults) + sum(fault.relief is not None for fault in faults)) as view:
        install_pacekeeper(view)
        started = time.time()
        with create_job(view, (REPOSITORY / "examples/gpt.yaml").read_text()):
            training_started = wait_for_first_step(view)
            outcomes = []
            for fault in faults:
                wait_until_steady(view, fault.steady_steps, fault.spare)
                outcomes.append(make_fault(fault, started, view))
                view.add(outcomes[-1])
                if fault.relief is not None:
                    outcomes.append(end_fault(fault.relief, started, view))
                    view.add(outcomes[-1])
            report = build_report(outcomes, finish_job(view), started, training_started)
        write_report(report, out)
    view.finish()
    return report


def build_report(
    outcomes: Sequence[FaultOutcome], status: DemoJobStatus, started: float, training_started: float
) -> DemoReport:
    """Build the report of a job that has ended, and trained from `training_started` on."""
    return DemoReport(
        outcomes=tuple(outcomes),
        phase=status.phase,
        steps=status.step,
        seconds=time.time() - started,
        **query_curves(started, training_started),
    )


def install_pacekeeper(view: DemoView) -> None:
    view.log_message("helm install pacekeeper")
    release.install_release()
    release.install_exporter()


@contextmanager
def create_job(view: DemoView, manifest: str) -> Iterator[None]:
    """Create a new job for the demo. Afterwards, delete its namespace and the quarantines that it caused."""
    clean_up()
    kube.run_kubectl("create", "namespace", job.NAMESPACE)
    view.log_message("kubectl apply: the job of examples/gpt.yaml")
    kube.run_kubectl("apply", "-n", job.NAMESPACE, "-f", "-", stdin=manifest)
    try:
        yield
    finally:
        clean_up()


def clean_up() -> None:
    for fault in _injected:
        fault.undo()
    _injected.clear()
    kube.delete_namespace(job.NAMESPACE)
    kube.run_kubectl("delete", "nodequarantine", "--all", "--timeout=120s", timeout=130)


_injected: list[DemoFault] = []
"""Injected faults that would outlast the job: `clean_up` undoes them, also when the demo is interrupted."""


def wait_for_first_step(view: DemoView) -> float:
    """Wait until the job trains, and return the time. Before, Prometheus may still have an earlier job's metrics."""

    def trains() -> bool:
        status = refresh_view(view)
        return status is not None and status.phase == "Running"

    kube.wait_for(trains, STEADY_SECONDS, "the first step")
    return time.time()


def wait_until_steady(view: DemoView, steps: int, spare: bool = True) -> None:
    """Wait until the job has trained undisturbed for `steps` steps, with all its workers.

    `spare`: also with a spare in place.
    """
    view.log_message("training undisturbed …")
    observed_steps: list[int] = []

    def undisturbed() -> bool:
        status = refresh_view(view)
        if status is None or status.has_ended:
            raise kube.DemoError(f"the job is {status.phase if status else 'gone'}, too early for the next fault")
        step = job.read_live_step()
        starting = step < 0  # the ranks of a new round have not reported a step yet
        if (
            starting
            or status.phase != "Running"
            or status.ready < REPLICAS
            or status.spares < spare
            or any(is_open(incident) for incident in job.list_incidents())
        ):
            observed_steps.clear()
            return False
        observed_steps.append(step)
        return step >= observed_steps[0] + steps

    kube.wait_for(undisturbed, STEADY_SECONDS, f"{steps} steps without a disturbance" + spare * " and a spare in place")


def make_fault(fault: DemoFault, started: float, view: DemoView) -> FaultOutcome:
    """Inject a fault, and wait until an Incident shows that the job has recovered by a fitting remedy.

    A straggler may have several Incidents: a free remedy comes first, and a more expensive one follows if it is not
    enough.
    """
    known_names = {incident["metadata"]["name"] for incident in job.list_incidents()}
    _injected.append(fault)
    fault.prepare()
    injected_at = time.time()
    view.log_message(f"FAULT {fault.name}: {fault.inject()}")

    def opened() -> list[FaultOutcome]:
        new_incidents = [
            candidate for candidate in job.list_incidents() if candidate["metadata"]["name"] not in known_names
        ]
        return [
            build_outcome(fault, candidate, injected_at, started)
            for candidate in new_incidents
            if candidate["spec"]["cause"] in fault.causes
        ]

    def healed() -> FaultOutcome | None:
        refresh_view(view)
        return next((outcome for outcome in opened() if outcome.healed), None)

    try:
        return kube.wait_for(healed, fault.timeout, fault.name)
    except kube.DemoError:
        return next(reversed(opened()), build_outcome(fault, {}, injected_at, started))


def end_fault(relief: FaultRelief, started: float, view: DemoView) -> FaultOutcome:
    """End a fault, and wait until the job trains as before."""
    was_disturbed = not relief.is_recovered()
    ended_at = time.time()
    view.log_message(f"RELIEF {relief.name}: {relief.relieve()}")

    def as_before() -> bool:
        refresh_view(view)
        return relief.is_recovered()

    try:
        kube.wait_for(as_before, relief.timeout, relief.name)
        healed = was_disturbed
    except kube.DemoError:
        healed = False
    recovery_seconds = round(time.time() - ended_at, 2)
    event = job.find_last_event(relief.event)
    return FaultOutcome(
        fault=relief.name,
        how=relief.how,
        remedy=relief.remedy,
        injected_at=round(ended_at - started, 2),
        detected_s=None,
        decided_s=round(max(kube.parse_seconds(event["eventTime"]) - ended_at, 0.0), 2) if healed and event else None,
        recovered_s=recovery_seconds if healed else None,
        steps_lost=0,
        gain=event["note"].partition(":")[0] if healed and event else "",
        healed=healed,
        incident="",
        reason=event["note"] if event else "",
    )


def build_outcome(fault: DemoFault, incident: dict[str, Any], injected_at: float, started: float) -> FaultOutcome:
    """Build the outcome of a fault. `incident` is empty if none was opened."""
    status = incident.get("status", {})
    remedy = status.get("remedy", "")

    def measure_until(stage: str) -> float | None:
        return round(max(kube.parse_seconds(status[stage]) - injected_at, 0.0), 2) if status.get(stage) else None

    chosen: dict[str, Any] = next((option for option in status.get("considered", []) if option["name"] == remedy), {})
    return FaultOutcome(
        fault=fault.name,
        how=fault.how,
        remedy=remedy,
        injected_at=round(injected_at - started, 2),
        detected_s=measure_until("detected"),
        decided_s=measure_until("decided"),
        recovered_s=measure_until("recovered"),
        steps_lost=status.get("stepsLost"),
        gain=format_gain(status),
        healed=status.get("outcome") in ("Recovered", "Mitigated") and remedy in fault.remedies,
        incident=incident.get("metadata", {}).get("name", ""),
        reason=chosen.get("reason", ""),
        **{name: status.get(field) for name, field in PRICE_FIELDS.items()},
    )


def format_gain(status: dict[str, Any]) -> str:
    before, after = status.get("slowdownBefore"), status.get("slowdownAfter")
    if before and after:
        return f"slowdown {float(before):.2f} → {float(after):.2f}"
    return "trains again" if status.get("recovered") else ""


def is_open(incident: dict[str, Any]) -> bool:
    return not incident.get("status", {}).get("outcome")


def finish_job(view: DemoView) -> DemoJobStatus:
    """End the job at its present step: on a slow machine, it would otherwise train on for minutes."""
    view.log_message(f"all faults injected; the job ends after its next evaluation: {job.stop_script()}")

    def find_ended_status() -> DemoJobStatus | None:
        status = refresh_view(view)
        return status if status and status.has_ended else None

    return kube.wait_for(find_ended_status, COMPLETE_SECONDS, "the job's end")


def refresh_view(view: DemoView) -> DemoJobStatus | None:
    status = DemoJobStatus.read()
    view.show_job(status, job.read_step_seconds(), job.read_loss())
    return status


def query_curves(started: float, training_started: float) -> dict[str, Any]:
    """Return the curves, in seconds since `started`, from `training_started` on, when the job first trained."""
    end = time.time()

    def curve(expression: str) -> list[tuple[float, float]]:
        return [
            (seconds, value)
            for seconds, value in kube.query_curve(expression, started, end)
            if started + seconds >= training_started
        ]

    loss = curve(f"avg({_LOSS})")
    return {
        "loss_before": loss[0][1] if loss else None,
        "loss_after": loss[-1][1] if loss else None,
        "curves": {
            "Training loss (nats per byte)": loss,
            "Step time (s)": curve(f"avg({_STEP})"),
            THROUGHPUT_TITLE: curve(f"sum({_SHARE} / {_STEP})"),
            "Slowdown (slowest rank's work over the mean)": curve(f"max({_OWN_WORK}) / avg({_OWN_WORK})"),
        },
    }
