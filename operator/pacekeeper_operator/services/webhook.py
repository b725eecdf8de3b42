"""Incidents for other systems: each beginning and each end is posted to a webhook, in the format in which Alertmanager
posts alerts (version 4), so that whatever receives those receives these.

What could not be delivered is tried again for an hour. An operator that ends takes along what it has not delivered: the
Incidents themselves stay the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .. import metrics
from ..api import Job, format_time
from ..limits import Backoff
from ..runtime import Runtime
from ..state import Incident

MOST_WAITING = 1000
"""Messages of some KB; the oldest go first."""
PATIENCE_SECONDS = 3600.0
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
POST_SECONDS = 10.0
NEVER = "0001-01-01T00:00:00Z"
"""As Alertmanager says that an alert has not ended."""
log = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Undelivered(Exception):
    """The message is to be sent again."""


class Refused(Exception):
    """The receiver does not want it: sending it again is of no use."""


@dataclass
class Webhook:
    post: Callable[[Message], Awaitable[None]]
    """Raises Undelivered or Refused."""
    runtime: Runtime
    _waiting: deque[tuple[float, Message]] = field(default_factory=deque)  # with the monotonic time of each
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, job: Job, incident: Incident) -> None:
        """As it is now. It returns at once."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._lose(f"more than {MOST_WAITING} wait")
        self._waiting.append((self.runtime.monotonic(), message(job, incident, self.runtime.now())))
        self._news.set()

    async def deliver(self) -> None:
        """One after the other, in order: until cancelled."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)
        while True:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
            first = since, body = self._waiting[0]
            pause = 0.0
            try:
                await self.post(body)
                backoff.succeeded()
            except Refused as error:
                self._lose(str(error))
            except Undelivered as error:
                if self.runtime.monotonic() - since <= PATIENCE_SECONDS:
                    pause = backoff.failed()
                    log.warning("the webhook for incidents: %s; tried again in %.0f s", error, pause)
                else:
                    self._lose(str(error))
            if not pause and self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
            await self.runtime.sleep(pause)

    def _lose(self, why: str) -> None:
        metrics.WEBHOOK_LOST.inc()
        log.warning("an incident is not sent to the webhook: %s", why)


def message(job: Job, incident: Incident, now: float) -> Message:
    """Alertmanager's webhook payload, version 4, with one alert. Labels name what does not change, annotations say
    how it is. `now`: when it ended, where it has."""
    over = incident.outcome is not None
    status = "resolved" if over else "firing"
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
        **({"outcome": str(incident.outcome)} if over else {}),
        **({"recovered_seconds": f"{incident.recovered - incident.first_sign:.1f}"} if incident.recovered else {}),
        "command": f"kubectl pacekeeper incidents {job.name} -n {job.namespace}",
    }
    ended = format_time(incident.recovered or now) if over else NEVER
    alert = {
        "status": status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": format_time(incident.first_sign),
        "endsAt": ended,
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


def over_http(folder: Path) -> Callable[[Message], Awaitable[None]]:
    """`folder`: a mounted Secret with `url`, and where they are there `token` and `ca.crt`; read each time. No word of
    the URL, which may hold a secret, gets into an error."""

    async def post(body: Message) -> None:
        try:
            url = (folder / "url").read_text().strip()
            token = (folder / "token").read_text().strip() if (folder / "token").exists() else ""
            authority = folder / "ca.crt"
            context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else True
        except (OSError, ValueError) as error:
            raise Undelivered(f"its Secret cannot be read: {type(error).__name__}; it needs the key url") from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        patience = aiohttp.ClientTimeout(total=POST_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=patience, trust_env=True) as session,
                session.post(url, json=body, headers=headers, ssl=context, allow_redirects=False) as answer,
            ):
                _judge(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Undelivered(f"no answer: {type(error).__name__}") from None

    return post


def _judge(status: int) -> None:
    """Raises Undelivered or Refused. Credentials and addresses may be mended in time."""
    if status < 300:
        return
    if status in (400, 413, 422):
        raise Refused(f"it is refused with status {status}")
    raise Undelivered(f"it is answered with status {status}")
