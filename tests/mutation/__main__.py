"""`python -m tests.mutation`: which changes of the operator does no check notice?

Exit status: 1 where one survives that `argued.toml` does not argue.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from . import checks
from .mutants import Mutant, iterate_mutants
from .trial import TrialResult, trace_checks, try_mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPERATOR = ROOT / "operator/pacekeeper_operator"
SCOPE = (
    *(f"{package}/**/*.py" for package in ("decide", "endpoint", "kube", "observe", "runtime", "services", "state")),
    *("api/codec.py", "pods/network_policies.py", "limits.py"),
)


@dataclass(frozen=True)
class Argued:
    """Mutants that nothing need notice, and why. A `*` stands for any text."""

    file: str  # below the operator's package
    function: str
    mutation: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        wanted = (self.file, self.function, self.mutation)
        return all(
            _compile_pattern(text).fullmatch(actual) for text, actual in zip(wanted, get_identity(mutant), strict=True)
        )


@cache
def _compile_pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", ".*"))


def list_files() -> list[Path]:
    return sorted({path for pattern in SCOPE for path in OPERATOR.glob(pattern)})


def load_argued() -> list[Argued]:
    return [Argued(**entry) for entry in tomllib.loads((HERE / "argued.toml").read_text())["argued"]]


def get_identity(mutant: Mutant) -> tuple[str, str, str]:
    """File, function, mutation: they stay the same when lines move."""
    return mutant.path.relative_to(OPERATOR).as_posix(), mutant.function, mutant.mutation


class Run:
    """A plug-in of pytest, in whose session the mutants meet the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict[Mutant, TrialResult] = {}
        self.unreached: set[Mutant] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        options = self.options
        gc.unfreeze()  # what tests/unit/conftest.py keeps from the collector, functions and caches among it
        all_checks = [*checks.iterate_tests(session), *checks.iterate_disasters(options.seeds)]
        try:
            reached = trace_checks(all_checks, list_files())
        except RuntimeError as error:
            pytest.exit(str(error), returncode=1)
        lines = frozenset[checks.Line]().union(*(reach.lines for reach in reached.values()))
        drawn = draw_sample(options.only, options.sample, options.seed)
        self.unreached = {
            candidate
            for candidate in drawn
            if lines.isdisjoint((str(candidate.path), line) for line in candidate.lines)
        }
        print(f"{len(drawn)} mutants meet {len(all_checks)} checks", file=sys.stderr)
        for count, (mutant, result) in enumerate(try_mutants(drawn, all_checks, reached, options.jobs), 1):
            self.results[mutant] = result
            if count % 50 == 0:
                print(f"{count} of {len(drawn)}: {format_counts(self.results)}", file=sys.stderr, flush=True)
        return True


def draw_sample(only: str, limit: int, seed: int) -> list[Mutant]:
    """At most `limit` of those whose file's path holds `only`, in the order of files and lines; 0: all."""
    mutants = [mutant for path in list_files() if only in path.as_posix() for mutant in _list_mutants(path)]
    if 0 < limit < len(mutants):
        chosen = sorted(random.Random(seed).sample(range(len(mutants)), limit))
        mutants = [mutants[index] for index in chosen]
    return mutants


@cache
def _list_mutants(path: Path) -> Sequence[Mutant]:
    return tuple(iterate_mutants(path))


def format_counts(results: Mapping[Mutant, TrialResult]) -> str:
    counts = Counter(result.name.lower() for result in results.values())
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def format_table(survivors: Sequence[Mutant], unreached: set[Mutant]) -> str:
    lines = []
    for mutant in survivors:
        file, function, mutation = get_identity(mutant)
        hint = "  (no check comes here)" if mutant in unreached else ""
        lines += [f"{file}:{mutant.lines.start} {function}{hint}", f"  - {mutant.before}", f"  + {mutant.after}"]
        lines += [f"  {mutation}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="part of the path of the modules to change")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants at most (all)")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--seeds", type=int, default=0, help="how many simulated disasters are checks, too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "build/mutation.json", help="where the result goes")
    options = parser.parse_args(arguments)
    run = Run(options)
    tests = str(ROOT / "tests/unit/operator")
    quiet = ["-q", "--capture=no", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    if pytest.main([tests, *quiet, "--override-ini", "addopts=--import-mode=importlib"], plugins=[run]):
        return 1
    surviving = [
        mutant for mutant, result in run.results.items() if result in (TrialResult.SURVIVED, TrialResult.FAILED)
    ]
    argued = load_argued()
    survivors = [mutant for mutant in surviving if not any(entry.covers(mutant) for entry in argued)]
    survivors.sort(key=lambda mutant: (mutant.path, mutant.number))
    print(format_table(survivors, run.unreached))
    print(f"{format_counts(run.results)}; {len(surviving) - len(survivors)} of them argued, {len(survivors)} not")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "mutants": len(run.results),
        **{result.name.lower(): sum(outcome is result for outcome in run.results.values()) for result in TrialResult},
        "argued": len(surviving) - len(survivors),
        "survivors": [
            dict(zip(("file", "function", "mutation"), get_identity(mutant), strict=True))
            | {"line": mutant.lines.start}
            for mutant in survivors
        ],
    }
    options.json.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
