"""`python -m tests.run.changed`: the tests that the working tree's changes can affect, nearest first."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import pytest

from .parts import ROOT
from .references import References, find_folders, read_references

LIMIT_SECONDS = 120
_COSTLY_FOLDERS = ("tests/unit/simulation/", "tests/distributed/", "tests/cluster/")  # each more than the one before
_LISTED = 12
"""How many of the nearest files are named for tests that do not run."""


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a test failed. Tests that time did not allow are named, and no failure."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.run.changed", description=__doc__)
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="what the working tree differs from")
    parser.add_argument("--all", action="store_true", help="without a limit of time, distributed and cluster tests too")
    options = parser.parse_args(arguments)
    changed = list_changed(options.base)
    distances = measure_distances(read_references(ROOT, [*_list_git("ls-files"), *changed]), changed)
    tests = [test for test in order_tests(distances, changed) if (ROOT / test).exists()]
    print(f"{len(changed)} changed files can affect {len(tests)} files of tests.")
    chosen = [test for test in tests if options.all or not test.startswith(_COSTLY_FOLDERS[1:])]
    _list_skipped(
        "Distributed and cluster tests, which only ALL=1 runs", [test for test in tests if test not in chosen]
    )
    if not chosen:
        return 0
    limit = TimeLimit(None if options.all else start + LIMIT_SECONDS)
    status = pytest.main([*chosen, "--durations=0", "--durations-min=5"], plugins=[limit])
    if not limit.left_out:
        return int(status)
    _list_skipped(f"After {LIMIT_SECONDS} s, left out (nearest first)", limit.left_out)
    return int(limit.session is None or limit.session.testsfailed > 0)


def list_changed(base: str) -> list[str]:
    """Return the files that differ from a revision, with those that git does not track yet."""
    return [
        *_list_git("diff", "--name-only", "--no-renames", base),
        *_list_git("ls-files", "--others", "--exclude-standard"),
    ]


def measure_distances(references: References, changed: Iterable[str]) -> Mapping[str, int]:
    """Return how many references away from a change each file is that leads to one."""
    referrers: dict[str, list[str]] = {}
    for path, targets in references.items():
        for target in targets:
            referrers.setdefault(target, []).append(path)
    distances = dict.fromkeys(changed, 0)
    for path in list(distances):
        if not path.endswith(".py"):
            distances.update(dict.fromkeys(find_folders(path), 0))
    frontier = list(distances)
    while frontier:
        following: list[str] = []
        for path in frontier:
            for referrer in referrers.get(path, ()):
                if referrer not in distances:
                    distances[referrer] = distances[path] + 1
                    following.append(referrer)
        frontier = following
    return distances


def order_tests(distances: Mapping[str, int], changed: Sequence[str]) -> list[str]:
    """Return the files of tests: changed ones, those that mirror a changed file, then by cost and distance.

    The folder determines the cost: a file of tests of decisions takes less than a second, one of the simulation many.
    """
    stems = {PurePosixPath(path).stem for path in changed}
    folders = {PurePosixPath(path).parent.name for path in changed}

    def rank(path: str) -> tuple[bool, bool, int, int, bool, str]:
        pure = PurePosixPath(path)
        nearby = pure.parent.name in folders
        mirrors = nearby and pure.stem.removeprefix("test_") in stems
        cost = next((cost for cost, folder in enumerate(_COSTLY_FOLDERS, 1) if path.startswith(folder)), 0)
        return distances[path] > 0, not mirrors, cost, distances[path], not nearby, path

    return sorted((path for path in distances if _is_test(path)), key=rank)


class TimeLimit:
    """A plugin of pytest that starts no test after a deadline, and records which files it left out."""

    def __init__(self, deadline: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        self.session: pytest.Session | None = None
        self.left_out: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if self._deadline is None or nextitem is None or self._clock() < self._deadline:
            return
        self.session = item.session
        remaining = item.session.items[item.session.items.index(nextitem) :]
        self.left_out = list(
            dict.fromkeys(left_item.path.relative_to(item.config.rootpath).as_posix() for left_item in remaining)
        )
        item.session.shouldstop = f"{len(remaining)} tests are left out"


def _is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    return pure.match("test_*.py") and path.startswith("tests/") and pure.parts[1] not in ("gpu", "data")


def _list_skipped(title: str, tests: Sequence[str]) -> None:
    if tests:
        more = f" and {len(tests) - _LISTED} more" if len(tests) > _LISTED else ""
        print(f"{title}: {' '.join(tests[:_LISTED])}{more}", flush=True)


def _list_git(*arguments: str) -> list[str]:
    """Return what a command of git lists, each name ended by a zero byte."""
    process = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return process.stdout.split("\0")[:-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
