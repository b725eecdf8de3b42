"""The demo from the empty machine to the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import job, kube
from demo.faults import REPLICAS, DemoFault, FaultRelief, list_faults
from demo.job import DemoJobStatus
from demo.report import THROUGHPUT_TITLE, FaultOutcome, DemoReport, write_report
from demo.view import DemoView
from testcluster import cluster, release
from testcluster.settings import REPOSITORY

STEADY_SECONDS = 300.0  # importing torch on five nodes takes a loaded machine a minute
COMPLETE_SECONDS = 900.0
_SHARE, _STEP, _LOSS, _OWN_WORK = (
    job.build_series_selector(f"pacekeeper_rank_{what}") for what in ("share", "step_seconds", "loss", "compute_seconds")
)


def run_fault_demo(out: Path, only: Sequence[str] | None = None) -> DemoReport:
    """Bring everything up, make the faults one after the other, wait for the job's end, and write the report to `out`.

    only: make just the faults whose name contains one of these words.
    """
    cluster.bring_up()
    faults = [fault for fault in list_faults() if only is None or any(word in fault.name for word in only)]
    with DemoView(len(faults) + sum(fault.relief is not None for fault in faults)) as view:
        install_pacekeeper(view)
        started = time.time()
        with create_job(view, (REPOSITORY / "examples/gpt.yaml").read_text()):
            begun = wait_for_first_step(view)
            outcomes = []
            for fault in faults:
                wait_until_steady(view, fault.steady_steps, fault.spare)
                outcomes.append(make_fault(fault, started, view))
                view.add(outcomes[-1])
                if fault.relief is not None:
                    outcomes.append(end_fault(fault.relief, started, view))
                    view.add(outcomes[-1])
            told = build_report(outcomes, finish_job(view), started, begun)
        write_report(told, out)
    view.finish()
    return told


def build_report(outcomes: Sequence[FaultOutcome], last: DemoJobStatus, started: float, begun: float) -> DemoReport:
    """Of a job that has come to its end, and trained from `begun` on."""
    return DemoReport(
        outcomes=tuple(outcomes),
        phase=last.phase,
        steps=last.step,
        seconds=time.time() - started,
        **query_curves(started, begun),
    )


def install_pacekeeper(view: DemoView) -> None:
    view.log_message("helm install pacekeeper")
    release.install_release()
    release.install_exporter()


@contextmanager
def create_job(view: DemoView, manifest: str) -> Iterator[None]:
    """A fresh job for the length of the demo; afterwards its namespace and the quarantines that it caused are gone."""
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
"""Faults made so far whose traces outlast the job: what `clean_up` undoes, also when the demo is interrupted."""


def wait_for_first_step(view: DemoView) -> float:
    """Wait until the job trains; returns when that was. Before, Prometheus may still answer with an earlier job's."""

    def trains() -> bool:
        now = refresh_view(view)
        return now is not None and now.phase == "Running"

    kube.wait_for(trains, STEADY_SECONDS, "the first step")
    return time.time()


def wait_until_steady(view: DemoView, steps: int, spare: bool = True) -> None:
    """Wait until the job has trained undisturbed for so many steps, with all its workers, and with a spare in place if
    there is to be one."""
    view.log_message("training undisturbed …")
    since: list[int] = []

    def undisturbed() -> bool:
        now = refresh_view(view)
        if now is None or now.has_ended:
            raise kube.DemoError(f"the job is {now.phase if now else 'gone'}, too early for the next fault")
        step = job.read_live_step()
        starting = step < 0  # the ranks of a new round have not said yet where they are
        if (
            starting
            or now.phase != "Running"
            or now.ready < REPLICAS
            or now.spares < spare
            or any(is_open(incident) for incident in job.list_incidents())
        ):
            since.clear()
            return False
        since.append(step)
        return step >= since[0] + steps

    kube.wait_for(undisturbed, STEADY_SECONDS, f"{steps} steps without a disturbance" + spare * " and a spare in place")


def make_fault(fault: DemoFault, started: float, view: DemoView) -> FaultOutcome:
    """Make a fault, and wait until an Incident says that the job has recovered from it by a fitting remedy.

    A straggler may have several: what is free comes first, and a dearer remedy follows where that mends too little.
    """
    known = {incident["metadata"]["name"] for incident in job.list_incidents()}
    _injected.append(fault)
    at = time.time()
    view.log_message(f"FAULT {fault.name}: {fault.inject()}")

    def opened() -> list[FaultOutcome]:
        fresh = [found for found in job.list_incidents() if found["metadata"]["name"] not in known]
        return [build_outcome(fault, found, at, started) for found in fresh if found["spec"]["cause"] in fault.causes]

    def healed() -> FaultOutcome | None:
        refresh_view(view)
        return next((outcome for outcome in opened() if outcome.healed), None)

    try:
        return kube.wait_for(healed, fault.timeout, fault.name)
    except kube.DemoError:
        return next(reversed(opened()), build_outcome(fault, {}, at, started))


def end_fault(relief: FaultRelief, started: float, view: DemoView) -> FaultOutcome:
    """End a fault, and wait until the job trains as before again."""
    changed = not relief.is_recovered()
    at = time.time()
    view.log_message(f"RELIEF {relief.name}: {relief.relieve()}")

    def as_before() -> bool:
        refresh_view(view)
        return relief.is_recovered()

    try:
        kube.wait_for(as_before, relief.timeout, relief.name)
        healed = changed
    except kube.DemoError:
        healed = False
    after = round(time.time() - at, 2)
    decided = job.find_last_event(relief.event)
    return FaultOutcome(
        fault=relief.name,
        how=relief.how,
        remedy=relief.remedy,
        injected_at=round(at - started, 2),
        detected_s=None,
        decided_s=round(max(kube.parse_seconds(decided["eventTime"]) - at, 0.0), 2) if healed and decided else None,
        recovered_s=after if healed else None,
        steps_lost=0,
        gain=decided["note"].partition(":")[0] if healed and decided else "",
        healed=healed,
        incident="",
        reason=decided["note"] if decided else "",
    )


def build_outcome(fault: DemoFault, incident: dict[str, Any], at: float, started: float) -> FaultOutcome:
    """`incident` is empty where none was opened."""
    status = incident.get("status", {})
    remedy = status.get("remedy", "")

    def after(stage: str) -> float | None:
        return round(max(kube.parse_seconds(status[stage]) - at, 0.0), 2) if status.get(stage) else None

    chosen: dict[str, Any] = next((option for option in status.get("considered", []) if option["name"] == remedy), {})
    return FaultOutcome(
        fault=fault.name,
        how=fault.how,
        remedy=remedy,
        injected_at=round(at - started, 2),
        detected_s=after("detected"),
        decided_s=after("decided"),
        recovered_s=after("recovered"),
        steps_lost=status.get("stepsLost"),
        gain=format_gain(status),
        healed=status.get("outcome") in ("Recovered", "Mitigated") and remedy in fault.remedies,
        incident=incident.get("metadata", {}).get("name", ""),
        reason=chosen.get("reason", ""),
    )


def format_gain(status: dict[str, Any]) -> str:
    before, after = status.get("slowdownBefore"), status.get("slowdownAfter")
    if before and after:
        return f"slowdown {float(before):.2f} → {float(after):.2f}"
    return "trains again" if status.get("recovered") else ""


def is_open(incident: dict[str, Any]) -> bool:
    return not incident.get("status", {}).get("outcome")


def finish_job(view: DemoView) -> DemoJobStatus:
    """However far it has come: a slow machine would else train on for minutes in which nothing happens."""
    view.log_message(f"all faults made; the job ends behind its next evaluation: {job.stop_script()}")

    def at_end() -> DemoJobStatus | None:
        now = refresh_view(view)
        return now if now and now.has_ended else None

    return kube.wait_for(at_end, COMPLETE_SECONDS, "the job's end")


def refresh_view(view: DemoView) -> DemoJobStatus | None:
    now = DemoJobStatus.read()
    view.show_job(now, job.read_step_seconds(), job.read_loss())
    return now


def query_curves(started: float, begun: float) -> dict[str, Any]:
    """In seconds since `started`, from `begun` on, when the job first trained."""
    end = time.time()

    def curve(expression: str) -> list[tuple[float, float]]:
        return [(at, value) for at, value in kube.query_curve(expression, started, end) if started + at >= begun]

    loss = curve(f"avg({_LOSS})")
    return {
        "loss_before": loss[0][1] if loss else None,
        "loss_after": loss[-1][1] if loss else None,
        "curves": {
            "Training loss (nats a byte)": loss,
            "Step time (s)": curve(f"avg({_STEP})"),
            THROUGHPUT_TITLE: curve(f"sum({_SHARE} / {_STEP})"),
            "Slowdown (slowest rank's work over the mean)": curve(f"max({_OWN_WORK}) / avg({_OWN_WORK})"),
        },
    }
