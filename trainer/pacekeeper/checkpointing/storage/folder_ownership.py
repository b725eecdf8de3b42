"""Ownership of a folder of checkpoints by a job, and how a job claims it.

Each claim of the folder is a folder `.owner-<number>/` that appears atomically, by one rename, and only if no other job
has created one with this number. The highest number owns the folder. `owner.json` repeats it for people and for
versions without claims. The owner reads it before it publishes, because network file systems read it without caches.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pacekeeper.environment import JobIdentity
from pacekeeper_analysis.protocol.decoding import MaxLength, Within, parse_json, read_dataclass

from .durable import sync_folder, write_durably

_OWNER_FILE = "owner.json"
_CLAIM_NAME_PATTERN = re.compile(r"\.owner-(\d{8,})")
_PREPARED_CLAIM_PREFIX = ".taking-"
_RETAINED_CLAIMS = 8
"""Number of claims to keep. A job that still tries to make an older one is this many rounds late."""
_MAX_SUPERSEDED_UIDS = 64
_MAX_JOB_NAME_CHARACTERS = 4096


@dataclass(frozen=True)
class FolderOwner:
    """Owner of a folder: one round of one job."""

    owner: Annotated[str, MaxLength(256)]
    """Unique ID of this claim."""
    job: Annotated[str, MaxLength(_MAX_JOB_NAME_CHARACTERS)] = ""
    """Name of the job; "": unknown, because an older version wrote it."""
    uid: Annotated[str, MaxLength(_MAX_JOB_NAME_CHARACTERS)] = ""
    round: Annotated[int, Within(0)] = 0
    adopted: Annotated[tuple[Annotated[str, MaxLength(_MAX_JOB_NAME_CHARACTERS)], ...], MaxLength(1024)] = ()
    """Names of the jobs whose checkpoints `job` has taken over."""
    superseded: Annotated[tuple[Annotated[str, MaxLength(_MAX_JOB_NAME_CHARACTERS)], ...], MaxLength(1024)] = ()
    """UIDs of the jobs and runs that owned the folder before: none of them may return."""
    host: Annotated[str, MaxLength(256)] = ""
    pid: Annotated[int, Within(0)] | None = None
    started: Annotated[int, Within(0)] | None = None
    """Start of rank 0's process in ticks since boot: with it and the host, `pid` is unique permanently."""

    def describe_job(self) -> str:
        """Return the job for messages."""
        return f"{self.job} (UID {self.uid})" if self.uid else self.job


@dataclass(frozen=True)
class OwnershipClaims:
    """Claims on a folder."""

    number: int = 0
    """Number of the newest claim; 0: none."""
    owner: FolderOwner | None = None
    """None: no job has owned it."""
    written_claim: str = ""
    """The claim that `owner.json` names; "": none."""


@dataclass(frozen=True)
class FolderClaimant:
    """A job that claims a folder."""

    job: JobIdentity
    round: int
    adopt: str = ""
    """Name of the job whose checkpoints it takes over; "": none."""

    def list_accepted_jobs(self, owner: FolderOwner | None) -> frozenset[str] | None:
        """Return the names of the jobs whose checkpoints it may continue from; None: all."""
        if not self.job.name:
            return None
        adopted = owner.adopted if owner is not None and owner.job in (self.job.name, self.adopt) else ()
        return frozenset({self.job.name, "", *adopted, *([self.adopt] if self.adopt else [])})

    def explain_refusal(self, owner: FolderOwner | None, newest: str | None) -> str:
        """Return why the job must not use the folder; "": it may.

        `newest`: name of the job that wrote the newest checkpoint there; None: there is none.
        """
        names = self.list_accepted_jobs(owner)
        if names is None:
            return ""
        job = newest if owner is None or not owner.job else owner.job
        if job is not None and job not in names:
            job_description = owner.describe_job() if owner is not None and owner.job else job
            return (
                f"holds checkpoints of another job, {job_description}; this one is {self.job.name}. Nothing was "
                "changed. Give this job a folder of its own (spec.checkpoint.path, or spec.checkpoint.subPath of a "
                f"claim or URI), or take the other job's checkpoints over: spec.checkpoint.adopt: {job} "
                f'(pk.Checkpoints(adopt="{job}")). To evaluate them, open the folder with '
                "pk.Checkpoints(read_only=True)"
            )
        if job is None and self.adopt and self.adopt != self.job.name:
            return (
                f"has no checkpoints, but spec.checkpoint.adopt expects those of {self.adopt} there; set "
                "spec.checkpoint.path and subPath to where they are, or remove spec.checkpoint.adopt"
            )
        if owner is None or owner.job != self.job.name:
            return ""
        if not _is_another_run(owner, self.job) and self.round == 0 < owner.round:
            return (
                "belongs to the ranks of this job, and this process is none of them. To evaluate its checkpoints, open "
                "the folder with pk.Checkpoints(read_only=True)"
            )
        if _is_another_run(owner, self.job):
            if self.job.uid and self.job.uid in owner.superseded:
                return (
                    f"belongs to a later run of this job by now, {owner.describe_job()}; this one "
                    f"({self.job.uid}) is over. "
                    "Give one of them a folder of its own"
                )
            if _is_alive(owner):
                return (
                    f"is in use by another run of {self.job.name}, process {owner.pid} on this host. End it first, or "
                    "give this run a folder of its own; runs of one script that differ in PACEKEEPER_JOB are different "
                    "jobs"
                )
        return ""

    def build_next_owner(self, owner: FolderOwner | None, newest: str | None) -> FolderOwner:
        """Return the next owner of the folder. `newest`: as in `explain_refusal`."""
        previous = owner or FolderOwner("")
        job = previous.job or newest or ""
        adopted = [*previous.adopted, job]
        uids = [uid for uid in (*previous.superseded, previous.uid) if uid and uid != self.job.uid]
        return FolderOwner(
            f"r{self.round}-{secrets.token_hex(8)}",
            self.job.name,
            self.job.uid,
            self.round,
            tuple(name for name in dict.fromkeys(adopted) if name not in ("", self.job.name)),
            tuple(dict.fromkeys(uids))[-_MAX_SUPERSEDED_UIDS:],
            socket.gethostname()[:256],
            os.getpid(),
            _read_process_start(os.getpid()),
        )


def read_claims(path: Path) -> OwnershipClaims:
    """Read the claims. Raises OSError if the volume cannot be read, which is no evidence about owners."""
    numbers = _list_claim_numbers(path)
    written_owner = _read_owner(path / _OWNER_FILE)
    owners = (_read_owner(path / _format_claim_name(number) / _OWNER_FILE) for number in numbers)
    owner = next((owner for owner in owners if owner is not None), written_owner)
    if owner is not None and written_owner is not None and not written_owner.job:
        owner = replace(owner, owner=written_owner.owner)  # an older version without job names has continued since
    return OwnershipClaims(max(numbers, default=0), owner, "" if written_owner is None else written_owner.owner)


def read_written_claim(path: Path) -> str:
    """Return the claim that `owner.json` names; "": none. Raises OSError as `read_claims` does."""
    owner = _read_owner(path / _OWNER_FILE)
    return "" if owner is None else owner.owner


def take_folder(path: Path, number: int, owner: FolderOwner) -> bool:
    """Make `owner` the owner by the claim of this number, and return whether it is.

    False means no change: another claim was faster. Raises OSError if the volume refuses. A crash at any line leaves
    the previous owner or the new one.
    """
    text = json.dumps(asdict(owner))
    prepared, claim = (
        path / f"{format_prepared_prefix(owner.job)}{secrets.token_hex(8)}",
        path / _format_claim_name(number),
    )
    try:
        prepared.mkdir()
        write_durably(prepared / _OWNER_FILE, text)
        if not claim.exists():
            prepared.rename(claim)
    except OSError as error:
        # A server may have done it although its response was lost: the content decides.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) and not _is_owned_by(claim, owner):
            raise
    finally:
        shutil.rmtree(prepared, ignore_errors=True)
    numbers = _list_claim_numbers(path)
    if max(numbers, default=0) != number or not _is_owned_by(claim, owner):
        return False
    sync_folder(path)
    write_durably(path / _OWNER_FILE, text)
    for old_number in numbers:
        if old_number <= number - _RETAINED_CLAIMS:
            shutil.rmtree(path / _format_claim_name(old_number), ignore_errors=True)
    return True


def format_prepared_prefix(job: str) -> str:
    """Return the prefix of folders in which a job of this name prepares a claim."""
    return f"{_PREPARED_CLAIM_PREFIX}{JobIdentity(job).name_tag}-"


def _list_claim_numbers(path: Path) -> list[int]:
    """Return the numbers of all claims, newest first."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]) for name in names if (match := _CLAIM_NAME_PATTERN.fullmatch(name))), reverse=True)


def _format_claim_name(number: int) -> str:
    return f".owner-{number:08d}"


def _is_owned_by(claim: Path, owner: FolderOwner) -> bool:
    current_owner = _read_owner(claim / _OWNER_FILE)
    return current_owner is not None and current_owner.owner == owner.owner


def _read_owner(path: Path) -> FolderOwner | None:
    """Return the owner in a file; None: it is missing or invalid. Raises OSError if the volume cannot be read."""
    try:
        return read_dataclass(FolderOwner, parse_json(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # InputError among them
        return None


def _is_another_run(owner: FolderOwner, job: JobIdentity) -> bool:
    return not job.uid or owner.uid != job.uid


def _is_alive(owner: FolderOwner) -> bool:
    """Return whether the process that claimed the folder runs on this host, and is not this one."""
    if owner.pid is None or owner.started is None:
        return False
    is_other_local_process = owner.host == socket.gethostname()[:256] and owner.pid != os.getpid()
    return is_other_local_process and _read_process_start(owner.pid) == owner.started


def _read_process_start(pid: int) -> int | None:
    """Return the start of a process in ticks since its host's boot; None: it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
