"""torchrun's options as `pacekeeper run` takes them: who has a command line of torchrun changes its first word.

In a worker's pod the plan says how many ranks there are and where they meet; without one, all ranks are on this
machine. So each option is used, passed over (said in one line), or refused with the remedy.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pacekeeper_analysis.errors import InputError


def local_ranks(asked: Namespace, environment: Mapping[str, str], devices: Path = Path("/dev")) -> int | None:
    """How many ranks to run on this machine; None: the plan says it, or nobody does.

    Raises InputError where the options contradict each other or the plan, and for those that are refused.
    """
    for option in _given(asked):
        if option.remedy:
            raise InputError(f"{option.name}: {option.remedy}")
    kind = asked.nproc_per_node
    wanted = None if kind in (None, *COUNTED) else _number("--nproc-per-node", kind)
    if asked.local is not None:
        if wanted not in (None, asked.local):
            raise InputError(f"--local {asked.local} and --nproc-per-node {wanted} contradict each other; drop one")
        return int(asked.local)
    if "PACEKEEPER_WORKER" in environment:
        planned = environment.get("PACEKEEPER_NPROC")
        if planned is not None and wanted not in (None, int(planned)):
            raise InputError(
                f"--nproc-per-node {wanted}: the TrainingJob has {planned} ranks a worker; "
                "set its spec.nprocPerNode, or leave the option out"
            )
        return None
    if not (asked.standalone or kind or asked.nnodes):
        return None
    nodes = (asked.nnodes or "1").partition(":")[0]
    if _number("--nnodes", nodes) > 1:
        raise InputError(
            f"--nnodes {asked.nnodes}: without a plan all ranks are on this machine; leave the option out, "
            f"or make a TrainingJob with spec.replicas {nodes}"
        )
    return _count(kind, environment, devices) if kind in COUNTED else wanted or 1


def passed_over(asked: Namespace, local: bool) -> str:
    """One line that says which of the given options change nothing, and what stands in their place; "": none.

    local: whether there is no plan.
    """
    words: dict[str, list[str]] = {}
    for option in _given(asked):
        instead = option.instead if option.instead_locally is None or not local else option.instead_locally
        if instead:
            words.setdefault(instead, []).append(option.name)
    return "; ".join(f"{', '.join(names)} passed over: {instead}" for instead, names in words.items())


def add_options(parser: ArgumentParser) -> None:
    """All of torchrun's, in both spellings, but those that `pacekeeper run` has itself (--max-restarts, --module)."""
    group = parser.add_argument_group("torchrun's options", "as torchrun has them; the plan goes before them")
    for option in OPTIONS:
        names = [*option.short, *dict.fromkeys((option.name, "--" + option.destination))]
        if option.flag:
            group.add_argument(*names, action="store_true", help=option.help)
        else:
            group.add_argument(*names, metavar="…", help=option.help)


COUNTED = ("cpu", "gpu", "auto", "xpu")
"""Values of --nproc-per-node that ask for as many ranks as there are devices."""


@dataclass(frozen=True)
class TorchrunOption:
    """One of torchrun's. Without any words below, it is used."""

    name: str
    instead: str = ""
    """It is passed over: what stands in its place."""
    instead_locally: str | None = None
    """The same without a plan, where that is something else; "": it is used there."""
    remedy: str = ""
    """It is refused: why, and what to do."""
    flag: bool = False
    short: tuple[str, ...] = ()

    @property
    def destination(self) -> str:
        """Its name in the parsed arguments, and torchrun's older spelling."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        if self.remedy:
            return f"refused: {self.remedy}"
        return f"passed over: {self.instead}" if self.instead else ""


_MEETING = "the plan says where ranks meet"
_HERE = "the ranks meet on this machine"
_OUTPUT = "the launcher passes the ranks' output on, each line with its rank"
_OWN_WATCH = "the launcher watches the ranks in its own way"

OPTIONS = (
    TorchrunOption("--nproc-per-node"),
    TorchrunOption("--nnodes", "the plan says who takes part (spec.replicas, spec.minReplicas)", instead_locally=""),
    TorchrunOption("--standalone", _MEETING, instead_locally="", flag=True),
    TorchrunOption("--node-rank", _MEETING, _HERE),
    TorchrunOption("--rdzv-backend", _MEETING, _HERE),
    TorchrunOption("--rdzv-endpoint", _MEETING, _HERE),
    TorchrunOption("--rdzv-id", _MEETING, _HERE),
    TorchrunOption("--rdzv-conf", _MEETING, _HERE),
    TorchrunOption("--master-addr", _MEETING, _HERE),
    TorchrunOption("--master-port", _MEETING, _HERE),
    TorchrunOption("--local-addr", _MEETING, _HERE),
    TorchrunOption("--monitor-interval", _OWN_WATCH),
    TorchrunOption("--event-log-handler", "faults are told to the operator, and said in the log"),
    TorchrunOption("--start-method", "ranks are forked from a process that has torch imported"),
    TorchrunOption("--run-path", "so are all scripts run", flag=True),
    TorchrunOption("--use-env", "LOCAL_RANK is always in the environment", flag=True),  # of torch.distributed.launch
    TorchrunOption("--role", 'ROLE_NAME is "default"'),
    TorchrunOption("--log-dir", _OUTPUT),
    TorchrunOption("--redirects", _OUTPUT, short=("-r",)),
    TorchrunOption("--tee", _OUTPUT, short=("-t",)),
    TorchrunOption("--logs-specs", _OUTPUT),
    TorchrunOption("--log-line-prefix-template", _OUTPUT),
    TorchrunOption("--local-ranks-filter", _OUTPUT),
    TorchrunOption("--duplicate-stdout-filters", _OUTPUT),
    TorchrunOption("--duplicate-stderr-filters", _OUTPUT),
    TorchrunOption("--numa-binding", "the kubelet's CPU manager binds containers", "ranks are bound to no processors"),
    TorchrunOption("--signals-to-handle", "the launcher heeds SIGTERM and SIGINT"),
    TorchrunOption(
        "--shutdown-timeout", "the pod's terminationGracePeriodSeconds is what ranks have to leave", "it is 25 seconds"
    ),
    TorchrunOption(
        "--no-python",
        remedy="ranks are forked from a Python process; give the Python script itself, or -m and its module",
        flag=True,
    ),
    TorchrunOption(
        "--virtual-local-rank",
        remedy="a rank is known by its LOCAL_RANK; leave it out, and let the script take the GPU of that number",
        flag=True,
    ),
    TorchrunOption("--print-completion", remedy="it prints torchrun's own completion; ask torchrun for that"),
)


def _given(asked: Namespace) -> list[TorchrunOption]:
    return [option for option in OPTIONS if getattr(asked, option.destination) not in (None, False)]


def _number(name: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise InputError(f"{name} {text}: give a number, at least 1")
    return number


def _count(kind: str, environment: Mapping[str, str], devices: Path) -> int:
    """Processors or GPUs that this process may use."""
    gpus = len(list(devices.glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    processors = len(os.sched_getaffinity(0))
    found = {"cpu": processors, "gpu": gpus, "auto": gpus or processors}.get(kind, 0)
    if not found:
        raise InputError(f"--nproc-per-node {kind}: none is visible here; give the number of ranks, or cpu")
    return found
