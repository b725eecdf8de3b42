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
from .mutants import Mutant, mutants
from .trial import Fate, survey, trials

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPERATOR = ROOT / "operator/pacekeeper_operator"
SCOPE = ("decide/**/*.py", "services/**/*.py", "observe/**/*.py")
PURE = ("codec", "decision", "ledger", "legacy", "limits", "observation", "policies", "rounds", "state", "subject")


@dataclass(frozen=True)
class Argued:
    """Mutants that nothing need notice, and why. A `*` stands for any text."""

    file: str  # below the operator's package
    function: str
    mutation: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        wanted = (self.file, self.function, self.mutation)
        return all(_pattern(text).fullmatch(found) for text, found in zip(wanted, identity(mutant), strict=True))


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", ".*"))


def files() -> list[Path]:
    return sorted({path for pattern in SCOPE for path in OPERATOR.glob(pattern)} | {OPERATOR / f"{n}.py" for n in PURE})


def argued() -> list[Argued]:
    return [Argued(**entry) for entry in tomllib.loads((HERE / "argued.toml").read_text())["argued"]]


def identity(mutant: Mutant) -> tuple[str, str, str]:
    """File, function, mutation: they stay the same when lines move."""
    return mutant.path.relative_to(OPERATOR).as_posix(), mutant.function, mutant.mutation


class Run:
    """A plug-in of pytest, in whose session the mutants meet the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.fates: dict[Mutant, Fate] = {}
        self.unreached: set[Mutant] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        options = self.options
        gc.unfreeze()  # what tests/unit/conftest.py keeps from the collector, functions and caches among it
        met = [*checks.of_pytest(session), *checks.of_simulation(options.seeds)]
        try:
            reached = survey(met, files())
        except RuntimeError as error:
            pytest.exit(str(error), returncode=1)
        lines = frozenset[checks.Line]().union(*(reach.lines for reach in reached.values()))
        drawn = sample(options.only, options.sample, options.seed)
        self.unreached = {m for m in drawn if lines.isdisjoint((str(m.path), line) for line in m.lines)}
        print(f"{len(drawn)} mutants meet {len(met)} checks", file=sys.stderr)
        for done, (mutant, fate) in enumerate(trials(drawn, met, reached, options.jobs), 1):
            self.fates[mutant] = fate
            if done % 50 == 0:
                print(f"{done} of {len(drawn)}: {told(self.fates)}", file=sys.stderr, flush=True)
        return True


def sample(only: str, most: int, seed: int) -> list[Mutant]:
    """At most so many of those whose file's path holds `only`, in the order of files and lines; 0: all."""
    found = [mutant for path in files() if only in path.as_posix() for mutant in _mutants_of(path)]
    if 0 < most < len(found):
        chosen = sorted(random.Random(seed).sample(range(len(found)), most))
        found = [found[index] for index in chosen]
    return found


@cache
def _mutants_of(path: Path) -> Sequence[Mutant]:
    return tuple(mutants(path))


def told(fates: Mapping[Mutant, Fate]) -> str:
    counts = Counter(fate.name.lower() for fate in fates.values())
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def table(survivors: Sequence[Mutant], unreached: set[Mutant]) -> str:
    lines = []
    for mutant in survivors:
        file, function, mutation = identity(mutant)
        hint = "  (no check comes here)" if mutant in unreached else ""
        lines += [f"{file}:{mutant.lines.start} {function}{hint}", f"  - {mutant.before}", f"  + {mutant.after}"]
        lines += [f"  {mutation}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="part of the path of the modules to change")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants at most (all)")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--seeds", type=int, default=0, help="so many simulated disasters are checks, too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "build/mutation.json", help="where the result goes")
    options = parser.parse_args(arguments)
    run = Run(options)
    tests = str(ROOT / "tests/unit/operator")
    quiet = ["-q", "--capture=no", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    if pytest.main([tests, *quiet, "--override-ini", "addopts=--import-mode=importlib"], plugins=[run]):
        return 1
    lasting = [mutant for mutant, fate in run.fates.items() if fate in (Fate.SURVIVED, Fate.FAILED)]
    known = argued()
    survivors = [mutant for mutant in lasting if not any(entry.covers(mutant) for entry in known)]
    survivors.sort(key=lambda mutant: (mutant.path, mutant.number))
    print(table(survivors, run.unreached))
    print(f"{told(run.fates)}; {len(lasting) - len(survivors)} of them argued, {len(survivors)} not")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "mutants": len(run.fates),
        **{fate.name.lower(): sum(found is fate for found in run.fates.values()) for fate in Fate},
        "argued": len(lasting) - len(survivors),
        "survivors": [
            dict(zip(("file", "function", "mutation"), identity(mutant), strict=True)) | {"line": mutant.lines.start}
            for mutant in survivors
        ],
    }
    options.json.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
