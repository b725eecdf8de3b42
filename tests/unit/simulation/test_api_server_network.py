"""What becomes of requests to the simulated API server, and of its streams."""

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


class Client:
    """One process of an operator, and what it is told."""

    def __init__(self, world: ApiServerOnlyWorld) -> None:
        self.world = world
        self.process = Process(world.loop, PLACE)
        self.connection = SimulatedApiConnection(world.api, PLACE, self.process)
        self.said: list[tuple[float, str]] = []  # when, what

    def patch(self, data: dict[str, str]) -> None:
        """Of the one object that there is."""
        self.process.spawn(self._patch(data), "patch")

    async def _patch(self, data: dict[str, str]) -> None:
        try:
            answer: ApiResponse = await self.connection.request("PATCH", f"{PATH}/a", {}, {"data": data}, MERGE_PATCH)
            self.said.append((self.world.loop.time(), str(answer.status)))
        except OSError as error:  # TimeoutError is one, too
            self.said.append((self.world.loop.time(), type(error).__name__))

    @property
    def words(self) -> list[str]:
        return [words for _, words in self.said]


@pytest.fixture
def world() -> ApiServerOnlyWorld:
    """The operator may write its config map here: no chart has been installed that would forbid it."""
    world = ApiServerOnlyWorld()
    world.api.create("nodes", {"metadata": {"name": "a"}, "spec": {}})
    return world


@pytest.fixture
def client(world: ApiServerOnlyWorld) -> Client:
    return Client(world)


@pytest.fixture(autouse=True)
def _object(world: ApiServerOnlyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.kubernetes.api.admission.ADMISSION_POLICIES", {})
    world.api.create("configmaps", build_config_map("a", namespace=NAMESPACE))


def data(world: ApiServerOnlyWorld) -> Object:
    found = world.api.get("configmaps", "a", NAMESPACE)
    assert found is not None
    written: Object = found.get("data", {})
    return written


def test_a_request_takes_a_moment_each_way(world: ApiServerOnlyWorld, client: Client) -> None:
    client.patch({"a": "1"})
    world.pass_time(0.0001)
    assert data(world) == {}
    world.pass_time(1.0)
    assert data(world) == {"a": "1"}
    ((when, words),) = client.said
    assert words == "200"
    assert 0.001 <= when <= 0.016


@pytest.mark.parametrize(
    ("shot", "words", "written"),
    [
        (OneShot("PATCH", "configmaps", RequestOutcome.REFUSED, 503), "503", False),
        (OneShot("PATCH", "configmaps", RequestOutcome.LOST), "TimeoutError", True),
        (OneShot("", "configmaps/a", RequestOutcome.BROKEN), "ConnectionResetError", True),
        (OneShot("", "", RequestOutcome.DROPPED), "TimeoutError", False),
    ],
)
def test_one_request_has_a_fate_of_its_own(
    world: ApiServerOnlyWorld, client: Client, shot: OneShot, words: str, written: bool
) -> None:
    world.api.faults.one_shots = [OneShot("GET", "", RequestOutcome.DROPPED), OneShot("", "pods"), shot]
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.words == [words]
    assert (data(world) == {"a": "1"}) == written
    client.patch({"a": "2"})
    world.pass_time(1.0)
    assert client.words == [words, "200"]
    assert len(world.api.faults.one_shots) == 2
    assert any(line.source == API_PLACE for line in world.log.lines)


def test_a_late_request_takes_effect_after_its_sender_has_given_up(world: ApiServerOnlyWorld, client: Client) -> None:
    world.api.faults.one_shots = [OneShot("PATCH", "", RequestOutcome.LATE)]
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 0.05)
    assert client.words == ["TimeoutError"]
    assert data(world) == {}
    world.pass_time(30.0)
    assert data(world) == {"a": "1"}


@pytest.mark.parametrize("rate", ["error_rate", "lost_rate", "late_rate"])
def test_rates_hit_some_requests(world: ApiServerOnlyWorld, client: Client, rate: str) -> None:
    setattr(world.api.faults, rate, 0.5)
    for i in range(40):
        client.patch({"a": str(i)})
    world.pass_time(60.0)
    good = client.words.count("200")
    assert 8 <= good <= 32
    bad = {"error_rate": {"500", "503", "429"}, "lost_rate": {"TimeoutError", "ConnectionResetError"}}
    assert set(client.words) - {"200"} == bad.get(rate, {"TimeoutError"})


def test_a_slow_server_answers_late(world: ApiServerOnlyWorld, client: Client) -> None:
    world.api.faults.slow = (3.0, 4.0)
    client.patch({"a": "1"})
    world.pass_time(10.0)
    ((when, words),) = client.said
    assert words == "200"
    assert 3.0 <= when <= 4.1


def test_a_server_that_is_down_refuses_connections(world: ApiServerOnlyWorld, client: Client) -> None:
    world.api.faults.down = True
    client.patch({"a": "1"})
    world.pass_time(1.0)
    assert client.words == ["ConnectionRefusedError"]
    world.api.faults.down = False
    client.patch({"a": "1"})
    world.pass_time(1.0)
    assert client.words[1:] == ["200"]


def test_a_server_that_goes_down_breaks_what_it_was_asked(world: ApiServerOnlyWorld, client: Client) -> None:
    world.api.faults.slow = (2.0, 2.0)
    client.patch({"a": "1"})
    world.pass_time(1.0)
    world.api.faults.down = True
    world.pass_time(2.0)
    world.api.faults.down = False
    world.pass_time(30.0)
    assert client.words == ["ConnectionResetError"]
    assert data(world) == {}


@pytest.mark.parametrize("fate", [RequestOutcome.LATE, None])
def test_what_a_server_held_up_ends_with_it(
    world: ApiServerOnlyWorld, client: Client, fate: RequestOutcome | None
) -> None:
    if fate is not None:
        world.api.faults.one_shots = [OneShot("", "", fate)]
    else:
        world.api.faults.slow_webhooks = [SlowWebhook("configmaps", "", 20.0)]
    body = {"metadata": {"name": "held"}}
    client.process.spawn(client.connection.request("POST", PATH, {}, body, "application/json"), "create")
    world.pass_time(1.0)
    world.api.faults.down = True
    world.pass_time(60.0)
    assert world.api.get("configmaps", "held", NAMESPACE) is None


@pytest.mark.parametrize("how", ["silent", "cut"])
def test_silence_is_a_time_out(world: ApiServerOnlyWorld, client: Client, how: str) -> None:
    if how == "silent":
        world.api.faults.silent = True
    else:
        world.network.cut(PLACE, API_PLACE)
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.words == ["TimeoutError"]
    assert client.said[0][0] == pytest.approx(REQUEST_SECONDS)
    assert data(world) == {}


def test_an_answer_may_be_lost_to_a_cut(world: ApiServerOnlyWorld, client: Client) -> None:
    """The request has arrived, the answer does not."""

    def cut(request: Request) -> None:
        if request.stage == RequestStage.APPLIED:
            world.network.cut(PLACE, API_PLACE)

    world.api.add_observer(cut)
    client.patch({"a": "1"})
    world.pass_time(REQUEST_SECONDS + 1.0)
    assert client.words == ["TimeoutError"]
    assert data(world) == {"a": "1"}


def test_a_slow_webhook_holds_up_creations_of_that_name(world: ApiServerOnlyWorld, client: Client) -> None:
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


def test_who_dies_before_it_sends_has_not_sent(world: ApiServerOnlyWorld, client: Client) -> None:
    world.api.add_observer(lambda request: client.process.kill() if request.stage == RequestStage.SENT else None)
    client.patch({"a": "1"})
    world.pass_time(20.0)
    assert data(world) == {}
    assert client.said == []


def test_who_dies_after_it_has_sent_has_written(world: ApiServerOnlyWorld, client: Client) -> None:
    stages: list[RequestStage] = []

    def see(request: Request) -> None:
        stages.append(request.stage)
        if request.stage == RequestStage.APPLIED:
            client.process.kill()

    world.api.add_observer(see)
    client.patch({"a": "1"})
    world.pass_time(20.0)
    assert data(world) == {"a": "1"}
    assert client.said == []
    assert stages[:2] == [RequestStage.SENT, RequestStage.APPLIED]


def test_stages_of_a_request(world: ApiServerOnlyWorld, client: Client) -> None:
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


class Reader:
    """Reads a stream, and begins no other one."""

    def __init__(self, world: ApiServerOnlyWorld, watch: WatchStream, process: Process) -> None:
        self.told: list[tuple[float, str, str]] = []  # when, type, name
        self._world = world
        process.spawn(self._read(watch), "read")

    async def _read(self, watch: WatchStream) -> None:
        end = "END"
        try:
            async for type, body in watch:
                self.told.append((self._world.loop.time(), type, body["metadata"].get("name", "")))
        except (WatchExpired, OSError) as error:
            end = type_of(error)
        self.told.append((self._world.loop.time(), end, ""))

    @property
    def words(self) -> list[str]:
        return [f"{type} {name}".strip() for _, type, name in self.told]


def type_of(error: Exception) -> str:
    return type(error).__name__


@pytest.fixture
def read(world: ApiServerOnlyWorld, client: Client) -> Callable[..., Reader]:
    def begin(version: str | None = None, **named: Any) -> Reader:
        since = str(world.api.version) if version is None else version
        watch = WatchStream(world.api, PLACE, client.process, KINDS["configmaps"], WatchOptions(since, **named))
        return Reader(world, watch, client.process)

    return begin


def change(world: ApiServerOnlyWorld, value: str) -> None:
    world.api.patch("configmaps", "a", NAMESPACE, {"data": {"a": value}})


def test_a_stream_is_late_and_in_order(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    world.api.faults.watch_lag = (0.0, 2.0)
    reader = read()
    world.pass_time(1.0)
    for i in range(20):
        world.api.create("configmaps", build_config_map(f"c-{i}", namespace=NAMESPACE))
    world.pass_time(5.0)
    assert reader.words == [f"ADDED c-{i}" for i in range(20)]
    times = [when for when, _, _ in reader.told]
    assert times == sorted(times)
    assert times[0] > 1.0
    assert times[-1] > 1.5


def test_a_stream_begins_where_it_is_asked_to(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    since = str(world.api.version)
    change(world, "1")
    change(world, "2")
    reader, everything = read(since), read("")
    world.pass_time(1.0)
    assert reader.words == ["MODIFIED a", "MODIFIED a"]
    assert everything.words == ["ADDED a"]
    change(world, "3")
    world.pass_time(1.0)
    assert reader.words[2:] == everything.words[1:] == ["MODIFIED a"]


def test_what_is_forgotten_cannot_be_asked_for(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    world.api.faults.history = 2
    versions = []
    for i in range(4):
        versions.append(str(world.api.version))
        change(world, str(i))
    old, oldest_kept = read(versions[1]), read(versions[2])
    world.pass_time(1.0)
    assert old.words == ["WatchExpired"]
    assert oldest_kept.words == ["MODIFIED a", "MODIFIED a"]


def test_a_stream_ends_after_its_time_with_bookmarks_before(
    world: ApiServerOnlyWorld, read: Callable[..., Reader]
) -> None:
    reader = read(seconds=130.0)
    world.pass_time(200.0)
    assert reader.words == ["BOOKMARK", "BOOKMARK", "END"]
    assert world.api.watches == []


@pytest.mark.parametrize(("gone", "words"), [(False, "END"), (True, "WatchExpired")])
def test_streams_can_be_ended(world: ApiServerOnlyWorld, read: Callable[..., Reader], gone: bool, words: str) -> None:
    since = str(world.api.version)
    change(world, "1")
    reader = read()
    world.pass_time(1.0)
    world.api.end_watches("another place", history_lost=False)
    world.api.end_watches(PLACE, "configmaps", history_lost=gone)
    again = read(since)
    world.pass_time(1.0)
    assert reader.words == [words]
    assert again.words == (["WatchExpired"] if gone else ["MODIFIED a"])


def test_a_short_cut_makes_a_stream_late(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    reader = read()
    world.pass_time(1.0)
    world.network.cut(PLACE, API_PLACE)
    change(world, "1")
    world.pass_time(20.0)
    assert reader.words == []
    world.network.mend(PLACE, API_PLACE)
    world.pass_time(30.0)
    assert reader.words == ["MODIFIED a"]


def test_after_a_long_cut_a_stream_is_silent_for_ever(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    reader = read()
    world.pass_time(1.0)
    world.network.cut(PLACE, API_PLACE)
    change(world, "1")
    world.pass_time(200.0)
    world.network.mend(PLACE, API_PLACE)
    change(world, "2")
    world.pass_time(1000.0)
    assert reader.words == []
    assert world.api.watches == []


def test_streams_of_a_server_that_is_down_break(world: ApiServerOnlyWorld, read: Callable[..., Reader]) -> None:
    reader = read()
    world.pass_time(1.0)
    world.api.faults.down = True
    late = read()
    world.pass_time(1.0)
    assert late.words == ["ConnectionRefusedError"]
    assert reader.words == ["ConnectionResetError"]
    assert world.api.watches == []
    world.api.faults.down = False
    again = read(str(world.api.version - 1))
    world.pass_time(1.0)
    assert again.words == ["WatchExpired"]


def test_controllers_wait_for_a_server_that_is_away(world: ApiServerOnlyWorld) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "nobody", "uid": "u"}
    world.api.create("configmaps", build_config_map("b", namespace=NAMESPACE, ownerReferences=[owner]))
    world.api.faults.down = True
    world.pass_time(10.0)
    assert world.api.get("configmaps", "b", NAMESPACE) is not None
    world.api.faults.down = False
    world.pass_time(1.6)
    assert world.api.get("configmaps", "b", NAMESPACE) is None


def test_a_dead_readers_stream_is_closed(
    world: ApiServerOnlyWorld, client: Client, read: Callable[..., Reader]
) -> None:
    reader = read()
    world.pass_time(1.0)
    assert len(world.api.watches) == 1
    client.process.kill()
    change(world, "1")
    world.pass_time(1.0)
    assert world.api.watches == []
    assert reader.words == []


def test_a_paused_reader_hears_it_all_later(
    world: ApiServerOnlyWorld, client: Client, read: Callable[..., Reader]
) -> None:
    reader = read()
    world.pass_time(1.0)
    client.process.pause()
    change(world, "1")
    change(world, "2")
    world.pass_time(30.0)
    assert reader.words == []
    client.process.resume()
    world.pass_time(0.1)
    assert reader.words == ["MODIFIED a", "MODIFIED a"]


def test_a_reader_that_stops_waiting_loses_nothing(world: ApiServerOnlyWorld, client: Client) -> None:
    options = WatchOptions(str(world.api.version))
    watch = WatchStream(world.api, PLACE, client.process, KINDS["configmaps"], options)
    told: list[str] = []

    async def read() -> None:
        while len(told) < 3:
            try:
                async with asyncio.timeout(0.5):
                    type, _ = await anext(watch)
                told.append(type)
            except TimeoutError:
                told.append("nothing")

    client.process.spawn(read(), "read")
    world.pass_time(0.7)
    change(world, "1")
    world.pass_time(2.0)
    assert told == ["nothing", "MODIFIED", "nothing"]
