"""The plan: the desired state of a job's ranks, and the part of it that each worker receives.

Each job has one plan, which only the operator writes. A worker receives only its own part, so a plan of thousands of
workers costs each of them little. What all ranks must apply together (shares, mode) goes to rank 0, which passes it to
the others at one step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from ipaddress import ip_address
from typing import Annotated, Any, Self, TypeVar

from ..errors import InputError
from ..stragglers.length_cost import SequenceCost
from .decoding import MaxLength, Within, abbreviate_value, read_dataclass
from .encoding import to_record

SECRET_BYTES = 32
"""Length of a membership's secret. The plan holds it as hexadecimal digits."""
MAX_JOB_PATHS = 1 << 16
"""Upper limit of planned paths of a job."""
MAX_WORKER_PATHS = 32
"""Upper limit of paths that begin or end at one worker: a ring on each of its GPUs, in both directions."""
MAX_JOB_WORKERS = 1 << 17
"""Upper limit of workers of a job."""
MAX_JOB_RANKS = 1 << 20
"""Upper limit of ranks of a job."""
MAX_FABRIC_HOPS = 1 << 14
"""Upper limit of addresses of a fabric's spines. Each spine has one toward each leaf."""
MIN_JOB_PORTS = 256
"""Smallest port range of a job: half of it to listen on, half to connect from."""

CLAIM_SCHEME = "claim://"
"""Scheme of the URIs that the operator gives to workers whose claim the checkpoint server mounts."""
CHECKPOINT_SERVER_PORT = 29500
"""Port of the checkpoint server, in the network of its own pod."""

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
    """How the ranks keep their parameters consistent."""

    SYNC = "Sync"
    EDIT = "EDiT"
    ASYNC_EDIT = "AsyncEDiT"


SYNC_MODES = tuple(SyncMode)
"""All modes. A mode's index is its number in `records.RING_STATE` and in the ranks' sync decision."""


class WorkerRole(StrEnum):
    """The role of a worker under the current plan."""

    MEMBER = "Member"  # it holds ranks
    SPARE = "Spare"  # started and warm, without ranks
    LEAVE = "Leave"  # end the ranks, if any, and exit


class Stop(StrEnum):
    """Why a job's ranks stop."""

    NO = ""
    SUSPEND = "Suspend"  # checkpoint, then leave
    FINISH = "Finish"  # nothing left to do: spares leave


@dataclass(frozen=True)
class PlannedPath:
    """The spine over which the traffic from one rank to another should go.

    In an unknown fabric, `spine` is "" and the pair's ports are drawn. Another `draw` gives other ports, and
    perhaps another route.
    """

    source: _Rank
    destination: _Rank
    spine: _Name = ""
    draw: Annotated[int, Within(0, 2**31)] = 0
    live_spines_fingerprint: Annotated[int, Within(0, 2**32)] = (
        0  # spines alive when the path was chosen (Topology.among)
    )


@dataclass(frozen=True)
class Hop:
    """One of the addresses from which a spine answers a packet whose TTL expires there."""

    address: _Address
    spine: _Name

    def __post_init__(self) -> None:
        _check_address("plan.paths.hops", self.address)


@dataclass(frozen=True)
class Paths:
    """How a job's traffic crosses the fabric from the next round on, and what launchers need to route it.

    Launchers need the spine of each address, and a port range that this job alone uses on its nodes.
    """

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
            raise InputError(f"plan.paths.hops: no address of {', '.join(sorted(unknown))}, which a path requires")
        _check_ports(self.first_port, self.last_port)


@dataclass(frozen=True)
class WorkerPath:
    """A path that begins or ends at one worker. The other end is at its `peer`."""

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
    """One worker's part of the job's `Paths`. `spines` is the number of spines of the fabric."""

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


@dataclass(frozen=True)
class CheckpointEndpoint:
    """The pod through which the workers reach their checkpoints, if only one node can mount the claim."""

    secret: str = field(repr=False)  # of the job, hex
    address: _Address = ""  # of its pod; "": it has none now
    port: _Port = CHECKPOINT_SERVER_PORT

    def __post_init__(self) -> None:
        _check_secret(self.secret)


_Members = Annotated[tuple[Member, ...], MaxLength(MAX_JOB_WORKERS)]


@dataclass(frozen=True)
class Plan:
    """The desired state of the whole job. `version` grows with each change.

    `membership` grows when the operator wants the ranks to start a new round: they change workers, or it has found a
    hang. Launchers may start rounds themselves in the same membership, `restarts` times at most. The launchers agree on
    the number of a round. It is at least `round`, and higher than each round that one of them has seen.
    """

    version: _Count = 0
    membership: _Count = 0
    round: _Count = 1
    members: _Members = ()  # in rank order; empty: no worker trains
    store_port: _StorePort = 29400  # members[0] serves the rendezvous there; from its heartbeat
    restarts: _Count = 0
    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: _Count = 16  # EDiT: steps of each rank between two synchronizations
    sync_seconds: _Seconds = 2.0  # AsyncEDiT: between two synchronizations
    shares: _RankValues | None = None  # samples of each rank in a step; None: as equal as integers allow
    gc_every: _Count = 0  # steps between garbage collections, in the same step on all ranks; 0: Python decides
    sequence_cost: _Terms | None = None  # of length_cost.SequenceCost; None: the script's own
    checkpoint_request: _Count = 0  # grows with each request: checkpoint at the next step
    paths: Paths | None = None  # through the fabric; None: the network chooses
    metrics_deadband: _Seconds = (
        0.05  # a rank reports metrics at once if they differ by this fraction from the last report
    )
    step_seconds: _Seconds | None = None  # of the slowest rank when this membership began; None: unknown
    stop: Stop = Stop.NO
    leaving: _Names = ()  # members whose pods are ending: their ranks save, then leave
    checkpoint_server: CheckpointEndpoint | None = None  # None: the workers reach their checkpoints themselves
    secret: str = field(default="", repr=False)  # of the membership, hex; "": from an older operator

    def __post_init__(self) -> None:
        _check_secret(self.secret)
        ranks = [rank for member in self.members for rank in member.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise InputError(
                f"plan.members: ranks {abbreviate_value(ranks)} must be 0 … {len(ranks) - 1}, each exactly once"
            )
        if self.shares is not None:
            if len(self.shares) != len(ranks):
                raise InputError(f"plan.shares: {len(self.shares)} shares for {len(ranks)} ranks; give one a rank")
            if min(self.shares, default=1) < 1:
                raise InputError(f"plan.shares: {abbreviate_value(list(self.shares))} must all be at least 1")
        if self.sync_every < 1 or not self.sync_seconds > 0 or self.gc_every < 0:
            raise InputError(
                f"plan: sync_every={self.sync_every} must be 1 step or more, "
                f"sync_seconds={self.sync_seconds} above 0, gc_every={self.gc_every} 0 or a number of steps"
            )
        _check_cost_terms(self.sequence_cost)
        if self.paths is not None:
            unknown_ranks = {rank for path in self.paths.wanted for rank in (path.source, path.destination)} - set(
                ranks
            )
            if unknown_ranks:
                raise InputError(f"plan.paths.wanted: no member has rank {min(unknown_ranks)} of {len(ranks)} ranks")

    @cached_property
    def world_size(self) -> int:
        return sum(len(member.ranks) for member in self.members)

    def with_membership_secret(self, previous: Plan, secret: str) -> Plan:
        """Return this plan with `secret` (hex) if its membership is new, else with the secret of `previous`."""
        return replace(self, secret=previous.secret if self.membership == previous.membership else secret)

    def build_worker_plan(self, worker: str) -> WorkerPlan:
        """Return the part of the plan that `worker` receives: its own ranks, and the address of the rendezvous.

        The cost per worker does not grow with the number of workers: fields common to all are computed once.
        """
        position = self._position_by_worker.get(worker)
        if position is None or self.stop is Stop.FINISH or worker in self.leaving:
            must_leave = position is not None or self.stop is not Stop.NO
            role = WorkerRole.LEAVE if must_leave else WorkerRole.SPARE
            return WorkerPlan(role=role, **self._shared_fields)
        member = self.members[position]
        peers = {self.members[(position + offset) % len(self.members)].address for offset in (-1, 1)}
        return WorkerPlan(
            role=WorkerRole.MEMBER,
            ranks=member.ranks,
            world_size=self.world_size,
            workers=len(self.members),
            store=f"{self.members[0].address}:{self.store_port}",
            serves_store=position == 0,
            peer_addresses=tuple(sorted(peers - {member.address})),
            sync_mode=self.sync_mode,
            shares=self.shares if 0 in member.ranks else None,
            sequence_cost=self.sequence_cost if 0 in member.ranks else None,
            secret=self.secret,
            paths=self._paths_by_position.get(position),
            **self._shared_fields,
        )

    @cached_property
    def _position_by_worker(self) -> Mapping[str, int]:
        """Position of each member, by worker."""
        return {member.worker: position for position, member in reversed(list(enumerate(self.members)))}

    @cached_property
    def _shared_fields(self) -> Mapping[str, Any]:
        """Fields that are the same for all workers."""
        return {name: getattr(self, name) for name in _SHARED_FIELDS}

    @cached_property
    def _paths_by_position(self) -> Mapping[int, WorkerPaths]:
        """Paths of each member, by position. Empty if the network chooses the routes."""
        return {} if self.paths is None else _split_paths_by_position(self.paths, self.members)

    def has_member(self, worker: str) -> bool:
        return worker in self._position_by_worker

    def to_json(self, leave_out: Container[str] = ()) -> dict[str, Any]:
        """Return the plan as JSON, without the fields named in `leave_out`."""
        return to_record(self, leave_out)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read a plan. Raises InputError, which names the field."""
        return _read_plan(cls, data, "plan", "the operator writes it, do not edit it by hand")


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's part of the plan. Its sidecar fetches it and its launcher follows it."""

    version: _Count = 0
    membership: _Count = 0
    round: _Count = 1
    role: WorkerRole = WorkerRole.SPARE
    ranks: _RankValues = ()
    world_size: _Count = 0
    workers: _Count = 0  # number of launchers in the rendezvous
    store: _Text = ""  # host:port
    serves_store: bool = False
    peer_addresses: Annotated[tuple[_Text, ...], MaxLength(64)] = ()  # addresses to probe if the ranks stall
    restarts: _Count = 0
    sync_mode: SyncMode = SyncMode.SYNC
    sync_every: _Count = 16
    sync_seconds: _Seconds = 2.0
    gc_every: _Count = 0
    shares: _RankValues | None = None  # of all ranks; only in the part of the worker of rank 0
    sequence_cost: _Terms | None = None  # only in the part of the worker of rank 0
    checkpoint_request: _Count = 0
    paths: WorkerPaths | None = None
    metrics_deadband: _Seconds = 0.05
    step_seconds: _Seconds | None = None  # of the job's slowest rank, as the operator measured it; None: unknown
    stop: Stop = Stop.NO
    checkpoint_server: CheckpointEndpoint | None = None
    secret: str = field(default="", repr=False)  # members authenticate each other with it, hex; spares get none

    def __post_init__(self) -> None:
        _check_cost_terms(self.sequence_cost)
        _check_secret(self.secret)

    def to_json(self) -> dict[str, Any]:
        return to_record(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read a worker's part. Raises InputError, which names the field."""
        if isinstance(data, Mapping) and "role" not in data:
            raise InputError("plan.role: must be given; is the sidecar of another version than the operator?")
        return _read_plan(cls, data, "plan", "is the sidecar of another version than the operator?")


_SHARED_FIELDS = (
    *("version", "membership", "round", "restarts", "checkpoint_request", "metrics_deadband", "step_seconds"),
    *("sync_every", "sync_seconds", "gc_every", "stop", "checkpoint_server"),
)
"""Fields that a plan and all of its parts have in common."""


def choose_rendezvous(ports: Sequence[int | None], secret: str) -> tuple[int, str]:
    """Return the `store_port` and the secret of a new membership.

    `ports` are the `rendezvous_port`s of its members' heartbeats, in rank order. `secret` is a fresh one.

    A member that announces no port has an older launcher, or an older sidecar, which would not pass the secret on. Then
    no member gets a secret, because members with a secret would reject that one.
    """
    first = ports[0] if ports else None
    return (Plan.store_port if first is None else first), ("" if None in ports or not ports else secret)


def _split_paths_by_position(paths: Paths, members: Sequence[Member]) -> Mapping[int, WorkerPaths]:
    """Return the paths that leave or reach each member, at most MAX_WORKER_PATHS. Leave out paths within a member."""
    holders = {rank: position for position, member in enumerate(members) for rank in member.ranks}
    addresses: dict[str, tuple[str, ...]] = {}
    for hop in paths.hops:
        addresses[hop.spine] = (*addresses.get(hop.spine, ()), hop.address)
    paths_by_position: dict[int, list[WorkerPath]] = {position: [] for position in range(len(members))}
    for path in paths.wanted:
        ends = holders[path.source], holders[path.destination]
        for local, remote in (ends, ends[::-1]) if ends[0] != ends[1] else ():
            if len(paths_by_position[local]) < MAX_WORKER_PATHS:
                hops, peer = addresses.get(path.spine, ()), members[remote]
                ranks = path.source, path.destination
                paths_by_position[local].append(
                    WorkerPath(*ranks, path.spine, hops, peer.worker, peer.address, path.draw)
                )
    spines = max(1, len(addresses))
    return {
        position: WorkerPaths(tuple(wanted), spines, paths.first_port, paths.last_port)
        for position, wanted in paths_by_position.items()
    }


_Record = TypeVar("_Record")


def _check_address(field: str, address: str) -> None:
    """Raise InputError if `address` is not an IP address in the form that the kernel reports."""
    try:
        canonical = str(ip_address(address))
    except ValueError:
        raise InputError(f"{field}: {address!r} is not an IP address") from None
    if canonical != address:
        raise InputError(f"{field}: {address!r}: give it as {canonical}")


def _check_ports(first: int, last: int) -> None:
    """Raise InputError if the range of ports is too small for a job."""
    if last - first < MIN_JOB_PORTS:
        raise InputError(f"plan.paths: ports {first} to {last} are too few; give {MIN_JOB_PORTS} at least")


def _read_plan(cls: type[_Record], data: Mapping[str, Any], path: str, remedy: str) -> _Record:
    """Read a plan or a part of it. `remedy` is what the reader of an error should do."""
    if not isinstance(data, Mapping):
        return read_dataclass(cls, data, path)
    _check_secret(data.get("secret", ""))  # checked first, so no error shows its content
    values = {**data, "sequence_cost": _parse_cost_terms(data.get("sequence_cost"))}
    try:
        return read_dataclass(cls, values, path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error


def _parse_cost_terms(terms: Any) -> tuple[float, float, float] | None:
    """Return the terms as floats. Raises InputError if they are not three numbers."""
    if terms is None:
        return None
    try:
        fixed, per_token, per_token_squared = (float(term) for term in terms)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"plan.sequence_cost: {abbreviate_value(terms)} must be three numbers: fixed, per token, per token squared"
        ) from error
    return fixed, per_token, per_token_squared


def _check_cost_terms(terms: tuple[float, float, float] | None) -> None:
    """Raise InputError if the terms are not valid for SequenceCost."""
    if terms is not None:
        try:
            SequenceCost(*terms)
        except InputError as error:
            raise InputError(f"plan.sequence_cost: {error}") from error


def _check_secret(secret: object) -> None:
    """Raise InputError if the secret is not hexadecimal. The message does not contain it."""
    try:
        bytes.fromhex(secret)  # type: ignore[arg-type]  # rejects other types here
    except (TypeError, ValueError):
        raise InputError("plan.secret: must be hexadecimal digits; the operator makes it, do not edit it") from None
