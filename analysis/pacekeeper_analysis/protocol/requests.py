"""Requests: what the operator asks of a job's ranks in addition to the plan, and the part that each worker receives.

The plan is desired state: it is written, and survives a change of the leader. Requests are not written. They do not
raise the plan's version, and a new leader issues its own. Answers to requests that it has not issued are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Self

from ..errors import InputError
from .decoding import MaxLength, Within, read_dataclass
from .encoding import to_record
from .plan import MAX_JOB_WORKERS

_Count = Annotated[int, Within(0)]
_Seconds = Annotated[float, Within(0, 1e12)]
_Text = Annotated[str, MaxLength(253)]  # a name, or an address


@dataclass(frozen=True)
class Requests:
    """The open requests to a job's ranks. The name of each request is unique, among all leaders."""

    evidence: EvidenceRequest | None = None
    probe: ProbeRequest | None = None  # to measure links
    profile: ProfileRequest | None = None

    @property
    def evidence_name(self) -> str:
        """Name of the open evidence request; "": there is none."""
        return "" if self.evidence is None else self.evidence.name

    @property
    def evidence_parts(self) -> tuple[EvidencePart, ...]:
        """What the open evidence request asks for."""
        return () if self.evidence is None else self.evidence.parts

    def build_worker_requests(self, worker: str, *, is_member: bool) -> WorkerRequests:
        """Return the part that `worker` receives. Only members have ranks to ask."""
        task = self._probe_task_by_worker.get(worker)
        evidence, profile = (self.evidence, self.profile) if is_member else (None, None)
        names = [request.name for request in (evidence, task, profile) if request is not None]
        return WorkerRequests(",".join(names), evidence, task, profile)

    @cached_property
    def _probe_task_by_worker(self) -> Mapping[str, LinkProbeTask]:
        """Part of the open link probe, by worker."""
        if self.probe is None:
            return {}
        targets = zip(self.probe.sources, self.probe.targets, strict=True)
        return {
            source: LinkProbeTask(self.probe.name, source_targets) for source, source_targets in reversed(list(targets))
        }


@dataclass(frozen=True)
class WorkerRequests:
    """One worker's part of the requests.

    `identity` differs for different parts. The sidecar returns it in its next poll, which shows the operator what the
    worker has received.
    """

    identity: Annotated[str, MaxLength(1024)] = ""  # "": no request is open
    evidence: EvidenceRequest | None = None
    probe: LinkProbeTask | None = None
    profile: ProfileRequest | None = None

    def to_json(self) -> dict[str, Any]:
        return to_record(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read a worker's part. Raises InputError, which names the field."""
        evidence = data.get("evidence") if isinstance(data, Mapping) else None
        if isinstance(evidence, Mapping):
            data = {**data, "evidence": {**evidence, **_keep_known_evidence_parts(evidence)}}
        return read_dataclass(cls, data, "requests")


class EvidencePart(StrEnum):
    """What an evidence request asks for."""

    WINDOWS = "Windows"  # steps, own work, samples
    OPERATIONS = "Operations"  # collectives of the last steps, and the members of each group
    LINKS = "Links"  # the kernel's counters of connections, and NCCL's counters of its transfers


@dataclass(frozen=True)
class EvidenceRequest:
    """A request for what the ranks have recorded of their last steps."""

    name: _Text
    parts: Annotated[tuple[EvidencePart, ...], MaxLength(16)] = (EvidencePart.WINDOWS,)


@dataclass(frozen=True)
class ProbeTarget:
    """A launcher to which another one measures its link.

    `slot` is its turn. A turn takes one second, and all measurements of one turn run at the same time.
    """

    worker: _Text
    address: _Text  # host:port
    slot: _Count = 0


_Targets = Annotated[tuple[ProbeTarget, ...], MaxLength(MAX_JOB_WORKERS)]


@dataclass(frozen=True)
class ProbeRequest:
    """A request to measure links between launchers: from each of `sources` to each of its targets."""

    name: _Text
    sources: Annotated[tuple[_Text, ...], MaxLength(MAX_JOB_WORKERS)] = ()  # workers
    targets: Annotated[tuple[_Targets, ...], MaxLength(MAX_JOB_WORKERS)] = ()  # of each source

    def __post_init__(self) -> None:
        """Raise InputError if `targets` does not have one entry per source."""
        if len(self.sources) != len(self.targets):
            raise InputError(
                f"requests.probe: targets for {len(self.targets)} sources, but there are {len(self.sources)}"
            )


@dataclass(frozen=True)
class LinkProbeTask:
    """One launcher's part of a `ProbeRequest`."""

    name: _Text
    targets: _Targets


class SourceNaming(StrEnum):
    """How a profile names files outside installed packages."""

    SHOW = "Show"
    HASH = "Hash"  # by a hash of the path; each rank logs which path a hash stands for; functions keep their names


@dataclass(frozen=True)
class ProfileRequest:
    """A request that all ranks profile the same steps.

    The window begins at `first_step`. It ends after `steps` steps or `seconds` seconds, whichever comes first.
    """

    name: _Text
    first_step: _Count
    steps: _Count = 32
    seconds: _Seconds = 20.0
    sources: SourceNaming = SourceNaming.HASH


def _keep_known_evidence_parts(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested parts that this version knows. Others come from another version."""
    parts = evidence.get("parts")
    known = tuple(EvidencePart)
    return {"parts": [part for part in parts if part in known]} if isinstance(parts, (list, tuple)) else {}
