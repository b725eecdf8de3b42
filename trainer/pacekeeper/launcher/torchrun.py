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

from .rank_options import OutputOptions, RankOptions, StandardStream, StreamSelection, build_rank_environment


def choose_local_ranks(arguments: Namespace, environment: Mapping[str, str], devices: Path = Path("/dev")) -> int | None:
    """How many ranks to run on this machine; None: the plan says it, or nobody does.

    Raises InputError where the options contradict each other or the plan, and for those that are refused.
    """
    for option in _list_given_options(arguments):
        if option.remedy:
            raise InputError(f"{option.name}: {option.remedy}")
    kind = arguments.nproc_per_node
    wanted = None if kind in (None, *COUNTED_DEVICE_KINDS) else _parse_positive_number("--nproc-per-node", kind)
    if arguments.local is not None:
        if wanted not in (None, arguments.local):
            raise InputError(f"--local {arguments.local} and --nproc-per-node {wanted} contradict each other; drop one")
        return int(arguments.local)
    if "PACEKEEPER_WORKER" in environment:
        planned = environment.get("PACEKEEPER_NPROC")
        if planned is not None and wanted not in (None, int(planned)):
            raise InputError(
                f"--nproc-per-node {wanted}: the TrainingJob has {planned} ranks a worker; "
                "set its spec.nprocPerNode, or leave the option out"
            )
        return None
    if not (arguments.standalone or kind or arguments.nnodes):
        return None
    nodes, *most = (arguments.nnodes or "1").split(":")
    if len(most) > 1 or any(_parse_positive_number("--nnodes", number) < int(nodes) for number in most if nodes.isdecimal()):
        raise InputError(f"--nnodes {arguments.nnodes}: give a number, or the smallest and the largest, such as 1:4")
    if _parse_positive_number("--nnodes", nodes) > 1:
        raise InputError(
            f"--nnodes {arguments.nnodes}: without a plan all ranks are on this machine; leave the option out, "
            f"or make a TrainingJob with spec.replicas {nodes}"
        )
    return _count_devices(kind, environment, devices) if kind in COUNTED_DEVICE_KINDS else wanted or 1


def describe_ignored_options(arguments: Namespace, local: bool, environment: Mapping[str, str]) -> str:
    """One line that says which of the given options change nothing, and what stands in their place; "": none.

    local: whether there is no plan. environment: whose variables of torchrun count, too.
    """
    words: dict[str, list[str]] = {}
    for option in _list_given_options(arguments):
        instead = option.replacement if option.local_replacement is None or not local else option.local_replacement
        if instead:
            words.setdefault(instead, []).append(option.name)
    filters = [option.name for option in _list_given_options(arguments) if option.name in _FILTER_OPTIONS]
    if filters and _parse_streams("--tee", arguments.tee) == StreamSelection():
        words["they filter the streams that --tee names"] = filters
    for name, instead in IGNORED_VARIABLES.items():
        if environment.get(name) not in (None, "", sys.executable):
            words.setdefault(instead, []).append(name)
    return "; ".join(f"{', '.join(names)} passed over: {instead}" for instead, names in words.items())


def apply_variables(arguments: Namespace, environment: Mapping[str, str]) -> str:
    """Fill in what the command line leaves open from torchrun's variables, such as PET_NNODES for --nnodes.

    Returns a line that names them; "": none. Raises InputError where a flag's is no number.
    """
    taken = []
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
        taken.append(f"{option.variable}={text}")
    return f"from the environment: {', '.join(taken)}" if taken else ""


def parse_max_restarts(arguments: Namespace) -> int:
    """Return how many rounds may follow the first. Raises InputError."""
    if arguments.max_restarts is None:
        return DEFAULT_MAX_RESTARTS
    text = str(arguments.max_restarts)
    if not text.isdecimal():
        raise InputError(f"--max-restarts {text}: give a number of rounds, 0 or more")
    return int(text)


def build_rank_options(arguments: Namespace, environment: Mapping[str, str], ranks: int | None) -> RankOptions:
    """What the options say about the ranks; the folder of log files is not made yet.

    ranks: on this machine; None: the plan says it. Raises InputError that names the option.
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
    """Whether ranks have log files. /dev/null as their folder means that they have none, as under torchrun."""
    none = StreamSelection()
    named = options.output.redirects != none or options.output.tee != none
    return arguments.log_dir != os.devnull and bool(arguments.log_dir or named)


def add_options(parser: ArgumentParser) -> None:
    """All of torchrun's, in both spellings, but those that `pacekeeper run` has itself (--max-restarts, --module)."""
    group = parser.add_argument_group("torchrun's options", "as torchrun has them; the plan goes before them")
    for option in TORCHRUN_OPTIONS:
        names = [*option.short, *dict.fromkeys((option.name, "--" + option.destination))]
        if option.flag:
            group.add_argument(*names, action="store_true", help=option.help)
        else:
            group.add_argument(*names, metavar="…", help=option.help)


COUNTED_DEVICE_KINDS = ("cpu", "gpu", "auto", "xpu")
"""Values of --nproc-per-node that ask for as many ranks as there are devices."""


@dataclass(frozen=True)
class TorchrunOption:
    """One of torchrun's. Where neither passed over nor refused, it is used."""

    name: str
    effect: str = ""
    """What it does where it is used."""
    replacement: str = ""
    """It is passed over: what stands in its place."""
    local_replacement: str | None = None
    """The same without a plan, where that is something else; "": it is used there."""
    remedy: str = ""
    """It is refused: why, and what to do."""
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
        """What it does here, in one sentence or two."""
        if self.remedy:
            return f"refused: {self.remedy}"
        if not self.replacement:
            return self.effect
        if self.local_replacement is None:
            return f"passed over: {self.replacement}"
        outside = self.effect if self.local_replacement == "" else f"passed over: {self.local_replacement}"
        return f"{outside}. In a worker's pod passed over: {self.replacement}"


DEFAULT_MAX_RESTARTS = 10
_FILTER_OPTIONS = ("--duplicate-stdout-filters", "--duplicate-stderr-filters")
_RENDEZVOUS_REPLACEMENT = "the plan says where ranks meet"
_LOCAL_REPLACEMENT = "the ranks meet on this machine"
_MONITORING_REPLACEMENT = "the launcher watches the ranks in its own way"

TORCHRUN_OPTIONS = (
    TorchrunOption(
        "--nproc-per-node",
        "runs so many ranks on this machine: a number, or gpu, cpu, auto. In a worker's pod it must be "
        "spec.nprocPerNode, or one of these words",
    ),
    TorchrunOption(
        "--nnodes",
        "must be 1, or a range that begins with 1: without a plan all ranks are on this machine",
        "the plan says who takes part (spec.replicas, spec.minReplicas)",
        local_replacement="",
    ),
    TorchrunOption(
        "--standalone", "runs the ranks on this machine: one, unless --nproc-per-node says more",
        _RENDEZVOUS_REPLACEMENT, local_replacement="", flag=True,
    ),
    TorchrunOption("--rdzv-id", "is TORCHELASTIC_RUN_ID, and begins the name of the run's folder of log files"),
    TorchrunOption("--node-rank", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-backend", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-endpoint", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--rdzv-conf", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--master-addr", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption(
        "--master-port",
        "is MASTER_PORT, where the ranks' store listens; with --standalone or --rdzv-backend=c10d any free port is",
        _RENDEZVOUS_REPLACEMENT,
        local_replacement="",
    ),
    TorchrunOption("--local-addr", "", _RENDEZVOUS_REPLACEMENT, _LOCAL_REPLACEMENT),
    TorchrunOption("--monitor-interval", "", _MONITORING_REPLACEMENT),
    TorchrunOption("--event-log-handler", "", "faults are reported to the operator, and logged"),
    TorchrunOption("--start-method", "", "ranks are forked from a process that has torch imported"),
    TorchrunOption("--run-path", "runs the script by runpy in a forked process, as it is without it", flag=True),
    TorchrunOption("--use-env", "changes nothing: LOCAL_RANK is always there", flag=True, has_variable=False),
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
        has_variable=False,
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
        local_replacement="",
    ),
    TorchrunOption(
        "--no-python",
        "runs any program once for each rank. A Python program in it is watched once it imports pacekeeper",
        flag=True,
    ),
    TorchrunOption("--virtual-local-rank", "gives each rank one GPU as number 0, and LOCAL_RANK=0", flag=True),
    TorchrunOption(
        "--numa-binding", "", "the kubelet's CPU manager binds containers", "ranks are bound to no processors",
        has_variable=False,
    ),
    TorchrunOption(
        "--print-completion", remedy="it prints torchrun's own completion; ask torchrun for that", has_variable=False
    ),
)  # fmt: skip

SHARED_OPTIONS = (
    TorchrunOption(
        "--max-restarts",
        f"starts the ranks again so often: {DEFAULT_MAX_RESTARTS} times unless it is given (torchrun: 0)",
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
"""Variables that torchrun reads and `pacekeeper run` does not: what stands in their place."""


def format_option_table() -> str:
    """Return the table of the documentation: each option of torchrun, and what it does here."""
    rows = []
    for option in (*TORCHRUN_OPTIONS, *SHARED_OPTIONS):
        names = ", ".join(f"`{name}`" for name in (option.name, *option.short))
        help_ = option.help[0].upper() + option.help[1:]
        rows.append(f"| {names} | {help_}. |")
    return "\n".join(["| option | what it does here |", "|---|---|", *rows])


def _list_given_options(arguments: Namespace) -> list[TorchrunOption]:
    return [option for option in (*TORCHRUN_OPTIONS, *SHARED_OPTIONS) if getattr(arguments, option.destination) not in (None, False)]


def _split_words(text: str | None) -> tuple[str, ...]:
    """Words between commas; two commas are one that belongs to the word."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _parse_streams(name: str, text: str | None) -> StreamSelection:
    """Raises InputError."""
    if text is None:
        return StreamSelection()
    if re.fullmatch(r"[0-3]", text):
        return StreamSelection(StandardStream(int(text)))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return StreamSelection(streams_by_rank={int(rank): StandardStream(int(number)) for rank, number in pairs})
    raise InputError(f"{name} {text}: give 1 (stdout), 2 (stderr) or 3, or that for each local rank, such as 0:3,1:2")


def _parse_local_ranks(text: str | None) -> frozenset[int] | None:
    """Raises InputError."""
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(f"--local-ranks-filter {text}: give local ranks with commas between, such as 0,1,2")
    return frozenset(int(number) for number in text.split(","))


def _parse_master_port(arguments: Namespace) -> int:
    """0: any, as where torchrun does not read it either. Raises InputError."""
    text = arguments.master_port or "0"
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise InputError(f"--master-port {text}: give a number below 65536")
    return 0 if arguments.standalone or arguments.rdzv_backend == "c10d" else int(text)


def _parse_grace_seconds(text: str | None, environment: Mapping[str, str]) -> float | None:
    """Seconds. Raises InputError."""
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
