"""Failures of ranks that the watch's library has caused, and those that only pass through it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pacekeeper_rank
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_analysis.protocol.watched_container import STACK_SIGNAL_NUMBER
from pacekeeper_operator.decide.library_failure import PASSING_FUNCTIONS, find_library_failure
from pacekeeper_rank.watching.process_files import STACK_SIGNAL

FAULT = FaultReport("w-0-r1-0-7-failed", FaultKind.RANK_FAILED, "w-0", 1, 100.0, rank=3, exit_code=1)
SCRIPT = '  File "/app/train.py", line 3, in <module>\n    loss.backward()\n'
OWN_FILE = "/pacekeeper/payload/lib/pacekeeper_rank/recorder.py"
OWN = f'  File "{OWN_FILE}", line 40, in end_step\n    return len(step)\n           ^^^^^^^^^\n'
PASSING = OWN.replace("end_step", "proceed")
HEAD, PEER_IS_GONE = "Traceback (most recent call last):\n", "RuntimeError: Connection reset by peer\n"
LOADER = f"RuntimeError: Caught TypeError in DataLoader worker process 0.\nOriginal {HEAD}"


@pytest.mark.parametrize(
    ("changes", "is_own"),
    [
        ({"error": f"{HEAD}{SCRIPT}{OWN}TypeError: no len()\n"}, True),
        ({"error": f"{HEAD}{SCRIPT}{LOADER}{OWN}TypeError: no len()\n"}, True),
        ({"exit_code": -STACK_SIGNAL_NUMBER}, True),
        ({"error": f"{HEAD}{SCRIPT}{PASSING}TypeError: of the called function\n"}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}{PEER_IS_GONE}"}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}torch.distributed.DistBackendError: NCCL error\n"}, False),
        ({"error": f"{HEAD}{OWN}{SCRIPT}ValueError: nan\n"}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}TypeError: no len()\n\nDuring handling …:\n\n{HEAD}{SCRIPT}E: e\n"}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}KeyboardInterrupt\n"}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}RecursionError: maximum recursion depth exceeded\nmore\n"}, False),
        ({"error": f"{HEAD}{SCRIPT}ValueError: /pacekeeper/payload/x is no file\n"}, False),
        ({"error": "", "exit_code": -11}, False),
        ({"error": f"{HEAD}{SCRIPT}{OWN}TypeError: no len()\n", "kind": FaultKind.STALLED}, False),
    ],
)
def test_what_the_library_has_caused(changes: dict[str, Any], is_own: bool) -> None:
    found = find_library_failure([FAULT, replace(FAULT, **changes)], "team/gpt")
    assert (found is not None) == is_own
    if found is not None:
        assert found[1].message.startswith("rank 3 of team/gpt (pod w-0) has failed: ")
        assert "exit_code" in changes or f"'TypeError: no len()' in {OWN_FILE}, line 40" in found[1].message


def test_both_sides_mean_the_same_signal() -> None:
    assert STACK_SIGNAL == STACK_SIGNAL_NUMBER


def test_functions_that_pass_on_calls_are_known() -> None:
    """One that is missing would take an error of torch, which any lost peer causes, for one of the watch."""
    functions = [*_iterate_functions()]
    passing = {function.name for function in functions if _passes_arguments_on(function)}
    assert passing >= {"bracketed", "call", "proceed"}
    assert passing <= PASSING_FUNCTIONS
    assert {function.name for function in functions} >= PASSING_FUNCTIONS, "remove those that exist no more"


def _iterate_functions() -> Iterator[ast.FunctionDef]:
    for path in Path(next(iter(pacekeeper_rank.__path__))).rglob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def _passes_arguments_on(function: ast.FunctionDef) -> bool:
    """Return whether the function, or a function in it without arguments, calls something with its `*arguments`."""
    own = {argument.arg for argument in (function.args.vararg, function.args.kwarg) if argument is not None}
    if not own and not function.args.args:
        own = {"values"}  # those of the function around it
    return any(
        isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name) and argument.value.id in own
        for call in _iterate_own_calls(function)
        for argument in call.args
    )


def _iterate_own_calls(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _iterate_own_calls(child)
