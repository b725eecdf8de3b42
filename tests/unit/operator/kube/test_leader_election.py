"""Of several operators one acts, whatever their clocks, the API server and people's hands do. Time is virtual."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import kopf
import pytest

from pacekeeper_operator.kube import leader_election
from pacekeeper_operator.kube.client import (
    LEASES,
    PODS,
    TOKEN_REVIEWS,
    ApiResponse,
    Cluster,
    Object,
    ObjectRejected,
    ResourceKind,
)
from pacekeeper_operator.kube.leader_election import LEASE_NAME, LeaderElector, LeaseLost, NotLeading
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.virtual_time import Timeline, VirtualRuntime

SECONDS = 10.0
SETTINGS = Settings(namespace="system", identity="one", lease_seconds=SECONDS)
HOUR = 3600.0
ADDRESSES = {"one": "192.0.2.1", "two": "fd00::2"}
Trouble = Callable[[], Exception | None]


class Line(FakeCluster):
    """One operator's way to the API server that all share."""

    def __init__(self, shared: FakeCluster, runtime: VirtualRuntime) -> None:
        self.shared = shared
        self.runtime = runtime
        self.before: Trouble = lambda: None  # of calls that do not arrive
        self.after: Trouble = lambda: None  # of answers that do not
        self.delay: Callable[[], float] = lambda: 0.0

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        return await self._through(lambda: self.shared.get(kind, name, namespace))

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        return await self._through(lambda: self.shared.create(kind, body, dry_run=dry_run))

    async def replace(self, kind: ResourceKind, body: Object) -> Object:
        return await self._through(lambda: self.shared.replace(kind, body))

    async def _through(self, call: Callable[[], Any]) -> Object:
        if error := self.before():
            raise error
        delivery = asyncio.ensure_future(self._deliver(call))
        delivery.add_done_callback(lambda done: done.cancelled() or done.exception())
        found: Object = await asyncio.shield(delivery)
        if error := self.after():
            raise error
        return found

    async def _deliver(self, call: Callable[[], Any]) -> Any:
        """What is on its way arrives, even if its sender has given up."""
        await self._pause()
        answer = await call()
        await self._pause()
        return answer

    async def _pause(self) -> None:
        if seconds := self.delay():
            await self.runtime.sleep(seconds)


@dataclass
class Contender:
    """An operator's process, as far as leadership goes."""

    identity: str
    shared: FakeCluster
    timeline: Timeline
    clock_off: float = 0.0
    turns: list[bool] = field(default_factory=list)
    """Whether it serves sidecars, as it was told."""

    def __post_init__(self) -> None:
        self.runtime = VirtualRuntime(self.timeline, self.clock_off)
        self.line = Line(self.shared, self.runtime)
        settings = replace(SETTINGS, identity=self.identity, pod_ip=ADDRESSES.get(self.identity, ""))
        self.lease = LeaderElector(self.line, settings, self.runtime)
        self.lease.on_serving_changed = self.turns.append

    def start(self) -> Contender:
        self.lease.start()
        return self

    def kill(self) -> None:
        keeper = self.lease._task
        assert keeper is not None
        keeper.cancel()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


Pair = tuple[Contender, Contender]


@pytest.fixture
def contend(cluster: FakeCluster, timeline: Timeline) -> Any:
    """Makes contenders, and ends them with the test."""
    made: list[Contender] = []

    def start(identity: str, clock_off: float = 0.0) -> Contender:
        made.append(Contender(identity, cluster, timeline, clock_off).start())
        return made[-1]

    yield start
    for contender in made:
        contender.kill()


async def edit(cluster: Cluster, **spec: object) -> None:
    """By somebody's hand."""
    body = await cluster.get(LEASES, LEASE_NAME, "system")
    body["spec"] |= spec
    await cluster.replace(LEASES, body)


async def unused(cluster: FakeCluster) -> None:
    """A Lease that its last holder has left well."""
    await cluster.create(LEASES, {"metadata": {"name": LEASE_NAME, "namespace": "system"}, "spec": {}})


@pytest.fixture
async def pair(cluster: FakeCluster, contend: Any) -> Pair:
    """Two that contend for a Lease that nobody holds."""
    await unused(cluster)
    return contend("one"), contend("two")


class TestTaking:
    async def test_a_lease_that_was_left_well_is_taken_at_once(self, cluster: Any, timeline: Any, contend: Any) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(0)
        assert one.lease.is_leader()

    async def test_where_there_is_none_it_is_waited_whether_a_holder_brings_it_back(
        self, timeline: Timeline, contend: Any
    ) -> None:
        one = contend("one")
        await timeline.run(SECONDS - 1)
        assert not one.lease.is_leader()
        await timeline.run(4)
        assert one.lease.is_leader()

    @pytest.mark.parametrize("off", [-HOUR, HOUR])
    async def test_a_clock_an_hour_off_takes_nothing_from_a_living_holder(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, off: float
    ) -> None:
        await unused(cluster)
        one, two = contend("one"), contend("two", off)
        for _ in range(60):
            await timeline.run(1)
            assert one.lease.is_leader()
            assert not two.lease.is_leader()

    @pytest.mark.parametrize("off", [-HOUR, HOUR])
    async def test_nor_does_it_keep_anybody_from_following_a_dead_one(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, off: float
    ) -> None:
        await unused(cluster)
        one, two = contend("one", off), contend("two")
        await timeline.run(5)
        one.kill()
        await timeline.run(1.5 * SECONDS)
        assert two.lease.is_leader()

    async def test_the_same_pod_leads_on_at_once_after_a_crash(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(1)
        one.kill()
        again = contend("one")
        await timeline.run(0)
        assert again.lease.is_leader()

    async def test_who_leaves_well_lets_the_next_begin(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        runtime = VirtualRuntime(timeline)
        async with leader_election.run_leader_election(cluster, SETTINGS, runtime) as lease:
            await lease.elected.wait()
            assert lease.is_leader()
        assert not lease.is_leader()
        two = contend("two")
        await timeline.run(0)
        assert two.lease.is_leader()

    async def test_one_that_is_given_back_is_taken_within_a_look(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(20)
        await one.lease.release()
        assert not one.lease.is_leader()
        await timeline.run(SECONDS * leader_election.LEASE_POLL_SHARE)
        assert two.lease.is_leader()

    async def test_one_that_could_not_renew_in_time_gives_back_what_is_still_its_own(
        self, timeline: Timeline, pair: Pair
    ) -> None:
        one, two = pair
        await timeline.run(20)
        one.line.before = lambda: kopf.TemporaryError("away")
        await timeline.run(SECONDS * leader_election.LEASE_RENEW_DEADLINE_SHARE)
        assert not one.lease.is_leader()
        one.line.before = lambda: None
        await one.lease.release()
        await timeline.run(SECONDS * leader_election.LEASE_POLL_SHARE)
        assert two.lease.is_leader()

    async def test_nobody_gives_back_what_is_anothers(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(2 * SECONDS)
        one.line.before = lambda: None
        await one.lease.release()
        await timeline.run(SECONDS / 2)
        assert two.lease.is_leader()

    async def test_a_dead_holder_is_followed_as_soon_as_its_lease_is_over(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(20)
        one.kill()
        await timeline.run(SECONDS * (1 - leader_election.LEASE_RETRY_PERIOD_SHARE) - 0.1)
        assert not two.lease.is_leader()
        await timeline.run(
            SECONDS * (leader_election.LEASE_RETRY_PERIOD_SHARE + leader_election.LEASE_POLL_SHARE) + 0.2
        )
        assert two.lease.is_leader(), (
            "it has looked within a look of the last renewal, and waits no longer than it lasts"
        )

    @pytest.mark.parametrize("asked", [False, True])
    async def test_who_waits_knows_where_the_leader_is_until_it_acts_no_more(
        self, timeline: Timeline, contend: Any, asked: bool, pair: Pair
    ) -> None:
        one, two = pair
        assert two.lease.leader_address == ""
        await timeline.run(20)
        assert two.lease.leader_address == "192.0.2.1:8443"
        assert one.lease.leader_address == "", "itself"
        if asked:
            await one.lease.release()
            await timeline.run(SECONDS * leader_election.LEASE_POLL_SHARE)
        else:
            one.kill()
            await timeline.run(SECONDS * leader_election.LEASE_DOUBT_SHARE + 1)
        assert two.lease.leader_address == "", "it is gone"
        await timeline.run(SECONDS)
        three = contend("three")
        await timeline.run(0.1)
        assert three.lease.leader_address == "", "nobody has been seen to renew it"
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert three.lease.leader_address == "[fd00::2]:8443"


class TestServing:
    """Sidecars are served until another may lead."""

    async def test_a_short_absence_of_the_api_server_is_not_noticed(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("away")
        await timeline.run(SECONDS * 0.7)
        assert not one.lease.is_leader()
        assert one.lease.can_serve()
        one.line.before = lambda: None
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert one.lease.is_leader()
        assert one.turns == [True]

    async def test_a_long_one_is_and_whoever_is_alone_goes_on_as_soon_as_it_can(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("away")
        await timeline.run(SECONDS * 5)
        assert not one.lease.can_serve()
        assert one.turns == [True, False]
        one.line.before = lambda: None
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert one.lease.is_leader(), "nobody has written since it did, so the Lease is still its own"
        assert one.turns == [True, False, True]

    async def test_who_comes_back_after_another_has_led_and_left_ends(self, timeline: Timeline, pair: Pair) -> None:
        """All that it remembers is old: pods that the other has made would be strangers to it."""
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(SECONDS * 2)
        assert two.lease.is_leader()
        await two.lease.release()
        one.line.before = lambda: None
        await timeline.run(SECONDS)
        assert isinstance(one.runtime.failure, LeaseLost)
        assert not one.lease.is_leader()
        assert one.turns == [True, False]

    async def test_to_end_so_is_said_and_is_no_error(
        self, timeline: Timeline, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whoever reads its log looks for nothing that is wrong."""
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(SECONDS * 2)
        one.line.before = lambda: None
        await timeline.run(SECONDS)
        assert isinstance(one.runtime.failure, LeaseLost)
        (said,) = (record for record in caplog.records if "the operator exits" in record.message)
        assert (said.levelname, said.exc_info) == ("WARNING", None)
        assert two.lease.is_leader()

    async def test_and_one_that_was_frozen_meanwhile(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.delay = lambda: 3 * SECONDS  # until then it does nothing, as far as anybody can see
        await timeline.run(SECONDS * 2)
        assert two.lease.is_leader()
        await two.lease.release()
        one.line.delay = lambda: 0.0
        await timeline.run(SECONDS * 3)
        assert isinstance(one.runtime.failure, LeaseLost)
        assert not one.lease.is_leader()

    async def test_nobody_waits_with_a_standby_while_another_lives(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        assert not two.lease.is_candidate
        one.kill()
        await timeline.run(SECONDS * leader_election.LEASE_DOUBT_SHARE + 1)
        assert two.lease.is_candidate

    async def test_be_it_that_nobody_knows_where(self, cluster: FakeCluster, timeline: Timeline, contend: Any) -> None:
        await unused(cluster)
        contend("without an address")
        two = contend("two")
        await timeline.run(5)
        assert (two.lease.leader_address, two.lease.is_candidate) == ("", False)

    async def test_who_is_followed_serves_no_more(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        for _ in range(40):
            await timeline.run(SECONDS / 20)
            assert not (one.lease.can_serve() and two.lease.can_serve())
        assert two.lease.can_serve()

    async def test_who_leaves_does_not(self, cluster: FakeCluster, timeline: Timeline, contend: Any) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        await one.lease.release()
        assert not one.lease.can_serve()
        assert one.turns == [True, False]


class TestKeeping:
    @pytest.mark.parametrize(
        "error",
        [ObjectRejected("denied the request"), kopf.PermanentError("gone"), kopf.TemporaryError("503")],
        ids=["a webhook denies", "another permanent error", "no answer"],
    )
    async def test_who_cannot_renew_stops_before_it_expires_and_goes_on_when_it_can(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, error: Exception
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.before = lambda: error
        await timeline.run(SECONDS - 1)
        assert not one.lease.is_leader()
        with pytest.raises(NotLeading):
            one.lease.require_leadership()
        assert not one.runtime.failed.is_set(), "it waits"
        one.line.before = lambda: None
        await timeline.run(SECONDS / 2)
        assert one.lease.is_leader()

    async def test_an_api_server_that_hangs_is_as_good_as_none(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.delay = lambda: 1000.0
        await timeline.run(SECONDS - 1)
        assert not one.lease.is_leader()

    async def test_who_is_followed_meanwhile_ends(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(2 * SECONDS)
        assert two.lease.is_leader()
        one.line.before = lambda: None
        await timeline.run(SECONDS)
        assert isinstance(one.runtime.failure, LeaseLost)
        assert two.lease.is_leader()

    async def test_a_lease_that_another_writes_by_hand_ends_the_holder(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(5)
        await edit(cluster, holderIdentity="somebody")
        await timeline.run(SECONDS / 2)
        assert not one.lease.is_leader()
        assert isinstance(one.runtime.failure, LeaseLost)
        assert "is now held by somebody" in str(one.runtime.failure)

    @pytest.mark.parametrize("how", ["deleted", "emptied"])
    async def test_a_lease_that_somebody_deletes_or_empties_stays_the_holders(
        self, cluster: FakeCluster, timeline: Timeline, how: str, pair: Pair
    ) -> None:
        one, two = pair
        await timeline.run(5)
        if how == "deleted":
            del cluster.objects["leases", "system", LEASE_NAME]
        else:
            await edit(cluster, holderIdentity="")
        for _ in range(30):
            await timeline.run(1)
            assert not two.lease.is_leader()
        assert one.lease.is_leader()

    async def test_nobody_acts_because_somebody_wrote_its_name(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        one = contend("one")
        await timeline.run(1)
        two = contend("two")  # which looks at other moments
        await timeline.run(3.5)
        await edit(cluster, holderIdentity="two")
        for _ in range(20):
            await timeline.run(0.1)
            assert not (one.lease.is_leader() and two.lease.is_leader())
        await timeline.run(2 * SECONDS)
        assert two.lease.is_leader()
        assert not one.lease.is_leader()

    async def test_a_duration_written_by_hand_is_not_waited_out_for_ever(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await unused(cluster)
        await edit(cluster, holderIdentity="somebody", leaseDurationSeconds=10**9)
        one = contend("one")
        await timeline.run(leader_election.MAX_LEASE_SECONDS + SECONDS)
        assert one.lease.is_leader()


@dataclass
class Weather:
    """What may go wrong, drawn anew for each call."""

    dice: random.Random
    calm: bool = False

    def trouble(self) -> Exception | None:
        errors = [ObjectRejected("denied"), kopf.TemporaryError("no answer"), kopf.PermanentError("no such thing")]
        return None if self.calm or self.dice.random() > 0.1 else self.dice.choice(errors)

    def delay(self) -> float:
        return 0.0 if self.calm else self.dice.choice([0.0] * 12 + [0.1, 1.0, 4.0, 12.0])


@pytest.mark.parametrize("seed", range(30))
async def test_there_are_never_two(cluster: FakeCluster, timeline: Timeline, contend: Any, seed: int) -> None:
    """Calls fail before or after they are carried out, hang, or land late; people edit; processes die and come back."""
    await unused(cluster)
    weather = Weather(random.Random(seed))
    names = iter(f"pod-{number}" for number in range(1000))

    def arrive() -> Contender:
        contender: Contender = contend(next(names), weather.dice.choice([-HOUR, 0.0, HOUR]))
        contender.line.before = contender.line.after = weather.trouble
        contender.line.delay = weather.delay
        return contender

    running = [arrive(), arrive()]
    acted = False
    for _ in range(300):
        await timeline.run(0.5)
        acting = [contender.identity for contender in running if contender.lease.is_leader()]
        assert len(acting) < 2
        acted = acted or bool(acting)
        await _meddle(cluster, weather.dice)
        running = [c if _lives(c, weather.dice) else arrive() for c in running]
    weather.calm = True
    running = [arrive() if contender.runtime.failed.is_set() else contender for contender in running]
    await timeline.run(4 * SECONDS)
    running = [arrive() if contender.runtime.failed.is_set() else contender for contender in running]
    await timeline.run(4 * SECONDS)
    assert len([c for c in running if c.lease.is_leader()]) == 1
    assert acted


def _lives(contender: Contender, dice: random.Random) -> bool:
    """A process that has died acts no more; its successor has a name of its own."""
    if not contender.runtime.failed.is_set() and dice.random() < 0.99:
        return True
    contender.kill()
    return False


async def _meddle(cluster: FakeCluster, dice: random.Random) -> None:
    if ("leases", "system", LEASE_NAME) not in cluster.objects or dice.random() < 0.98:
        return
    what = dice.choice(["delete", "empty", "another", "time"])
    if what == "delete":
        del cluster.objects["leases", "system", LEASE_NAME]
    elif what == "empty":
        await edit(cluster, holderIdentity="", renewTime="2001-01-01T00:00:00.000000Z")
    elif what == "another":
        await edit(cluster, holderIdentity="somebody")
    else:
        await edit(cluster, renewTime="2099-01-01T00:00:00.000000Z")


class TestWriting:
    """By the real client, whose connection notes what is sent."""

    @pytest.fixture
    def sent(self) -> list[str]:
        return []

    @pytest.fixture
    def client(self, sent: list[str]) -> Cluster:
        class Line:
            async def request(self, method: str, path: str, *_: object) -> ApiResponse:
                sent.append(f"{method} {path}")
                return ApiResponse(200, {})

        return Cluster(cast(Any, Line()))

    async def test_who_does_not_lead_sends_nothing_that_changes_the_cluster(
        self, client: Cluster, timeline: Timeline, sent: list[str]
    ) -> None:
        client.before_write = LeaderElector(client, SETTINGS, VirtualRuntime(timeline)).require_leadership
        body = {"metadata": {"name": "x", "namespace": "ns"}}
        writes = [
            client.create(PODS, body),
            client.replace(PODS, body),
            client.patch(PODS, "x", {}, "ns"),
            client.apply(PODS, body, manager="m"),
            client.delete(PODS, "x", "ns"),
        ]
        for write in writes:
            with pytest.raises(NotLeading):
                await write
        assert sent == []

    async def test_it_reads_asks_whose_token_it_is_and_takes_the_lease(
        self, client: Cluster, timeline: Timeline, sent: list[str]
    ) -> None:
        client.before_write = LeaderElector(client, SETTINGS, VirtualRuntime(timeline)).require_leadership
        await client.get(PODS, "x", "ns")
        await client.create(TOKEN_REVIEWS, {"metadata": {}})
        await client.replace(LEASES, {"metadata": {"name": LEASE_NAME, "namespace": "system"}})
        assert len(sent) == 3


async def test_an_unknown_error_ends_the_process(cluster: FakeCluster, timeline: Timeline, contend: Any) -> None:
    await unused(cluster)
    one = contend("one")
    await timeline.run(1)
    one.line.before = lambda: RuntimeError("a defect")
    await timeline.run(SECONDS)
    assert one.runtime.failed.is_set()
    assert not one.lease.is_leader()
