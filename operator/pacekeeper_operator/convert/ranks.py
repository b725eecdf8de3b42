"""Ranks per worker: what command, environment, fields of the source, and GPUs say together."""

from __future__ import annotations

from dataclasses import dataclass

from pacekeeper_analysis.errors import InputError

from ..api.names import Object
from ..pods.injection import is_gpu_resource
from ..pods.resources import parse_quantity
from ..pods.trainer_container import SCRIPT_VARIABLE
from .commands import Command, LaunchKind, read_command
from .draft import ConversionRefused, Draft

MAX_RANKS_PER_WORKER = 128
"""The CRD's limit of spec.nprocPerNode."""
_UNKNOWN_COMMAND = (
    "the command cannot be read from here: check that it starts torchrun or accelerate; if it starts one Python "
    f"process per pod, set the container's variable {SCRIPT_VARIABLE} to that script, and spec.nprocPerNode to 1"
)
NPROC_OPTION, NPROC_VARIABLE = "nproc_per_node", "PET_NPROC_PER_NODE"


@dataclass(frozen=True)
class RanksField:
    """What a field of the source says about ranks per worker: a number, `auto`, `gpu`, or `cpu`."""

    path: str = ""
    value: int | str = ""
    is_default: bool = False  # the source does not have the field
    auto_counts_processors: bool = False  # without GPUs, `auto` and `cpu` mean the container's own processors


NO_RANKS_FIELD = RanksField()


def set_ranks_per_worker(draft: Draft, container: Object, path: str, source: RanksField) -> None:
    """Set `spec.nprocPerNode`. `path` is where the container is in the source.

    Raises ConversionRefused if the command cannot be converted, or needs more GPUs than the container has.
    """
    command, gpus = read_command(container), count_gpus(container)
    if command.refusal:
        raise ConversionRefused(f"{path}.command: {command.refusal}")
    if command.launcher is LaunchKind.PYTHON:
        ranks, origin = 1, "the command starts one process"
        if gpus > 1:
            origin += f"; for a rank per GPU, start it by torchrun --nproc-per-node={gpus}, and set spec.nprocPerNode"
    elif command.launcher is LaunchKind.ACCELERATE:
        ranks, origin = _count_accelerate_processes(draft, command, gpus)
    else:
        ranks, origin = _count_torchrun_processes(command, gpus, container, source)
    if not 1 <= ranks <= MAX_RANKS_PER_WORKER:
        raise ConversionRefused(
            f"{path}: {ranks} ranks per worker ({origin}) must be 1 to {MAX_RANKS_PER_WORKER}: change --nproc-per-node"
        )
    if gpus and ranks > gpus:
        raise ConversionRefused(
            f"{path}: {ranks} ranks per worker ({origin}) exceed its {gpus} GPUs, and each rank has a GPU "
            "of its own; lower --nproc-per-node, or raise resources.limits"
        )
    draft.spec["nprocPerNode"] = ranks
    if source.value and not source.is_default:
        effect = f"spec.nprocPerNode: {ranks}" if origin.startswith(source.path) else f"{source.value} has no effect"
        draft.note_taken(effect, source.path)
    if not origin.startswith(source.path) or source.is_default or not source.path:
        draft.note_taken(f"spec.nprocPerNode is {ranks}: {origin}", f"{path}.command")


def count_gpus(container: Object) -> int:
    """Return the GPUs of any kind that the container asks for.

    Raises ConversionRefused for what is no number.
    """
    limits = (container.get("resources") or {}).get("limits") or {}
    gpus = 0
    for name, quantity in limits.items():
        if is_gpu_resource(name):
            if not str(quantity).isdecimal():
                raise ConversionRefused(f"resources.limits: {name} must be a whole number of GPUs, like 8")
            gpus += int(quantity)
    return gpus


def _count_torchrun_processes(command: Command, gpus: int, container: Object, source: RanksField) -> tuple[int, str]:
    option = command.options.get(NPROC_OPTION)
    variable = command.variables.get(NPROC_VARIABLE)
    if option is not None:
        written, origin = command.resolve(option) or option, "--nproc-per-node of the command"
    elif source.value:
        written, origin = str(source.value), source.path
    elif variable is not None:
        written, origin = variable, NPROC_VARIABLE
    elif command.launcher is LaunchKind.TORCHRUN:
        return 1, "torchrun's default without --nproc-per-node"
    else:
        return gpus or 1, ("one per GPU; " if gpus else "") + _UNKNOWN_COMMAND
    if written.isdecimal():
        return int(written), origin
    if gpus and written != "cpu":
        return gpus, f"{origin} is {written}, which is one per GPU"
    if source.auto_counts_processors and written in ("auto", "cpu"):
        return _count_processors(container), f"{origin} is {written}, which is one per processor of the container"
    return 1, f"{origin} is {written}, which depends on the node; if it was more than one, set spec.nprocPerNode"


def _count_accelerate_processes(draft: Draft, command: Command, gpus: int) -> tuple[int, str]:
    """Return the processes per machine: accelerate's own option counts those of all machines."""
    processes = command.resolve(command.options.get("num_processes", "")) or ""
    machines = command.resolve(command.options.get("num_machines", "")) or ""
    workers = int(machines) if machines.isdecimal() and int(machines) else draft.spec["replicas"]
    if processes.isdecimal():
        return max(1, int(processes) // workers), f"--num_processes {processes} of accelerate on {workers} machines"
    if gpus:
        return gpus, "one per GPU, as accelerate does without --num_processes"
    return 1, "accelerate's configuration cannot be read from here: check it"


def _count_processors(container: Object) -> int:
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        if (quantity := (resources.get(kind) or {}).get("cpu")) is not None:
            try:
                return max(1, int(parse_quantity(str(quantity))))
            except InputError as error:
                raise ConversionRefused(f"resources.{kind}.cpu: {error}") from error
    return 1
