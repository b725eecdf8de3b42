"""torchrun's options as `pacekeeper run` takes them: who has a command line of torchrun changes its first word.

In a worker's pod the plan says how many ranks there are and where they meet; without one, all ranks are on this
machine. So each option is used, passed over (said in one line), or refused with the remedy. torchrun's variables
(PET_NNODES for --nnodes) count as options that are given.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pacekeeper_analysis.errors import InputError

from .rank_options import OutputOptions, RankOptions, Std, StreamSelection, rank_environment


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
    nodes, *most = (asked.nnodes or "1").split(":")
    if len(most) > 1 or any(_number("--nnodes", number) < int(nodes) for number in most if nodes.isdecimal()):
        raise InputError(f"--nnodes {asked.nnodes}: give a number, or the smallest and the largest, such as 1:4")
    if _number("--nnodes", nodes) > 1:
        raise InputError(
            f"--nnodes {asked.nnodes}: without a plan all ranks are on this machine; leave the option out, "
            f"or make a TrainingJob with spec.replicas {nodes}"
        )
    return _count(kind, environment, devices) if kind in COUNTED else wanted or 1


def passed_over(asked: Namespace, local: bool, environment: Mapping[str, str]) -> str:
    """One line that says which of the given options change nothing, and what stands in their place; "": none.

    local: whether there is no plan. environment: whose variables of torchrun count, too.
    """
    words: dict[str, list[str]] = {}
    for option in _given(asked):
        instead = option.instead if option.instead_locally is None or not local else option.instead_locally
        if instead:
            words.setdefault(instead, []).append(option.name)
    filters = [option.name for option in _given(asked) if option.name in _FILTERS]
    if filters and _streams("--tee", asked.tee) == StreamSelection():
        words["they filter the streams that --tee names"] = filters
    for name, instead in VARIABLES_PASSED_OVER.items():
        if environment.get(name) not in (None, "", sys.executable):
            words.setdefault(instead, []).append(name)
    return "; ".join(f"{', '.join(names)} passed over: {instead}" for instead, names in words.items())


def take_variables(asked: Namespace, environment: Mapping[str, str]) -> str:
    """Fill in what the command line leaves open from torchrun's variables, such as PET_NNODES for --nnodes.

    Returns a line that names them; "": none. Raises InputError where a flag's is no number.
    """
    taken = []
    for option in (*OPTIONS, *SHARED):
        text = environment.get(option.variable, "") if option.by_variable else ""
        if not text or getattr(asked, option.destination) not in (None, False):
            continue
        if option.flag:
            if not text.isdecimal():
                raise InputError(f"{option.variable}={text}: give 1, or 0 for no")
            setattr(asked, option.destination, int(text) != 0)
        else:
            setattr(asked, option.destination, text)
        taken.append(f"{option.variable}={text}")
    return f"from the environment: {', '.join(taken)}" if taken else ""


def restarts(asked: Namespace) -> int:
    """Return how many rounds may follow the first. Raises InputError."""
    if asked.max_restarts is None:
        return DEFAULT_RESTARTS
    text = str(asked.max_restarts)
    if not text.isdecimal():
        raise InputError(f"--max-restarts {text}: give a number of rounds, 0 or more")
    return int(text)


def rank_options(asked: Namespace, environment: Mapping[str, str], ranks: int | None) -> RankOptions:
    """What the options say about the ranks; the folder of log files is not made yet.

    ranks: on this machine; None: the plan says it. Raises InputError that names the option.
    """
    if asked.no_python and asked.module:
        raise InputError("--no-python and --module contradict each other: a module is run by Python; drop one")
    options = RankOptions(
        role=asked.role or RankOptions.role,
        run_id=asked.rdzv_id or "",
        virtual_local_rank=asked.virtual_local_rank,
        master_port=0 if ranks is None else _master_port(asked),
        grace_seconds=_grace(asked.shutdown_timeout, environment),
        output=OutputOptions(
            redirects=_streams("--redirects", asked.redirects),
            tee=_streams("--tee", asked.tee),
            shown=_local_ranks(asked.local_ranks_filter),
            prefix_template=asked.log_line_prefix_template or environment.get(PREFIX_VARIABLE, ""),
            stdout_filters=_words(asked.duplicate_stdout_filters),
            stderr_filters=_words(asked.duplicate_stderr_filters),
        ),
    )
    for local_rank in range(int(environment.get("PACEKEEPER_NPROC", 0)) if ranks is None else ranks):
        rank_environment(options, local_rank, environment)
    return options


def wants_log_files(asked: Namespace, options: RankOptions) -> bool:
    """Whether ranks have log files. /dev/null as their folder means that they have none, as under torchrun."""
    none = StreamSelection()
    named = options.output.redirects != none or options.output.tee != none
    return asked.log_dir != os.devnull and bool(asked.log_dir or named)


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
    """One of torchrun's. Where neither passed over nor refused, it is used."""

    name: str
    does: str = ""
    """What it does where it is used."""
    instead: str = ""
    """It is passed over: what stands in its place."""
    instead_locally: str | None = None
    """The same without a plan, where that is something else; "": it is used there."""
    remedy: str = ""
    """It is refused: why, and what to do."""
    flag: bool = False
    short: tuple[str, ...] = ()
    by_variable: bool = True
    """Whether torchrun also reads it from the environment."""

    @property
    def variable(self) -> str:
        return f"PET_{self.destination.upper()}"

    @property
    def destination(self) -> str:
        """Its name in the parsed arguments, and torchrun's older spelling."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """What it does here, in one sentence or two."""
        if self.remedy:
            return f"refused: {self.remedy}"
        if not self.instead:
            return self.does
        if self.instead_locally is None:
            return f"passed over: {self.instead}"
        outside = self.does if self.instead_locally == "" else f"passed over: {self.instead_locally}"
        return f"{outside}. In a worker's pod passed over: {self.instead}"


DEFAULT_RESTARTS = 10
_FILTERS = ("--duplicate-stdout-filters", "--duplicate-stderr-filters")
_MEETING = "the plan says where ranks meet"
_HERE = "the ranks meet on this machine"
_OWN_WATCH = "the launcher watches the ranks in its own way"

OPTIONS = (
    TorchrunOption(
        "--nproc-per-node",
        "runs so many ranks on this machine: a number, or gpu, cpu, auto. In a worker's pod it must be "
        "spec.nprocPerNode, or one of these words",
    ),
    TorchrunOption(
        "--nnodes",
        "must be 1, or a range that begins with 1: without a plan all ranks are on this machine",
        "the plan says who takes part (spec.replicas, spec.minReplicas)",
        instead_locally="",
    ),
    TorchrunOption(
        "--standalone", "runs the ranks on this machine: one, unless --nproc-per-node says more",
        _MEETING, instead_locally="", flag=True,
    ),
    TorchrunOption("--rdzv-id", "is TORCHELASTIC_RUN_ID, and begins the name of the run's folder of log files"),
    TorchrunOption("--node-rank", "", _MEETING, _HERE),
    TorchrunOption("--rdzv-backend", "", _MEETING, _HERE),
    TorchrunOption("--rdzv-endpoint", "", _MEETING, _HERE),
    TorchrunOption("--rdzv-conf", "", _MEETING, _HERE),
    TorchrunOption("--master-addr", "", _MEETING, _HERE),
    TorchrunOption(
        "--master-port",
        "is MASTER_PORT, where the ranks' store listens; with --standalone or --rdzv-backend=c10d any free port is",
        _MEETING,
        instead_locally="",
    ),
    TorchrunOption("--local-addr", "", _MEETING, _HERE),
    TorchrunOption("--monitor-interval", "", _OWN_WATCH),
    TorchrunOption("--event-log-handler", "", "faults are reported to the operator, and logged"),
    TorchrunOption("--start-method", "", "ranks are forked from a process that has torch imported"),
    TorchrunOption("--run-path", "runs the script by runpy in a forked process, as it is without it", flag=True),
    TorchrunOption("--use-env", "changes nothing: LOCAL_RANK is always there", flag=True, by_variable=False),
    TorchrunOption("--role", "is ROLE_NAME, and the name in the prefix of teed lines"),
    TorchrunOption(
        "--log-dir",
        "makes `<log dir>/<run id>_<random>/attempt_N/<local rank>/` for the files of --redirects and --tee, and for "
        "the error.json of torch's @record. With /dev/null there are no files",
    ),
    TorchrunOption(
        "--redirects", "writes the named streams to stdout.log and stderr.log instead of the console", short=("-r",)
    ),
    TorchrunOption("--tee", "writes the named streams to these files and to the console", short=("-t",)),
    TorchrunOption(
        "--log-line-prefix-template",
        "begins each line on the console, of all streams: with it also those that are not teed",
    ),
    TorchrunOption("--local-ranks-filter", "shows only these local ranks' output on the console"),
    TorchrunOption(
        "--duplicate-stdout-filters", "copies teed lines that hold one of the words to attempt_N/filtered_stdout.log"
    ),
    TorchrunOption(
        "--duplicate-stderr-filters", "copies teed lines that hold one of the words to attempt_N/filtered_stderr.log"
    ),
    TorchrunOption(
        "--logs-specs",
        remedy="log files have torchrun's default layout, and no class of one's own; leave it out, and use --log-dir",
        by_variable=False,
    ),
    TorchrunOption(
        "--signals-to-handle",
        "ends the run on these signals, and always on SIGTERM and SIGINT. Each rank gets the same signal; one that "
        "handles SIGTERM but not this one, as with pk.init, gets SIGTERM. The exit code is 143, or 130 after SIGINT",
    ),
    TorchrunOption(
        "--shutdown-timeout",
        "kills ranks that are still there so many seconds after such a signal (without it: 25)",
        "the pod's terminationGracePeriodSeconds is what ranks have to leave",
        instead_locally="",
    ),
    TorchrunOption(
        "--no-python",
        "runs any program once for each rank. A Python program in it is watched once it imports pacekeeper",
        flag=True,
    ),
    TorchrunOption("--virtual-local-rank", "gives each rank one GPU as number 0, and LOCAL_RANK=0", flag=True),
    TorchrunOption(
        "--numa-binding", "", "the kubelet's CPU manager binds containers", "ranks are bound to no processors",
        by_variable=False,
    ),
    TorchrunOption(
        "--print-completion", remedy="it prints torchrun's own completion; ask torchrun for that", by_variable=False
    ),
)  # fmt: skip

SHARED = (
    TorchrunOption(
        "--max-restarts",
        f"starts the ranks again so often: {DEFAULT_RESTARTS} times unless it is given (torchrun: 0)",
        "the plan has its own (spec.remediation.maxRestarts)",
        instead_locally="",
    ),
    TorchrunOption("--module", "runs a module, as python -m does", flag=True, short=("-m",)),
)
"""Options that `pacekeeper run` has itself."""

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
VARIABLES_PASSED_OVER = {
    "PYTHON_EXEC": "ranks run in the launcher's Python; start that one, or use --no-python",
    "TORCHELASTIC_ENABLE_FILE_TIMER": _OWN_WATCH,
    "TORCHELASTIC_HEALTH_CHECK_PORT": _OWN_WATCH,
}
"""Variables that torchrun reads and `pacekeeper run` does not: what stands in their place."""


def option_table() -> str:
    """Return the table of the documentation: each option of torchrun, and what it does here."""
    rows = []
    for option in (*OPTIONS, *SHARED):
        names = ", ".join(f"`{name}`" for name in (option.name, *option.short))
        help_ = option.help[0].upper() + option.help[1:]
        rows.append(f"| {names} | {help_}. |")
    return "\n".join(["| option | what it does here |", "|---|---|", *rows])


def _given(asked: Namespace) -> list[TorchrunOption]:
    return [option for option in (*OPTIONS, *SHARED) if getattr(asked, option.destination) not in (None, False)]


def _words(text: str | None) -> tuple[str, ...]:
    """Words between commas; two commas are one that belongs to the word."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _streams(name: str, text: str | None) -> StreamSelection:
    """Raises InputError."""
    if text is None:
        return StreamSelection()
    if re.fullmatch(r"[0-3]", text):
        return StreamSelection(Std(int(text)))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return StreamSelection(by_rank={int(rank): Std(int(number)) for rank, number in pairs})
    raise InputError(f"{name} {text}: give 1 (stdout), 2 (stderr) or 3, or that for each local rank, such as 0:3,1:2")


def _local_ranks(text: str | None) -> frozenset[int] | None:
    """Raises InputError."""
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"--local-ranks-filter {text}: give local ranks with commas between, such as 0,1,2")
    return frozenset(int(number) for number in text.split(","))


def _master_port(asked: Namespace) -> int:
    """0: any, as where torchrun does not read it either. Raises InputError."""
    text = asked.master_port or "0"
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise InputError(f"--master-port {text}: give a number below 65536")
    return 0 if asked.standalone or asked.rdzv_backend == "c10d" else int(text)


def _grace(text: str | None, environment: Mapping[str, str]) -> float | None:
    """Seconds. Raises InputError."""
    name = "--shutdown-timeout" if text is not None else GRACE_VARIABLE
    text = text if text is not None else environment.get(GRACE_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(f"{name} {text}: give whole seconds, 0 or more")
    return float(text)


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
