"""Checkpoints in an object store, which has no rename: a checkpoint is published by the object that is put last.

A round puts its files below `step-00000100.r<round>-a<attempt>-<job>-<run>/`, and `manifest.json` after all others have
been verified. Without a manifest there is no checkpoint. A job owns the store by the claim with the highest number,
`.owner-00000012.json`, which is created only if it does not exist. Reading an object by its name shows its present
state; a listing may be late. `.published.json` therefore names the checkpoints, and claims are read one by one.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pacekeeper.environment import JobIdentity
from pacekeeper.torch_internals import StorageInfo
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, Within, parse_json, read_dataclass

from .checkpoint_folder import describe_error
from .checkpoint_storage import Result, StorageUnavailableError, WritableStream
from .distributed_checkpoint import prefetch_items
from .folder_ownership import FolderClaimant, FolderOwner, OwnershipClaims
from .manifests import FileChecksum, Manifest
from .object_store import ObjectStore

_FOLDER_PATTERN = re.compile(r"step-(\d{8,})(?:\.r(\d+)-a(\d+)-([0-9a-f]{8})-[0-9a-f]{8}-[0-9a-f]{8})?")
"""A checkpoint, or an unfinished one. Without a suffix it was published by a rename on the claim (CheckpointFolder)."""
_CLAIM_PATTERN = re.compile(r"\.owner-(\d{8,})\.json")
_MANIFEST_OBJECT = "manifest.json"
_INDEX_OBJECT = ".published.json"
_NEWEST_CLAIM_OBJECT = "owner.json"
_PROBE_PREFIX = ".writable-"
_VISIBILITY_OBJECT_PREFIX = ".seen-by-all."
_MAX_CLAIM_REQUESTS = 16
_MAX_UNLISTED_CLAIMS = 1024
"""Claims in a row that a listing may lack."""
_RETAINED_CLAIM_OBJECTS = 8
_CHECKSUM_RANGE_BYTES = 16 << 20
STORAGE_REMEDY = (
    "Give all workers the same endpoint and credentials by the template (environment, Secret, or service account)"
)
"""Remedy if workers see different objects."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _NewestClaim:
    """Number of a claim that was made. A later one may exist."""

    number: Annotated[int, Within(0)]


@dataclass(frozen=True)
class _PublishedIndex:
    """Folders of checkpoints, oldest first."""

    folders: Annotated[tuple[Annotated[str, MaxLength(256)], ...], MaxLength(1 << 12)] = ()


class ObjectCheckpoints:
    """The checkpoints of one job below `spec.checkpoint.uri`."""

    def __init__(
        self,
        store: ObjectStore,
        round_: int,
        keep: int = 3,
        job: JobIdentity = JobIdentity(),  # noqa: B008  # it is frozen
        adopt: str = "",
        read_only: bool = False,
        *,
        rank: int = 0,
    ) -> None:
        """Open the checkpoints. Only rank 0 sends requests: it checks ownership and whether it may write.

        `adopt` and `read_only` as for `CheckpointFolder`. Raises InputError if another job owns the store, or if the
        store refuses to be used. A store that does not answer is no reason to raise: a snapshot may have the state.
        """
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep} must be at least 1 (spec.checkpoint.keep)")
        self.round = round_
        self.read_only = read_only
        self.run_tag = f"{job.file_tag}-{secrets.token_hex(4)}"
        self.new_owner_message = ""
        self._store = store
        self._job = job
        self._retained_count = keep
        self._claimant = FolderClaimant(job, round_, adopt)
        self._own_claim: tuple[int, bytes] | None = None
        """Number and content of this round's claim; None: it has none yet."""
        self._previous_number: int | None = None
        """Number of the newest claim before this round; None: unknown."""
        self._accepted_jobs: frozenset[str] | None = None
        """Names of jobs whose checkpoints this one may continue from; None: all."""
        self._is_admitted = read_only
        """Whether the owner is known to be this job, or none."""
        self._attempts = 0
        self._partial: ObjectFiles | None = None
        """Files of the current attempt."""
        if rank != 0:
            return
        try:
            if read_only:
                if not self._list_folders():
                    raise InputError(f"{self.field}: {self.location} has no checkpoints; give the URI of a job's")
                return
            self._admit()
            self._check_writable()
        except StorageUnavailableError as error:
            _log.warning("%s: checkpoints cannot be used yet: %s", self.location, error)
        except OSError as error:
            raise InputError(f"{self.field}: {self.location} cannot be used: {describe_error(error)}") from error

    @property
    def field(self) -> str:
        return self._store.field

    @property
    def location(self) -> str:
        return self._store.uri

    @property
    def remedy_if_unshared(self) -> str:
        return STORAGE_REMEDY

    def claim(self) -> None:
        """Claim the store, as `CheckpointStorage.claim`. Raises InputError if another job has become the owner."""
        try:
            self._previous_number = self._read_claims().number
            self._make_claim()
        except OSError as error:
            _log.warning("%s: this round cannot publish checkpoints yet: %s", self.location, error)
            return
        with suppress(OSError):  # it takes room, and the next round tries again
            self._clear_partials()

    def create_visibility_mark(self) -> str:
        name = f"{_VISIBILITY_OBJECT_PREFIX}{self._job.name_tag}.{secrets.token_hex(8)}"
        try:
            self._store.put(name, b"mark")
        except OSError:
            return ""
        return name

    def has_visibility_mark(self, mark: str) -> bool:
        try:
            return self._store.get(mark) is not None
        except StorageUnavailableError as error:  # no evidence about what it holds
            _log.warning("%s: whether all workers see the same objects is not known: %s", self.location, error)
            return True
        except OSError as error:
            _log.warning("%s cannot be read by this worker: %s", self.location, describe_error(error))
            return False

    def remove_visibility_mark(self, mark: str) -> None:
        if mark:
            with suppress(OSError):
                self._store.delete(mark)

    def begin_attempt(self, step: int) -> ObjectFiles:
        self._attempts += 1
        self._partial = ObjectFiles(self._store, f"step-{step:08d}.r{self.round}-a{self._attempts}-{self.run_tag}")
        return self._partial

    def open_checkpoint(self, manifest: Manifest) -> ObjectFiles:
        return ObjectFiles(self._store, manifest.folder)

    def publish(self, manifest: Manifest) -> bool:
        """Put the manifest of the current attempt, as `CheckpointStorage.publish`.

        After a crash at any line, the previous or the new checkpoint exists.
        """
        assert self._partial is not None, "an attempt has begun"
        folder = self._partial.folder
        if not self._has_all_files(folder, manifest):
            raise InputError(f"{self._store.describe(folder)} lacks what the ranks have written. {STORAGE_REMEDY}")
        if not self._is_current():
            with suppress(OSError):
                self._delete_folder(folder)
            return False
        content = json.dumps(manifest.to_json()).encode()
        try:
            self._store.put(f"{folder}/{_MANIFEST_OBJECT}", content)
        except OSError:
            if self._store.get(f"{folder}/{_MANIFEST_OBJECT}") != content:  # the answer alone may be lost
                raise
        with suppress(OSError):  # the checkpoint is published regardless; the next one prunes again
            self._write_index([*self._read_index(), folder])
            self._prune(manifest.step, folder)
        return True

    def discard(self, step: int, owns_file: Callable[[str], bool]) -> None:  # noqa: ARG002
        folder = "" if self._partial is None else self._partial.folder
        if not folder:
            return
        with suppress(OSError):
            names = [_MANIFEST_OBJECT, *self._store.list_entries(folder)]
            for name in dict.fromkeys(name for name in names if owns_file(name)):
                self._store.delete(f"{folder}/{name}")

    def list_published(self) -> list[Manifest]:
        if not self._is_admitted:  # the store did not answer before
            self._admit()
        manifests: dict[int, Manifest] = {}
        for step, folder in self._list_folders():
            manifest = self._read_manifest(folder)
            if (
                manifest is not None
                and step not in manifests
                and manifest.step == step
                and (self._accepted_jobs is None or manifest.job in self._accepted_jobs)
                and self._has_all_files(folder, manifest)
            ):
                manifests[step] = manifest
        return sorted(manifests.values(), key=lambda entry: entry.step, reverse=True)

    def _list_folders(self) -> list[tuple[int, str]]:
        """Return steps and the folders that may be their checkpoints, newest first. Raises OSError."""
        names = {*self._store.list_entries(), *self._read_index()}
        matches = [match for name in names if (match := _FOLDER_PATTERN.fullmatch(name))]
        matches.sort(key=lambda match: (int(match[1]), int(match[2] or 0), int(match[3] or 0), match[0]), reverse=True)
        return [(int(match[1]), match[0]) for match in matches]

    def _read_manifest(self, folder: str) -> Manifest | None:
        """Return the manifest of a folder; None: there is none, or it is invalid. Raises OSError."""
        content = self._store.get(f"{folder}/{_MANIFEST_OBJECT}")
        if content is None:
            return None
        try:
            return replace(Manifest.from_json(parse_json(content)), folder=folder)
        except ValueError:  # InputError among them
            return None

    def _has_all_files(self, folder: str, manifest: Manifest) -> bool:
        """Return whether all files of the manifest have its sizes. Raises OSError."""
        listed = self._store.list_entries(folder)
        return all(
            listed.get(name) == entry.nbytes or self._store.get_size(f"{folder}/{name}") == entry.nbytes
            for name, entry in manifest.files.items()
        )

    # Retention

    def _read_index(self) -> tuple[str, ...]:
        """Return the folders that the index names, which are at least the newest ones. Raises OSError."""
        content = self._store.get(_INDEX_OBJECT)
        try:
            return () if content is None else read_dataclass(_PublishedIndex, parse_json(content)).folders
        except ValueError:  # InputError among them
            return ()

    def _write_index(self, folders: list[str]) -> None:
        kept = tuple(dict.fromkeys(folders))[-(self._retained_count + 1 << 1) :]
        self._store.put(_INDEX_OBJECT, json.dumps(asdict(_PublishedIndex(kept))).encode())

    def _prune(self, step: int, published_folder: str) -> None:
        """Delete all but the newest valid checkpoints of this job up to `step`, which has just been published.

        As `CheckpointFolder._prune`. Another checkpoint of the same step was torn, or of another number of ranks.
        """
        retained = [
            manifest for manifest in self.list_published() if manifest.step <= step and self._is_own_job(manifest.job)
        ][: self._retained_count]
        if not retained:
            return
        deleted = set()
        for folder_step, folder in self._list_folders():
            is_replaced = folder_step == step and folder != published_folder
            if folder_step >= retained[-1].step and not is_replaced:
                continue
            manifest = self._read_manifest(folder)
            if manifest is not None and self._is_own_job(manifest.job):
                self._delete_folder(folder)
                deleted.add(folder)
        if deleted:
            self._write_index([folder for folder in self._read_index() if folder not in deleted])

    def _is_own_job(self, name: str) -> bool:
        return not self._job.name or name in (self._job.name, "")

    def _delete_folder(self, folder: str) -> None:
        """Delete a checkpoint or an unfinished one. The manifest is first: without it, it is no checkpoint."""
        self._store.delete(f"{folder}/{_MANIFEST_OBJECT}")
        for name in self._store.list_entries(folder):
            self._store.delete(f"{folder}/{name}")

    def _clear_partials(self) -> None:
        """Delete unfinished checkpoints of this job and of jobs that it took over. Raises OSError."""
        names = self._accepted_jobs if self._accepted_jobs is not None else {""}
        name_tags = {JobIdentity(name).name_tag for name in names} | {self._job.name_tag}
        for name in self._store.list_entries():
            match = _FOLDER_PATTERN.fullmatch(name)
            if match is not None:
                is_own_attempt = name.endswith(self.run_tag)
                has_manifest = is_own_attempt or self._store.get(f"{name}/{_MANIFEST_OBJECT}") is not None
                if match[4] in name_tags and not has_manifest:
                    self._delete_folder(name)
            elif name.startswith((f"{_VISIBILITY_OBJECT_PREFIX}{self._job.name_tag}.", _PROBE_PREFIX)):
                self._store.delete(name)

    # Ownership

    def _admit(self) -> None:
        """Find out whose checkpoints this job may continue from. Raises as `_check_admission`."""
        self._accepted_jobs = self._claimant.list_accepted_jobs(self._check_admission()[0].owner)
        self._is_admitted = True

    def _check_admission(self) -> tuple[OwnershipClaims, str | None]:
        """Return the claims, and the job that wrote the newest checkpoint if no owner has a name.

        Raises InputError if the store belongs to another job, OSError if it cannot be read.
        """
        claims = self._read_claims()
        newest = self._find_newest_job() if claims.owner is None or not claims.owner.job else None
        if refusal := self._claimant.explain_refusal(claims.owner, newest):
            raise InputError(f"{self.field}: {self.location} {refusal}")
        return claims, newest

    def _find_newest_job(self) -> str | None:
        manifests = (self._read_manifest(folder) for _, folder in self._list_folders())
        return next((manifest.job for manifest in manifests if manifest is not None), None)

    def _check_writable(self) -> None:
        """Raise OSError if objects cannot be written or deleted, and warn if writes cannot be conditional."""
        name = f"{_PROBE_PREFIX}{secrets.token_hex(8)}"
        first, second = secrets.token_bytes(8), secrets.token_bytes(8)
        self._store.put(name, first)
        try:
            if not self._store.has_conditional_writes or self._store.create(name, second):
                _log.warning(
                    "%s: the store ignores conditional writes. If two jobs claim it at the same moment, the one that "
                    "loses trains on until its next checkpoint; give each job its own spec.checkpoint.uri",
                    self.location,
                )
        finally:
            self._store.delete(name)

    def _make_claim(self) -> None:
        """Claim the store. Raises InputError if another job owns it, OSError if the store refuses."""
        for _ in range(_MAX_CLAIM_REQUESTS):
            claims, newest = self._check_admission()
            owner = self._claimant.build_next_owner(claims.owner, newest)
            number, content = claims.number + 1, json.dumps(asdict(owner)).encode()
            if self._store.create(_format_claim_name(number), content):
                self._own_claim, self._accepted_jobs = (number, content), self._claimant.list_accepted_jobs(owner)
                self._is_admitted = True
                self._record_newest_claim(number)
                return
        raise OSError(errno.EBUSY, f"others have claimed it {_MAX_CLAIM_REQUESTS} times in a row")

    def _record_newest_claim(self, number: int) -> None:
        with suppress(OSError):  # claims are found without it, unless all of them are deleted or unlisted
            self._store.put(_NEWEST_CLAIM_OBJECT, json.dumps(asdict(_NewestClaim(number))).encode())
            for old_number in self._list_claim_numbers():
                if old_number <= number - _RETAINED_CLAIM_OBJECTS:
                    self._store.delete(_format_claim_name(old_number))

    def _read_claims(self) -> OwnershipClaims:
        """Read the claims. Raises OSError if the store cannot be read, which is no evidence about owners."""
        number = max([*self._list_claim_numbers(), self._read_newest_number()], default=0)
        for _ in range(_MAX_UNLISTED_CLAIMS):
            if self._store.get(_format_claim_name(number + 1)) is None:
                break
            number += 1
        candidates = range(number, max(0, number - _RETAINED_CLAIM_OBJECTS), -1)
        owners = (self._read_owner(_format_claim_name(candidate)) for candidate in candidates)
        return OwnershipClaims(number, next((owner for owner in owners if owner is not None), None))

    def _list_claim_numbers(self) -> Iterator[int]:
        for name in self._store.list_entries():
            if match := _CLAIM_PATTERN.fullmatch(name):
                yield int(match[1])

    def _read_newest_number(self) -> int:
        content = self._store.get(_NEWEST_CLAIM_OBJECT)
        try:
            return 0 if content is None else read_dataclass(_NewestClaim, parse_json(content)).number
        except ValueError:  # InputError among them
            return 0

    def _read_owner(self, name: str) -> FolderOwner | None:
        content = self._store.get(name)
        try:
            return None if content is None else read_dataclass(FolderOwner, parse_json(content))
        except ValueError:  # InputError among them
            return None

    def _is_current(self) -> bool:
        """Return whether no later round has begun.

        Claims the store if this round could not before, or if it was emptied. A claim between this check and the
        manifest is not noticed. The manifest then is a valid checkpoint of this job all the same.
        """
        if self._own_claim is not None:
            number, content = self._own_claim
            has_own = self._store.get(_format_claim_name(number)) == content
            if has_own and self._store.get(_format_claim_name(number + 1)) is None:
                return True
        claims = self._read_claims()
        owner = claims.owner
        if self._own_claim is not None:
            may_claim = owner is None
        elif self._previous_number is not None:
            may_claim = owner is None or claims.number == self._previous_number
        else:  # the store did not answer when this round began
            may_claim = owner is None or (owner.job, owner.uid) != (self._job.name, self._job.uid)
            may_claim = may_claim or (owner is not None and owner.round <= self.round)
        if may_claim:
            try:
                self._make_claim()
            except InputError as error:
                self.new_owner_message = str(error)
                return False
            return True
        if owner is not None and (owner.job, owner.uid) != (self._job.name, self._job.uid):
            self.new_owner_message = (
                f"{self.field}: {self.location} belongs to {owner.describe_job() or 'another job'} by now"
            )
        return False


class ObjectFiles:
    """The files of one checkpoint in an object store."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self.folder = folder
        self._store = store

    def describe(self, name: str) -> str:
        return self._store.describe(f"{self.folder}/{name}")

    def write_file(self, name: str, nbytes: int, write: Callable[[WritableStream], Result]) -> Result:
        return self._store.write_file(f"{self.folder}/{name}", nbytes, write)

    def read_file(self, name: str) -> bytes:
        content = self._store.get(f"{self.folder}/{name}")
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object")
        return content

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self._store.get_range(f"{self.folder}/{name}", offset, length)

    def compute_checksum(self, name: str) -> FileChecksum:
        size = self._store.get_size(f"{self.folder}/{name}")
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object")
        ranges = [
            StorageInfo(name, offset, min(_CHECKSUM_RANGE_BYTES, size - offset))
            for offset in range(0, size, _CHECKSUM_RANGE_BYTES)
        ]
        crc = nbytes = 0
        for _, content in prefetch_items(
            [(None, part) for part in ranges], lambda part: self.read_range(name, part.offset, part.length)
        ):
            crc, nbytes = zlib.crc32(content, crc), nbytes + len(content)
        return FileChecksum(nbytes, crc)

    def wait_until_visible(self, name: str) -> bool:
        return self._store.get_size(f"{self.folder}/{name}") is not None


def _format_claim_name(number: int) -> str:
    return f".owner-{number:08d}.json"
