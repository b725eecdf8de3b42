"""Incidents for other systems: the start and end of each Incident are posted to a webhook.

The format is that of Alertmanager's alerts (version 4), so that receivers of alerts can receive Incidents.

Failed deliveries are retried for an hour. If the operator ends, undelivered messages are lost: the Incidents themselves
remain the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from .. import metrics
from ..api.formats import format_time
from ..api.training_job import TrainingJob
from ..async_runtime import OperatorRuntime
from ..limits import Backoff
from ..state.desired_state import Incident

MAX_QUEUED_MESSAGES = 1000
"""Messages of a few KB each; the oldest are dropped first."""
WEBHOOK_DELIVERY_TIMEOUT_SECONDS = 3600.0
FIRST_WEBHOOK_BACKOFF_SECONDS, LONGEST_WEBHOOK_BACKOFF_SECONDS = 1.0, 60.0
WEBHOOK_POST_TIMEOUT_SECONDS = 10.0
NO_END_TIME = "0001-01-01T00:00:00Z"
"""Alertmanager's end time of an alert that has not ended."""
log = logging.getLogger(__name__)

WebhookMessage = Mapping[str, Any]


class WebhookUndelivered(Exception):
    """The message must be sent again."""


class WebhookRefused(Exception):
    """The receiver rejects the message: another attempt is useless."""


@dataclass
class Webhook:
    """Posts Incidents in order, with retries."""

    post: Callable[[WebhookMessage], Awaitable[None]]
    """Posts one message. Raises WebhookUndelivered or WebhookRefused."""
    runtime: OperatorRuntime
    _queue: deque[tuple[float, WebhookMessage]] = field(default_factory=deque)  # with the monotonic time of each
    _queued_event: asyncio.Event = field(default_factory=asyncio.Event)

    def enqueue(self, job: TrainingJob, incident: Incident) -> None:
        """Enqueue the Incident as it is now, and return at once."""
        if len(self._queue) >= MAX_QUEUED_MESSAGES:
            self._queue.popleft()
            self._drop(f"more than {MAX_QUEUED_MESSAGES} messages wait")
        self._queue.append((self.runtime.monotonic(), build_message(job, incident, self.runtime.now())))
        self._queued_event.set()

    async def deliver(self) -> None:
        """Deliver messages one by one, in order, until cancelled."""
        backoff = Backoff(FIRST_WEBHOOK_BACKOFF_SECONDS, LONGEST_WEBHOOK_BACKOFF_SECONDS)
        while True:
            if not self._queue:
                self._queued_event.clear()
                await self._queued_event.wait()
            first = since, body = self._queue[0]
            pause = 0.0
            try:
                await self.post(body)
                backoff.record_success()
            except WebhookRefused as error:
                self._drop(str(error))
            except WebhookUndelivered as error:
                if self.runtime.monotonic() - since <= WEBHOOK_DELIVERY_TIMEOUT_SECONDS:
                    pause = backoff.record_failure()
                    log.warning("the incident webhook: %s; retrying in %.0f s", error, pause)
                else:
                    self._drop(str(error))
            if not pause and self._queue and self._queue[0] is first:
                self._queue.popleft()
            await self.runtime.sleep(pause)

    def _drop(self, reason: str) -> None:
        metrics.WEBHOOK_MESSAGES_LOST.inc()
        log.warning("a message about an Incident is dropped, the webhook did not get it: %s", reason)


def build_message(job: TrainingJob, incident: Incident, now: float) -> WebhookMessage:
    """Build Alertmanager's webhook payload, version 4, with one alert.

    Labels identify the Incident and do not change; annotations describe its state. `now`: its end, if it has no
    recovery.
    """
    is_over = incident.outcome is not None
    status = "resolved" if is_over else "firing"
    labels = {
        "alertname": "PacekeeperIncident",
        "severity": "warning",
        "namespace": job.namespace,
        "job_name": job.name,
        "incident": incident.name,
        "cause": str(incident.cause),
        "class": str(incident.class_),
        **({"node": incident.node} if incident.node else {}),
    }
    annotations = {
        "summary": f"{job.namespace}/{job.name}: {incident.message}",
        "remedy": incident.remedy or "none",
        **({"outcome": str(incident.outcome)} if is_over else {}),
        **({"recovered_seconds": f"{incident.recovered - incident.first_sign:.1f}"} if incident.recovered else {}),
        "command": f"kubectl pacekeeper incidents {job.name} -n {job.namespace}",
    }
    ends_at = format_time(incident.recovered or now) if is_over else NO_END_TIME
    alert = {
        "status": status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": format_time(incident.first_sign),
        "endsAt": ends_at,
        "generatorURL": "",
        "fingerprint": hashlib.sha256(f"{job.uid}/{incident.name}".encode()).hexdigest()[:16],
    }
    return {
        "version": "4",
        "groupKey": f"{{}}:{{incident={incident.name!r}, namespace={job.namespace!r}}}",
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "pacekeeper",
        "groupLabels": {"namespace": job.namespace, "incident": incident.name},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [alert],
    }


def create_http_post(folder: Path) -> Callable[[WebhookMessage], Awaitable[None]]:
    """Return a function that posts a message to the URL in the mounted Secret `folder`.

    The Secret has `url`, and optionally `token` and `ca.crt`; it is read each time. Errors never contain the URL, which
    may hold a secret.
    """

    async def post(body: WebhookMessage) -> None:
        try:
            url = (folder / "url").read_text().strip()
            token = (folder / "token").read_text().strip() if (folder / "token").exists() else ""
            authority = folder / "ca.crt"
            context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else True
        except (OSError, ValueError) as error:
            raise WebhookUndelivered(
                f"its Secret cannot be read: {type(error).__name__}; it needs the key url"
            ) from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=WEBHOOK_POST_TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
                session.post(url, json=body, headers=headers, ssl=context, allow_redirects=False) as response,
            ):
                _check_status(response.status)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise WebhookUndelivered(f"no answer: {type(error).__name__}") from None

    return post


def _check_status(status: int) -> None:
    """Raise WebhookUndelivered or WebhookRefused for an error status.

    Wrong credentials and addresses may be corrected in time.
    """
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return
    if status in (400, 413, 422):
        raise WebhookRefused(f"the receiver rejects it with status {status}")
    raise WebhookUndelivered(f"the receiver responds with status {status}")
