"""What checkpoints need of the storage that holds them.

There are two implementations: a mounted folder (checkpoint_folder.py) and an object store (object_checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .manifests import FileChecksum, Manifest

Result = TypeVar("Result")


class StorageUnavailableError(OSError):
    """The storage does not answer, which is no evidence about what it holds."""


class WritableStream(Protocol):
    """A file that is written sequentially."""

    def write(self, content: Any, /) -> int: ...


class CheckpointFiles(Protocol):
    """The files of one checkpoint."""

    def describe(self, name: str) -> str:
        """Return where a file lies, for messages."""

    def write_file(self, name: str, nbytes: int, write: Callable[[WritableStream], Result]) -> Result:
        """Store what `write` writes as the file of this name, and return the result of `write`.

        `nbytes`: estimate of the file's size. `write` is called again if the storage fails. The file survives a crash
        of the host afterwards. Raises OSError.
        """

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file. Raises OSError."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or fewer if the file is shorter. Raises OSError."""

    def compute_checksum(self, name: str) -> FileChecksum:
        """Read the whole file, and return its checksum. Raises OSError."""

    def wait_until_visible(self, name: str) -> bool:
        """Return whether the file exists. Some storages show other hosts' files late. Raises OSError."""


class CheckpointStorage(Protocol):
    """The checkpoints of one job."""

    run_tag: str
    """Tag in the names of what this run writes: all its ranks use rank 0's."""

    @property
    def field(self) -> str:
        """Field of the TrainingJob that names the storage, for messages."""

    @property
    def location(self) -> str:
        """Where the checkpoints lie, for messages."""

    @property
    def remedy_if_unshared(self) -> str:
        """Remedy if workers see different files."""

    @property
    def round(self) -> int: ...

    @property
    def read_only(self) -> bool: ...

    @property
    def new_owner_message(self) -> str:
        """Message about the owner that has taken the storage, unless it is a later round of this run; "": none."""

    def claim(self) -> None:
        """Make this round the only one that may publish, and remove unfinished writes of earlier rounds of the job.

        Rank 0 calls it once the state that the round continues from is known. If the storage refuses the claim,
        `publish` tries again; the job trains in the meantime. Raises InputError if another job has become the owner.
        """

    def create_visibility_mark(self) -> str:
        """Create a file by which other ranks detect that they see the same files. Returns its name; "": it failed."""

    def has_visibility_mark(self, mark: str) -> bool:
        """Return whether the file that another rank created as `mark` is visible."""

    def remove_visibility_mark(self, mark: str) -> None: ...

    def begin_attempt(self, step: int) -> CheckpointFiles:
        """Return the files of a checkpoint that is written now. All ranks call it in the same order."""

    def publish(self, manifest: Manifest) -> bool:
        """Publish what the ranks have written since `begin_attempt`, and delete the oldest checkpoints.

        Returns False without a change if a later round has begun, or if another job has taken the storage
        (`new_owner_message`). Raises OSError if the storage refuses, and InputError if this rank does not see all files
        of the other ranks. The previous checkpoint of this step then remains.
        """

    def discard(self, step: int, owns_file: Callable[[str], bool]) -> None:
        """Delete what this rank has written of `step`, which cannot be published.

        `owns_file`: returns whether this rank has written the file of a name.
        """

    def list_published(self) -> list[Manifest]:
        """Return the manifests of all usable checkpoints, newest first.

        This job may continue from them, their manifests are readable and of their step, and their files have the right
        sizes. Raises OSError if the storage cannot be read.
        """

    def open_checkpoint(self, manifest: Manifest) -> CheckpointFiles:
        """Return the files of the checkpoint that has this manifest."""
