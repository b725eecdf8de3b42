"""The sidecar's loops between a container and the operator.

They retry indefinitely: the operator may be away for hours, and the training goes on during that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from pacekeeper.health.rank_metrics import MetricsReporter
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Heartbeat

from .delivery import RetryBackoff, deliver_report
from .monitor import Monitor
from .operator_client import OperatorClient, OperatorUnavailable, RequestRejected
from .settings import SidecarSettings

RING_POLL_INTERVAL_SECONDS = 1.0
"""Seconds between two polls of the ranks' rings: the minimum between two heartbeats that only carry metrics."""
MIN_REPORTED_SILENCE_SECONDS, MAX_REPORTED_SILENCE_SECONDS = 5, 15
"""Between these seconds of the launcher's silence, each second is reported at once: the operator decides by them."""
FINAL_REPORT_SECONDS = 3.0
"""Seconds within which the operator must receive the final reports."""
_POLL_ERRORS = (OperatorUnavailable, RequestRejected, InputError, OSError)
"""OSError: the volume has no room for the answer."""


class Sidecar:
    """The sidecar's loops. They share the last plan and the last requests that were received."""

    def __init__(self, settings: SidecarSettings, client: OperatorClient, monitor: Monitor) -> None:
        self._settings = settings
        self._client = client
        self._monitor = monitor
        self._plan, self._requests = monitor.read_stored_answers()
        self._metrics = MetricsReporter()
        self._last_report: tuple[object, ...] = ()

    async def run(self) -> None:
        """Run until cancelled. Then send what the operator has not received, such as that the ranks have finished.

        The final reports are dropped after FINAL_REPORT_SECONDS.
        """
        loops = (self._check_files, self._poll_ranks, self._poll_plan, self._send_changes, self._deliver_faults)
        try:
            async with asyncio.TaskGroup() as tasks:
                for loop in (*loops, self._answer_requests, *self._monitor.list_loops(self._client)):
                    tasks.create_task(loop())
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINAL_REPORT_SECONDS):
                    await self._send_final_reports()

    async def _send_final_reports(self) -> None:
        """Send the last heartbeat and faults.

        The container's processes exit before its sidecar is stopped, so their files are final.
        """
        self._monitor.check(time.monotonic(), time.time(), is_over=True)
        backoff = RetryBackoff()
        while (urgent := self._select_urgent_fields()) != self._last_report:
            try:
                await self._send_heartbeat(urgent)
            except _POLL_ERRORS as error:
                await backoff.sleep("last heartbeat not sent", error)
        await asyncio.gather(*map(self._deliver_fault, list(self._monitor.list_faults())))

    async def _check_files(self) -> None:
        while True:
            self._monitor.check(time.monotonic(), time.time())
            await asyncio.sleep(self._monitor.poll_interval_seconds)

    async def _poll_ranks(self) -> None:
        while True:
            deadband = WorkerPlan.metrics_deadband if self._plan is None else self._plan.metrics_deadband
            self._metrics.update(self._monitor.measure_metrics(), deadband, time.monotonic())
            await asyncio.sleep(RING_POLL_INTERVAL_SECONDS)

    async def _poll_plan(self) -> None:
        """Poll the plan. Each poll carries the heartbeat.

        A poll may be held for twice as long as the previous one. So an unresponsive operator with few workers is
        detected soon.
        """
        backoff, wait, held_seconds = RetryBackoff(), self._settings.poll_seconds, 0.0
        while True:
            began = time.monotonic()
            try:
                has_news = await self._poll(wait, min(self._settings.hold_seconds, max(wait, 2 * held_seconds)))
                held_seconds = held_seconds if has_news else time.monotonic() - began
                backoff.reset()
            except _POLL_ERRORS as error:
                await backoff.sleep("operator not reached", error)

    async def _send_changes(self) -> None:
        """Send the heartbeat at once when more than the step has changed, or metrics are urgent.

        It is sent in addition to the poll that is being held.
        """
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(self._monitor.poll_interval_seconds)
            urgent = self._select_urgent_fields()
            needs_contact = self._monitor.needs_contact()
            if urgent == self._last_report and not needs_contact:
                continue
            try:
                await self._send_heartbeat(urgent)
                backoff.reset()
            except _POLL_ERRORS as error:
                await backoff.sleep("heartbeat not sent", error)

    async def _send_heartbeat(self, urgent: tuple[object, ...]) -> None:
        await self._poll(wait=0)
        self._last_report = urgent

    async def _deliver_faults(self) -> None:
        """Send each fault until the operator has acknowledged it, several at once: none waits for another."""
        deliveries: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                deliveries = {name: task for name, task in deliveries.items() if not task.done()}
                for name in self._monitor.list_faults():
                    if name not in deliveries:
                        deliveries[name] = asyncio.create_task(self._deliver_fault(name))
                await asyncio.sleep(self._monitor.poll_interval_seconds)
        finally:  # the final reports have them again
            for task in deliveries.values():
                task.cancel()

    async def _deliver_fault(self, name: str) -> None:
        backoff, fault = RetryBackoff(), self._monitor.read_fault(name)
        while fault is not None and not await deliver_report(
            self._client.send_fault(fault), f"fault {fault.name}", backoff
        ):
            pass
        self._monitor.drop_fault(name)

    async def _answer_requests(self) -> None:
        """Answer each request for evidence, once."""
        answered, backoff = "", RetryBackoff()
        while True:
            await asyncio.sleep(self._monitor.poll_interval_seconds)
            request = self._requests.evidence
            if request is None or request.name == answered:
                continue
            evidence = self._monitor.build_evidence(request, self._plan)
            if evidence is None:
                continue
            if await deliver_report(self._client.send_evidence(evidence), f"evidence {request.name}", backoff):
                answered = request.name

    async def _poll(self, wait: float, hold: float = 0.0) -> bool:
        """Poll plan and requests, and return whether the operator had news before the poll's time was over."""
        known_version, known_requests = None if self._plan is None else self._plan.version, self._requests.identity
        heartbeat = replace(self._monitor.heartbeat, rank_metrics=self._metrics.take_report())
        answer = await self._client.poll(heartbeat, known_version, known_requests, wait, hold)
        self._receive(answer or PollAnswer(), known_requests)
        return answer is not None

    def _receive(self, answer: PollAnswer, known_requests: str) -> None:
        """Store what is new. `known_requests`: identity of the requests at the time of the poll.

        Two polls run at the same time, and their answers may arrive in any order. Requests have no order: an answer to
        a poll from before the last change is dropped, and the next poll gets it if it is the newer one.
        """
        requests = answer.requests if known_requests == self._requests.identity else None
        plan = answer.plan
        if plan is not None and self._plan is not None and plan.version <= self._plan.version:
            plan = None
        self._monitor.store_answer(requests, plan)
        self._requests, self._plan = requests or self._requests, plan or self._plan

    def _select_urgent_fields(self) -> tuple[object, ...]:
        """Return what of the heartbeat cannot wait for the next poll."""
        heartbeat, changes = self._monitor.heartbeat, self._metrics.urgent_changes + self._monitor.urgent_changes
        return select_urgent_fields(heartbeat, heartbeat.launcher_silent_seconds, changes)


def select_urgent_fields(heartbeat: Heartbeat, silent_seconds: float, urgent_changes: int) -> tuple[object, ...]:
    """Return what of a heartbeat cannot wait for the next poll.

    `silent_seconds`: the launcher's silence. `urgent_changes`: of the metrics. Signs of a GPU fault cannot wait; other
    values of the GPUs' health can, and so can steps, progress, snapshots, and checkpoints.
    """
    watched = heartbeat.watched
    urgent = replace(
        heartbeat,
        progress=replace(heartbeat.progress, step=None, steps_in_round=0, step_ended_at=None),
        checkpoint=replace(heartbeat.checkpoint, step=None, snapshot_step=None, replicated_step=None, age_seconds=None),
        launcher_silent_seconds=0.0,
        rank_metrics=(),
        gpus=(),
        reported_progress=None,
        watched=None if watched is None else replace(watched, sums=()),
    )
    return urgent, heartbeat.gpu_signs, _quantize_silence(silent_seconds), urgent_changes


def _quantize_silence(seconds: float) -> int:
    """Return a number that changes whenever the launcher's silence, or its end, is to be reported."""
    return min(int(seconds), MAX_REPORTED_SILENCE_SECONDS) if seconds >= MIN_REPORTED_SILENCE_SECONDS else 0
