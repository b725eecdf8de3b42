"""Ranks that the watch's own library has made fail: by an exception that it raised, or by its signal for stacks. Pure.

The library catches its own exceptions. What it lets through comes from what it calls for the script. Its frame is then
the innermost one of the traceback if the called function is written in C. So frames of such functions prove nothing.

A rank that a signal such as SIGSEGV ends leaves no stack. Whether the watch is the cause shows by comparison with jobs
that are not watched only (`injection_breaker.find_excess_failure`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_analysis.protocol.watched_container import STACK_SIGNAL_NUMBER

from ..pods.injection import PAYLOAD_PATH
from .injection_breaker import InjectionFailure

PASSING_FUNCTIONS = frozenset(
    {
        *("_find_elsewhere", "_report_call", "_report_exception", "_run_image_module", "bracketed", "call"),
        *("dispatched", "execute_and_call", "fetch", "load", "proceed", "run"),
    }
)
"""Functions of the library that call functions of the script or of torch, and pass on what these raise."""
MAX_NAMED_ERROR_CHARACTERS = 200
_TRACEBACK_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (\S+)$', re.MULTILINE)
_CAUSED_ELSEWHERE = (
    *("KeyboardInterrupt", "MemoryError", "RecursionError", "StopIteration", "SystemExit"),
    *("RuntimeError", "torch."),
)
"""Exceptions that Python raises in any function or that only end the process, and those of torch's C++ code."""


def find_library_failure(faults: Iterable[FaultReport], job: str) -> tuple[FaultReport, InjectionFailure] | None:
    """Return the first fault that the library has caused, and why the injection has to be switched off.

    `job`: namespace and name of the WatchedJob.
    """
    for fault in faults:
        if fault.kind is FaultKind.RANK_FAILED and (cause := _find_own_cause(fault)):
            return fault, InjectionFailure(f"rank {fault.rank} of {job} (pod {fault.worker}) has failed: {cause}")
    return None


def _find_own_cause(fault: FaultReport) -> str:
    """Return how the library has made the rank fail; "": it has not, as far as is known."""
    if fault.exit_code == -STACK_SIGNAL_NUMBER:
        return f"signal {STACK_SIGNAL_NUMBER}, by which the watch asks for stacks, has ended it"
    frames = list(_TRACEBACK_FRAME.finditer(fault.error))
    if not frames:
        return ""
    file, line, function = frames[-1].groups()
    # Source and carets of the frame are indented, and the exception is not.
    rest = fault.error[frames[-1].end() :].splitlines()
    error = next((text for text in rest if text and not text[0].isspace()), "")
    is_own = file.startswith(f"{PAYLOAD_PATH}/") and function not in PASSING_FUNCTIONS
    if not is_own or error.startswith(_CAUSED_ELSEWHERE):
        return ""
    return f"the watch has raised {error[:MAX_NAMED_ERROR_CHARACTERS]!r} in {file}, line {line}, in {function}"
