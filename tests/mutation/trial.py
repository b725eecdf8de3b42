"""Puts mutants to the test, each in a forked process of its own: all is imported there, and one function is swapped."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import resource
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from tempfile import TemporaryFile
from types import CodeType, FunctionType

from .checks import Check, Reach, trace_check
from .mutants import Mutant

MAX_MEMORY_BYTES = 4 << 30
"""More than this a mutant may not use: some never stop to make things."""
PATIENCE_SECONDS = 10
"""So much longer than its checks take under the tracer may it take before it is taken for one that never ends."""

Place = tuple[str, str, int]
"""Of a function: file, qualified name, first line."""
Functions = Mapping[Place, Sequence[FunctionType]]


class TrialResult(Enum):
    SURVIVED = 0
    FAILED = 1  # to be made: a defect of this tool, printed on standard error
    SAME = 2  # as the code was before: no mutant
    KILLED = 3
    ENDLESS = 4  # which counts as killed


def trace_checks(checks: Sequence[Check], files: Sequence[Path]) -> Mapping[str, Reach]:
    """What each check reaches, by its name. Raises RuntimeError where one does not hold even without a mutation."""

    caches = _collect_caches()

    def measure() -> TrialResult:
        reaches = {}
        for check in checks:
            _clear_caches(caches)
            reaches[check.name] = trace_check(check, files)
        pickle.dump(reaches, file)
        file.flush()
        return TrialResult.SURVIVED

    with TemporaryFile() as file:
        _, status = os.waitpid(_fork_trial(measure), 0)
        if status:
            raise RuntimeError("the checks do not all hold without a mutation: see above")
        file.seek(0)
        reached: Mapping[str, Reach] = pickle.load(file)
    return reached


def try_mutants(
    mutants: Iterable[Mutant], checks: Sequence[Check], reached: Mapping[str, Reach], jobs: int = 1
) -> Iterator[tuple[Mutant, TrialResult]]:
    """Each mutant meets the checks that reach its lines, quickest first, until one does not hold; `jobs` at a time."""
    functions, caches = _collect_functions(), _collect_caches()
    quickest_first = sorted(checks, key=lambda check: reached[check.name].seconds)
    running: dict[int, Mutant] = {}
    for mutant in mutants:
        if len(running) == jobs:
            yield _wait_for_trial(running)
        lines = {(str(mutant.path), line) for line in mutant.lines}
        chosen = [check for check in quickest_first if not lines.isdisjoint(reached[check.name].lines)]
        limit = int(PATIENCE_SECONDS + sum(reached[check.name].seconds for check in chosen))

        def attempt(mutant: Mutant = mutant, chosen: Sequence[Check] = chosen, limit: int = limit) -> TrialResult:
            if not _swap_code(mutant, functions):
                return TrialResult.SAME
            _clear_caches(caches)
            return _run_checks(chosen, limit)

        running[_fork_trial(attempt)] = mutant
    while running:
        yield _wait_for_trial(running)


def _run_checks(checks: Iterable[Check], limit: int) -> TrialResult:
    """Within this many seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends this process at any point
    signal.alarm(limit)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return TrialResult.SURVIVED if all(_holds_check(check) for check in checks) else TrialResult.KILLED


def _wait_for_trial(running: dict[int, Mutant]) -> tuple[Mutant, TrialResult]:
    pid = 0
    while pid not in running:  # others' orphans may have become children of this process
        pid, status = os.wait()
    return running.pop(pid), TrialResult.ENDLESS if os.WIFSIGNALED(status) else TrialResult(os.WEXITSTATUS(status))


def _holds_check(check: Check) -> bool:
    try:
        return check.holds()
    except BaseException:  # a check that the mutant stops by any error does not hold
        return False


def _swap_code(mutant: Mutant, functions: Functions) -> bool:
    """Give the functions that there are the mutant's code, where it differs; False: it does not."""
    module = compile(mutant.build_module(), str(mutant.path), "exec", dont_inherit=True)
    changed = False
    for code in _iterate_codes(module):
        for function in functions.get((code.co_filename, code.co_qualname, code.co_firstlineno), ()):
            if function.__code__ != code:
                function.__code__, changed = code, True
    return changed


def _iterate_codes(code: CodeType) -> Iterator[CodeType]:
    """Of all functions within it, outer ones first."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _iterate_codes(constant)


def _collect_functions() -> Functions:
    """All that exist, closures and what decorators hide included."""
    functions: dict[Place, list[FunctionType]] = defaultdict(list)
    for candidate in gc.get_objects():
        if type(candidate) is FunctionType:  # `isinstance` calls the object itself, and some of torch then warn
            code = candidate.__code__
            functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(candidate)
    return functions


def _clear_caches(caches: Sequence[functools._lru_cache_wrapper[object]]) -> None:
    """What functions keep of earlier calls: a check shall call them again."""
    for cache in caches:
        cache.cache_clear()


def _collect_caches() -> Sequence[functools._lru_cache_wrapper[object]]:
    candidates = (candidate for candidate in gc.get_objects() if type(candidate) is functools._lru_cache_wrapper)
    return [cache for cache in candidates if str(cache.__module__).startswith("pacekeeper")]


def _fork_trial(work: Callable[[], TrialResult]) -> int:
    """The process that does it, and whose exit status is what comes of it; it writes nothing to standard output."""
    if pid := os.fork():
        return pid
    result = TrialResult.FAILED
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        result = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(result.value)
