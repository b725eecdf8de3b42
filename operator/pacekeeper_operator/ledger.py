"""How plan and bookkeeping of a job are written: one object, `TrainingJobState`, so that one write changes both.

Workers stand in columns, with ranges in place of lists, so that 10,000 of them with long names stay below the 1.5 MiB
that etcd takes. What a newer operator has written and this one does not know is kept as it stands and written back:
a rollback loses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar, get_args

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Member, Plan

from .api import TrainingJob
from .codec import camel_case, from_json, list_field_hints, to_json
from .state import DesiredState, GpuReadings, Incidents, Placement, State, WorkerRecord

STATE_SCHEMA_VERSION = 1
"""Of what is written. It grows when an older operator would misread it; new fields alone are passed over."""
MAX_STATE_BYTES = int(1.1 * 2**20)
"""Of 1.5 MiB, which etcd takes: the rest is for incidents, their evidence, and what one event says of all workers."""
MAX_RUN_NUMBERS = 1 << 22
"""Of what is written in runs: a few characters make as many as they please."""
MAX_LISTED_QUARANTINES = 32
"""More nodes that one event has cost are written as a table."""
Json = dict[str, Any]
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class StoredState:
    """An object as it was read: what this operator makes of it, and what it does not know."""

    desired: DesiredState
    unknown: Mapping[str, Any] = field(default_factory=dict)


def encode_state(desired: DesiredState, job: str, unknown: Mapping[str, Any] | None = None) -> Json:
    """The object's fields beside its metadata. `job`: name of the job, which its workers' names begin with."""
    state = {
        camel_case(owner.name): to_json(getattr(desired.state, owner.name), {})
        for owner in fields(State)
        if owner.name not in ("placement", "gpus")
    }
    state["placement"] = _write_placement(desired.state.placement, job)
    incidents = state["incidents"]
    incidents["settled"] = _write_settled(desired.state.incidents.settled, job)
    if len(incidents["quarantines"]) > MAX_LISTED_QUARANTINES:
        incidents["quarantines"] = _write_table(incidents["quarantines"])
    state["gpus"] = {
        "nodes": _write_indexed(desired.state.gpus.nodes, [worker.node for worker in desired.state.placement.workers]),
        "values": [[key, value] for key, value in desired.state.gpus.values.items()],
    }
    content = {"schemaVersion": STATE_SCHEMA_VERSION, "plan": _write_plan(desired.plan, job), "state": state}
    return _overlay_unknown(unknown or {}, content)


def decode_state(content: Mapping[str, Any], job: str) -> StoredState:
    """Raises InputError where this is no bookkeeping that can be gone on from."""
    try:
        plan = _read_plan(content["plan"], job)
        state, spoilt = _read_state(content["state"], job)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"the bookkeeping in TrainingJobState {job} cannot be read ({error!r}); delete it, and the job's workers "
            "are replaced under a new one"
        ) from error
    draft = DesiredState(plan, state)
    return StoredState(draft, _merge_unknown(_collect_unknown(content, encode_state(draft, job)), spoilt))


def compute_stored_bytes(content: Mapping[str, Any]) -> int:
    """Bytes as they are stored."""
    return len(json.dumps(content, separators=(",", ":")).encode())


def explain_state_size_limit(job: TrainingJob) -> str:
    """Why the bookkeeping of a job of this size could not be kept, with the remedy; "": it can.

    Of the bookkeeping as it would be with all workers seated and one fault of each: before any pod is made.
    """
    spec = job.spec
    workers = spec.replicas + spec.spares
    takes = _compute_full_bytes(spec.replicas, workers, spec.nproc_per_node)
    if takes <= MAX_STATE_BYTES:
        return ""
    most = int(workers * MAX_STATE_BYTES / takes) // 100 * 100
    return (
        f"spec.replicas: {workers} workers of {spec.nproc_per_node} ranks would need {takes / 2**20:.1f} MiB of "
        f"bookkeeping, and etcd takes {MAX_STATE_BYTES / 2**20:.1f} beside what incidents need; ask for {most} workers and "
        "spares at most, or for more ranks in each"
    )


def _compute_full_bytes(replicas: int, workers: int, each: int) -> int:
    """Bytes of what `_full` gives, exactly. A few workers are written, which show what one more takes:
    whoever asks for a million ranks has the operator work no longer than others."""
    of_workers = _extrapolate_size(lambda count: _measure_sample(1, count, 1), workers)
    of_members = _extrapolate_size(lambda count: _measure_sample(count, _SAMPLE_WORKERS, 1) - _count_address_bytes(count), replicas)
    of_a_rank = _measure_sample(1, 1, 2) - _measure_sample(1, 1, 1)
    further_ranks = of_a_rank * replicas * (each - 1) + len(str(each)) - 1
    return of_workers + of_members + _count_address_bytes(replicas) - _measure_sample(1, _SAMPLE_WORKERS, 1) + further_ranks


_SAMPLE_WORKERS = 11
"""The last of them, and how many they are, have two digits."""


def _extrapolate_size(size_of: Callable[[int], int], count: int) -> int:
    """`size_of(count)`, by what it is of few. One more takes always the same, and of each column of runs its count
    ("0*10") or its last number ("0-10") may take a digit more."""
    if count <= _SAMPLE_WORKERS:
        return size_of(count)
    eight, nine, ten, eleven = map(size_of, range(_SAMPLE_WORKERS - 3, _SAMPLE_WORKERS + 1))
    one = nine - eight
    counts, lasts = ten - nine - one, eleven - ten - one
    return nine + one * (count - 9) + counts * (len(str(count)) - 1) + lasts * (len(str(count - 1)) - 1)


@cache
def _measure_sample(replicas: int, workers: int, each: int) -> int:
    return compute_stored_bytes(encode_state(_build_full_state(replicas, workers, each), "j"))


def _build_full_state(replicas: int, workers: int, each: int) -> DesiredState:
    """With names as long as clouds make them. The job's own is in none that is written."""
    names = [f"j-w{n}-0" for n in range(workers)]
    ranks = [tuple(range(n * each, (n + 1) * each)) for n in range(replicas)]
    seats = zip(names, ranks, strict=False)
    members = tuple(Member(name, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", own) for n, (name, own) in enumerate(seats))
    made = tuple(WorkerRecord(name, n, 0, f"{n:036}", f"ip-{n:044}") for n, name in enumerate(names))
    placement = Placement(made, {str(n): 0 for n in range(workers)})
    settled = tuple(f"{name}-19a{n:08x}-r1-stalled-1" for n, name in enumerate(names))
    plan = Plan(members=members, shares=tuple(100 + n % 2 for n in range(replicas * each)))
    return DesiredState(plan, State(placement=placement, incidents=Incidents(settled=settled)))


def _count_address_bytes(count: int) -> int:
    """Of so many addresses of `_full`, without what parts them: of 256 in a row only the last number differs."""
    blocks = ((f"10.{block >> 8}.{block & 255}.", min(256, count - 256 * block)) for block in range(-(-count // 256)))
    return sum(len(first) * here + _CUMULATIVE_DIGITS[here] for first, here in blocks)


_CUMULATIVE_DIGITS = tuple(accumulate((len(str(n)) for n in range(256)), initial=0))
"""Of the numbers below."""


def _write_plan(plan: Plan, job: str) -> Json:
    content = plan.to_json(leave_out=("members",))
    each = len(plan.members[0].ranks) if plan.members else 0
    in_order = [rank for member in plan.members for rank in member.ranks] == list(range(each * len(plan.members)))
    content["members"] = {
        **_write_names([member.worker for member in plan.members], job),
        "addresses": " ".join(member.address for member in plan.members),
        "ranks": each if in_order and each else [list(member.ranks) for member in plan.members],
        **_write_optional_columns(plan.members),
    }
    if plan.paths is not None:
        content["paths"] |= {"wanted": _write_columns(plan.paths.wanted), "hops": _write_columns(plan.paths.hops)}
    return content


def _write_optional_columns(members: Sequence[Member]) -> Json:
    """Fields of a member that most jobs leave as they are by default."""
    further = [f for f in fields(Member) if f.name not in ("worker", "address", "ranks")]
    columns = {f.name: [getattr(member, f.name) for member in members] for f in further}
    return {name: column for name, column in columns.items() if any(column)}


def _read_plan(content: Mapping[str, Any], job: str) -> Plan:
    columns = content["members"]
    names, addresses = _read_names(columns, job), columns["addresses"].split(" ")
    ranks = columns["ranks"]
    if isinstance(ranks, int):
        _check_count(ranks * len(names))
        ranks = [range(position * ranks, (position + 1) * ranks) for position in range(len(names))]
    known = [f.name for f in fields(Member) if f.name in columns and f.name not in ("worker", "address", "ranks")]
    members = [
        {"worker": name, "address": address, "ranks": list(mine), **{key: columns[key][i] for key in known}}
        for i, (name, address, mine) in enumerate(zip(names, addresses, ranks, strict=False))
    ]
    read = {**content, "members": members}
    if content.get("paths") is not None:
        columns = {name: _read_columns(content["paths"][name]) for name in ("wanted", "hops")}
        read["paths"] = {**content["paths"], **columns}
    return Plan.from_json(read)


def _write_columns(records: Sequence[Any]) -> Json:
    """Records of numbers and words without spaces, a column for each field: there may be thousands of them."""
    columns: Json = {"count": len(records)}
    for item in fields(records[0]) if records else ():
        values = [getattr(record, item.name) for record in records]
        columns[item.name] = write_runs(values) if isinstance(values[0], int) else {"words": " ".join(values)}
    return columns


def _read_columns(content: Mapping[str, Any]) -> list[Json]:
    """As of JSON, one for each record."""
    columns = {
        name: column["words"].split(" ") if isinstance(column, Mapping) else read_runs(column)
        for name, column in content.items()
        if name != "count"
    }
    _check_count(content["count"])
    return [{name: column[place] for name, column in columns.items()} for place in range(content["count"])]


def _write_placement(placement: Placement, job: str) -> Json:
    workers = placement.workers
    content = to_json(placement, {"workers": lambda _: None, "incarnations": lambda _: None})
    content["workers"] = {
        **_write_names([worker.name for worker in workers], job),
        "uids": " ".join(worker.uid for worker in workers),
        "nodes": " ".join(worker.node for worker in workers),
        # Of thousands at once, while a job starts.
        "startingSince": write_runs([int(worker.starting_since) for worker in workers]),
        "marks": {
            str(i): marks
            for i, worker in enumerate(workers)
            if (marks := {n: v for n in _WORKER_MARKS if (v := getattr(worker, n))})
        },
    }
    ordinals = sorted((int(ordinal), highest) for ordinal, highest in placement.incarnations.items())
    content["incarnations"] = {
        "ordinals": write_runs([ordinal for ordinal, _ in ordinals]),
        "highest": write_runs([highest for _, highest in ordinals]),
    }
    return content


_WORKER_MARKS = ("leaving", "dead", "force", "patient")


def _read_placement(content: Mapping[str, Any], job: str) -> tuple[Placement, Json]:
    columns = content["workers"]
    names = _read_names(columns, job)
    uids, nodes, marks = columns["uids"].split(" "), columns["nodes"].split(" "), columns.get("marks", {})
    starting = read_runs(columns.get("startingSince", "")) or [0] * len(names)
    workers = tuple(
        WorkerRecord(
            name,
            *_parse_worker_numbers(name, job),
            uid=uids[i],
            node=nodes[i],
            starting_since=float(starting[i]),
            **{key: value for key, value in marks.get(str(i), {}).items() if key in _WORKER_MARKS},
        )
        for i, name in enumerate(names)
    )
    highest = content["incarnations"]
    incarnations = dict(zip(map(str, read_runs(highest["ordinals"])), read_runs(highest["highest"]), strict=True))
    others = {key: value for key, value in content.items() if key not in ("workers", "incarnations")}
    placement, spoilt = _read_tolerantly(Placement, others)
    known = {f.name: getattr(placement, f.name) for f in fields(Placement)}
    return Placement(**{**known, "workers": workers, "incarnations": incarnations}), spoilt


def _read_state(content: Mapping[str, Any], job: str) -> tuple[State, Json]:
    owners: Json = {}
    spoilt: Json = {}
    for name, key, owner in list_field_hints(State):
        given = content.get(key, {})
        if name == "placement":
            owners["placement"], lost = _read_placement(given, job)
        elif name == "gpus":
            nodes = [worker.node for worker in owners["placement"].workers]
            owners["gpus"], lost = _read_gpus(given, nodes), {}
        elif name == "incidents":
            owners["incidents"], lost = _read_tolerantly(Incidents, _read_incidents(given, job))
        else:
            owners[name], lost = _read_tolerantly(owner, given)
        if lost:
            spoilt[key] = lost
    return State(**owners), {"state": spoilt} if spoilt else {}


def _read_gpus(content: Mapping[str, Any], nodes: Sequence[str]) -> GpuReadings:
    return GpuReadings(tuple(_read_indexed(content.get("nodes", {}), nodes)), dict(content.get("values", ())))


def _read_incidents(content: Mapping[str, Any], job: str) -> Json:
    """With lists in the place of columns."""
    read = dict(content)
    if "settled" in content:
        read["settled"] = _read_settled(content["settled"], job)
    if isinstance(content.get("quarantines"), Mapping):
        read["quarantines"] = _read_table(content["quarantines"])
    return read


def _write_table(records: Sequence[Json]) -> Json:
    """Records of which thousands may differ in little: of each field the distinct values, and whose they are."""
    table: Json = {"count": len(records)}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [json.dumps(record.get(name)) for record in records]
        place = {value: number for number, value in enumerate(dict.fromkeys(values))}
        table[name] = {"values": list(map(json.loads, place)), "of": write_runs([place[value] for value in values])}
    return table


def _read_table(content: Mapping[str, Any]) -> list[Json]:
    _check_count(content["count"])
    records: list[Json] = [{} for _ in range(content["count"])]
    for name, column in content.items():
        if name != "count":
            for record, place in zip(records, read_runs(column["of"]), strict=True):
                record[name] = column["values"][place]
    return records


def _write_settled(names: Sequence[str], job: str) -> Json:
    """Names of faults: of a worker, of its launcher's process, and what the fault was, which is the same for thousands
    when a job stalls; others as they are."""
    matches = (_FAULT_NAME_PATTERN.fullmatch(name, len(job)) if name.startswith(job) else None for name in names)
    ours = [(place, match) for place, match in enumerate(matches) if match is not None]
    kinds = list(dict.fromkeys(match["kind"] for _, match in ours))
    place_of = {kind: number for number, kind in enumerate(kinds)}
    known = {place for place, _ in ours}
    return {
        "places": write_runs([place for place, _ in ours]),
        "ordinals": write_runs([int(match["ordinal"]) for _, match in ours]),
        "incarnations": write_runs([int(match["incarnation"]) for _, match in ours]),
        "processes": " ".join(match["process"] for _, match in ours),
        "of": write_runs([place_of[match["kind"]] for _, match in ours]),
        "kinds": kinds,
        "others": [name for place, name in enumerate(names) if place not in known],
    }


_FAULT_NAME_PATTERN = re.compile(
    r"-w(?P<ordinal>0|[1-9]\d*)-(?P<incarnation>0|[1-9]\d*)-(?P<process>[^ -]+)-(?P<kind>.+)", re.DOTALL
)
"""Name of a fault after its job's. Numbers are written without leading zeros, so that they are read as they were."""


def _read_settled(content: Any, job: str) -> list[str]:
    """An operator before this form wrote the names."""
    if isinstance(content, list):
        return [name for name in content if isinstance(name, str)]
    columns = [read_runs(content[name]) for name in ("places", "ordinals", "incarnations", "of")]
    processes = content["processes"].split(" ") if content["processes"] else []
    kinds, others = content["kinds"], list(content["others"])
    for place, ordinal, incarnation, of, process in zip(*columns, processes, strict=True):
        others.insert(place, f"{job}-w{ordinal}-{incarnation}-{process}-{kinds[of]}")
    return others


_READ_ERRORS = (InputError, AttributeError, TypeError, ValueError)


def _read_tolerantly(cls: type[Owner], content: Mapping[str, Any]) -> tuple[Owner, Json]:
    """The record, and what of it cannot be read here: values of a newer operator, which are passed over."""
    with suppress(*_READ_ERRORS):
        return from_json(cls, content, cls.__name__, {}), {}
    known: Json = {}
    spoilt: Json = {}
    for _, key, hint in list_field_hints(cls):  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
        if key not in content:
            continue
        good, bad = _split_readable(cls, key, hint, content[key])
        if good is not None:
            known[key] = good
        if bad:
            spoilt[key] = bad
    return from_json(cls, known, cls.__name__, {}), spoilt


def _split_readable(cls: type[Any], key: str, hint: Any, value: Any) -> tuple[Any, Any]:
    """(what can be read, what cannot) of a field; of a list of records item by item."""
    items = get_args(hint)
    if isinstance(value, list) and items and is_dataclass(items[0]):
        good = [item for item in value if _is_readable(cls, key, [item])]
        return good, [item for item in value if item not in good]
    return (value, None) if _is_readable(cls, key, value) else (None, value)


def _is_readable(cls: type[Any], key: str, value: Any) -> bool:
    try:
        from_json(cls, {key: value}, key, {})
    except _READ_ERRORS:
        return False
    return True


def _write_names(names: Sequence[str], job: str) -> Json:
    numbers = [_parse_worker_numbers(name, job) for name in names]
    return {
        "ordinals": write_runs([ordinal for ordinal, _ in numbers]),
        "incarnations": write_runs([incarnation for _, incarnation in numbers]),
    }


def _read_names(columns: Mapping[str, Any], job: str) -> list[str]:
    pairs = zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True)
    return [f"{job}-w{ordinal}-{incarnation}" for ordinal, incarnation in pairs]


def _parse_worker_numbers(name: str, job: str) -> tuple[int, int]:
    ordinal, _, incarnation = name.removeprefix(f"{job}-w").partition("-")
    return int(ordinal), int(incarnation)


def write_runs(numbers: Sequence[int]) -> str:
    """`0-9,12,7*3`: runs that rise by one, single numbers, and repetitions, in order. Numbers are ≥ 0."""
    return ",".join(_iterate_runs(numbers))


def _iterate_runs(numbers: Sequence[int]) -> Iterator[str]:
    start = 0
    while start < len(numbers):
        rising = same = start + 1
        while rising < len(numbers) and numbers[rising] == numbers[rising - 1] + 1:
            rising += 1
        while same < len(numbers) and numbers[same] == numbers[start]:
            same += 1
        if rising - start > 1:
            yield f"{numbers[start]}-{numbers[rising - 1]}"
        elif same - start > 1:
            yield f"{numbers[start]}*{same - start}"
        else:
            yield str(numbers[start])
        start = max(rising, same)


def read_runs(text: str) -> list[int]:
    """What `write_runs` has written. Raises ValueError for more than MOST_NUMBERS, which no job has."""
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        first, dash, last = run.partition("-")
        value, star, times = run.partition("*")
        low, high = (int(first), int(last)) if dash else (int(value), int(value))
        count = int(times) if star else 1
        _check_count(len(numbers) + count * (high - low + 1))
        numbers += [*range(low, high + 1)] * count
    return numbers


def _check_count(count: int) -> None:
    """Before so many values are made of a few characters. Raises ValueError for more than any job has."""
    if count > MAX_RUN_NUMBERS:
        raise ValueError(f"more numbers than {MAX_RUN_NUMBERS}")


def _write_indexed(chosen: Iterable[str], known: Sequence[str]) -> Json:
    """Most are among `known`, and named by their place there; the others by themselves."""
    place = {name: i for i, name in reversed(list(enumerate(known)))}
    wanted = list(chosen)
    return {
        "of": write_runs(sorted(place[name] for name in wanted if name in place)),
        "others": [name for name in wanted if name not in place],
    }


def _read_indexed(content: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    return sorted({*(known[i] for i in read_runs(content.get("of", ""))), *content.get("others", ())})


def _collect_unknown(raw: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """What stands in `raw` and has no place in `known`."""
    found: Json = {}
    for key, value in raw.items():
        if key not in known:
            found[key] = value
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping):
            found |= {key: inner} if (inner := _collect_unknown(value, known[key])) else {}
    for gone in ("apiVersion", "kind", "metadata"):
        found.pop(gone, None)
    return found


def _overlay_unknown(unknown: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """`known`, and what it does not say; lists are joined."""
    merged = dict(known)
    for key, value in unknown.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = _overlay_unknown(value, merged[key])
        elif isinstance(value, list) and isinstance(merged[key], list):
            merged[key] = [*merged[key], *value]
    return merged


def _merge_unknown(one: Mapping[str, Any], other: Mapping[str, Any]) -> Json:
    return _overlay_unknown(one, other) if other else dict(one)
