"""Incidents that are posted to a webhook: the format, retries, and messages that are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pacekeeper_operator import metrics
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
from pacekeeper_operator.services import webhook
from pacekeeper_operator.services.webhook import (
    NO_END_TIME,
    Webhook,
    WebhookMessage,
    WebhookRefused,
    WebhookUndelivered,
    build_message,
    create_http_post,
)
from pacekeeper_operator.state.desired_state import Incident
from testing.operators.virtual_time import Timeline, VirtualRuntime

JOB = TrainingJob("team-a", "gpt", "uid-1", 1, JobSpec(template={}))
INCIDENT = Incident(
    "gpt-7", IncidentCause.NODE_LOST, IncidentClass.INFRASTRUCTURE, 3, "node n1 is gone", 100.0, 101.0, 102.0, node="n1"
)
ENDED = replace(INCIDENT, outcome=IncidentOutcome.RECOVERED, recovered=112.5, remedy="ReplaceWorker")


class Receiver:
    """Raises the given errors first, and receives messages after that."""

    def __init__(self, *answers: Exception) -> None:
        self.answers, self.received, self.attempts = list(answers), list[WebhookMessage](), 0

    async def post(self, body: WebhookMessage) -> None:
        self.attempts += 1
        if self.answers:
            raise self.answers.pop(0)
        self.received.append(body)

    @property
    def deliveries(self) -> list[tuple[str, str]]:
        return [(body["groupLabels"]["incident"], body["status"]) for body in self.received]


class WebhookBench:
    def __init__(self, *answers: Exception) -> None:
        self.receiver, self.timeline = Receiver(*answers), Timeline()
        self.webhook = Webhook(self.receiver.post, VirtualRuntime(self.timeline))
        self.lost_before = metrics.WEBHOOK_MESSAGES_LOST._value.get()

    @property
    def lost_messages(self) -> float:
        return float(metrics.WEBHOOK_MESSAGES_LOST._value.get() - self.lost_before)

    async def run(self, seconds: float) -> None:
        task = asyncio.create_task(self.webhook.deliver())
        await self.timeline.run(seconds)
        task.cancel()


def test_an_open_incident_is_a_firing_alert_in_the_format_of_alertmanager() -> None:
    body = build_message(JOB, INCIDENT, 200.0)
    (alert,) = body["alerts"]
    assert (body["version"], body["status"], alert["status"]) == ("4", "firing", "firing")
    assert alert["labels"]["alertname"] == "PacekeeperIncident"
    assert {alert["labels"][name] for name in ("namespace", "job_name", "node")} == {"team-a", "gpt", "n1"}
    assert (alert["startsAt"], alert["endsAt"]) == ("1970-01-01T00:01:40.000000Z", NO_END_TIME)
    assert alert["annotations"]["summary"] == "team-a/gpt: node n1 is gone"
    assert all(isinstance(value, str) for part in ("labels", "annotations") for value in alert[part].values())


def test_an_ended_incident_resolves_the_same_alert() -> None:
    before, after = build_message(JOB, INCIDENT, 200.0)["alerts"][0], build_message(JOB, ENDED, 200.0)["alerts"][0]
    assert after["status"] == "resolved"
    assert before["fingerprint"] == after["fingerprint"]
    assert before["labels"] == after["labels"], "receivers tell alerts apart by their labels"
    assert after["endsAt"] == "1970-01-01T00:01:52.500000Z"
    assert after["annotations"]["recovered_seconds"] == "12.5"


async def test_an_undelivered_message_is_sent_again_in_order() -> None:
    bench = WebhookBench(*[WebhookUndelivered("no answer")] * 5)
    bench.webhook.enqueue(JOB, INCIDENT)
    bench.webhook.enqueue(JOB, ENDED)
    await bench.run(120)
    assert bench.receiver.deliveries == [("gpt-7", "firing"), ("gpt-7", "resolved")]
    assert (bench.receiver.attempts, bench.lost_messages) == (7, 0)


async def test_a_refused_message_is_not_sent_again() -> None:
    bench = WebhookBench(WebhookRefused("status 400"))
    bench.webhook.enqueue(JOB, INCIDENT)
    bench.webhook.enqueue(JOB, ENDED)
    await bench.run(120)
    assert bench.receiver.deliveries == [("gpt-7", "resolved")]
    assert bench.lost_messages == 1


async def test_an_undelivered_message_is_dropped_after_a_timeout() -> None:
    bench = WebhookBench(*[WebhookUndelivered("no answer")] * 10_000)
    bench.webhook.enqueue(JOB, INCIDENT)
    await bench.run(2 * webhook.WEBHOOK_DELIVERY_TIMEOUT_SECONDS)
    assert bench.receiver.attempts < 100
    assert bench.lost_messages == 1


async def test_the_queue_of_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_QUEUED_MESSAGES", 3)
    bench = WebhookBench()
    for number in range(5):
        bench.webhook.enqueue(JOB, replace(INCIDENT, name=f"gpt-{number}"))
    await bench.run(10)
    assert bench.receiver.deliveries == [(f"gpt-{number}", "firing") for number in (2, 3, 4)]
    assert bench.lost_messages == 2


class TestOverHttp:
    @pytest.fixture
    async def server(self) -> AsyncIterator[tuple[str, list[Any], Iterator[int]]]:
        requests: list[Any] = []
        statuses = iter([200, 302, 422, 503])

        async def answer(request: web.Request) -> web.Response:
            requests.append((request.headers.get("Authorization"), await request.json()))
            return web.Response(status=next(statuses), headers={"Location": "/elsewhere"})

        app = web.Application()
        app.router.add_post("/hook/secret-part", answer)
        async with TestServer(app) as running:
            yield str(running.make_url("/hook/secret-part")), requests, statuses

    async def test_a_post_sends_json_with_the_token_and_follows_no_redirect(
        self, server: tuple[str, list[Any], Iterator[int]], tmp_path: Path
    ) -> None:
        url, requests, _ = server
        (tmp_path / "url").write_text(f"{url}\n")
        (tmp_path / "token").write_text("t\n")
        post = create_http_post(tmp_path)
        await post({"version": "4"})
        with pytest.raises(WebhookUndelivered, match="302"):
            await post({})
        with pytest.raises(WebhookRefused, match="422"):
            await post({})
        with pytest.raises(WebhookUndelivered, match="503"):
            await post({})
        assert requests[0] == ("Bearer t", {"version": "4"})
        assert len(requests) == 4

    async def test_errors_do_not_show_the_address(self, tmp_path: Path) -> None:
        with pytest.raises(WebhookUndelivered, match="needs the key url"):
            await create_http_post(tmp_path)({})
        (tmp_path / "url").write_text("http://127.0.0.1:9/secret-part")
        with pytest.raises(WebhookUndelivered) as error:
            await create_http_post(tmp_path)({})
        assert "secret-part" not in str(error.value)
