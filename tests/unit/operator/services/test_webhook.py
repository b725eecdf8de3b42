"""Incidents that are posted to a webhook: the format, retries, and what becomes of those that nobody takes."""

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
    """Takes messages, once those answers are used up that it is given."""

    def __init__(self, *answers: Exception) -> None:
        self.answers, self.taken, self.tries = list(answers), list[WebhookMessage](), 0

    async def post(self, body: WebhookMessage) -> None:
        self.tries += 1
        if self.answers:
            raise self.answers.pop(0)
        self.taken.append(body)

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(body["groupLabels"]["incident"], body["status"]) for body in self.taken]


class World:
    def __init__(self, *answers: Exception) -> None:
        self.receiver, self.timeline = Receiver(*answers), Timeline()
        self.webhook = Webhook(self.receiver.post, VirtualRuntime(self.timeline))
        self.lost = metrics.WEBHOOK_MESSAGES_LOST._value.get()

    @property
    def lost_by_now(self) -> float:
        return float(metrics.WEBHOOK_MESSAGES_LOST._value.get() - self.lost)

    async def run(self, seconds: float) -> None:
        task = asyncio.create_task(self.webhook.deliver())
        await self.timeline.run(seconds)
        task.cancel()


def test_a_beginning_is_a_firing_alert_of_alertmanagers_format() -> None:
    body = build_message(JOB, INCIDENT, 200.0)
    (alert,) = body["alerts"]
    assert (body["version"], body["status"], alert["status"]) == ("4", "firing", "firing")
    assert alert["labels"]["alertname"] == "PacekeeperIncident"
    assert {alert["labels"][name] for name in ("namespace", "job_name", "node")} == {"team-a", "gpt", "n1"}
    assert (alert["startsAt"], alert["endsAt"]) == ("1970-01-01T00:01:40.000000Z", NO_END_TIME)
    assert alert["annotations"]["summary"] == "team-a/gpt: node n1 is gone"
    assert all(isinstance(value, str) for part in ("labels", "annotations") for value in alert[part].values())


def test_its_end_resolves_the_same_alert() -> None:
    before, after = build_message(JOB, INCIDENT, 200.0)["alerts"][0], build_message(JOB, ENDED, 200.0)["alerts"][0]
    assert after["status"] == "resolved"
    assert before["fingerprint"] == after["fingerprint"]
    assert before["labels"] == after["labels"], "receivers tell alerts apart by their labels"
    assert after["endsAt"] == "1970-01-01T00:01:52.500000Z"
    assert after["annotations"]["recovered_seconds"] == "12.5"


async def test_what_is_not_taken_is_sent_again_and_nothing_overtakes_it() -> None:
    world = World(*[WebhookUndelivered("no answer")] * 5)
    world.webhook.enqueue(JOB, INCIDENT)
    world.webhook.enqueue(JOB, ENDED)
    await world.run(120)
    assert world.receiver.names == [("gpt-7", "firing"), ("gpt-7", "resolved")]
    assert (world.receiver.tries, world.lost_by_now) == (7, 0)


async def test_what_is_refused_is_not_sent_again() -> None:
    world = World(WebhookRefused("status 400"))
    world.webhook.enqueue(JOB, INCIDENT)
    world.webhook.enqueue(JOB, ENDED)
    await world.run(120)
    assert world.receiver.names == [("gpt-7", "resolved")]
    assert world.lost_by_now == 1


async def test_after_an_hour_it_is_given_up() -> None:
    world = World(*[WebhookUndelivered("no answer")] * 10_000)
    world.webhook.enqueue(JOB, INCIDENT)
    await world.run(2 * webhook.WEBHOOK_DELIVERY_TIMEOUT_SECONDS)
    assert world.receiver.tries < 100
    assert world.lost_by_now == 1


async def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_QUEUED_MESSAGES", 3)
    world = World()
    for number in range(5):
        world.webhook.enqueue(JOB, replace(INCIDENT, name=f"gpt-{number}"))
    await world.run(10)
    assert world.receiver.names == [(f"gpt-{number}", "firing") for number in (2, 3, 4)]
    assert world.lost_by_now == 2


class TestOverHttp:
    @pytest.fixture
    async def server(self) -> AsyncIterator[tuple[str, list[Any], Iterator[int]]]:
        asked: list[Any] = []
        statuses = iter([200, 302, 422, 503])

        async def answer(request: web.Request) -> web.Response:
            asked.append((request.headers.get("Authorization"), await request.json()))
            return web.Response(status=next(statuses), headers={"Location": "/elsewhere"})

        app = web.Application()
        app.router.add_post("/hook/secret-part", answer)
        async with TestServer(app) as running:
            yield str(running.make_url("/hook/secret-part")), asked, statuses

    async def test_it_posts_json_with_the_token_and_follows_nobody(
        self, server: tuple[str, list[Any], Iterator[int]], tmp_path: Path
    ) -> None:
        url, asked, _ = server
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
        assert asked[0] == ("Bearer t", {"version": "4"})
        assert len(asked) == 4

    async def test_errors_do_not_show_the_address(self, tmp_path: Path) -> None:
        with pytest.raises(WebhookUndelivered, match="needs the key url"):
            await create_http_post(tmp_path)({})
        (tmp_path / "url").write_text("http://127.0.0.1:9/secret-part")
        with pytest.raises(WebhookUndelivered) as error:
            await create_http_post(tmp_path)({})
        assert "secret-part" not in str(error.value)
