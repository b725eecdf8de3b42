"""How plan and state are written: compactly, and without losing content of other versions of the operator."""

from __future__ import annotations

import json
import random
from bisect import bisect
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Hop, Member, Paths, Plan, PlannedPath
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.network.paths import MAX_PATHS_PER_JOB
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import (
    MAX_CURRENT_INCIDENTS,
    MAX_SETTLED_FAULTS,
    DesiredState,
    GpuReadings,
    Incident,
    PastIncident,
    Placement,
    QuarantineRequest,
    State,
    WorkerRecord,
)
from testing.operators.observations import NOW, build_job, build_policy, build_stalls, build_training

ETCD_BYTES = 1.5 * 2**20
LONG = "-117.us-west-2.compute.internal.example"


def encode_as_json(desired: DesiredState, **named: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(state_codec.encode_state(desired, "j", **named)))
    return content


def test_a_state_that_is_written_is_read_unchanged() -> None:
    observation = build_training()
    observation = observation.with_desired(
        observation.desired.with_gpus(values={"node-1/0/DCGM_FI_DEV_XID_ERRORS": 31.0})
    )
    desired = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()).desired
    assert desired.state.incidents.current
    assert state_codec.decode_state(encode_as_json(desired), "j") == state_codec.StoredState(desired)


def test_replaced_and_leaving_workers_are_read_unchanged() -> None:
    workers = (
        WorkerRecord("j-w3-7", 3, 7, "uid-a", "node-a", leaving="its pod is gone", dead=True, force=True),
        WorkerRecord("j-w0-0", 0, 0),
        WorkerRecord("j-w1-2", 1, 2, "uid-b"),
    )
    plan = Plan(members=(Member("j-w9-4", "10.0.0.1", (1, 0)), Member("j-w1-2", "10.0.0.2", (2,))))
    placement = Placement(workers=workers, incarnations={"0": 0, "1": 2, "3": 7, "10": 1})
    gpus = GpuReadings(nodes=("elsewhere", "node-a"))
    desired = DesiredState(plan, State(placement=placement, gpus=gpus))
    assert state_codec.decode_state(encode_as_json(desired), "j").desired == desired


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([7, 7], "7*2"), ([7, 8], "7-8"), ([7, 7, 8, 9, 3], "7*2,8-9,3")]
)
def test_runs_are_written_compactly(numbers: list[int], text: str) -> None:
    assert state_codec.write_runs(numbers) == text


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_read_as_the_same_numbers(seed: int) -> None:
    rng = random.Random(seed)
    numbers: list[int] = []
    for _ in range(rng.randint(0, 12)):
        start, length = rng.randint(0, 30), rng.randint(1, 6)
        numbers += rng.choice([list(range(start, start + length)), [start] * length])
    assert state_codec.read_runs(state_codec.write_runs(numbers)) == numbers


def test_ten_thousand_workers_with_long_names_fit_into_etcd() -> None:
    name = "j" * 40
    workers = tuple(
        WorkerRecord(
            f"{name}-w{n}-{n % 3}", n, n % 3, f"{n:08x}-1111-4222-8333-{n:012x}", f"ip-10-{n % 250}-{n // 250}-117.node"
        )
        for n in range(10_000)
    )
    workers = tuple(replace(w, node=f"{w.node}.us-west-2.compute.internal"[-50:]) for w in workers)
    members = tuple(
        Member(worker.name, f"10.100.{n // 250}.{n % 250}", tuple(range(8 * n, 8 * n + 8)))
        for n, worker in enumerate(workers)
    )
    past = tuple(
        PastIncident(IncidentCause.CRASH, NOW, 3.0, 7, workers[n].name, workers[n].node, IncidentClass.UNKNOWN)
        for n in range(100)
    )
    state = State(
        placement=Placement(workers=workers, incarnations={str(n): n % 3 for n in range(10_000)}),
        gpus=GpuReadings(nodes=tuple(sorted({worker.node for worker in workers}))),
    )
    jumps = [(8 * n, (8 * n + 24_007) % 80_000) for n in range(MAX_PATHS_PER_JOB // 2)]
    planned = tuple(PlannedPath(*pair, f"s{n % 999}") for n, pair in enumerate([*jumps, *((b, a) for a, b in jumps)]))
    hops = tuple(Hop(f"10.98.{n // 250}.{n % 250}", f"s{n % 999}") for n in range(4096))
    desired = DesiredState(Plan(version=10**9, members=members, paths=Paths(planned, hops)), state)
    desired = desired.with_incidents(
        past=past, settled_faults=tuple(f"{workers[n].name}-rank-{n}-round-7" for n in range(500))
    )
    content = state_codec.encode_state(desired, name)
    assert state_codec.compute_stored_bytes(content) < 0.9 * ETCD_BYTES
    assert state_codec.decode_state(json.loads(json.dumps(content)), name).desired == desired


@pytest.mark.parametrize(
    "paths",
    [
        Paths((), ()),
        Paths(
            (PlannedPath(1, 0, "s1", live_spines_fingerprint=7), PlannedPath(0, 1, "s2")),
            (Hop("10.0.0.1", "s1"), Hop("10.0.0.2", "s2")),
        ),
        Paths((PlannedPath(1, 0, "", 3), PlannedPath(0, 1, "", 0)), (), 20000, 20511),
    ],
)
def test_paths_are_written_in_columns_and_read_unchanged(paths: Paths) -> None:
    desired = build_training(2, 0).desired.with_plan(paths=paths)
    content = json.loads(json.dumps(state_codec.encode_state(desired, "j")))
    assert state_codec.decode_state(content, "j").desired == desired
    assert isinstance(content["plan"]["paths"]["wanted"], dict)


class TestOtherVersions:
    """An older operator ignores what a newer one has written, and does not lose it, so that a rollback is possible."""

    def build_newer_content(self) -> dict[str, Any]:
        content = encode_as_json(build_training().desired)
        content["schemaVersion"] = 1
        content["shards"] = 2
        content["plan"]["novel"] = {"x": 1}
        content["state"]["future"] = {"a": [1, 2]}
        content["state"]["lifecycle"]["moon"] = "full"
        content["state"]["incidents"]["past"] = [
            {"cause": "sunspots", "at": 1.0, "seconds": 2.0},
            {"cause": "crash", "at": 1.0, "seconds": 2.0, "class": "Unknown"},
        ]
        content["state"]["adaptation"]["fruitlessInvestigation"] = {"shape": "unknown here"}
        return content

    def test_unknown_content_is_ignored(self) -> None:
        desired = state_codec.decode_state(self.build_newer_content(), "j").desired
        assert desired.plan == build_training().plan
        assert [past.cause for past in desired.state.incidents.past] == [IncidentCause.CRASH]
        assert desired.state.adaptation.fruitless_investigation is None

    def test_unknown_content_is_written_back_with_changes(self) -> None:
        stored = state_codec.decode_state(self.build_newer_content(), "j")
        changed = stored.desired.with_lifecycle(completed_at=NOW)
        content = encode_as_json(changed, unknown=stored.unknown)
        assert content["shards"] == 2
        assert content["plan"]["novel"] == {"x": 1}
        assert content["state"]["future"] == {"a": [1, 2]}
        assert content["state"]["lifecycle"] | {"moon": "full", "completedAt": NOW} == content["state"]["lifecycle"]
        assert {item["cause"] for item in content["state"]["incidents"]["past"]} == {"sunspots", "crash"}
        assert content["state"]["adaptation"]["fruitlessInvestigation"] == {"shape": "unknown here"}

    def test_unknown_content_of_another_shape_gives_way_to_known_content(self) -> None:
        """A field that has become an object, a list, or a string."""
        shapes: list[Any] = [{"x": 1}, [1], "x"]
        for known in shapes:
            for unknown in shapes:
                merged = state_codec._overlay_unknown({"field": unknown}, {"field": known})
                joined = {"x": 1} if isinstance(known, dict) else [1, 1] if isinstance(known, list) else "x"
                assert merged == {"field": joined if type(known) is type(unknown) else known}
                assert state_codec._collect_unknown({"field": unknown}, {"field": known}) == {}

    @pytest.mark.parametrize("path", [("plan",), ("state",), ("state", "placement"), ("plan", "members")])
    @pytest.mark.parametrize("invalid", [None, 7, "x", [], {}])
    def test_invalid_content_is_refused_with_the_remedy(self, path: tuple[str, ...], invalid: object) -> None:
        content = encode_as_json(build_training().desired)
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = invalid
        with pytest.raises(InputError, match=r"TrainingJobState j cannot be read .* delete it"):
            state_codec.decode_state(content, "j")


class TestBounds:
    """Where Incidents cannot be written for a long time, the state does not grow with them."""

    def build_incident(self, number: int, outcome: IncidentOutcome | None) -> Incident:
        name = f"j-r{number}-crash"
        evidence = ("x" * 4000,) * 4
        return Incident(
            name,
            IncidentCause.CRASH,
            IncidentClass.UNKNOWN,
            number,
            "",
            NOW,
            NOW,
            NOW,
            evidence=evidence,
            outcome=outcome,
        )

    def test_of_many_incidents_the_newest_keep_their_evidence_and_open_ones_stay(self) -> None:
        desired = build_training().desired.with_incident(self.build_incident(0, None))
        for number in range(1, 300):
            desired = desired.with_incident(self.build_incident(number, IncidentOutcome.FAILED))
        assert len(desired.state.incidents.current) == MAX_CURRENT_INCIDENTS
        assert desired.state.incidents.open
        assert desired.state.incidents.current[-1].evidence
        assert state_codec.compute_stored_bytes(state_codec.encode_state(desired, "j")) < 400_000

    def test_an_incident_that_blames_a_node_stays_until_its_quarantine_is_decided(self) -> None:
        recovered = self.build_incident(1, IncidentOutcome.RECOVERED)
        request = QuarantineRequest("node-1", "uid", "it does not answer", recovered.name, at=NOW)
        incidents = (
            build_training()
            .desired.with_incident(recovered)
            .with_incidents(quarantine_requests=(request,))
            .state.incidents
        )
        written = frozenset({recovered.name})
        assert incidents.sweep(written).find(recovered.name) == recovered
        assert replace(incidents, quarantine_requests=()).sweep(written).find(recovered.name) is None


class TestSettledFaults:
    """Names of faults that have been settled: thousands, when a job stalls."""

    @pytest.mark.parametrize("seed", range(10))
    def test_settled_faults_are_read_unchanged(self, seed: int) -> None:
        rng = random.Random(seed)
        strange = (
            "j-w01-0-a-b",
            "j-w1-00-a-b",
            "j-w1-0",
            "j-w1-0-a",
            "other-w1-0-a-b",
            "jj-w1-0-a-b",
            "",
            "j-w1-0-a -b",
        )
        names = [*strange, *(f"j-w{rng.randrange(9)}-{rng.randrange(3)}-{n:x}-r{n % 3}-stalled-1" for n in range(30))]
        rng.shuffle(names)
        desired = DesiredState(Plan()).with_incidents(settled_faults=tuple(names))
        assert state_codec.decode_state(encode_as_json(desired), "j").desired == desired

    @pytest.mark.parametrize(("workers", "remembered"), [(10, MAX_SETTLED_FAULTS), (5000, 10_000)])
    def test_all_faults_of_one_event_in_a_large_job_are_remembered(self, workers: int, remembered: int) -> None:
        placement = Placement(workers=tuple(WorkerRecord(f"j-w{n}-0", n, 0) for n in range(workers)))
        desired = DesiredState(Plan(), State(placement=placement))
        for event in range(3):
            desired = desired.settle_faults(tuple(f"{event}-{n}" for n in range(5000)))
        assert len(desired.state.incidents.settled_faults) == remembered
        assert desired.state.incidents.settled_faults[-1] == "2-4999"

    def test_settled_faults_of_an_older_operator_are_read(self) -> None:
        desired = DesiredState(Plan()).with_incidents(settled_faults=("j-w0-0-0-r1-stalled-1", "gone"))
        content = encode_as_json(desired)
        content["state"]["incidents"]["settledFaults"] = list(desired.state.incidents.settled_faults)
        stored = state_codec.decode_state(content, "j")
        assert stored == state_codec.StoredState(desired)

    def test_two_settled_faults_per_worker_take_little_space(self) -> None:
        name = "j" * 40
        names = tuple(f"{name}-w{n}-{n % 3}-19a{n:08x}-r7-stalled-{k}" for k in range(2) for n in range(10_000))
        desired = DesiredState(Plan()).with_incidents(settled_faults=names)
        assert state_codec.compute_stored_bytes(state_codec.encode_state(desired, name)) < 0.25 * ETCD_BYTES


class TestQuarantines:
    def test_quarantine_requests_of_thousands_of_nodes_take_little_space(self) -> None:
        def build_desired(count: int) -> DesiredState:
            reason = "neither its workers nor its kubelet answer"
            requests = (
                QuarantineRequest(f"node-{n}", f"{n:036}", reason, f"i-{n % 2}", at=NOW, weak=n == 7)
                for n in range(count)
            )
            return DesiredState(Plan()).with_incidents(quarantine_requests=tuple(requests))

        for count in (0, 1, state_codec.MAX_LISTED_QUARANTINES, state_codec.MAX_LISTED_QUARANTINES + 1, 5000):
            assert state_codec.decode_state(encode_as_json(build_desired(count)), "j") == state_codec.StoredState(
                build_desired(count)
            )
        few, many = (
            state_codec.compute_stored_bytes(state_codec.encode_state(build_desired(count), "j"))
            for count in (1000, 5000)
        )
        assert (many - few) / 4000 < 65, "bytes of one request"


class TestSizeLimit:
    """A job whose state etcd would not accept is refused before any of its pods is created."""

    @pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (5000, 8), (6000, 4)])
    def test_large_jobs_are_accepted(self, replicas: int, ranks: int) -> None:
        assert state_codec.explain_state_size_limit(build_job(replicas, 8, nproc_per_node=ranks)) == ""

    def test_a_job_that_does_not_fit_is_refused_with_a_size_that_fits(self) -> None:
        too_large = state_codec.explain_state_size_limit(build_job(30_000, 0, nproc_per_node=8))
        most = int(too_large.partition("request ")[2].split()[0])
        assert too_large.startswith("spec.replicas: 30000 workers of 8 ranks would need ")
        assert 5_000 < most < 10_000
        assert state_codec.explain_state_size_limit(build_job(most, 0, nproc_per_node=8)) == ""

    @pytest.mark.parametrize(
        ("replicas", "spares", "ranks"),
        [
            *(
                (1, 0, 1),
                (1, 0, 128),
                (9, 0, 1),
                (9, 1, 8),
                (10, 0, 9),
                (10, 1, 10),
                (11, 0, 3),
                (12, 0, 2),
                (1, 100, 1),
            ),
            *(
                (99, 0, 1),
                (100, 0, 99),
                (100, 1, 100),
                (101, 0, 2),
                (256, 0, 1),
                (257, 3, 4),
                (999, 1, 2),
                (1000, 1, 2),
            ),
            *((2600, 0, 10), (6400, 17, 8), (10_000, 1, 2), (1200, 1000, 128)),
        ],
    )
    def test_the_computed_size_is_the_written_size(self, replicas: int, spares: int, ranks: int) -> None:
        workers = replicas + spares
        full = state_codec.encode_state(state_codec._build_full_state(replicas, workers, ranks), "j")
        assert state_codec._compute_full_bytes(replicas, workers, ranks) == state_codec.compute_stored_bytes(full)

    def test_the_limit_is_by_the_written_size(self) -> None:
        sizes = range(5_000, 10_000)
        most = sizes[
            bisect(
                sizes,
                False,
                key=lambda n: bool(state_codec.explain_state_size_limit(build_job(n, 8, nproc_per_node=8))),
            )
            - 1
        ]
        fits, too_large = (
            state_codec.compute_stored_bytes(state_codec.encode_state(state_codec._build_full_state(n, n + 8, 8), "j"))
            for n in (most, most + 1)
        )
        assert fits <= state_codec.MAX_STATE_BYTES < too_large

    def test_a_huge_job_is_measured_as_fast_as_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built, full = 0, state_codec._build_full_state

        def count_workers_and_ranks(replicas: int, workers: int, each: int) -> DesiredState:
            nonlocal built
            built += workers + replicas * each
            return full(replicas, workers, each)

        state_codec._measure_sample.cache_clear()
        monkeypatch.setattr(state_codec, "_build_full_state", count_workers_and_ranks)
        assert state_codec.explain_state_size_limit(build_job(10_000, 1000, nproc_per_node=128)).startswith(
            "spec.replicas: 11000 workers of 128 "
        )
        assert 0 < built < 200, "workers and ranks"
        state_codec.explain_state_size_limit(build_job(9_999, 999, nproc_per_node=127))
        assert built < 200, "for all of them together"


@pytest.mark.parametrize(
    "runs", ["0-99999999999", "0-9999999999999999999999", "7*99999999999", ",".join(["0-999999"] * 5)]
)
def test_runs_of_more_numbers_than_any_job_has_are_refused(runs: str) -> None:
    with pytest.raises(ValueError, match="numbers"):
        state_codec.read_runs(runs)
