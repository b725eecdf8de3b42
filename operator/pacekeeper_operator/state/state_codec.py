"""The stored form of a job's plan and bookkeeping: one object, `TrainingJobState`, so that one write changes both.

Workers are stored in columns, with ranges instead of lists. So 10,000 of them with long names stay below the 1.5 MiB
that etcd accepts. Fields of a newer operator that this one does not know are preserved and written back: a rollback
loses nothing.
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
from pacekeeper_analysis.protocol.plan import Member, Plan

from ..api.codec import camel_case, from_json, list_field_hints, to_json
from ..api.training_job import TrainingJob
from .desired_state import DesiredState, GpuReadings, Incidents, Placement, State, WorkerRecord

STATE_SCHEMA_VERSION = 1
"""Version of the stored form. It grows when an older operator would misread it; new fields alone are ignored."""
MAX_STATE_BYTES = int(1.1 * 2**20)
"""Of the 1.5 MiB that etcd accepts. The rest is for incidents, their evidence, and what one event adds."""
MAX_RUN_NUMBERS = 1 << 22
"""Numbers that are decoded from runs: a few characters can encode any number of them."""
MAX_LISTED_QUARANTINES = 32
"""Number of quarantine requests above which they are stored as a table."""
Json = dict[str, Any]
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class StoredState:
    """An object as it was read: the part that this operator understands, and the rest."""

    desired: DesiredState
    unknown: Mapping[str, Any] = field(default_factory=dict)


def encode_state(desired: DesiredState, job: str, unknown: Mapping[str, Any] | None = None) -> Json:
    """Return the object's fields without its metadata. `job`: the job's name, with which its workers' names begin."""
    state = {
        camel_case(owner.name): to_json(getattr(desired.state, owner.name), {})
        for owner in fields(State)
        if owner.name not in ("placement", "gpus") and (owner.name != "watched" or desired.state.watched.rounds)
    }
    state["placement"] = _write_placement(desired.state.placement, job)
    incidents = state["incidents"]
    incidents["settledFaults"] = _write_settled(desired.state.incidents.settled_faults, job)
    if len(incidents["quarantineRequests"]) > MAX_LISTED_QUARANTINES:
        incidents["quarantineRequests"] = _write_table(incidents["quarantineRequests"])
    state["gpus"] = {
        "nodes": _write_indexed(desired.state.gpus.nodes, [worker.node for worker in desired.state.placement.workers]),
        "values": [[key, value] for key, value in desired.state.gpus.values.items()],
    }
    content = {"schemaVersion": STATE_SCHEMA_VERSION, "plan": _write_plan(desired.plan, job), "state": state}
    return _overlay_unknown(unknown or {}, content)


def decode_state(content: Mapping[str, Any], job: str) -> StoredState:
    """Return the state that is stored in `content`.

    Raises InputError if it cannot be read.
    """
    try:
        plan = _read_plan(content["plan"], job)
        state, unreadable = _read_state(content["state"], job)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"the bookkeeping in TrainingJobState {job} cannot be read ({error!r}); delete it, and the job's workers "
            "are replaced under a new one"
        ) from error
    desired = DesiredState(plan, state)
    return StoredState(desired, _merge_unknown(_collect_unknown(content, encode_state(desired, job)), unreadable))


def compute_stored_bytes(content: Mapping[str, Any]) -> int:
    """Return the size as it is stored, in bytes."""
    return len(json.dumps(content, separators=(",", ":")).encode())


def explain_state_size_limit(job: TrainingJob) -> str:
    """Return why the bookkeeping of a job of this size could not be stored, with the remedy; "": it could.

    It is estimated before any pod is created, for all workers with ranks and one fault of each.
    """
    spec = job.spec
    workers = spec.replicas + spec.spares
    needed_bytes = _compute_full_bytes(spec.replicas, workers, spec.nproc_per_node)
    if needed_bytes <= MAX_STATE_BYTES:
        return ""
    max_workers = int(workers * MAX_STATE_BYTES / needed_bytes) // 100 * 100
    return (
        f"spec.replicas: {workers} workers of {spec.nproc_per_node} ranks would need {needed_bytes / 2**20:.1f} MiB of "
        f"bookkeeping, and etcd takes {MAX_STATE_BYTES / 2**20:.1f} in addition to incidents; request {max_workers} "
        "workers and "
        "spares at most, or more ranks in each"
    )


def _compute_full_bytes(replicas: int, workers: int, ranks_per_worker: int) -> int:
    """Return the exact size in bytes of what `_build_full_state` returns.

    Only a few workers are encoded, which show what one more adds. So a request for a million ranks costs the operator
    no more than others.
    """
    worker_bytes = _extrapolate_size(lambda count: _measure_sample(1, count, 1), workers)
    member_bytes = _extrapolate_size(
        lambda count: _measure_sample(count, _SAMPLE_WORKERS, 1) - _count_address_bytes(count), replicas
    )
    rank_bytes = _measure_sample(1, 1, 2) - _measure_sample(1, 1, 1)
    further_rank_bytes = rank_bytes * replicas * (ranks_per_worker - 1) + len(str(ranks_per_worker)) - 1
    return (
        worker_bytes
        + member_bytes
        + _count_address_bytes(replicas)
        - _measure_sample(1, _SAMPLE_WORKERS, 1)
        + further_rank_bytes
    )


_SAMPLE_WORKERS = 11
"""The highest ordinal and the number of these workers have two digits."""


def _extrapolate_size(size_of: Callable[[int], int], count: int) -> int:
    """Return `size_of(count)`, extrapolated from small counts.

    Each one more adds the same size. In addition, the count ("0*10") or the last number ("0-10") of a column of runs
    may take a digit more.
    """
    if count <= _SAMPLE_WORKERS:
        return size_of(count)
    eight, nine, ten, eleven = map(size_of, range(_SAMPLE_WORKERS - 3, _SAMPLE_WORKERS + 1))
    increment = nine - eight
    count_digit, last_digit = ten - nine - increment, eleven - ten - increment
    return nine + increment * (count - 9) + count_digit * (len(str(count)) - 1) + last_digit * (len(str(count - 1)) - 1)


@cache
def _measure_sample(replicas: int, workers: int, ranks_per_worker: int) -> int:
    return compute_stored_bytes(encode_state(_build_full_state(replicas, workers, ranks_per_worker), "j"))


def _build_full_state(replicas: int, workers: int, ranks_per_worker: int) -> DesiredState:
    """Return a state with names as long as cloud providers make them. The job's own name is not stored."""
    names = [f"j-w{n}-0" for n in range(workers)]
    ranks = [tuple(range(n * ranks_per_worker, (n + 1) * ranks_per_worker)) for n in range(replicas)]
    slots = zip(names, ranks, strict=False)
    members = tuple(
        Member(name, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", worker_ranks)
        for n, (name, worker_ranks) in enumerate(slots)
    )
    records = tuple(WorkerRecord(name, n, 0, f"{n:036}", f"ip-{n:044}") for n, name in enumerate(names))
    placement = Placement(records, {str(n): 0 for n in range(workers)})
    settled = tuple(f"{name}-19a{n:08x}-r1-stalled-1" for n, name in enumerate(names))
    plan = Plan(members=members, shares=tuple(100 + n % 2 for n in range(replicas * ranks_per_worker)))
    return DesiredState(plan, State(placement=placement, incidents=Incidents(settled_faults=settled)))


def _count_address_bytes(count: int) -> int:
    """Return the size of that many addresses of `_build_full_state`, without separators.

    In a block of 256, only the last number differs.
    """
    blocks = ((f"10.{block >> 8}.{block & 255}.", min(256, count - 256 * block)) for block in range(-(-count // 256)))
    return sum(len(prefix) * addresses + _CUMULATIVE_DIGITS[addresses] for prefix, addresses in blocks)


_CUMULATIVE_DIGITS = tuple(accumulate((len(str(n)) for n in range(256)), initial=0))
"""Total digits of the numbers below each index."""


def _write_plan(plan: Plan, job: str) -> Json:
    content = plan.to_json(leave_out=("members",))
    ranks_per_worker = len(plan.members[0].ranks) if plan.members else 0
    in_order = [rank for member in plan.members for rank in member.ranks] == list(
        range(ranks_per_worker * len(plan.members))
    )
    content["members"] = {
        **_write_names([member.worker for member in plan.members], job),
        "addresses": " ".join(member.address for member in plan.members),
        "ranks": ranks_per_worker if in_order and ranks_per_worker else [list(member.ranks) for member in plan.members],
        **_write_optional_columns(plan.members),
    }
    if plan.paths is not None:
        content["paths"] |= {"wanted": _write_columns(plan.paths.wanted), "hops": _write_columns(plan.paths.hops)}
    return content


def _write_optional_columns(members: Sequence[Member]) -> Json:
    """Return the columns of a member's fields that most jobs leave at their defaults."""
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
    optional = [f.name for f in fields(Member) if f.name in columns and f.name not in ("worker", "address", "ranks")]
    members = [
        {"worker": name, "address": address, "ranks": list(worker_ranks), **{key: columns[key][i] for key in optional}}
        for i, (name, address, worker_ranks) in enumerate(zip(names, addresses, ranks, strict=False))
    ]
    read = {**content, "members": members}
    if content.get("paths") is not None:
        columns = {name: _read_columns(content["paths"][name]) for name in ("wanted", "hops")}
        read["paths"] = {**content["paths"], **columns}
    return Plan.from_json(read)


def _write_columns(records: Sequence[Any]) -> Json:
    """Return records of numbers and words without spaces as a column per field: there may be thousands of them."""
    columns: Json = {"count": len(records)}
    for item in fields(records[0]) if records else ():
        values = [getattr(record, item.name) for record in records]
        columns[item.name] = write_runs(values) if isinstance(values[0], int) else {"words": " ".join(values)}
    return columns


def _read_columns(content: Mapping[str, Any]) -> list[Json]:
    """Return a JSON object for each record."""
    columns = {
        name: column["words"].split(" ") if isinstance(column, Mapping) else read_runs(column)
        for name, column in content.items()
        if name != "count"
    }
    _check_count(content["count"])
    return [{name: column[index] for name, column in columns.items()} for index in range(content["count"])]


def _write_placement(placement: Placement, job: str) -> Json:
    workers = placement.workers
    content = to_json(placement, {"workers": lambda _: None, "incarnations": lambda _: None})
    content["workers"] = {
        **_write_names([worker.name for worker in workers], job),
        "uids": " ".join(worker.uid for worker in workers),
        "nodes": " ".join(worker.node for worker in workers),
        # While a job starts, thousands have a value. 0: it is not starting.
        "startingSince": write_runs([int(worker.starting_since or 0) for worker in workers]),
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


_WORKER_MARKS = ("leaving", "dead", "force", "waits_for_checkpoint")


def _read_placement(content: Mapping[str, Any], job: str) -> tuple[Placement, Json]:
    columns = content["workers"]
    names = _read_names(columns, job)
    uids, nodes, marks = columns["uids"].split(" "), columns["nodes"].split(" "), columns.get("marks", {})
    starting = read_runs(columns.get("startingSince", "")) or [0] * len(names)
    workers = tuple(
        WorkerRecord(
            name,
            *(_parse_worker_numbers(name, job) if "names" not in columns else (i, 0)),
            uid=uids[i],
            node=nodes[i],
            starting_since=float(starting[i]) if starting[i] else None,
            **{key: value for key, value in marks.get(str(i), {}).items() if key in _WORKER_MARKS},
        )
        for i, name in enumerate(names)
    )
    highest = content["incarnations"]
    incarnations = dict(zip(map(str, read_runs(highest["ordinals"])), read_runs(highest["highest"]), strict=True))
    rest = {key: value for key, value in content.items() if key not in ("workers", "incarnations")}
    placement, unreadable = _read_tolerantly(Placement, rest)
    values = {f.name: getattr(placement, f.name) for f in fields(Placement)}
    return Placement(**{**values, "workers": workers, "incarnations": incarnations}), unreadable


def _read_state(content: Mapping[str, Any], job: str) -> tuple[State, Json]:
    owners: Json = {}
    unreadable: Json = {}
    for name, key, owner in list_field_hints(State):
        owner_content = content.get(key, {})
        if name == "placement":
            owners["placement"], unreadable_part = _read_placement(owner_content, job)
        elif name == "gpus":
            nodes = [worker.node for worker in owners["placement"].workers]
            owners["gpus"], unreadable_part = _read_gpus(owner_content, nodes), {}
        elif name == "incidents":
            owners["incidents"], unreadable_part = _read_tolerantly(Incidents, _read_incidents(owner_content, job))
        else:
            owners[name], unreadable_part = _read_tolerantly(owner, owner_content)
        if unreadable_part:
            unreadable[key] = unreadable_part
    return State(**owners), {"state": unreadable} if unreadable else {}


def _read_gpus(content: Mapping[str, Any], nodes: Sequence[str]) -> GpuReadings:
    return GpuReadings(tuple(_read_indexed(content.get("nodes", {}), nodes)), dict(content.get("values", ())))


def _read_incidents(content: Mapping[str, Any], job: str) -> Json:
    """Return the incidents with lists instead of columns."""
    read = dict(content)
    if "settledFaults" in content:
        read["settledFaults"] = _read_settled(content["settledFaults"], job)
    if isinstance(content.get("quarantineRequests"), Mapping):
        read["quarantineRequests"] = _read_table(content["quarantineRequests"])
    return read


def _write_table(records: Sequence[Json]) -> Json:
    """Return similar records as a table: the distinct values of each field, and their index for each record."""
    table: Json = {"count": len(records)}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [json.dumps(record.get(name)) for record in records]
        index_of = {value: index for index, value in enumerate(dict.fromkeys(values))}
        table[name] = {
            "values": list(map(json.loads, index_of)),
            "of": write_runs([index_of[value] for value in values]),
        }
    return table


def _read_table(content: Mapping[str, Any]) -> list[Json]:
    _check_count(content["count"])
    records: list[Json] = [{} for _ in range(content["count"])]
    for name, column in content.items():
        if name != "count":
            for record, index in zip(records, read_runs(column["of"]), strict=True):
                record[name] = column["values"][index]
    return records


def _write_settled(names: Sequence[str], job: str) -> Json:
    """Return the names of faults as columns: worker, process of its launcher, and kind.

    The kind is the same for thousands when a job stalls. Names of another form are stored as they are.
    """
    matches = (_FAULT_NAME_PATTERN.fullmatch(name, len(job)) if name.startswith(job) else None for name in names)
    parsed = [(position, match) for position, match in enumerate(matches) if match is not None]
    kinds = list(dict.fromkeys(match["kind"] for _, match in parsed))
    kind_index = {kind: index for index, kind in enumerate(kinds)}
    parsed_positions = {position for position, _ in parsed}
    return {
        "places": write_runs([position for position, _ in parsed]),
        "ordinals": write_runs([int(match["ordinal"]) for _, match in parsed]),
        "incarnations": write_runs([int(match["incarnation"]) for _, match in parsed]),
        "processes": " ".join(match["process"] for _, match in parsed),
        "of": write_runs([kind_index[match["kind"]] for _, match in parsed]),
        "kinds": kinds,
        "others": [name for position, name in enumerate(names) if position not in parsed_positions],
    }


_FAULT_NAME_PATTERN = re.compile(
    r"-w(?P<ordinal>0|[1-9]\d*)-(?P<incarnation>0|[1-9]\d*)-(?P<process>[^ -]+)-(?P<kind>.+)", re.DOTALL
)
"""Name of a fault after its job's. Numbers have no leading zeros, so that decoding restores them exactly."""


def _read_settled(content: Any, job: str) -> list[str]:
    """Return the names of faults. Operators before this form stored a list of names."""
    if isinstance(content, list):
        return [name for name in content if isinstance(name, str)]
    columns = [read_runs(content[name]) for name in ("places", "ordinals", "incarnations", "of")]
    processes = content["processes"].split(" ") if content["processes"] else []
    kinds, names = content["kinds"], list(content["others"])
    for position, ordinal, incarnation, kind_index, process in zip(*columns, processes, strict=True):
        names.insert(position, f"{job}-w{ordinal}-{incarnation}-{process}-{kinds[kind_index]}")
    return names


_READ_ERRORS = (InputError, AttributeError, TypeError, ValueError)


def _read_tolerantly(cls: type[Owner], content: Mapping[str, Any]) -> tuple[Owner, Json]:
    """Return the record, and the part of `content` that cannot be read here: values of a newer operator."""
    with suppress(*_READ_ERRORS):
        return from_json(cls, content, cls.__name__, {}), {}
    readable: Json = {}
    unreadable: Json = {}
    for _, key, hint in list_field_hints(cls):  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
        if key not in content:
            continue
        good, bad = _split_readable(cls, key, hint, content[key])
        if good is not None:
            readable[key] = good
        if bad:
            unreadable[key] = bad
    return from_json(cls, readable, cls.__name__, {}), unreadable


def _split_readable(cls: type[Any], key: str, hint: Any, value: Any) -> tuple[Any, Any]:
    """Return (readable, unreadable) parts of a field; a list of records is split item by item."""
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
    """Return the names as numbers; of a watched job, whose pods others have named, as they are."""
    if any(not _WORKER_NAME_PATTERN.fullmatch(name.removeprefix(job)) for name in names):
        return {"names": " ".join(names)}
    numbers = [_parse_worker_numbers(name, job) for name in names]
    return {
        "ordinals": write_runs([ordinal for ordinal, _ in numbers]),
        "incarnations": write_runs([incarnation for _, incarnation in numbers]),
    }


_WORKER_NAME_PATTERN = re.compile(r"-w(0|[1-9]\d*)-(0|[1-9]\d*)", re.ASCII)


def _read_names(columns: Mapping[str, Any], job: str) -> list[str]:
    if "names" in columns:
        return list(columns["names"].split(" "))
    pairs = zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True)
    return [f"{job}-w{ordinal}-{incarnation}" for ordinal, incarnation in pairs]


def _parse_worker_numbers(name: str, job: str) -> tuple[int, int]:
    ordinal, _, incarnation = name.removeprefix(f"{job}-w").partition("-")
    return int(ordinal), int(incarnation)


def write_runs(numbers: Sequence[int]) -> str:
    """Return `0-9,12,7*3`: runs that rise by one, single numbers, and repetitions, in order. Numbers are ≥ 0."""
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
    """Return the numbers that `write_runs` has encoded. Raises ValueError for more than MAX_RUN_NUMBERS."""
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
    """Raise ValueError if there are more numbers than any job has, before a few characters expand to them."""
    if count > MAX_RUN_NUMBERS:
        raise ValueError(f"more numbers than {MAX_RUN_NUMBERS}")


def _write_indexed(chosen: Iterable[str], known: Sequence[str]) -> Json:
    """Return the indices of the names that are among `known`, which most are; the others as names."""
    index_of = {name: i for i, name in reversed(list(enumerate(known)))}
    wanted = list(chosen)
    return {
        "of": write_runs(sorted(index_of[name] for name in wanted if name in index_of)),
        "others": [name for name in wanted if name not in index_of],
    }


def _read_indexed(content: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    return sorted({*(known[i] for i in read_runs(content.get("of", ""))), *content.get("others", ())})


def _collect_unknown(raw: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """Return the part of `raw` that has no place in `known`."""
    unknown: Json = {}
    for key, value in raw.items():
        if key not in known:
            unknown[key] = value
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping):
            unknown |= {key: inner} if (inner := _collect_unknown(value, known[key])) else {}
    for metadata_key in ("apiVersion", "kind", "metadata"):
        unknown.pop(metadata_key, None)
    return unknown


def _overlay_unknown(unknown: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """Return `known` with the fields that only `unknown` has; lists are joined."""
    merged = dict(known)
    for key, value in unknown.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = _overlay_unknown(value, merged[key])
        elif isinstance(value, list) and isinstance(merged[key], list):
            merged[key] = [*merged[key], *value]
    return merged


def _merge_unknown(first: Mapping[str, Any], second: Mapping[str, Any]) -> Json:
    return _overlay_unknown(first, second) if second else dict(first)
