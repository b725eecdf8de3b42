"""The result of a conversion, and the draft that leads to it: a TrainingJob, and a note about each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pacekeeper_analysis.errors import InputError

from ..api.names import API_VERSION, Object


class ConversionRefused(InputError):
    """The source cannot be converted. The message names the field and the remedy."""


class NoteKind(StrEnum):
    TAKEN = "taken over"
    CHANGED = "changed"
    NO_COUNTERPART = "no counterpart"


@dataclass(frozen=True)
class Note:
    """What a conversion did with fields of the source, and with all that is below them."""

    kind: NoteKind
    fields: tuple[str, ...]  # paths in the source, like spec.runPolicy.suspend
    text: str  # where they are now; or why they changed; or what the user has to do

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.fields)}: {self.text}"


@dataclass(frozen=True)
class Conversion:
    """A TrainingJob, and the notes about the fields of its source, in the order of the conversion."""

    job: Object
    notes: tuple[Note, ...]


@dataclass
class Draft:
    """A TrainingJob that is being written."""

    metadata: Object = field(default_factory=dict)
    spec: Object = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    def note_taken(self, text: str, *fields: str) -> None:
        self.notes.append(Note(NoteKind.TAKEN, fields, text))

    def note_changed(self, text: str, *fields: str) -> None:
        self.notes.append(Note(NoteKind.CHANGED, fields, text))

    def note_no_counterpart(self, text: str, *fields: str) -> None:
        self.notes.append(Note(NoteKind.NO_COUNTERPART, fields, text))

    def set_spec(self, path: str, value: object, *fields: str) -> None:
        """Set a field below `spec`, like `runPolicy.activeDeadlineSeconds`, to what `fields` of the source say."""
        *parents, name = path.split(".")
        target = self.spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self.note_taken(shown if fields == (f"spec.{path}",) else f"spec.{path}: {shown}", *fields)

    def finish(self) -> Conversion:
        job = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": self.metadata, "spec": self.spec}
        return Conversion(job, tuple(self.notes))
