"""`python -m simulation`: many schedules, or one told as a story. README.md says how to read it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from . import batch, coverage, mortal
from .generator import generate
from .run import Outcome, run
from .scenarios import known_defects
from .schedule import Schedule
from .shrink import shrink

ROOT = Path(__file__).parent.parent
CODE = ("analysis", "operator", "simulation", "trainer/pacekeeper/launcher")
"""What a run depends on."""
FIRST_FRESH = 1_000_000
OPEN = Path(__file__).parent / "open.json"
"""Seeds whose violations are known and not yet mended or argued away, with what is known of each."""


def main(arguments: list[str]) -> int:
    """Exit status 1 where an invariant was broken."""
    options = _parser().parse_args(arguments)
    match options.command:
        case "run":
            return _run(options)
        case "replay":
            return _replay(_schedule(options))
        case "shrink":
            return _shrink(_schedule(options), options)
        case "mortal":
            return _mortal(options.scenario, options.jobs)
        case "compare":
            return _compare(options.seeds)
    return _coverage(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("run", "many seeds"), ("coverage", "the same, and what they have reached of the operator")):
        command = commands.add_parser(name, help=words)
        command.add_argument("seeds", nargs="?", default="0-149", help="like 7, 3,5,8 or 0-149 (default)")
        command.add_argument("--fresh", type=int, default=0, metavar="N", help="and N seeds that this code has drawn")
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    for name, words in (("replay", "one seed, as a story"), ("shrink", "the least that still breaks the same rule")):
        command = commands.add_parser(name, help=words)
        chosen = command.add_mutually_exclusive_group(required=True)
        chosen.add_argument("seed", nargs="?", type=int)
        chosen.add_argument("--json", metavar="FILE", help="a schedule; -: from standard input")
        chosen.add_argument("--defect", choices=known_defects.SCENARIOS, metavar="NAME", help="one that is mended")
        if name == "shrink":
            command.add_argument("--rule", help="default: the first that is broken")
            command.add_argument("--tries", type=int, default=300, help="runs at most")
    command = commands.add_parser("mortal", help="the operator is killed before and after each of its writes")
    command.add_argument("scenario", nargs="*", help=f"of {', '.join(mortal.SCENARIOS)}; default: all")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    command = commands.add_parser("compare", help="disasters in the simulation and on the test cluster, side by side")
    command.add_argument("seeds", nargs="?", default="1-20", help="like 7, 3,5,8 or 1-20 (default)")
    return parser


def _run(options: argparse.Namespace) -> int:
    fixed, fresh = _seeds(options.seeds), _fresh(options.fresh)
    known = json.loads(OPEN.read_text())
    began, failed, done = time.perf_counter(), 0, 0
    for outcome in batch.run_all([generate(seed) for seed in (*fixed, *fresh)], options.jobs):
        done += 1
        if outcome.violations and (why := known.get(str(outcome.seed))):
            print(f"seed {outcome.seed}, an open finding: {why}")
        elif outcome.violations:
            failed += 1
            _report(outcome)
        elif done % 50 == 0:
            print(f"{done} of {len(fixed) + len(fresh)}, {failed} fail", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{done} schedules in {seconds:.1f} s, {done / seconds / options.jobs:.2f} a second and process: {failed} fail"
    )
    return 1 if failed else 0


def _report(outcome: Outcome) -> None:
    """One line."""
    first = outcome.violations[0]
    words = f"{len(outcome.violations)} violations, the first: {first.rule}: {first.words}"
    print(f"seed {outcome.seed}: {words[:400]}", flush=True)


def _replay(schedule: Schedule) -> int:
    print(f"seed {schedule.seed}, for {schedule.aim}: {schedule.world}")
    for job in schedule.jobs:
        print(f"  {job}")
    for place, stroke in enumerate(schedule.strokes):
        print(f"  stroke {place}: {stroke}")
    outcome = run(schedule, story=True)
    print(*outcome.story, sep="\n")
    print(
        f"{outcome.virtual_seconds:.0f} simulated seconds in {outcome.real_seconds:.2f} s, "
        f"{outcome.requests} requests, {outcome.writes} writes, digest {outcome.digest}"
    )
    print(*(f"VIOLATED {violation}" for violation in outcome.violations), sep="\n")
    return 1 if outcome.violations else 0


def _shrink(schedule: Schedule, options: argparse.Namespace) -> int:
    """The schedule is printed as JSON, for `replay --json`."""
    rules = run(schedule).rules
    rule = options.rule or next(iter(rules), "")
    if rule not in rules:
        print(f"no rule{f' {rule!r}' if rule else ''} is broken", file=sys.stderr)
        return 0
    print(f"rule: {rule}", file=sys.stderr)

    def breaks(candidate: Schedule) -> bool:
        broken = rule in run(candidate).rules
        if broken:
            print(f"  still with {', '.join(candidate.kinds) or 'no fault'}", file=sys.stderr, flush=True)
        return broken

    print(json.dumps(shrink(schedule, breaks, options.tries).to_json()))
    return 1


def _mortal(names: Iterable[str], jobs: int) -> int:
    failed = 0
    for name in names or mortal.SCENARIOS:
        base = run(mortal.SCENARIOS[name])
        print(f"{name}: {base.writes} writes", flush=True)
        schedules = mortal.killed_at_each_write(mortal.SCENARIOS[name], base.writes)
        for schedule, outcome in zip(schedules, batch.run_all(schedules, jobs, in_order=True), strict=True):
            if outcome.violations:
                failed += 1
                print(f"  {schedule.strokes[-1]}: {outcome.violations[0]}"[:400], flush=True)
        if base.violations:
            failed += 1
            _report(base)
    return 1 if failed else 0


def _compare(seeds: str) -> int:
    from .two_worlds.compare import compare  # it needs what tests need

    return compare(_seeds(seeds))


def _coverage(options: argparse.Namespace) -> int:
    reached: Counter[str] = Counter()
    for outcome in batch.run_all(
        [generate(seed) for seed in (*_seeds(options.seeds), *_fresh(options.fresh))], options.jobs
    ):
        reached.update(sorted(outcome.coverage))
        if outcome.violations:
            _report(outcome)
    for what in sorted(coverage.everything()):
        print(f"{reached[what]:6}  {what}")
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    if options.defect is not None:
        return known_defects.SCENARIOS[options.defect].schedule
    if options.json is None:
        return generate(options.seed)
    text = sys.stdin.read() if options.json == "-" else Path(options.json).read_text()
    return Schedule.from_json(json.loads(text))


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _fresh(number: int) -> list[int]:
    """Drawn by the code: another code has others, the same code the same ones, so that what has passed passes again."""
    if not number:
        return []
    content = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        content.update(path.read_bytes())
    first = FIRST_FRESH + int(content.hexdigest()[:8], 16)
    print(f"fresh seeds: {first}-{first + number - 1}", flush=True)
    return list(range(first, first + number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
