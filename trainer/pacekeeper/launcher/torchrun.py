"""torchrun's options in `pacekeeper run`: to migrate a torchrun command line, replace its first word.

In a worker's pod, the plan sets the number of ranks and their rendezvous. Without a plan, all ranks run on this
machine. So each option is used, ignored (reported in one line), or refused with the remedy. torchrun's variables
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

from .ranks.rank_options import OutputOptions, RankOptions, StandardStream, StreamSelection, build_rank_environment


def choose_local_ranks(
    arguments: Namespace, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> int | None:
    """Return how many ranks to run on this machine; None: the plan sets it, or the command line leaves it open.

    Raises InputError if options contradict each other or the plan, or if an option is refused.
    """
    for option in _list_given_options(arguments):
        if option.remedy:
            raise InputError(f"{option.name}: {option.remedy}")
    nproc = arguments.nproc_per_node
    rank_count = None if nproc in (None, *COUNTED_DEVICE_KINDS) else _parse_positive_number("--nproc-per-node", nproc)
    if arguments.local is not None:
        if rank_count not in (None, arguments.local):
            raise InputError(
                f"--local {arguments.local} and --nproc-per-node {rank_count} contradict each other; drop one"
            )
        return int(arguments.local)
    if "PACEKEEPER_WORKER" in environment:
        planned = environment.get("PACEKEEPER_NPROC")
        if planned is not None and rank_count not in (None, int(planned)):
            raise InputError(
                f"--nproc-per-node {rank_count}: the TrainingJob has {planned} ranks a worker; "
                "set its spec.nprocPerNode, or leave the option out"
            )
        return None
    if not (arguments.standalone or nproc or arguments.nnodes):
        return None
    min_nodes, *max_nodes = (arguments.nnodes or "1").split(":")
    if len(max_nodes) > 1 or any(
        _parse_positive_number("--nnodes", number) < int(min_nodes) for number in max_nodes if min_nodes.isdecimal()
    ):
        raise InputError(f"--nnodes {arguments.nnodes}: give a number, or the smallest and the largest, such as 1:4")
    if _parse_positive_number("--nnodes", min_nodes) > 1:
        raise InputError(
            f"--nnodes {arguments.nnodes}: without a plan all ranks are on this machine; leave the option out, "
            f"or make a TrainingJob with spec.replicas {min_nodes}"
        )
    return _count_devices(nproc, environment, devices) if nproc in COUNTED_DEVICE_KINDS else rank_count or 1


def describe_ignored_options(arguments: Namespace, local: bool, environment: Mapping[str, str]) -> str:
    """Return one line that names the ignored options and what applies instead; "": no option is ignored.

    `local`: whether there is no plan. `environment`: the environment that may hold ignored variables of torchrun.
    """
    names_by_replacement: dict[str, list[str]] = {}
    for option in _list_given_options(arguments):
        replacement = option.replacement if option.local_replacement is None or not local else option.local_replacement
        if replacement:
            names_by_replacement.setdefault(replacement, []).append(option.name)
    filters = [option.name for option in _list_given_options(arguments) if option.name in _FILTER_OPTIONS]
    if filters and _parse_streams("--tee", arguments.tee) == StreamSelection():
        names_by_replacement["they filter only streams that --tee names"] = filters
    for name, replacement in IGNORED_VARIABLES.items():
        if environment.get(name) not in (None, "", sys.executable):
            names_by_replacement.setdefault(replacement, []).append(name)
    return "; ".join(
        f"{', '.join(names)} ignored: {replacement}" for replacement, names in names_by_replacement.items()
    )


def apply_variables(arguments: Namespace, environment: Mapping[str, str]) -> str:
    """Set the options that the command line leaves open from torchrun's variables, such as PET_NNODES for --nnodes.

    Return a line that names the variables; "": none. Raises InputError if a flag's variable is not a number.
    """
    applied = []
    for option in (*TORCHRUN_OPTIONS, *SHARED_OPTIONS):
        text = environment.get(option.variable, "") if option.has_variable else ""
        if not text or getattr(arguments, option.destination) not in (None, False):
            continue
        if option.flag:
            if not text.isdecimal():
                raise InputError(f"{option.variable}={text}: give 1, or 0 for no")
            setattr(arguments, option.destination, int(text) != 0)
        else:
            setattr(arguments, option.destination, text)
        applied.append(f"{option.variable}={text}")
    return f"from the environment: {', '.join(applied)}" if applied else ""


def parse_max_restarts(arguments: Namespace) -> int:
    """Return the maximum number of rounds after the first. Raises InputError."""
    if arguments.max_restarts is None:
        return DEFAULT_MAX_RESTARTS
    text = str(arguments.max_restarts)
    if not text.isdecimal():
        raise InputError(f"--max-restarts {text}: give a number of rounds, 0 or more")
    return int(text)


def build_rank_options(arguments: Namespace, environment: Mapping[str, str], ranks: int | None) -> RankOptions:
    """Build the rank options from the arguments. The folder of log files is not made yet.

    `ranks`: the number of ranks on this machine; None: the plan sets it. Raises InputError that names the option.
    """
    if arguments.no_python and arguments.module:
        raise InputError("--no-python and --module contradict each other: a module is run by Python; drop one")
    options = RankOptions(
        role=arguments.role or RankOptions.role,
        run_id=arguments.rdzv_id or "",
        virtual_local_rank=arguments.virtual_local_rank,
        master_port=0 if ranks is None else _parse_master_port(arguments),
        grace_seconds=_parse_grace_seconds(arguments.shutdown_timeout, environment),
        output=OutputOptions(
            redirects=_parse_streams("--redirects", arguments.redirects),
            tee=_parse_streams("--tee", arguments.tee),
            shown_ranks=_parse_local_ranks(arguments.local_ranks_filter),
            prefix_template=arguments.log_line_prefix_template or environment.get(LOG_PREFIX_VARIABLE, ""),
            stdout_filters=_split_words(arguments.duplicate_stdout_filters),
            stderr_filters=_split_words(arguments.duplicate_stderr_filters),
        ),
    )
    for local_rank in range(int(environment.get("PACEKEEPER_NPROC", 0)) if ranks is None else ranks):
        build_rank_environment(options, local_rank, environment)
    return options


def needs_log_files(arguments: Namespace, options: RankOptions) -> bool:
    """Return whether ranks have log files. `--log-dir /dev/null` means that they have none, as in torchrun."""
    no_streams = StreamSelection()
    selects_streams = options.output.redirects != no_streams or options.output.tee != no_streams
    return arguments.log_dir != os.devnull and bool(arguments.log_dir or selects_streams)


def add_options(parser: ArgumentParser) -> None:
    """Add torchrun's options in both spellings, except those that `pacekeeper run` has itself (SHARED_OPTIONS)."""
    group = parser.add_argument_group("torchrun's options", "as in torchrun; the plan takes precedence")
    for option in TORCHRUN_OPTIONS:
        names = [*option.short, *dict.fromkeys((option.name, "--" + option.destination))]
        if option.flag:
            group.add_argument(*names, action="store_true", help=option.help)
        else:
            group.add_argument(*names, metavar="…", help=option.help)


COUNTED_DEVICE_KINDS = ("cpu", "gpu", "auto", "xpu")
"""Values of --nproc-per-node that request one rank per device."""


@dataclass(frozen=True)
class TorchrunOption:
    """One option of torchrun. It is used unless it is ignored or refused."""

    name: str
    effect: str = ""
    """What it does if it is used."""
    replacement: str = ""
    """Not empty: the option is ignored. What applies instead."""
    local_replacement: str | None = None
    """The same without a plan; None: as `replacement`; "": the option is used."""
    remedy: str = ""
    """Not empty: the option is refused. Why, and what to do."""
    flag: bool = False
    short: tuple[str, ...] = ()
    has_variable: bool = True
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
        """The help text: one or two sentences on what it does here."""
        if self.remedy:
            return f"refused: {self.remedy}"
        if not self.replacement:
            return self.effect
        if self.local_replacement is None:
            return f"ignored: {self.replacement}"
        local_help = self.effect if self.local_replacement == "" else f"ignored: {self.local_replacement}"
        return f"{local_help}. In a worker's pod it is ignored: {self.replacement}"


DEFAULT_MAX_RESTARTS = 10
_FILTER_OPTIONS = ("--duplicate-stdout-filters", "--duplicate-stderr-filters")
_RENDEZVOUS_REPLACEMENT = "the plan sets the rendezvous"
_LOCAL_REPLACEMENT = "the rendezvous is on this machine"
_MONITORING_REPLACEMENT = "the launcher monitors the ranks itself"

TORCHRUN_OPTIONS = (
    TorchrunOption(
        "--nproc-per-node",
        "runs this number of ranks on this machine: a number, or gpu, cpu, auto. In a worker's pod it must be "
        "spec.nprocPerNode, or one of these words",
    ),
    TorchrunOption(
        "--nnodes",
        "must be 1, or a range that begins with 1: without a plan, all ranks are on this machine",
        "the plan sets the workers (spec.replicas, spec.minReplicas)",
        local_replacement="",
    ),
    TorchrunOption(
        "--standalone", "runs the ranks on this machine: one, unless --nproc-per-node sets more",
        _RENDEZVOUS_REPLACEMENT, local_replacement="", flag=True,
    ),
    TorchrunOption("--rdzv-id", "sets TORCHELASTIC_RUN_ID, and the start of the name of the run's log folder"),
    TorchrunOption("--node-rank", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-backend", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-endpoint", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-conf", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--master-addr", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption(
        "--master-port",
        "sets MASTER_PORT, where the ranks' store listens. With --standalone or --rdzv-backend=c10d any port is used",
        _RENDEZVOUS_REPLACEMENT,
        local_replacement="",
    ),
    TorchrunOption("--local-addr", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--monitor-interval", "", _MONITORING_REPLACEMENT),
    TorchrunOption("--event-log-handler", "", "faults are reported to the operator, and logged"),
    TorchrunOption("--start-method", "", "ranks are forked from a process that has imported torch"),
    TorchrunOption("--run-path", "runs the script by runpy in a forked process, which is also the default", flag=True),
    TorchrunOption("--use-env", "has no effect: LOCAL_RANK is always set", flag=True, has_variable=False),
    TorchrunOption("--role", "sets ROLE_NAME, and the name in the prefix of teed lines"),
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
        "sets the prefix of each line on the console, of all streams: also of those that are not teed",
    ),
    TorchrunOption("--local-ranks-filter", "shows only these local ranks' output on the console"),
    TorchrunOption(
        "--duplicate-stdout-filters", "copies teed lines that contain one of the words to attempt_N/filtered_stdout.log"
    ),
    TorchrunOption(
        "--duplicate-stderr-filters", "copies teed lines that contain one of the words to attempt_N/filtered_stderr.log"
    ),
    TorchrunOption(
        "--logs-specs",
        remedy="log files have torchrun's default layout, and custom classes are not supported; use --log-dir instead",
        has_variable=False,
    ),
    TorchrunOption(
        "--signals-to-handle",
        "ends the run on these signals, and always on SIGTERM and SIGINT. Each rank gets the same signal. A rank that "
        "handles SIGTERM but not this one, as with pk.init, gets SIGTERM. The exit code is 143, or 130 after SIGINT",
    ),
    TorchrunOption(
        "--shutdown-timeout",
        "kills ranks that are still running this many seconds after such a signal (default 25)",
        "ranks have the pod's terminationGracePeriodSeconds",
        local_replacement="",
    ),
    TorchrunOption(
        "--no-python",
        "runs any program once per rank. A Python program in it is monitored once it imports pacekeeper",
        flag=True,
    ),
    TorchrunOption("--virtual-local-rank", "gives each rank one GPU as number 0, and LOCAL_RANK=0", flag=True),
    TorchrunOption(
        "--numa-binding", "", "the kubelet's CPU manager binds containers", "ranks are not bound to processors",
        has_variable=False,
    ),
    TorchrunOption(
        "--print-completion", remedy="it prints torchrun's own completion; run torchrun for that", has_variable=False
    ),
)  # fmt: skip

SHARED_OPTIONS = (
    TorchrunOption(
        "--max-restarts",
        f"sets how often the ranks restart (default {DEFAULT_MAX_RESTARTS}; torchrun: 0)",
        "the plan has its own (spec.remediation.maxRestarts)",
        local_replacement="",
    ),
    TorchrunOption("--module", "runs a module, as python -m does", flag=True, short=("-m",)),
)
"""Options that `pacekeeper run` has itself."""

LOG_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
IGNORED_VARIABLES = {
    "PYTHON_EXEC": "ranks run in the launcher's Python; start that one, or use --no-python",
    "TORCHELASTIC_ENABLE_FILE_TIMER": _MONITORING_REPLACEMENT,
    "TORCHELASTIC_HEALTH_CHECK_PORT": _MONITORING_REPLACEMENT,
}
"""Variables that torchrun reads and `pacekeeper run` ignores, and what applies instead."""


def format_option_table() -> str:
    """Return the table of docs/torchrun.md: each option of torchrun, and what it does here."""
    rows = []
    for option in (*TORCHRUN_OPTIONS, *SHARED_OPTIONS):
        names = ", ".join(f"`{name}`" for name in (option.name, *option.short))
        help_ = option.help[0].upper() + option.help[1:]
        rows.append(f"| {names} | {help_}. |")
    return "\n".join(["| option | what it does here |", "|---|---|", *rows])


def _list_given_options(arguments: Namespace) -> list[TorchrunOption]:
    return [
        option
        for option in (*TORCHRUN_OPTIONS, *SHARED_OPTIONS)
        if getattr(arguments, option.destination) not in (None, False)
    ]


def _split_words(text: str | None) -> tuple[str, ...]:
    """Split words at commas. Two commas are an escaped one that belongs to the word."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _parse_streams(name: str, text: str | None) -> StreamSelection:
    """Parse the value of --redirects or --tee. Raises InputError."""
    if text is None:
        return StreamSelection()
    if re.fullmatch(r"[0-3]", text):
        return StreamSelection(StandardStream(int(text)))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return StreamSelection(streams_by_rank={int(rank): StandardStream(int(number)) for rank, number in pairs})
    raise InputError(f"{name} {text}: give 1 (stdout), 2 (stderr) or 3, or that for each local rank, such as 0:3,1:2")


def _parse_local_ranks(text: str | None) -> frozenset[int] | None:
    """Parse a set of local ranks; None: all. Raises InputError."""
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"--local-ranks-filter {text}: give local ranks with commas between, such as 0,1,2")
    return frozenset(int(number) for number in text.split(","))


def _parse_master_port(arguments: Namespace) -> int:
    """Return the port; 0: any free one, also where torchrun ignores the option. Raises InputError."""
    text = arguments.master_port or "0"
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise InputError(f"--master-port {text}: give a number below 65536")
    return 0 if arguments.standalone or arguments.rdzv_backend == "c10d" else int(text)


def _parse_grace_seconds(text: str | None, environment: Mapping[str, str]) -> float | None:
    """Return the seconds of --shutdown-timeout or its variable; None: not given. Raises InputError."""
    name = "--shutdown-timeout" if text is not None else SHUTDOWN_TIMEOUT_VARIABLE
    text = text if text is not None else environment.get(SHUTDOWN_TIMEOUT_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(f"{name} {text}: give whole seconds, 0 or more")
    return float(text)


def _parse_positive_number(name: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise InputError(f"{name} {text}: give a number, at least 1")
    return number


def _count_devices(kind: str, environment: Mapping[str, str], devices: Path) -> int:
    """Return the number of processors or GPUs that this process may use. Raises InputError if it is 0."""
    gpus = len(list(devices.glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    processors = len(os.sched_getaffinity(0))
    count = {"cpu": processors, "gpu": gpus, "auto": gpus or processors}.get(kind, 0)
    if not count:
        raise InputError(f"--nproc-per-node {kind}: none is visible here; give the number of ranks, or cpu")
    return count
