"""The folder of checkpoints on the volume: published in one step, checked before they are used.

A round writes into `step-00000100.partial-r<round>-<job>/` through torch.distributed.checkpoint, adds `manifest.json`
with the size and checksum of every file, and publishes by renaming the folder to `step-00000100/`. Only the current
round of the job that owns the folder may publish: `owner.json` names it, and a rank that was cut off from the rest
finds another name there (see ownership.py).
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
from pacekeeper_analysis.reading import parse_json

from .durable import sync_folder as _sync_folder
from .durable import write_durably as _write_durably
from .manifests import Manifest
from .ownership import FolderClaimant, OwnershipClaims, read_claims, take_folder, format_prepared_prefix, read_written_claim

_CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{8,})(?:\.(new|replaced)-.+)?")
"""A checkpoint. Next to one that it is to replace, `new` until that is gone; `replaced` is an older version's word for
the one that was there before."""
_PARTIAL_NAME_PATTERN = re.compile(r"step-\d+\.partial-r\d+(?:-([0-9a-f]{8})-[0-9a-f]{8})?")
_MANIFEST_FILE = "manifest.json"
_MAX_CLAIM_ATTEMPTS = 16
_FILE_VISIBILITY_SECONDS = 10.0
_MAX_REASON_CHARACTERS = 400
"""Letters: each rank has all ranks' reasons in its memory."""
_VISIBILITY_MARK_PREFIX = ".seen-by-all."
SHARED_VOLUME_REMEDY = (
    "Mount one volume on all workers (spec.checkpoint.volumeClaimName, of a claim with access mode ReadWriteMany), or "
    "set spec.checkpoint.path to a folder on one"
)
"""What helps where each worker sees a folder of its own."""
_ERRNO_REMEDIES = {
    errno.ENOSPC: "make room on the volume, or keep fewer (spec.checkpoint.keep)",
    errno.EDQUOT: "raise the volume's quota, or keep fewer (spec.checkpoint.keep)",
    errno.EROFS: "mount the volume of spec.checkpoint.path to be written to: without readOnly, and mended where the "
    "kernel has made it read-only after an error",
    errno.EACCES: "let this user write to spec.checkpoint.path (fsGroup)",
}
"""What helps where a file cannot be written."""
_log = logging.getLogger(__name__)


class CheckpointFolder:
    """The folder `spec.checkpoint.path` of one job. It does no more than files: no tensors, no peers."""

    def __init__(
        self,
        path: Path,
        round_: int,
        keep: int = 3,
        job: JobIdentity = JobIdentity(),  # noqa: B008  # it is frozen
        adopt: str = "",
        read_only: bool = False,
    ) -> None:
        """adopt: name of another job whose checkpoints this one takes over. read_only: nothing is ever changed there.

        Raises InputError where another job owns the folder, before anything is changed in it, or where nothing can be
        written there.
        """
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep} must be at least 1 (spec.checkpoint.keep)")
        self.path = path
        self.round = round_
        self.job = job
        self.read_only = read_only
        self.run_tag = job.file_tag
        """In the names of what this run writes: all its ranks have rank 0's."""
        self.new_owner_message = ""
        """Who owns the folder now, in words, where that is no later round of this run; "": nobody has taken it."""
        self._retained_count = keep
        self._claimant = FolderClaimant(job, round_, adopt)
        self._own_claim = ""
        """This round's claim; "": it has none yet."""
        self._previous_claim = ""
        self._accepted_jobs: frozenset[str] | None = None
        """Names of jobs whose checkpoints this one goes on from; None: of all."""
        if read_only:
            if not path.is_dir():
                raise InputError(f"spec.checkpoint.path: {path} is not there; give the folder of a job's checkpoints")
            return
        try:
            self._accepted_jobs = self._claimant.list_accepted_jobs(self._check_admission()[0].owner)
        except OSError as error:
            raise InputError(f"spec.checkpoint.path: {path} cannot be read ({error.strerror})") from error
        _check_writable(path)

    def claim(self) -> None:
        """Makes this round the one that may publish; rank 0 does so once it is known what the round goes on from.
        Clears away what earlier rounds of the job left half-written.

        Where the volume has no room for it now, `publish` tries again: the job can train in the meantime. Raises
        InputError where another job has become the owner since.
        """
        try:
            self._previous_claim = read_written_claim(self.path)
            try:
                self._make_claim()
            except OSError:  # there may be room without what is half-written
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
        """Makes a file by which others tell that they see the same folder, and returns its name; "": it cannot now."""
        name = f"{_VISIBILITY_MARK_PREFIX}{self.job.name_tag}.{secrets.token_hex(8)}"
        try:
            (self.path / name).touch()
        except OSError:
            return ""
        return name

    def has_visibility_mark(self, mark: str) -> bool:
        """Whether the file is there that another rank has made by `mark`."""
        return wait_until_visible(self.path / mark)

    def remove_visibility_mark(self, mark: str) -> None:
        if mark:
            with suppress(OSError):
                (self.path / mark).unlink()

    def get_partial_path(self, step: int) -> Path:
        """Where this round writes the checkpoint of `step`."""
        return self.path / f"step-{step:08d}.partial-r{self.round}-{self.run_tag}"

    def publish(self, manifest: Manifest) -> bool:
        """Makes what lies in `partial` the checkpoint of its step, then forgets the oldest ones.

        False, and nothing changes, where a later round has begun, or another job has taken the folder (`taken_by`).
        Raises OSError where it could not, InputError where this rank does not see all that the others have written;
        what was there of this step before is still there then. After a crash at any line there is the checkpoint of
        before or the new one.
        """
        partial, final = self.get_partial_path(manifest.step), self._get_final_path(manifest.step)
        _write_durably(partial / _MANIFEST_FILE, json.dumps(manifest.to_json()))
        if self._read_valid_manifest(partial) is None:
            raise InputError(f"{partial} does not have all that the ranks have written. {SHARED_VOLUME_REMEDY}")
        if not self._is_current():
            shutil.rmtree(partial, ignore_errors=True)
            return False
        if final.exists():  # torn, or of another number of ranks: else the job would have gone on from it
            fresh = self.path / f"{final.name}.new-r{self.round}-{self.run_tag}"
            shutil.rmtree(fresh, ignore_errors=True)  # of an attempt that failed
            partial.rename(fresh)
            _sync_folder(self.path)
            with suppress(OSError):  # it is published by now, under either name
                self._settle_replacement(fresh, final)
        else:
            partial.rename(final)
        _sync_folder(self.path)
        with suppress(OSError):  # it is published all the same; the next one tries again
            self._prune(manifest.step)
        return True

    def discard(self, step: int, mine: Callable[[str], bool]) -> None:
        """Gives back the room of what this rank has written of `step` and cannot be published.

        mine: whether this rank has written the file of that name. The last rank takes the folder with it.
        """
        partial = self.get_partial_path(step)
        with suppress(OSError):
            for path in partial.iterdir():
                if mine(path.name):
                    path.unlink(missing_ok=True)
            partial.rmdir()

    def list_published(self) -> list[Manifest]:
        """All checkpoints that this job may go on from, whose manifest can be read, is of their step, and whose files
        have the right sizes, newest first."""
        found: dict[int, Manifest] = {}
        for step, folder in self._list_folders():
            manifest = self._read_valid_manifest(folder)
            if manifest and manifest.step == step and (self._accepted_jobs is None or manifest.job in self._accepted_jobs):
                found.setdefault(step, manifest)
        return sorted(found.values(), key=lambda its: its.step, reverse=True)

    def find_folder(self, manifest: Manifest) -> Path:
        """Where the checkpoint of this manifest lies."""
        plain = self._get_final_path(manifest.step)
        places = [folder for step, folder in self._list_folders() if step == manifest.step]
        if places in ([], [plain]):
            return plain
        return next((place for place in places if self._read_valid_manifest(place) == manifest), plain)

    def _get_final_path(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _list_folders(self) -> list[tuple[int, Path]]:
        """Steps, and what claims to be their checkpoints: of one step, what is to count first."""
        order = {"new": 0, None: 1, "replaced": 2}
        found = [(match, path) for path in self.path.iterdir() if (match := _CHECKPOINT_NAME_PATTERN.fullmatch(path.name))]
        found.sort(key=lambda its: (int(its[0][1]), order[its[0][2]], its[1].name))
        return [(int(match[1]), path) for match, path in found]

    def _settle_replacement(self, beside: Path, final: Path) -> None:
        """Gives a checkpoint next to its place that place, unless what is there already is to stay."""
        whole = self._read_valid_manifest(beside) is not None
        counts = whole and (".new-" in beside.name or self._read_valid_manifest(final) is None)
        if final.exists():
            loser = final if counts else beside
            if not self._is_own(loser):
                return
            self._remove_checkpoint(loser)
        if counts or not final.exists():
            beside.rename(final)

    def _read_valid_manifest(self, folder: Path) -> Manifest | None:
        """None: it cannot be read, or files have other sizes than it says."""
        manifest = _read_manifest(folder)
        try:
            sizes = {name: (folder / name).stat().st_size for name in manifest.files} if manifest else {}
        except (OSError, ValueError):
            return None
        if manifest is None or any(sizes[name] != entry.nbytes for name, entry in manifest.files.items()):
            return None
        return manifest

    def _is_own(self, folder: Path) -> bool:
        """Whether this job may delete it: its manifest names this job or, as those of older versions, none."""
        if not (folder / _MANIFEST_FILE).exists():
            return False
        manifest = _read_manifest(folder)
        return not self.job.name or manifest is None or manifest.job in (self.job.name, "")

    def _prune(self, step: int) -> None:
        """Forgets all but the newest good ones of this job up to `step`, which has just been published.

        What is torn does not count as good, and goes once it is older. Nor does what is of a later step: this round has
        not gone on from it, so that it may be damaged where sizes do not tell. What other jobs have written stays.
        """
        own = (manifest for manifest in self.list_published() if not self.job.name or manifest.job in (self.job.name, ""))
        good = [manifest for manifest in own if manifest.step <= step][: self._retained_count]
        if not good:
            return
        for number, folder in self._list_folders():
            if number < good[-1].step and self._is_own(folder):
                self._remove_checkpoint(folder)

    def _remove_checkpoint(self, folder: Path) -> None:
        """In one step, whatever comes in between: what is left half-removed is cleared away with what is half-written.
        Raises OSError."""
        match = _CHECKPOINT_NAME_PATTERN.fullmatch(folder.name)
        assert match is not None, "it is a checkpoint"
        half = self.get_partial_path(int(match[1]))
        shutil.rmtree(half, ignore_errors=True)
        folder.rename(half)
        shutil.rmtree(half, ignore_errors=True)

    def _clear_partials(self) -> None:
        """Of this job, of those that it has taken over, and of versions that do not say whose they are."""
        names = self._accepted_jobs if self._accepted_jobs is not None else {""}
        marks = {JobIdentity(name).name_tag for name in names} | {self.job.name_tag, None}
        for left in self.path.iterdir():
            partial = _PARTIAL_NAME_PATTERN.fullmatch(left.name)
            if (partial and partial[1] in marks) or left.name.startswith(format_prepared_prefix(self.job.name)):
                shutil.rmtree(left, ignore_errors=True)
            elif left.name.startswith(_VISIBILITY_MARK_PREFIX):
                owner, _, own = left.name.removeprefix(_VISIBILITY_MARK_PREFIX).partition(".")
                if owner == self.job.name_tag or not own:  # older versions do not say whose it is
                    left.unlink(missing_ok=True)

    def _check_admission(self) -> tuple[OwnershipClaims, str | None]:
        """What the folder says of its owners, and the name of the job that wrote its newest checkpoint where no owner
        has one. Raises InputError where it belongs to another job, OSError where the volume cannot be read."""
        claims = read_claims(self.path)
        newest = self._find_newest_job() if claims.owner is None or not claims.owner.job else None
        if refusal := self._claimant.explain_refusal(claims.owner, newest):
            raise InputError(f"spec.checkpoint.path: {self.path} {refusal}")
        return claims, newest

    def _is_current(self) -> bool:
        """Whether no later round has begun. Claims the folder where this one could not, or somebody has emptied it."""
        there = read_written_claim(self.path)
        if there and there == self._own_claim:
            return True
        if there in ("", self._previous_claim):
            try:
                self._make_claim()
            except InputError as refusal:
                self.new_owner_message = str(refusal)
                return False
            return True
        owner = read_claims(self.path).owner
        if owner is not None and (owner.job, owner.uid) != (self.job.name, self.job.uid):
            self.new_owner_message = f"spec.checkpoint.path: {self.path} belongs to {owner.describe_job() or 'another job'} by now"
        return False

    def _make_claim(self) -> None:
        """Raises InputError where another job owns the folder, OSError where the volume refuses."""
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            claims, newest = self._check_admission()
            owner = self._claimant.build_next_owner(claims.owner, newest)
            if take_folder(self.path, claims.number + 1, owner):
                self._own_claim, self._accepted_jobs = owner.owner, self._claimant.list_accepted_jobs(owner)
                return
        raise OSError(errno.EBUSY, f"others have claimed it {_MAX_CLAIM_ATTEMPTS} times in a row")

    def _find_newest_job(self) -> str | None:
        """Name of the job that wrote the newest checkpoint; None: there is none."""
        try:
            folders = self._list_folders()
        except (FileNotFoundError, NotADirectoryError):
            return None
        manifests = (_read_manifest(folder) for _, folder in reversed(folders))
        return next((manifest.job for manifest in manifests if manifest is not None), None)


def _read_manifest(folder: Path) -> Manifest | None:
    """What a checkpoint says of itself, which may be torn; None: it cannot be read."""
    try:
        return Manifest.from_json(parse_json((folder / _MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError):  # InputError among them
        return None


def wait_until_visible(path: Path) -> bool:
    """Whether it is there, or comes within seconds: some network file systems show another host's files late."""
    deadline = time.monotonic() + _FILE_VISIBILITY_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line that is not endless, and what helps where that is known."""
    remedy = _ERRNO_REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS] + (f": {remedy}" if remedy else "")


def summarize_reasons(reasons: Iterable[str], max_reasons: int = 3) -> str:
    """The ranks' reasons, each once, and how many more there are: thousands of ranks may fail at the same moment."""
    different = list(dict.fromkeys(reasons))
    more = [f"and {len(different) - max_reasons} more"] if len(different) > max_reasons else []
    return "; ".join(different[:max_reasons] + more)


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
