"""One of several operators leads, despite faults of clocks, API server, and users. Time is virtual."""

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
FailureSource = Callable[[], Exception | None]


class Link(FakeCluster):
    """The connection of one operator to the shared API server."""

    def __init__(self, shared: FakeCluster, runtime: VirtualRuntime) -> None:
        self.shared = shared
        self.runtime = runtime
        self.before: FailureSource = lambda: None  # the error of calls that do not arrive
        self.after: FailureSource = lambda: None  # the error of answers that do not arrive
        self.delay: Callable[[], float] = lambda: 0.0

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        return await self._call_with_faults(lambda: self.shared.get(kind, name, namespace))

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        return await self._call_with_faults(lambda: self.shared.create(kind, body, dry_run=dry_run))

    async def replace(self, kind: ResourceKind, body: Object) -> Object:
        return await self._call_with_faults(lambda: self.shared.replace(kind, body))

    async def _call_with_faults(self, call: Callable[[], Any]) -> Object:
        if error := self.before():
            raise error
        delivery = asyncio.ensure_future(self._deliver(call))
        delivery.add_done_callback(lambda done: done.cancelled() or done.exception())
        found: Object = await asyncio.shield(delivery)
        if error := self.after():
            raise error
        return found

    async def _deliver(self, call: Callable[[], Any]) -> Any:
        """Deliver a call even if its sender has given up."""
        await self._pause()
        answer = await call()
        await self._pause()
        return answer

    async def _pause(self) -> None:
        if seconds := self.delay():
            await self.runtime.sleep(seconds)


@dataclass
class Contender:
    """An operator process that takes part in leader election."""

    identity: str
    shared: FakeCluster
    timeline: Timeline
    clock_off: float = 0.0
    serving_changes: list[bool] = field(default_factory=list)
    """The changes of whether it serves sidecars."""

    def __post_init__(self) -> None:
        self.runtime = VirtualRuntime(self.timeline, self.clock_off)
        self.line = Link(self.shared, self.runtime)
        settings = replace(SETTINGS, identity=self.identity, pod_ip=ADDRESSES.get(self.identity, ""))
        self.lease = LeaderElector(self.line, settings, self.runtime)
        self.lease.on_serving_changed = self.serving_changes.append

    def start(self) -> Contender:
        self.lease.start()
        return self

    def kill(self) -> None:
        task = self.lease._task
        assert task is not None
        task.cancel()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


Pair = tuple[Contender, Contender]


@pytest.fixture
def contend(cluster: FakeCluster, timeline: Timeline) -> Any:
    """Yield a function that starts contenders, and stop them with the test."""
    made: list[Contender] = []

    def start(identity: str, clock_off: float = 0.0) -> Contender:
        made.append(Contender(identity, cluster, timeline, clock_off).start())
        return made[-1]

    yield start
    for contender in made:
        contender.kill()


async def edit_lease(cluster: Cluster, **spec: object) -> None:
    """Edit the Lease as a user would."""
    body = await cluster.get(LEASES, LEASE_NAME, "system")
    body["spec"] |= spec
    await cluster.replace(LEASES, body)


async def create_free_lease(cluster: FakeCluster) -> None:
    """Create a Lease that its last holder has released."""
    await cluster.create(LEASES, {"metadata": {"name": LEASE_NAME, "namespace": "system"}, "spec": {}})


@pytest.fixture
async def pair(cluster: FakeCluster, contend: Any) -> Pair:
    """Two contenders for a Lease without a holder."""
    await create_free_lease(cluster)
    return contend("one"), contend("two")


class TestAcquisition:
    async def test_a_released_lease_is_taken_at_once(self, cluster: Any, timeline: Any, contend: Any) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(0)
        assert one.lease.is_leader()

    async def test_a_missing_lease_is_created_after_a_wait(self, timeline: Timeline, contend: Any) -> None:
        one = contend("one")
        await timeline.run(SECONDS - 1)
        assert not one.lease.is_leader()
        await timeline.run(4)
        assert one.lease.is_leader()

    @pytest.mark.parametrize("off", [-HOUR, HOUR])
    async def test_a_clock_an_hour_off_does_not_take_the_lease_of_a_living_holder(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, off: float
    ) -> None:
        await create_free_lease(cluster)
        one, two = contend("one"), contend("two", off)
        for _ in range(60):
            await timeline.run(1)
            assert one.lease.is_leader()
            assert not two.lease.is_leader()

    @pytest.mark.parametrize("off", [-HOUR, HOUR])
    async def test_a_dead_holder_with_a_clock_an_hour_off_is_succeeded(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, off: float
    ) -> None:
        await create_free_lease(cluster)
        one, two = contend("one", off), contend("two")
        await timeline.run(5)
        one.kill()
        await timeline.run(1.5 * SECONDS)
        assert two.lease.is_leader()

    async def test_the_same_pod_leads_on_at_once_after_a_crash(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(1)
        one.kill()
        again = contend("one")
        await timeline.run(0)
        assert again.lease.is_leader()

    async def test_a_clean_exit_lets_the_next_operator_lead(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        runtime = VirtualRuntime(timeline)
        async with leader_election.run_leader_election(cluster, SETTINGS, runtime) as lease:
            await lease.elected.wait()
            assert lease.is_leader()
        assert not lease.is_leader()
        two = contend("two")
        await timeline.run(0)
        assert two.lease.is_leader()

    async def test_a_released_lease_is_taken_within_one_poll(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(20)
        await one.lease.release()
        assert not one.lease.is_leader()
        await timeline.run(SECONDS * leader_election.LEASE_POLL_SHARE)
        assert two.lease.is_leader()

    async def test_a_lease_that_was_not_renewed_in_time_can_still_be_released(
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

    async def test_an_operator_does_not_release_the_lease_of_another(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(2 * SECONDS)
        one.line.before = lambda: None
        await one.lease.release()
        await timeline.run(SECONDS / 2)
        assert two.lease.is_leader()

    async def test_a_dead_holder_is_succeeded_once_its_lease_expires(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(20)
        one.kill()
        await timeline.run(SECONDS * (1 - leader_election.LEASE_RETRY_PERIOD_SHARE) - 0.1)
        assert not two.lease.is_leader()
        await timeline.run(
            SECONDS * (leader_election.LEASE_RETRY_PERIOD_SHARE + leader_election.LEASE_POLL_SHARE) + 0.2
        )
        assert two.lease.is_leader(), (
            "it has polled shortly after the last renewal, and waits no longer than the lease duration"
        )

    @pytest.mark.parametrize("released", [False, True])
    async def test_a_standby_has_the_address_of_the_leader_while_it_leads(
        self, timeline: Timeline, contend: Any, released: bool, pair: Pair
    ) -> None:
        one, two = pair
        assert two.lease.leader_address == ""
        await timeline.run(20)
        assert two.lease.leader_address == "192.0.2.1:8443"
        assert one.lease.leader_address == "", "itself"
        if released:
            await one.lease.release()
            await timeline.run(SECONDS * leader_election.LEASE_POLL_SHARE)
        else:
            one.kill()
            await timeline.run(SECONDS * leader_election.LEASE_DOUBT_SHARE + 1)
        assert two.lease.leader_address == "", "the leader is lost"
        await timeline.run(SECONDS)
        three = contend("three")
        await timeline.run(0.1)
        assert three.lease.leader_address == "", "no renewal has been observed"
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert three.lease.leader_address == "[fd00::2]:8443"


class TestServing:
    """Sidecars are served until another may lead."""

    async def test_serving_continues_through_a_short_outage_of_the_api_server(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("away")
        await timeline.run(SECONDS * 0.7)
        assert not one.lease.is_leader()
        assert one.lease.can_serve()
        one.line.before = lambda: None
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert one.lease.is_leader()
        assert one.serving_changes == [True]

    async def test_serving_stops_in_a_long_outage_and_resumes_after_it(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("away")
        await timeline.run(SECONDS * 5)
        assert not one.lease.can_serve()
        assert one.serving_changes == [True, False]
        one.line.before = lambda: None
        await timeline.run(SECONDS * leader_election.LEASE_RETRY_PERIOD_SHARE)
        assert one.lease.is_leader(), "no other has written the Lease since, so it is still its own"
        assert one.serving_changes == [True, False, True]

    async def test_an_operator_that_returns_after_another_led_exits(self, timeline: Timeline, pair: Pair) -> None:
        """All that it has cached is out of date: it does not know the pods that the other created."""
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
        assert one.serving_changes == [True, False]

    async def test_the_exit_after_a_lost_lease_is_logged_as_a_warning(
        self, timeline: Timeline, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log must not suggest a defect."""
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(SECONDS * 2)
        one.line.before = lambda: None
        await timeline.run(SECONDS)
        assert isinstance(one.runtime.failure, LeaseLost)
        (logged,) = (record for record in caplog.records if "the operator exits" in record.message)
        assert (logged.levelname, logged.exc_info) == ("WARNING", None)
        assert two.lease.is_leader()

    async def test_a_suspended_operator_exits_after_another_led(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.delay = lambda: 3 * SECONDS  # until then it has no effect on others
        await timeline.run(SECONDS * 2)
        assert two.lease.is_leader()
        await two.lease.release()
        one.line.delay = lambda: 0.0
        await timeline.run(SECONDS * 3)
        assert isinstance(one.runtime.failure, LeaseLost)
        assert not one.lease.is_leader()

    async def test_a_standby_is_a_candidate_only_without_a_leader(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        assert not two.lease.is_candidate
        one.kill()
        await timeline.run(SECONDS * leader_election.LEASE_DOUBT_SHARE + 1)
        assert two.lease.is_candidate

    async def test_a_standby_is_no_candidate_while_a_leader_without_address_lives(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        contend("without an address")
        two = contend("two")
        await timeline.run(5)
        assert (two.lease.leader_address, two.lease.is_candidate) == ("", False)

    async def test_a_succeeded_operator_stops_serving(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        for _ in range(40):
            await timeline.run(SECONDS / 20)
            assert not (one.lease.can_serve() and two.lease.can_serve())
        assert two.lease.can_serve()

    async def test_an_operator_that_released_its_lease_stops_serving(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(5)
        await one.lease.release()
        assert not one.lease.can_serve()
        assert one.serving_changes == [True, False]


class TestRenewal:
    @pytest.mark.parametrize(
        "error",
        [ObjectRejected("denied the request"), kopf.PermanentError("gone"), kopf.TemporaryError("503")],
        ids=["a webhook denies", "another permanent error", "no answer"],
    )
    async def test_a_leader_that_cannot_renew_stops_before_expiry_and_resumes_later(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any, error: Exception
    ) -> None:
        await create_free_lease(cluster)
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

    async def test_a_hanging_api_server_counts_as_an_outage(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(5)
        one.line.delay = lambda: 1000.0
        await timeline.run(SECONDS - 1)
        assert not one.lease.is_leader()

    async def test_a_leader_that_was_succeeded_exits(self, timeline: Timeline, pair: Pair) -> None:
        one, two = pair
        await timeline.run(5)
        one.line.before = lambda: kopf.TemporaryError("cut off")
        await timeline.run(2 * SECONDS)
        assert two.lease.is_leader()
        one.line.before = lambda: None
        await timeline.run(SECONDS)
        assert isinstance(one.runtime.failure, LeaseLost)
        assert two.lease.is_leader()

    async def test_a_lease_edited_by_hand_ends_its_holder(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(5)
        await edit_lease(cluster, holderIdentity="somebody")
        await timeline.run(SECONDS / 2)
        assert not one.lease.is_leader()
        assert isinstance(one.runtime.failure, LeaseLost)
        assert "is now held by somebody" in str(one.runtime.failure)

    @pytest.mark.parametrize("how", ["deleted", "emptied"])
    async def test_a_deleted_or_emptied_lease_stays_with_its_holder(
        self, cluster: FakeCluster, timeline: Timeline, how: str, pair: Pair
    ) -> None:
        one, two = pair
        await timeline.run(5)
        if how == "deleted":
            del cluster.objects["leases", "system", LEASE_NAME]
        else:
            await edit_lease(cluster, holderIdentity="")
        for _ in range(30):
            await timeline.run(1)
            assert not two.lease.is_leader()
        assert one.lease.is_leader()

    async def test_a_holder_name_written_by_hand_does_not_make_two_leaders(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        one = contend("one")
        await timeline.run(1)
        two = contend("two")  # which polls at other moments
        await timeline.run(3.5)
        await edit_lease(cluster, holderIdentity="two")
        for _ in range(20):
            await timeline.run(0.1)
            assert not (one.lease.is_leader() and two.lease.is_leader())
        await timeline.run(2 * SECONDS)
        assert two.lease.is_leader()
        assert not one.lease.is_leader()

    async def test_a_lease_duration_written_by_hand_is_limited(
        self, cluster: FakeCluster, timeline: Timeline, contend: Any
    ) -> None:
        await create_free_lease(cluster)
        await edit_lease(cluster, holderIdentity="somebody", leaseDurationSeconds=10**9)
        one = contend("one")
        await timeline.run(leader_election.MAX_LEASE_SECONDS + SECONDS)
        assert one.lease.is_leader()


@dataclass
class FaultInjection:
    """Faults, drawn again for each call."""

    rng: random.Random
    disabled: bool = False

    def pick_error(self) -> Exception | None:
        errors = [ObjectRejected("denied"), kopf.TemporaryError("no answer"), kopf.PermanentError("no such thing")]
        return None if self.disabled or self.rng.random() > 0.1 else self.rng.choice(errors)

    def delay(self) -> float:
        return 0.0 if self.disabled else self.rng.choice([0.0] * 12 + [0.1, 1.0, 4.0, 12.0])


@pytest.mark.parametrize("seed", range(30))
async def test_there_are_never_two_leaders(cluster: FakeCluster, timeline: Timeline, contend: Any, seed: int) -> None:
    """Calls fail before or after they take effect, hang, or arrive late. Users edit, and processes die and restart."""
    await create_free_lease(cluster)
    injection = FaultInjection(random.Random(seed))
    names = iter(f"pod-{number}" for number in range(1000))

    def start_contender() -> Contender:
        contender: Contender = contend(next(names), injection.rng.choice([-HOUR, 0.0, HOUR]))
        contender.line.before = contender.line.after = injection.pick_error
        contender.line.delay = injection.delay
        return contender

    running = [start_contender(), start_contender()]
    has_led = False
    for _ in range(300):
        await timeline.run(0.5)
        leaders = [contender.identity for contender in running if contender.lease.is_leader()]
        assert len(leaders) < 2
        has_led = has_led or bool(leaders)
        await _edit_lease_at_random(cluster, injection.rng)
        running = [c if _keeps_running(c, injection.rng) else start_contender() for c in running]
    injection.disabled = True
    running = [start_contender() if contender.runtime.failed.is_set() else contender for contender in running]
    await timeline.run(4 * SECONDS)
    running = [start_contender() if contender.runtime.failed.is_set() else contender for contender in running]
    await timeline.run(4 * SECONDS)
    assert len([c for c in running if c.lease.is_leader()]) == 1
    assert has_led


def _keeps_running(contender: Contender, rng: random.Random) -> bool:
    """Return whether a process goes on; the successor of a dead one has a new name."""
    if not contender.runtime.failed.is_set() and rng.random() < 0.99:
        return True
    contender.kill()
    return False


async def _edit_lease_at_random(cluster: FakeCluster, rng: random.Random) -> None:
    if ("leases", "system", LEASE_NAME) not in cluster.objects or rng.random() < 0.98:
        return
    what = rng.choice(["delete", "empty", "another", "time"])
    if what == "delete":
        del cluster.objects["leases", "system", LEASE_NAME]
    elif what == "empty":
        await edit_lease(cluster, holderIdentity="", renewTime="2001-01-01T00:00:00.000000Z")
    elif what == "another":
        await edit_lease(cluster, holderIdentity="somebody")
    else:
        await edit_lease(cluster, renewTime="2099-01-01T00:00:00.000000Z")


class TestWriteGuard:
    """Writes by the real client, whose connection records what is sent."""

    @pytest.fixture
    def sent(self) -> list[str]:
        return []

    @pytest.fixture
    def client(self, sent: list[str]) -> Cluster:
        class Link:
            async def request(self, method: str, path: str, *_: object) -> ApiResponse:
                sent.append(f"{method} {path}")
                return ApiResponse(200, {})

        return Cluster(cast(Any, Link()))

    async def test_an_operator_that_does_not_lead_sends_no_writes(
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

    async def test_an_operator_that_does_not_lead_reads_reviews_tokens_and_takes_the_lease(
        self, client: Cluster, timeline: Timeline, sent: list[str]
    ) -> None:
        client.before_write = LeaderElector(client, SETTINGS, VirtualRuntime(timeline)).require_leadership
        await client.get(PODS, "x", "ns")
        await client.create(TOKEN_REVIEWS, {"metadata": {}})
        await client.replace(LEASES, {"metadata": {"name": LEASE_NAME, "namespace": "system"}})
        assert len(sent) == 3


async def test_an_unknown_error_ends_the_process(cluster: FakeCluster, timeline: Timeline, contend: Any) -> None:
    await create_free_lease(cluster)
    one = contend("one")
    await timeline.run(1)
    one.line.before = lambda: RuntimeError("a defect")
    await timeline.run(SECONDS)
    assert one.runtime.failed.is_set()
    assert not one.lease.is_leader()
