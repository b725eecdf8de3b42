"""The plan: what the operator wants of a job's ranks, and the part of it that each worker is told.

One plan a job, written by the operator alone. A worker learns only its own part, so that a plan of thousands of workers
costs each of them little; what all ranks must know alike (shares, mode) goes to rank 0, which hands it to the others on
one step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from ipaddress import ip_address
from typing import Annotated, Any, Self, TypeVar

from .errors import InputError
from .lengths import SequenceCost
from .reading import MaxLength, Within, abbreviate_value, read_dataclass

SECRET_BYTES = 32
"""Of a membership's secret; in the plan they are hexadecimal digits."""
MAX_JOB_PATHS = 1 << 16
"""Of a job."""
MAX_WORKER_PATHS = 32
"""That begin or end there: those of a ring on each of its GPUs, in both directions."""
MAX_JOB_WORKERS = 1 << 17
"""Of a job."""
MAX_JOB_RANKS = 1 << 20
"""Of a job."""
MAX_FABRIC_HOPS = 1 << 14
"""Addresses of a fabric's spines: each has one towards each leaf."""
MIN_JOB_PORTS = 256
"""Of a job: half of them to listen at, half to connect from."""

_Rank = Annotated[int, Within(0, 2**31)]
_Count = Annotated[int, Within(0)]
_Seconds = Annotated[float, Within(0, 1e12)]
_Text = Annotated[str, MaxLength(253)]  # a name, or an address
_Terms = Annotated[tuple[float, float, float], MaxLength(3)]
_RankValues = Annotated[tuple[_Rank, ...], MaxLength(MAX_JOB_RANKS)]
_Port = Annotated[int, Within(1024, 65535)]
_Name = Annotated[str, MaxLength(253)]
_StorePort = Annotated[int, Within(0, 65535)]
_Address = Annotated[str, MaxLength(45)]
_Names = Annotated[tuple[_Text, ...], MaxLength(MAX_JOB_WORKERS)]


class SyncMode(StrEnum):
    """How the ranks keep their parameters alike."""

    SYNC = "Sync"
    EDIT = "EDiT"
    ASYNC_EDIT = "AsyncEDiT"


SYNC_MODES = tuple(SyncMode)
"""A mode's place in it is its number in `records.STATE` and in the ranks' agreement."""


class WorkerRole(StrEnum):
    """What a worker is for under the plan in force."""

    MEMBER = "Member"  # it holds ranks
    SPARE = "Spare"  # started and warm, without ranks
    LEAVE = "Leave"  # end the ranks, if any, and exit


class Stop(StrEnum):
    """Why a job's ranks shall stop."""

    NO = ""
    SUSPEND = "Suspend"  # checkpoint, then leave
    FINISH = "Finish"  # nothing left to do: spares leave


class EvidencePart(StrEnum):
    """What an evidence request asks for."""

    WINDOWS = "Windows"  # steps, own work, samples
    OPERATIONS = "Operations"  # collectives of the last steps, and who is in which group
    LINKS = "Links"  # the kernel's counters of connections, and NCCL's of its transfers


@dataclass(frozen=True)
class ProbeTarget:
    """Somebody to whom a launcher measures its link. `slot`: its turn; turns take a second, those of one turn run at
    once."""

    worker: _Text
    address: _Text  # host:port
    slot: _Count = 0


_Targets = Annotated[tuple[ProbeTarget, ...], MaxLength(MAX_JOB_WORKERS)]


@dataclass(frozen=True)
class ProbeRequest:
    """Links to be measured between launchers: by each of the `sources`, to each of its targets."""

    name: _Text
    sources: Annotated[tuple[_Text, ...], MaxLength(MAX_JOB_WORKERS)] = ()  # workers
    targets: Annotated[tuple[_Targets, ...], MaxLength(MAX_JOB_WORKERS)] = ()  # of each source

    def __post_init__(self) -> None:
        """Raises InputError where a source has no targets of its own."""
        if len(self.sources) != len(self.targets):
            raise InputError(f"plan.probe: targets of {len(self.targets)} sources, and there are {len(self.sources)}")


@dataclass(frozen=True)
class LinkProbeTask:
    """One launcher's part of it."""

    name: _Text
    targets: _Targets


class SourceNaming(StrEnum):
    """How a profile names files that are not of installed packages."""

    SHOW = "Show"
    HASH = "Hash"  # by a hash of their path, which each rank explains in its own log; functions keep their names


@dataclass(frozen=True)
class ProfileRequest:
    """A window in which all ranks profile the same steps: from `first_step` on, for so many steps or seconds at most,
    whichever is over first."""

    name: _Text
    first_step: _Count
    steps: _Count = 32
    seconds: _Seconds = 20.0
    sources: SourceNaming = SourceNaming.HASH


@dataclass(frozen=True)
class PlannedPath:
    """By which spine what one rank sends to another is to go.

    In a fabric that nobody knows, `spine` is "" and the pair's ports are drawn: another `draw`, other ports, and
    perhaps another way.
    """

    source: _Rank
    destination: _Rank
    spine: _Name = ""
    draw: Annotated[int, Within(0, 2**31)] = 0
    among: Annotated[int, Within(0, 2**32)] = 0  # the spines that were alive when it was chosen (Topology.among)


@dataclass(frozen=True)
class Hop:
    """One of the addresses from which a spine answers a packet that ends there."""

    address: _Address
    spine: _Name

    def __post_init__(self) -> None:
        _check_address("plan.paths.hops", self.address)


@dataclass(frozen=True)
class Paths:
    """How a job's traffic goes through the fabric, from the next round on, and what launchers need to bring it there:
    which addresses are whose, and a range of ports that is the job's alone on its nodes."""

    wanted: Annotated[tuple[PlannedPath, ...], MaxLength(MAX_JOB_PATHS)]
    hops: Annotated[tuple[Hop, ...], MaxLength(MAX_FABRIC_HOPS)]
    first_port: _Port = 20000
    last_port: _Port = 29999

    def __post_init__(self) -> None:
        pairs = [(path.source, path.destination) for path in self.wanted]
        if len(set(pairs)) < len(pairs):
            raise InputError("plan.paths.wanted: a pair of ranks has two paths; give each direction one")
        unknown = {path.spine for path in self.wanted} - {hop.spine for hop in self.hops} - {""}
        if unknown:
            raise InputError(f"plan.paths.hops: no address of {', '.join(sorted(unknown))}, which paths want")
        _check_ports(self.first_port, self.last_port)


@dataclass(frozen=True)
class WorkerPath:
    """A path that begins or ends at one worker; the other end is at its `peer`."""

    source: _Rank
    destination: _Rank
    spine: _Name
    hops: Annotated[tuple[_Address, ...], MaxLength(MAX_FABRIC_HOPS)]  # the spine's addresses
    peer: _Name  # worker
    address: _Address  # of the peer
    draw: Annotated[int, Within(0, 2**31)] = 0

    def __post_init__(self) -> None:
        _check_address("plan.paths.wanted", self.address)


@dataclass(frozen=True)
class WorkerPaths:
    """One worker's part of the job's `Paths`. `spines`: of the fabric."""

    wanted: Annotated[tuple[WorkerPath, ...], MaxLength(MAX_WORKER_PATHS)]
    spines: Annotated[int, Within(1, MAX_FABRIC_HOPS)]
    first_port: _Port
    last_port: _Port

    def __post_init__(self) -> None:
        _check_ports(self.first_port, self.last_port)


@dataclass(frozen=True)
class Member:
    """A worker that holds ranks."""

    worker: _Text  # name of its pod
    address: _Text  # of its pod
    ranks: _RankValues


_Members = Annotated[tuple[Member, ...], MaxLength(MAX_JOB_WORKERS)]


@dataclass(frozen=True)
class Plan:
    """What the operator wants of the whole job. `version` grows with every change.

    `membership` grows whenever the ranks are to start a new round by the operator's will: because they change workers,
    or because it has found a hang. Launchers may start rounds by themselves in the same membership, `restarts` times at
    most. The number of a round is agreed by its launchers: it is at least `round` and above every round that one of
    them has seen.
    """

    version: _Count = 0
    membership: _Count = 0
    round: _Count = 1
    members: _Members = ()  # in rank order; empty: nobody trains
    store_port: _StorePort = 29400  # members[0] serves the launchers' meeting there; as its heartbeat announces
    restarts: _Count = 0
    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: _Count = 16  # EDiT: steps of each rank between two synchronisations
    sync_seconds: _Seconds = 2.0  # AsyncEDiT: between two synchronisations
    shares: _RankValues | None = None  # samples of each rank in a step; None: as equal as integers allow
    garbage_every: _Count = 0  # steps between garbage collections, on all ranks in the same step; 0: as Python likes
    sequence_cost: _Terms | None = None  # of lengths.SequenceCost; None: the script's own
    checkpoint_request: _Count = 0  # grows with each request: checkpoint at the next step
    evidence_request: _Text = ""  # name of the request that is out; "": none
    evidence_parts: Annotated[tuple[EvidencePart, ...], MaxLength(16)] = (EvidencePart.WINDOWS,)  # what it asks for
    probe: ProbeRequest | None = None  # of links, that is out
    profile: ProfileRequest | None = None  # that is out
    paths: Paths | None = None  # through the fabric; None: the network chooses
    figures_band: _Seconds = 0.05  # a rank's figures are told at once when they leave what was told last by this part
    step_seconds: _Seconds = 0.0  # of the slowest rank, when this membership began; 0: not known
    stop: Stop = Stop.NO
    leaving: _Names = ()  # members whose pods end: their ranks save, and leave
    secret: str = field(default="", repr=False)  # of the membership, hex; "": an older operator gave none

    def __post_init__(self) -> None:
        _check_secret(self.secret)
        ranks = [rank for member in self.members for rank in member.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise InputError(f"plan.members: ranks {abbreviate_value(ranks)} must be 0 … {len(ranks) - 1}, each exactly once")
        if self.shares is not None:
            if len(self.shares) != len(ranks):
                raise InputError(f"plan.shares: {len(self.shares)} shares for {len(ranks)} ranks; give one a rank")
            if min(self.shares, default=1) < 1:
                raise InputError(f"plan.shares: {abbreviate_value(list(self.shares))} must all be at least 1")
        if self.sync_every < 1 or not self.sync_seconds > 0 or self.garbage_every < 0:
            raise InputError(
                f"plan: sync_every={self.sync_every} must be 1 step or more, "
                f"sync_seconds={self.sync_seconds} above 0, garbage_every={self.garbage_every} 0 or a number of steps"
            )
        _check_cost_terms(self.sequence_cost)
        if self.paths is not None:
            strangers = {rank for path in self.paths.wanted for rank in (path.source, path.destination)} - set(ranks)
            if strangers:
                raise InputError(f"plan.paths.wanted: no member has rank {min(strangers)} of {len(ranks)} ranks")

    @cached_property
    def world_size(self) -> int:
        return sum(len(member.ranks) for member in self.members)

    def with_membership_secret(self, before: Plan, secret: str) -> Plan:
        """With `secret` (hex) where this is another membership than that of `before`, and with its own otherwise."""
        return replace(self, secret=before.secret if self.membership == before.membership else secret)

    def build_worker_plan(self, worker: str) -> WorkerPlan:
        """What `worker` is told: its own ranks and where to meet the others. Of thousands each costs the same: what is
        common to them is worked out once."""
        position, task = self._position_by_worker.get(worker), self._probe_task_by_worker.get(worker)
        if position is None or self.stop is Stop.FINISH or worker in self.leaving:
            leaves = position is not None or self.stop is not Stop.NO
            role = WorkerRole.LEAVE if leaves else WorkerRole.SPARE
            return WorkerPlan(role=role, probe=task, **self._shared_fields)
        member = self.members[position]
        neighbours = {self.members[(position + offset) % len(self.members)].address for offset in (-1, 1)}
        return WorkerPlan(
            role=WorkerRole.MEMBER,
            ranks=member.ranks,
            world_size=self.world_size,
            workers=len(self.members),
            store=f"{self.members[0].address}:{self.store_port}",
            serves_store=position == 0,
            neighbours=tuple(sorted(neighbours - {member.address})),
            sync_mode=self.sync_mode,
            shares=self.shares if 0 in member.ranks else None,
            sequence_cost=self.sequence_cost if 0 in member.ranks else None,
            secret=self.secret,
            paths=self._paths_by_position.get(position),
            probe=task,
            **self._shared_fields,
        )

    @cached_property
    def _position_by_worker(self) -> Mapping[str, int]:
        """Of members, by worker."""
        return {member.worker: position for position, member in reversed(list(enumerate(self.members)))}

    @cached_property
    def _shared_fields(self) -> Mapping[str, Any]:
        """Fields that are the same for all workers."""
        return {name: getattr(self, name) for name in _SHARED_FIELDS}

    @cached_property
    def _probe_task_by_worker(self) -> Mapping[str, LinkProbeTask]:
        """Of the probe that is out, by worker."""
        if self.probe is None:
            return {}
        targets = zip(self.probe.sources, self.probe.targets, strict=True)
        return {source: LinkProbeTask(self.probe.name, of) for source, of in reversed(list(targets))}

    @cached_property
    def _paths_by_position(self) -> Mapping[int, WorkerPaths]:
        """By position; nobody has any where the network chooses."""
        return {} if self.paths is None else _split_paths_by_position(self.paths, self.members)

    def to_json(self, leave_out: Container[str] = ()) -> dict[str, Any]:
        """But for the fields that are left out."""
        return _to_record(self, leave_out)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return _read_plan(cls, data, "plan", "the operator writes it, do not edit it by hand")


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's part of the plan: what its sidecar fetches and its launcher follows."""

    version: _Count = 0
    membership: _Count = 0
    round: _Count = 1
    role: WorkerRole = WorkerRole.SPARE
    ranks: _RankValues = ()
    world_size: _Count = 0
    workers: _Count = 0  # how many launchers meet in the store
    store: _Text = ""  # host:port
    serves_store: bool = False
    neighbours: Annotated[tuple[_Text, ...], MaxLength(64)] = ()  # addresses to probe when the ranks stall
    restarts: _Count = 0
    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: _Count = 16
    sync_seconds: _Seconds = 2.0
    garbage_every: _Count = 0
    shares: _RankValues | None = None  # of all ranks; only the worker of rank 0 is told
    sequence_cost: _Terms | None = None  # only the worker of rank 0 is told
    checkpoint_request: _Count = 0
    evidence_request: _Text = ""
    evidence_parts: Annotated[tuple[EvidencePart, ...], MaxLength(16)] = (EvidencePart.WINDOWS,)
    probe: LinkProbeTask | None = None
    profile: ProfileRequest | None = None
    paths: WorkerPaths | None = None
    figures_band: _Seconds = 0.05
    step_seconds: _Seconds = 0.0  # of the job's slowest rank, as the operator knows it; 0: not known
    stop: Stop = Stop.NO
    secret: str = field(default="", repr=False)  # that members prove themselves by to each other, hex; spares get none

    def __post_init__(self) -> None:
        _check_cost_terms(self.sequence_cost)
        _check_secret(self.secret)

    def to_json(self) -> dict[str, Any]:
        return _to_record(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        if isinstance(data, Mapping) and "role" not in data:
            raise InputError("plan.role: must be given; is the sidecar of another version than the operator?")
        return _read_plan(cls, data, "plan", "is the sidecar of another version than the operator?")


_SHARED_FIELDS = (
    *("version", "membership", "round", "restarts", "checkpoint_request", "evidence_request", "evidence_parts"),
    *("profile", "figures_band", "step_seconds", "sync_every", "sync_seconds", "garbage_every", "stop"),
)
"""Fields that a plan and all of its parts have alike."""


def choose_rendezvous(ports: Sequence[int], secret: str) -> tuple[int, str]:
    """The `store_port` and `secret` of a new membership, from the `meeting_port`s of its members' heartbeats in rank
    order. `secret`: a fresh one.

    A member that announces none has an older launcher, or an older sidecar, which would not hand the secret on: then
    nobody gets one, because those who had it would not let that member in.
    """
    return (ports[0] if ports and ports[0] else Plan.store_port), (secret if ports and all(ports) else "")


def _split_paths_by_position(paths: Paths, members: Sequence[Member]) -> Mapping[int, WorkerPaths]:
    """Of each member those that leave or reach it, as many as it takes; what stays within it takes none."""
    holders = {rank: position for position, member in enumerate(members) for rank in member.ranks}
    addresses: dict[str, tuple[str, ...]] = {}
    for hop in paths.hops:
        addresses[hop.spine] = (*addresses.get(hop.spine, ()), hop.address)
    own: dict[int, list[WorkerPath]] = {position: [] for position in range(len(members))}
    for path in paths.wanted:
        ends = holders[path.source], holders[path.destination]
        for here, there in (ends, ends[::-1]) if ends[0] != ends[1] else ():
            if len(own[here]) < MAX_WORKER_PATHS:
                hops, peer = addresses.get(path.spine, ()), members[there]
                ranks = path.source, path.destination
                own[here].append(WorkerPath(*ranks, path.spine, hops, peer.worker, peer.address, path.draw))
    spines = max(1, len(addresses))
    return {
        position: WorkerPaths(tuple(found), spines, paths.first_port, paths.last_port)
        for position, found in own.items()
    }


_Record = TypeVar("_Record")


def _check_address(field: str, address: str) -> None:
    """Raises InputError where it is none, or not written as the kernel's answers are."""
    try:
        usual = str(ip_address(address))
    except ValueError:
        raise InputError(f"{field}: {address!r} is no address") from None
    if usual != address:
        raise InputError(f"{field}: {address!r}: give it as {usual}")


def _check_ports(first: int, last: int) -> None:
    """Raises InputError where a job has no room in them."""
    if last - first < MIN_JOB_PORTS:
        raise InputError(f"plan.paths: ports {first} to {last} are too few; give {MIN_JOB_PORTS} at least")


def _read_plan(cls: type[_Record], data: Mapping[str, Any], path: str, remedy: str) -> _Record:
    """`remedy`: what whoever reads the error is to do."""
    if not isinstance(data, Mapping):
        return read_dataclass(cls, data, path)
    _check_secret(data.get("secret", ""))  # whatever it is, no error shows it
    given = {**data, "evidence_parts": _keep_known_evidence_parts(data), "sequence_cost": _parse_cost_terms(data.get("sequence_cost"))}
    try:
        return read_dataclass(cls, given, path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error


def _keep_known_evidence_parts(data: Mapping[str, Any]) -> object:
    """Those of another version that are not known here are left out."""
    given = data.get("evidence_parts", (EvidencePart.WINDOWS,))
    return [part for part in given if part in tuple(EvidencePart)] if isinstance(given, (list, tuple)) else given


def _parse_cost_terms(given: Any) -> tuple[float, float, float] | None:
    """Raises InputError where these are not three numbers."""
    if given is None:
        return None
    try:
        fixed, per_token, per_token_squared = (float(term) for term in given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"plan.sequence_cost: {abbreviate_value(given)} must be three numbers: fixed, per token, per token squared"
        ) from error
    return fixed, per_token, per_token_squared


def _check_cost_terms(terms: tuple[float, float, float] | None) -> None:
    """Raises InputError where these are no cost."""
    if terms is not None:
        try:
            SequenceCost(*terms)
        except InputError as error:
            raise InputError(f"plan.sequence_cost: {error}") from error


def _check_secret(secret: object) -> None:
    """Raises InputError, without the secret in it, where this is none."""
    try:
        bytes.fromhex(secret)  # type: ignore[arg-type]  # what is no string is refused here
    except (TypeError, ValueError):
        raise InputError("plan.secret: must be hexadecimal digits; the operator makes it, do not edit it") from None


def _to_record(value: Any, leave_out: Container[str] = ()) -> dict[str, Any]:
    names = (name for name in value.__dataclass_fields__ if name not in leave_out)
    return {name: _to_jsonable(getattr(value, name)) for name in names}


def _to_jsonable(value: Any) -> Any:
    """Tuples as lists, records as objects, enumerations as strings, so that what is written equals what is read."""
    if value is None or type(value) in _JSON_SCALAR_TYPES:
        return value
    if isinstance(value, (list, tuple)):
        return [_to_jsonable(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else _to_record(value)


_JSON_SCALAR_TYPES = frozenset({str, int, float, bool})
