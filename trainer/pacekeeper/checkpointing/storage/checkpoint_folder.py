"""The folder of checkpoints on the volume: published atomically, checked before use.

A round writes into `step-00000100.partial-r<round>-<job>/` through torch.distributed.checkpoint. It adds
`manifest.json` with the size and checksum of every file, and publishes by renaming the folder to `step-00000100/`. Only
the current round of the job that owns the folder may publish: `owner.json` names it, and a rank that is partitioned
from the rest finds another name there (see folder_ownership.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pacekeeper.environment import JobIdentity
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json

from .checkpoint_storage import Result, StorageUnavailableError, WritableStream
from .claim_filesystem import CheckpointServerUnavailableError
from .durable import sync_folder as _sync_folder
from .durable import write_durably as _write_durably
from .folder_ownership import (
    FolderClaimant,
    OwnershipClaims,
    format_prepared_prefix,
    read_claims,
    read_written_claim,
    take_folder,
)
from .manifests import FileChecksum, Manifest, compute_checksum

_CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{8,})(?:\.(new|replaced)-.+|\.r\d+-a\d+(?:-[0-9a-f]{8}){3})?")
"""A checkpoint. One with round and attempt was written through the checkpoint server (ObjectCheckpoints).

`new` stands next to a checkpoint that it will replace, until that is removed. `replaced` is the name that older
versions gave to the previous one.
"""
_PARTIAL_NAME_PATTERN = re.compile(r"step-\d+\.partial-r\d+(?:-([0-9a-f]{8})-[0-9a-f]{8})?")
_MANIFEST_FILE = "manifest.json"
_MAX_CLAIM_ATTEMPTS = 16
_FILE_VISIBILITY_SECONDS = 10.0
_MAX_REASON_CHARACTERS = 400
"""Limit in characters: each rank holds all ranks' reasons in memory."""
_VISIBILITY_MARK_PREFIX = ".seen-by-all."
SHARED_VOLUME_REMEDY = (
    "Mount one volume on all workers (spec.checkpoint.volumeClaimName, of a claim with access mode ReadWriteMany), or "
    "set spec.checkpoint.path to a folder on one"
)
"""Remedy if each worker sees a different folder."""
_ERRNO_REMEDIES = {
    errno.ENOSPC: "make room on the volume, or keep fewer (spec.checkpoint.keep)",
    errno.EDQUOT: "raise the volume's quota, or keep fewer (spec.checkpoint.keep)",
    errno.EROFS: "mount the volume of spec.checkpoint.path writable: without readOnly, and repaired if the "
    "kernel has made it read-only after an error",
    errno.EACCES: "let this user write to spec.checkpoint.path (fsGroup)",
}
"""Remedies if a file cannot be written."""
_STORE_REMEDIES: dict[type[OSError], str] = {
    PermissionError: "allow the workers to list, read, write, and delete objects at spec.checkpoint.uri, by "
    "credentials in the template's environment, a Secret, or its service account",
    FileNotFoundError: "create the bucket, or correct spec.checkpoint.uri",
    StorageUnavailableError: "check that the workers reach the endpoint of spec.checkpoint.uri",
    CheckpointServerUnavailableError: "the operator starts the job's checkpoint server again; if it does not become "
    "ready, `kubectl describe pod` shows why",
}
"""Remedies if an object store refuses. Its errors have no errno."""
_log = logging.getLogger(__name__)


class CheckpointFolder:
    """The folder `spec.checkpoint.path` of one job. It handles files only: no tensors, no peers."""

    def __init__(
        self,
        path: Path,
        round_: int,
        keep: int = 3,
        job: JobIdentity = JobIdentity(),  # noqa: B008  # it is frozen
        adopt: str = "",
        read_only: bool = False,
    ) -> None:
        """Open the folder.

        `adopt`: name of another job whose checkpoints this one takes over. `read_only`: never change anything there.

        Raises InputError if another job owns the folder, before anything in it changes, or if it is not writable.
        """
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep} must be at least 1 (spec.checkpoint.keep)")
        self.path = path
        self.round = round_
        self.job = job
        self.read_only = read_only
        self.run_tag = job.file_tag
        """Tag in the names of what this run writes: all its ranks use rank 0's."""
        self.new_owner_message = ""
        """Message about the owner that has taken the folder, unless it is a later round of this run; "": none."""
        self._retained_count = keep
        self._claimant = FolderClaimant(job, round_, adopt)
        self._own_claim = ""
        """This round's claim; "": it has none yet."""
        self._previous_claim: str | None = None
        """The claim that this round found when it began; "": none. None: the volume could not be read."""
        self._accepted_jobs: frozenset[str] | None = None
        """Names of jobs whose checkpoints this one may continue from; None: all."""
        if read_only:
            if not path.is_dir():
                raise InputError(f"spec.checkpoint.path: {path} is not there; give the folder of a job's checkpoints")
            return
        try:
            self._accepted_jobs = self._claimant.list_accepted_jobs(self._check_admission()[0].owner)
        except OSError as error:
            raise InputError(f"spec.checkpoint.path: {path} cannot be read ({error.strerror})") from error
        _check_writable(path)

    @property
    def field(self) -> str:
        return "spec.checkpoint.path"

    @property
    def location(self) -> str:
        return str(self.path)

    @property
    def remedy_if_unshared(self) -> str:
        return SHARED_VOLUME_REMEDY

    def claim(self) -> None:
        """Make this round the only one that may publish, and remove unfinished writes of earlier rounds of the job.

        Rank 0 calls it once the state that the round continues from is known. If the volume has no room for the claim,
        `publish` tries again; the job trains in the meantime. Raises InputError if another job has become the owner.
        """
        try:
            self._previous_claim = read_written_claim(self.path)
            try:
                self._make_claim()
            except OSError:  # unfinished writes may take the room
                self._clear_partials()
                self._make_claim()
        except OSError as error:
            _log.warning("%s: this round cannot publish checkpoints yet: %s", self.path, error)
            return
        self._clear_partials()
        for path in list(self.path.iterdir()):
            match = _CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
            if match and match[2]:
                with suppress(OSError):
                    self._settle_replacement(path, self._get_final_path(int(match[1])))

    def create_visibility_mark(self) -> str:
        """Create a file by which other ranks detect that they see the same folder. Returns its name; "": it failed."""
        name = f"{_VISIBILITY_MARK_PREFIX}{self.job.name_tag}.{secrets.token_hex(8)}"
        try:
            (self.path / name).touch()
        except OSError:
            return ""
        return name

    def has_visibility_mark(self, mark: str) -> bool:
        """Return whether the file that another rank created as `mark` is visible."""
        return wait_until_visible(self.path / mark)

    def remove_visibility_mark(self, mark: str) -> None:
        if mark:
            with suppress(OSError):
                (self.path / mark).unlink()

    def get_partial_path(self, step: int) -> Path:
        """Return the folder where this round writes the checkpoint of `step`."""
        return self.path / f"step-{step:08d}.partial-r{self.round}-{self.run_tag}"

    def begin_attempt(self, step: int) -> FolderFiles:
        return FolderFiles(self.get_partial_path(step))

    def open_checkpoint(self, manifest: Manifest) -> FolderFiles:
        return FolderFiles(self.find_folder(manifest))

    def publish(self, manifest: Manifest) -> bool:
        """Make the partial folder the checkpoint of its step, and delete the oldest ones.

        Returns False without a change if a later round has begun, or if another job has taken the folder
        (`new_owner_message`). Raises OSError if the volume refuses, and InputError if this rank does not see all files
        of the other ranks. The previous checkpoint of this step then remains. After a crash at any line, the previous
        or the new checkpoint exists.
        """
        partial, final = self.get_partial_path(manifest.step), self._get_final_path(manifest.step)
        _write_durably(partial / _MANIFEST_FILE, json.dumps(manifest.to_json()))
        if self._read_valid_manifest(partial) is None:
            raise InputError(f"{partial} does not have all that the ranks have written. {SHARED_VOLUME_REMEDY}")
        if not self._is_current():
            shutil.rmtree(partial, ignore_errors=True)
            return False
        if final.exists():  # torn, or of another number of ranks: otherwise the job would have continued from it
            replacement = self.path / f"{final.name}.new-r{self.round}-{self.run_tag}"
            shutil.rmtree(replacement, ignore_errors=True)  # left by a failed attempt
            partial.rename(replacement)
            _sync_folder(self.path)
            with suppress(OSError):  # it is published at this point, under either name
                self._settle_replacement(replacement, final)
        else:
            partial.rename(final)
        _sync_folder(self.path)
        with suppress(OSError):  # the checkpoint is published regardless; the next one prunes again
            self._prune(manifest.step)
        return True

    def discard(self, step: int, owns_file: Callable[[str], bool]) -> None:
        """Delete what this rank has written of `step`, which cannot be published.

        `owns_file`: returns whether this rank has written the file of a name. The last rank removes the folder.
        """
        partial = self.get_partial_path(step)
        with suppress(OSError):
            for path in partial.iterdir():
                if owns_file(path.name):
                    path.unlink(missing_ok=True)
            partial.rmdir()

    def list_published(self) -> list[Manifest]:
        """Return the manifests of all usable checkpoints, newest first.

        This job may continue from them, their manifests are readable and of their step, and their files have the right
        sizes.
        """
        manifests: dict[int, Manifest] = {}
        for step, folder in self._list_folders():
            manifest = self._read_valid_manifest(folder)
            if (
                manifest
                and manifest.step == step
                and (self._accepted_jobs is None or manifest.job in self._accepted_jobs)
            ):
                manifests.setdefault(step, manifest)
        return sorted(manifests.values(), key=lambda entry: entry.step, reverse=True)

    def find_folder(self, manifest: Manifest) -> Path:
        """Return the folder of the checkpoint that has this manifest."""
        final = self._get_final_path(manifest.step)
        folders = [folder for step, folder in self._list_folders() if step == manifest.step]
        if folders in ([], [final]):
            return final
        return next((candidate for candidate in folders if self._read_valid_manifest(candidate) == manifest), final)

    def _get_final_path(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _list_folders(self) -> list[tuple[int, Path]]:
        """Return steps and the folders that may be their checkpoints; of one step, the preferred folder first."""
        preference = {"new": 0, None: 1, "replaced": 2}
        matches = [
            (match, path) for path in self.path.iterdir() if (match := _CHECKPOINT_NAME_PATTERN.fullmatch(path.name))
        ]
        matches.sort(key=lambda entry: (int(entry[0][1]), preference[entry[0][2]], entry[1].name))
        return [(int(match[1]), path) for match, path in matches]

    def _settle_replacement(self, replacement: Path, final: Path) -> None:
        """Rename a checkpoint next to its final name to that name, unless the existing one is to remain."""
        is_valid = self._read_valid_manifest(replacement) is not None
        is_preferred = is_valid and (".new-" in replacement.name or self._read_valid_manifest(final) is None)
        if final.exists():
            discarded = final if is_preferred else replacement
            if not self._is_own(discarded):
                return
            self._remove_checkpoint(discarded)
        if is_preferred or not final.exists():
            replacement.rename(final)

    def _read_valid_manifest(self, folder: Path) -> Manifest | None:
        """Return the manifest. None: it is unreadable, or files do not have its sizes."""
        manifest = _read_manifest(folder)
        try:
            sizes = {name: (folder / name).stat().st_size for name in manifest.files} if manifest else {}
        except (OSError, ValueError):
            return None
        if manifest is None or any(sizes[name] != entry.nbytes for name, entry in manifest.files.items()):
            return None
        return manifest

    def _is_own(self, folder: Path) -> bool:
        """Return whether this job may delete it: the manifest names this job, or none, as in older versions."""
        if not (folder / _MANIFEST_FILE).exists():
            return False
        manifest = _read_manifest(folder)
        return not self.job.name or manifest is None or manifest.job in (self.job.name, "")

    def _prune(self, step: int) -> None:
        """Delete all but the newest valid checkpoints of this job up to `step`, which has just been published.

        A torn checkpoint is not valid, and is deleted once it is older. One of a later step is not valid either: this
        round has not continued from it, so its content may be damaged although the sizes are right. Checkpoints of
        other jobs remain.
        """
        own_manifests = (
            manifest for manifest in self.list_published() if not self.job.name or manifest.job in (self.job.name, "")
        )
        retained = [manifest for manifest in own_manifests if manifest.step <= step][: self._retained_count]
        if not retained:
            return
        for folder_step, folder in self._list_folders():
            if folder_step < retained[-1].step and self._is_own(folder):
                self._remove_checkpoint(folder)

    def _remove_checkpoint(self, folder: Path) -> None:
        """Remove a checkpoint atomically: a half-removed one is cleaned up like a partial one. Raises OSError."""
        match = _CHECKPOINT_NAME_PATTERN.fullmatch(folder.name)
        assert match is not None, "it is a checkpoint"
        partial = self.get_partial_path(int(match[1]))
        shutil.rmtree(partial, ignore_errors=True)
        folder.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)

    def _clear_partials(self) -> None:
        """Remove partial folders of this job, of jobs that it took over, and of old versions without a job name."""
        names = self._accepted_jobs if self._accepted_jobs is not None else {""}
        name_tags = {JobIdentity(name).name_tag for name in names} | {self.job.name_tag, None}
        for path in self.path.iterdir():
            partial = _PARTIAL_NAME_PATTERN.fullmatch(path.name)
            if (partial and partial[1] in name_tags) or path.name.startswith(format_prepared_prefix(self.job.name)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_VISIBILITY_MARK_PREFIX):
                owner_tag, _, token = path.name.removeprefix(_VISIBILITY_MARK_PREFIX).partition(".")
                if owner_tag == self.job.name_tag or not token:  # older versions do not name the job
                    path.unlink(missing_ok=True)

    def _check_admission(self) -> tuple[OwnershipClaims, str | None]:
        """Return the claims on the folder, and the job that wrote its newest checkpoint if no owner has a name.

        Raises InputError if it belongs to another job, OSError if the volume cannot be read.
        """
        claims = read_claims(self.path)
        newest = self._find_newest_job() if claims.owner is None or not claims.owner.job else None
        if refusal := self._claimant.explain_refusal(claims.owner, newest):
            raise InputError(f"spec.checkpoint.path: {self.path} {refusal}")
        return claims, newest

    def _is_current(self) -> bool:
        """Return whether no later round has begun.

        Claims the folder if this round could not before, or if it was emptied.
        """
        written_claim = read_written_claim(self.path)
        if written_claim and written_claim == self._own_claim:
            return True
        owner = read_claims(self.path).owner
        is_own_run = owner is not None and (owner.job, owner.uid) == (self.job.name, self.job.uid)
        may_claim = written_claim in ("", self._previous_claim)
        if self._previous_claim is None and not self._own_claim:
            may_claim = owner is None or not is_own_run or owner.round < self.round
        if may_claim:
            try:
                self._make_claim()
            except InputError as error:
                self.new_owner_message = str(error)
                return False
            return True
        if owner is not None and not is_own_run:
            self.new_owner_message = (
                f"spec.checkpoint.path: {self.path} belongs to {owner.describe_job() or 'another job'} by now"
            )
        return False

    def _make_claim(self) -> None:
        """Claim the folder. Raises InputError if another job owns it, OSError if the volume refuses."""
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            claims, newest = self._check_admission()
            owner = self._claimant.build_next_owner(claims.owner, newest)
            if take_folder(self.path, claims.number + 1, owner):
                self._own_claim, self._accepted_jobs = owner.owner, self._claimant.list_accepted_jobs(owner)
                return
        raise OSError(errno.EBUSY, f"others have claimed it {_MAX_CLAIM_ATTEMPTS} times in a row")

    def _find_newest_job(self) -> str | None:
        """Return the name of the job that wrote the newest checkpoint; None: there is none."""
        try:
            folders = self._list_folders()
        except (FileNotFoundError, NotADirectoryError):
            return None
        manifests = (_read_manifest(folder) for _, folder in reversed(folders))
        return next((manifest.job for manifest in manifests if manifest is not None), None)


class FolderFiles:
    """The files of one checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def describe(self, name: str) -> str:
        return str(self.path / name)

    def write_file(self, name: str, nbytes: int, write: Callable[[WritableStream], Result]) -> Result:  # noqa: ARG002
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / name).open("wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        return result

    def read_file(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with (self.path / name).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def compute_checksum(self, name: str) -> FileChecksum:
        return compute_checksum(self.path / name)

    def wait_until_visible(self, name: str) -> bool:
        return wait_until_visible(self.path / name)


def _read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, which may be torn; None: it cannot be read."""
    try:
        return Manifest.from_json(parse_json((folder / _MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError):  # InputError among them
        return None


def wait_until_visible(path: Path) -> bool:
    """Return whether `path` exists, waiting some seconds: some network file systems show other hosts' files late."""
    deadline = time.monotonic() + _FILE_VISIBILITY_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def describe_error(error: BaseException) -> str:
    """Return the error in one line of limited length, and a remedy if one is known."""
    remedy = None
    if isinstance(error, OSError):
        remedy = _STORE_REMEDIES.get(type(error)) if error.errno is None else _ERRNO_REMEDIES.get(error.errno)
    return f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS] + (f": {remedy}" if remedy else "")


def summarize_reasons(reasons: Iterable[str], max_reasons: int = 3) -> str:
    """Return the ranks' reasons, each once, and the number of further ones: thousands of ranks may fail at once."""
    unique_reasons = list(dict.fromkeys(reasons))
    more = [f"and {len(unique_reasons) - max_reasons} more"] if len(unique_reasons) > max_reasons else []
    return "; ".join(unique_reasons[:max_reasons] + more)


def _check_writable(path: Path) -> None:
    probe = path / f".writable-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"spec.checkpoint.path: {path} is not writable ({error.strerror}); mount a volume there that user "
            f"{os.getuid()} may write to (spec.checkpoint.volumeClaimName, fsGroup), or choose another path. "
            "The kubelet makes spec.checkpoint.subPath of a claim, as root, with the mode of the claim itself, which "
            'subPath: "" mounts'
        ) from error
