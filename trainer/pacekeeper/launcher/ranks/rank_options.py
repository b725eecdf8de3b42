"""Rank options of the command line: role, device, and where the output goes. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from string import Template

from pacekeeper_analysis.errors import InputError


class StandardStream(IntFlag):
    """Standard streams of a rank, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2


@dataclass(frozen=True)
class StreamSelection:
    """The streams that torchrun's -r or -t selects: the same for all ranks, or per rank."""

    default_streams: StandardStream = StandardStream.NONE
    streams_by_rank: Mapping[int, StandardStream] = field(default_factory=dict)
    """By local rank. If it is not empty, `default_streams` is NONE."""

    def includes(self, stream: StandardStream, local_rank: int) -> bool:
        return stream in self.streams_by_rank.get(local_rank, self.default_streams)


@dataclass(frozen=True)
class RankPlace:
    """Which rank of which attempt writes an output."""

    rank: int
    local_rank: int
    attempt: int
    """Number of rounds before this one, as in TORCHELASTIC_RESTART_COUNT."""
    shares_console: bool
    """Whether other ranks write to the same console."""


@dataclass(frozen=True)
class StreamPlan:
    """Where one stream of one rank goes."""

    console: bool
    prefix: str
    """Prefix of each line on the console, and in the filtered file."""
    file: Path | None = None
    filtered: Path | None = None
    """File of all ranks for the lines that contain one of `filters`."""
    filters: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputOptions:
    """torchrun's --log-dir, --redirects, --tee, and related options."""

    folder: Path | None = None
    """Folder of this run's log files; None: there are none."""
    redirects: StreamSelection = StreamSelection()
    tee: StreamSelection = StreamSelection()
    shown_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown on the console; None: all."""
    prefix_template: str = ""
    """Template with torchrun's macros ${role_name}, ${local_rank}, ${rank}, ${hostname}; "": the default prefix."""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    def attempt_folder(self, attempt: int) -> Path | None:
        return self.folder / f"attempt_{attempt}" if self.folder is not None else None

    def rank_folder(self, attempt: int, local_rank: int) -> Path | None:
        folder = self.attempt_folder(attempt)
        return folder / str(local_rank) if folder is not None else None

    def plan_stream(self, stream: StandardStream, place: RankPlace, role: str, hostname: str) -> StreamPlan:
        """Choose where a stream goes. File names are those of torchrun's default layout."""
        shown = self.shown_ranks is None or place.local_rank in self.shown_ranks
        attempt, folder = self.attempt_folder(place.attempt), self.rank_folder(place.attempt, place.local_rank)
        teed = self.tee.includes(stream, place.local_rank) and folder is not None
        prefix = self._format_prefix(place, role, hostname, teed)
        if folder is None or attempt is None:
            return StreamPlan(shown, prefix)
        name = "stdout" if stream is StandardStream.OUT else "stderr"
        file = folder / f"{name}.log"
        if not teed:
            redirected = self.redirects.includes(stream, place.local_rank)
            return StreamPlan(False, prefix, file) if redirected else StreamPlan(shown, prefix)
        filters = self.stdout_filters if stream is StandardStream.OUT else self.stderr_filters
        if not (filters and shown):  # torchrun filters only what it shows
            return StreamPlan(shown, prefix, file)
        return StreamPlan(shown, prefix, file, attempt / f"filtered_{name}.log", filters)

    def _format_prefix(self, place: RankPlace, role: str, hostname: str, teed: bool) -> str:
        if self.prefix_template:
            return Template(self.prefix_template).safe_substitute(
                role_name=role, rank=place.rank, local_rank=place.local_rank, hostname=hostname
            )
        if teed:
            return f"[{role}{place.local_rank}]:"
        return f"[{place.rank}] " if place.shares_console else ""


@dataclass(frozen=True)
class RankOptions:
    """How ranks run. The defaults are torchrun's."""

    role: str = "default"
    run_id: str = ""
    """TORCHELASTIC_RUN_ID; "": the job's name."""
    virtual_local_rank: bool = False
    """Whether each rank sees only its own GPU, as number 0."""
    grace_seconds: float | None = None
    """Seconds from the end signal until ranks are killed; None: the launcher's setting."""
    master_port: int = 0
    """Port of the ranks' store, for scripts that name the port themselves; 0: any free port."""
    output: OutputOptions = OutputOptions()


def build_rank_environment(options: RankOptions, local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return LOCAL_RANK, and the visible GPUs if they differ from the launcher's `environment`.

    Raises InputError if fewer GPUs are visible than ranks run here.
    """
    if not options.virtual_local_rank:
        return {"LOCAL_RANK": str(local_rank)}
    # On ROCm, HIP_VISIBLE_DEVICES takes precedence over CUDA_VISIBLE_DEVICES, so both are set there.
    names = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if environment.get(name)]
    devices = environment[names[0]].split(",") if names else [str(number) for number in range(local_rank + 1)]
    if local_rank >= len(devices):
        raise InputError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU in {names[0]}={environment[names[0]]}; "
            "start one rank for each GPU"
        )
    device = devices[local_rank].strip()
    variables = {"LOCAL_RANK": "0", "PACEKEEPER_LOCAL_RANK": str(local_rank)}
    return variables | dict.fromkeys({"CUDA_VISIBLE_DEVICES", *names}, device)
