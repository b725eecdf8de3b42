"""The folder of checkpoints on the volume: published in one step, checked before they are used.

A round writes into `step-00000100.partial-r<round>/` through torch.distributed.checkpoint, adds `manifest.json` with
the size and checksum of every file, and publishes by renaming the folder to `step-00000100/`. Only the job's current
round may publish: `owner.json` names the round that began last, and a rank that was cut off from the rest finds another
name there.
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

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

from .manifests import Manifest

_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d+\.(partial|replaced)-r\d+")
_MANIFEST = "manifest.json"
_OWNER = "owner.json"
_LATE_SECONDS = 10.0
_LONGEST_REASON = 400
"""Letters: each rank has all ranks' reasons in its memory."""
_MARK = ".seen-by-all."
ONE_VOLUME = (
    "Mount one volume on all workers (spec.checkpoint.volumeClaimName, of a claim with access mode ReadWriteMany), or "
    "set spec.checkpoint.path to a folder on one"
)
"""What helps where each worker sees a folder of its own."""
_REMEDIES = {
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

    def __init__(self, path: Path, round_: int, keep: int = 3) -> None:
        """Raises InputError where nothing can be written there."""
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep} must be at least 1 (spec.checkpoint.keep)")
        self.path = path
        self.round = round_
        self._keep = keep
        self._owner = f"r{round_}-{secrets.token_hex(8)}"
        self._owner_before = ""
        _check_writable(path)

    def own(self) -> None:
        """Makes this round the one that may publish; rank 0 does so when the round begins. Clears away what earlier
        rounds left half-written.

        Where the volume has no room for it now, `publish` tries again: the job can train in the meantime.
        """
        self._owner_before = self._owner_there()
        try:
            self._claim()
        except OSError as error:
            _log.warning("%s: this round cannot publish checkpoints yet: %s", self.path, error)
        for left in self.path.iterdir():
            if _PARTIAL.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
            elif left.name.startswith(_MARK):
                left.unlink(missing_ok=True)

    def mark(self) -> str:
        """Makes a file by which others tell that they see the same folder, and returns its name; "": it cannot now."""
        name = f"{_MARK}{secrets.token_hex(8)}"
        try:
            (self.path / name).touch()
        except OSError:
            return ""
        return name

    def sees(self, mark: str) -> bool:
        """Whether the file is there that another rank has made by `mark`."""
        return appears(self.path / mark)

    def unmark(self, mark: str) -> None:
        if mark:
            with suppress(OSError):
                (self.path / mark).unlink()

    def partial(self, step: int) -> Path:
        """Where this round writes the checkpoint of `step`."""
        return self.path / f"step-{step:08d}.partial-r{self.round}"

    def publish(self, manifest: Manifest) -> bool:
        """Makes what lies in `partial` the checkpoint of its step, then forgets the oldest ones.

        False, and nothing changes, where a later round has begun. Raises OSError where it could not, InputError where
        this rank does not see all that the others have written; what was there of this step before is still there then.
        """
        partial, final = self.partial(manifest.step), self.path / f"step-{manifest.step:08d}"
        _write_durably(partial / _MANIFEST, json.dumps(manifest.to_json()))
        if self._manifest(partial) is None:
            raise InputError(f"{partial} does not have all that the ranks have written. {ONE_VOLUME}")
        if not self._is_current():
            shutil.rmtree(partial, ignore_errors=True)
            return False
        aside = self.path / f"{final.name}.replaced-r{self.round}"
        if final.exists():  # torn, or of another number of ranks: else the job would have gone on from it
            shutil.rmtree(aside, ignore_errors=True)  # of an attempt that failed
            final.rename(aside)
        try:
            partial.rename(final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise
        _sync_folder(self.path)
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it is published all the same; the next one tries again
            self._prune(manifest.step)
        return True

    def discard(self, step: int, mine: Callable[[str], bool]) -> None:
        """Gives back the room of what this rank has written of `step` and cannot be published.

        mine: whether this rank has written the file of that name. The last rank takes the folder with it.
        """
        partial = self.partial(step)
        with suppress(OSError):
            for path in partial.iterdir():
                if mine(path.name):
                    path.unlink(missing_ok=True)
            partial.rmdir()

    def published(self) -> list[Manifest]:
        """All checkpoints whose manifest can be read, is of their step, and whose files have the right sizes, newest
        first."""
        folders = [folder for folder in self.path.iterdir() if _STEP.fullmatch(folder.name)]
        manifests = [(folder, self._manifest(folder)) for folder in folders]
        own = [manifest for folder, manifest in manifests if manifest and self.folder(manifest) == folder]
        return sorted(own, key=lambda found: found.step, reverse=True)

    def folder(self, manifest: Manifest) -> Path:
        return self.path / f"step-{manifest.step:08d}"

    def _manifest(self, folder: Path) -> Manifest | None:
        try:
            manifest = Manifest.from_json(parse_json((folder / _MANIFEST).read_bytes()))
            sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        except (OSError, ValueError):  # InputError among them
            return None
        return manifest if all(sizes[name] == entry.nbytes for name, entry in manifest.files.items()) else None

    def _prune(self, step: int) -> None:
        """Forgets all but the newest good ones up to `step`, which has just been published.

        What is torn does not count as good, and goes once it is older. Nor does what is of a later step: this round has
        not gone on from it, so that it may be damaged where sizes do not tell.
        """
        good = [manifest for manifest in self.published() if manifest.step <= step][: self._keep]
        if not good:
            return
        for folder in self.path.iterdir():
            match = _STEP.fullmatch(folder.name)
            if match and int(match[1]) < good[-1].step:
                shutil.rmtree(folder, ignore_errors=True)

    def _is_current(self) -> bool:
        """Whether no later round has begun. Claims the folder where this one could not, or somebody has emptied it."""
        there = self._owner_there()
        if there in ("", self._owner_before):
            self._claim()
            return True
        return there == self._owner

    def _claim(self) -> None:
        _write_durably(self.path / _OWNER, json.dumps({"owner": self._owner}))

    def _owner_there(self) -> str:
        """ "": nobody. Raises OSError where the volume cannot be read, which says nothing of rounds."""
        try:
            return str(parse_json((self.path / _OWNER).read_text())["owner"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""


def appears(path: Path) -> bool:
    """Whether it is there, or comes within seconds: some network file systems show another host's files late."""
    deadline = time.monotonic() + _LATE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def described(error: BaseException) -> str:
    """What went wrong, in one line that is not endless, and what helps where that is known."""
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON] + (f": {remedy}" if remedy else "")


def in_short(reasons: Iterable[str], most: int = 3) -> str:
    """The ranks' reasons, each once, and how many more there are: thousands of ranks may fail at the same moment."""
    different = list(dict.fromkeys(reasons))
    more = [f"and {len(different) - most} more"] if len(different) > most else []
    return "; ".join(different[:most] + more)


def _check_writable(path: Path) -> None:
    probe = path / f".writable-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"spec.checkpoint.path: {path} is not writable ({error.strerror}); mount a volume there that user "
            f"{os.getuid()} may write to (spec.checkpoint.volumeClaimName, fsGroup), or choose another path"
        ) from error


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
