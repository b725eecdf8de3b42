"""Outcomes of requests to the simulated API server, and of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pacekeeper_operator.kube.client import MERGE_PATCH, REQUEST_SECONDS, ApiResponse
from simulation.kubernetes.api.api_faults import OneShot, RequestOutcome, SlowWebhook
from simulation.kubernetes.api.connection import SimulatedApiConnection
from simulation.kubernetes.api.errors import WatchExpired
from simulation.kubernetes.api.objects import KINDS
from simulation.kubernetes.api.requests import Request, RequestStage
from simulation.kubernetes.api.watch import WatchOptions, WatchStream
from simulation.loop import Process
from simulation.network import API_PLACE
from testing.kubernetes.api_probes import build_config_map
from testing.simulated.simulated_api import NAMESPACE, ApiServerOnlyWorld

Object = dict[str, Any]
PLACE = "operator-0-0"
PATH = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


class OperatorClient:
    """One process of an operator, and the results of its requests."""

    def __init__(self, world: ApiServerOnlyWorld) -> None:
        self.world = world
        self.process = Process(world.loop, PLACE)
        self.connection = SimulatedApiConnection(world.api, PLACE, self.process)
        self.events: list[tuple[float, str]] = []  # when, what

    def patch(self, data: dict[str, str]) -> None:
        """Patch the only object."""
        self.process.spawn(self._patch(data), "patch")

    async def _patch(self, data: dict[str, str]) -> None:
        try:
            answer: ApiResponse = await self.connection.request("PATCH", f"{PATH}/a", {}, {"data": data}, MERGE_PATCH)
            self.events.append((self.world.loop.time(), str(answer.status)))
        except OSError as error:  # includes TimeoutError
            self.events.append((self.world.loop.time(), type(error).__name__))

    @property
    def outcomes(self) -> list[str]:
        return [result for _, result in self.events]


@pytest.fixture
def world() -> ApiServerOnlyWorld:
    """The operator may write its ConfigMap here: no chart is installed that forbids it."""
    world = ApiServerOnlyWorld()
    world.api.create("nodes", {"metadata": {"name": "a"}, "spec": {}})
    return world


@pytest.fixture
def client(world: ApiServerOnlyWorld) -> OperatorClient:
    return OperatorClient(world)


@pytest.fixture(autouse=True)
def _object(world: ApiServerOnlyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.kubernetes.api.admission.ADMISSION_POLICIES", {})
    world.api.create("configmaps", build_config_map("a", namespace=NAMESPACE))


def read_data(world: ApiServerOnlyWorld) -> Object:
    found = world.api.get("configmaps", "a", NAMESPACE)
    assert found is not None
    written: Object = found.get("data", {})
    return written


def test_a_request_takes_a_moment_each_way(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    client.patch({"a": "1"})
    world.pass_time(0.0001)
    assert read_data(world) == {}
    world.pass_time(1.0)
    assert read_data(world) == {"a": "1"}
    ((when, result),) = client.events
    assert result == "200"
    assert 0.001 <= when <= 0.016


@pytest.mark.parametrize(
    ("shot", "result", "written"),
    [
        (OneShot("PATCH", "configmaps", RequestOutcome.REFUSED, 503), "503", False),
        (OneShot("PATCH", "configmaps", RequestOutcome.LOST), "TimeoutError", True),
        (OneShot("", "configmaps/a", RequestOutcome.BROKEN), "ConnectionResetError", True),
        (OneShot("", "", RequestOutcome.DROPPED), "TimeoutError", False),
    ],
)
def test_one_request_can_have_its_own_outcome(
    world: ApiServerOnlyWorld, client: OperatorClient, shot: OneShot, result: str, written: bool
) -> None:
    world.api.faults.one_shots = [OneShot("GET", "", RequestOutcome.DROPPED), OneShot("", "pods"), shot]
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.outcomes == [result]
    assert (read_data(world) == {"a": "1"}) == written
    client.patch({"a": "2"})
    world.pass_time(1.0)
    assert client.outcomes == [result, "200"]
    assert len(world.api.faults.one_shots) == 2
    assert any(line.source == API_PLACE for line in world.log.lines)


def test_a_late_request_takes_effect_after_its_sender_has_given_up(
    world: ApiServerOnlyWorld, client: OperatorClient
) -> None:
    world.api.faults.one_shots = [OneShot("PATCH", "", RequestOutcome.LATE)]
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 0.05)
    assert client.outcomes == ["TimeoutError"]
    assert read_data(world) == {}
    world.pass_time(30.0)
    assert read_data(world) == {"a": "1"}


@pytest.mark.parametrize("rate", ["error_rate", "lost_rate", "late_rate"])
def test_rates_hit_some_requests(world: ApiServerOnlyWorld, client: OperatorClient, rate: str) -> None:
    setattr(world.api.faults, rate, 0.5)
    for i in range(40):
        client.patch({"a": str(i)})
    world.pass_time(60.0)
    good = client.outcomes.count("200")
    assert 8 <= good <= 32
    bad = {"error_rate": {"500", "503", "429"}, "lost_rate": {"TimeoutError", "ConnectionResetError"}}
    assert set(client.outcomes) - {"200"} == bad.get(rate, {"TimeoutError"})


def test_a_slow_server_answers_late(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    world.api.faults.slow = (3.0, 4.0)
    client.patch({"a": "1"})
    world.pass_time(10.0)
    ((when, result),) = client.events
    assert result == "200"
    assert 3.0 <= when <= 4.1


def test_a_server_that_is_down_refuses_connections(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    world.api.faults.down = True
    client.patch({"a": "1"})
    world.pass_time(1.0)
    assert client.outcomes == ["ConnectionRefusedError"]
    world.api.faults.down = False
    client.patch({"a": "1"})
    world.pass_time(1.0)
    assert client.outcomes[1:] == ["200"]


def test_a_server_that_goes_down_breaks_open_requests(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    world.api.faults.slow = (2.0, 2.0)
    client.patch({"a": "1"})
    world.pass_time(1.0)
    world.api.faults.down = True
    world.pass_time(2.0)
    world.api.faults.down = False
    world.pass_time(30.0)
    assert client.outcomes == ["ConnectionResetError"]
    assert read_data(world) == {}


@pytest.mark.parametrize("outcome", [RequestOutcome.LATE, None])
def test_requests_that_a_server_delayed_end_with_it(
    world: ApiServerOnlyWorld, client: OperatorClient, outcome: RequestOutcome | None
) -> None:
    if outcome is not None:
        world.api.faults.one_shots = [OneShot("", "", outcome)]
    else:
        world.api.faults.slow_webhooks = [SlowWebhook("configmaps", "", 20.0)]
    body = {"metadata": {"name": "held"}}
    client.process.spawn(client.connection.request("POST", PATH, {}, body, "application/json"), "create")
    world.pass_time(1.0)
    world.api.faults.down = True
    world.pass_time(60.0)
    assert world.api.get("configmaps", "held", NAMESPACE) is None


@pytest.mark.parametrize("failure", ["silent", "cut"])
def test_an_unanswered_request_times_out(world: ApiServerOnlyWorld, client: OperatorClient, failure: str) -> None:
    if failure == "silent":
        world.api.faults.silent = True
    else:
        world.network.cut(PLACE, API_PLACE)
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.outcomes == ["TimeoutError"]
    assert client.events[0][0] == pytest.approx(REQUEST_SECONDS)
    assert read_data(world) == {}


def test_an_answer_may_be_lost_to_a_cut(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    """The request arrives, but the response does not."""

    def cut(request: Request) -> None:
        if request.stage == RequestStage.APPLIED:
            world.network.cut(PLACE, API_PLACE)

    world.api.add_observer(cut)
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.outcomes == ["TimeoutError"]
    assert read_data(world) == {"a": "1"}


def test_a_slow_webhook_delays_creations_of_that_name(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    world.api.faults.slow_webhooks = [SlowWebhook("configmaps", "held", 4.0), SlowWebhook("pods", "", 100.0)]
    done: dict[str, float] = {}

    async def create(name: str) -> None:
        await client.connection.request("POST", PATH, {}, {"metadata": {"name": name}}, "application/json")
        done[name] = world.loop.time()

    for name in ("held-1", "free"):
        client.process.spawn(create(name), name)
    world.pass_time(10.0)
    assert done["free"] < 0.1
    assert 4.0 <= done["held-1"] < 4.1


def test_a_process_that_is_killed_before_it_sends_has_written_nothing(
    world: ApiServerOnlyWorld, client: OperatorClient
) -> None:
    world.api.add_observer(lambda request: client.process.kill() if request.stage == RequestStage.SENT else None)
    client.patch({"a": "1"})
    world.pass_time(20.0)
    assert read_data(world) == {}
    assert client.events == []


def test_a_process_that_is_killed_after_it_sent_has_written(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    stages: list[RequestStage] = []

    def see(request: Request) -> None:
        stages.append(request.stage)
        if request.stage == RequestStage.APPLIED:
            client.process.kill()

    world.api.add_observer(see)
    client.patch({"a": "1"})
    world.pass_time(20.0)
    assert read_data(world) == {"a": "1"}
    assert client.events == []
    assert stages[:2] == [RequestStage.SENT, RequestStage.APPLIED]


def test_a_request_goes_through_all_stages(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    seen: list[tuple[RequestStage, int, str]] = []
    world.api.add_observer(lambda request: seen.append((request.stage, request.status, request.method)))
    client.patch({"a": "1"})
    world.pass_time(1.0)
    assert seen == [
        (RequestStage.SENT, 0, "PATCH"),
        (RequestStage.APPLIED, 200, "PATCH"),
        (RequestStage.ANSWERED, 200, "PATCH"),
    ]


# Streams


class StreamReader:
    """Reads a stream, and begins no other one."""

    def __init__(self, world: ApiServerOnlyWorld, watch: WatchStream, process: Process) -> None:
        self.events: list[tuple[float, str, str]] = []  # when, type, name
        self._world = world
        process.spawn(self._read(watch), "read")

    async def _read(self, watch: WatchStream) -> None:
        end = "END"
        try:
            async for type, body in watch:
                self.events.append((self._world.loop.time(), type, body["metadata"].get("name", "")))
        except (WatchExpired, OSError) as error:
            end = name_error(error)
        self.events.append((self._world.loop.time(), end, ""))

    @property
    def outcomes(self) -> list[str]:
        return [f"{type} {name}".strip() for _, type, name in self.events]


def name_error(error: Exception) -> str:
    return type(error).__name__


@pytest.fixture
def open_stream(world: ApiServerOnlyWorld, client: OperatorClient) -> Callable[..., StreamReader]:
    def begin(version: str | None = None, **named: Any) -> StreamReader:
        since = str(world.api.version) if version is None else version
        watch = WatchStream(world.api, PLACE, client.process, KINDS["configmaps"], WatchOptions(since, **named))
        return StreamReader(world, watch, client.process)

    return begin


def change_object(world: ApiServerOnlyWorld, value: str) -> None:
    world.api.patch("configmaps", "a", NAMESPACE, {"data": {"a": value}})


def test_a_stream_is_late_and_in_order(world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]) -> None:
    world.api.faults.watch_lag = (0.0, 2.0)
    reader = open_stream()
    world.pass_time(1.0)
    for i in range(20):
        world.api.create("configmaps", build_config_map(f"c-{i}", namespace=NAMESPACE))
    world.pass_time(5.0)
    assert reader.outcomes == [f"ADDED c-{i}" for i in range(20)]
    times = [when for when, _, _ in reader.events]
    assert times == sorted(times)
    assert times[0] > 1.0
    assert times[-1] > 1.5


def test_a_stream_begins_at_the_requested_version(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]
) -> None:
    since = str(world.api.version)
    change_object(world, "1")
    change_object(world, "2")
    reader, everything = open_stream(since), open_stream("")
    world.pass_time(1.0)
    assert reader.outcomes == ["MODIFIED a", "MODIFIED a"]
    assert everything.outcomes == ["ADDED a"]
    change_object(world, "3")
    world.pass_time(1.0)
    assert reader.outcomes[2:] == everything.outcomes[1:] == ["MODIFIED a"]


def test_a_version_that_is_too_old_is_refused(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]
) -> None:
    world.api.faults.history = 2
    versions = []
    for i in range(4):
        versions.append(str(world.api.version))
        change_object(world, str(i))
    old, oldest_available = open_stream(versions[1]), open_stream(versions[2])
    world.pass_time(1.0)
    assert old.outcomes == ["WatchExpired"]
    assert oldest_available.outcomes == ["MODIFIED a", "MODIFIED a"]


def test_a_stream_sends_bookmarks_and_ends_after_its_timeout(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]
) -> None:
    reader = open_stream(seconds=130.0)
    world.pass_time(200.0)
    assert reader.outcomes == ["BOOKMARK", "BOOKMARK", "END"]
    assert world.api.watches == []


@pytest.mark.parametrize(("gone", "result"), [(False, "END"), (True, "WatchExpired")])
def test_streams_can_be_ended(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader], gone: bool, result: str
) -> None:
    since = str(world.api.version)
    change_object(world, "1")
    reader = open_stream()
    world.pass_time(1.0)
    world.api.end_watches("another place", history_lost=False)
    world.api.end_watches(PLACE, "configmaps", history_lost=gone)
    again = open_stream(since)
    world.pass_time(1.0)
    assert reader.outcomes == [result]
    assert again.outcomes == (["WatchExpired"] if gone else ["MODIFIED a"])


def test_a_short_cut_makes_a_stream_late(world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]) -> None:
    reader = open_stream()
    world.pass_time(1.0)
    world.network.cut(PLACE, API_PLACE)
    change_object(world, "1")
    world.pass_time(20.0)
    assert reader.outcomes == []
    world.network.mend(PLACE, API_PLACE)
    world.pass_time(30.0)
    assert reader.outcomes == ["MODIFIED a"]


def test_after_a_long_cut_a_stream_stays_silent(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]
) -> None:
    reader = open_stream()
    world.pass_time(1.0)
    world.network.cut(PLACE, API_PLACE)
    change_object(world, "1")
    world.pass_time(200.0)
    world.network.mend(PLACE, API_PLACE)
    change_object(world, "2")
    world.pass_time(1000.0)
    assert reader.outcomes == []
    assert world.api.watches == []


def test_streams_of_a_server_that_is_down_break(
    world: ApiServerOnlyWorld, open_stream: Callable[..., StreamReader]
) -> None:
    reader = open_stream()
    world.pass_time(1.0)
    world.api.faults.down = True
    late = open_stream()
    world.pass_time(1.0)
    assert late.outcomes == ["ConnectionRefusedError"]
    assert reader.outcomes == ["ConnectionResetError"]
    assert world.api.watches == []
    world.api.faults.down = False
    again = open_stream(str(world.api.version - 1))
    world.pass_time(1.0)
    assert again.outcomes == ["WatchExpired"]


def test_controllers_wait_for_an_unavailable_server(world: ApiServerOnlyWorld) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "nobody", "uid": "u"}
    world.api.create("configmaps", build_config_map("b", namespace=NAMESPACE, ownerReferences=[owner]))
    world.api.faults.down = True
    world.pass_time(10.0)
    assert world.api.get("configmaps", "b", NAMESPACE) is not None
    world.api.faults.down = False
    world.pass_time(1.6)
    assert world.api.get("configmaps", "b", NAMESPACE) is None


def test_a_dead_readers_stream_is_closed(
    world: ApiServerOnlyWorld, client: OperatorClient, open_stream: Callable[..., StreamReader]
) -> None:
    reader = open_stream()
    world.pass_time(1.0)
    assert len(world.api.watches) == 1
    client.process.kill()
    change_object(world, "1")
    world.pass_time(1.0)
    assert world.api.watches == []
    assert reader.outcomes == []


def test_a_paused_reader_receives_all_events_later(
    world: ApiServerOnlyWorld, client: OperatorClient, open_stream: Callable[..., StreamReader]
) -> None:
    reader = open_stream()
    world.pass_time(1.0)
    client.process.pause()
    change_object(world, "1")
    change_object(world, "2")
    world.pass_time(30.0)
    assert reader.outcomes == []
    client.process.resume()
    world.pass_time(0.1)
    assert reader.outcomes == ["MODIFIED a", "MODIFIED a"]


def test_a_reader_that_stops_waiting_loses_nothing(world: ApiServerOnlyWorld, client: OperatorClient) -> None:
    options = WatchOptions(str(world.api.version))
    watch = WatchStream(world.api, PLACE, client.process, KINDS["configmaps"], options)
    events: list[str] = []

    async def read_events() -> None:
        while len(events) < 3:
            try:
                async with asyncio.timeout(0.5):
                    type, _ = await anext(watch)
                events.append(type)
            except TimeoutError:
                events.append("nothing")

    client.process.spawn(read_events(), "read")
    world.pass_time(0.7)
    change_object(world, "1")
    world.pass_time(2.0)
    assert events == ["nothing", "MODIFIED", "nothing"]
