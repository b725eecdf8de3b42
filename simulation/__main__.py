"""`python -m simulation`: run many schedules, or replay one with its log.

README.md describes how to read the output.
"""

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

from . import batch, coverage, crash_test
from .generator import generate_schedule
from .run import RunOutcome, run_schedule
from .scenarios import known_defects
from .schedule import Schedule
from .shrink import shrink_schedule

REPOSITORY_ROOT = Path(__file__).parent.parent
FINGERPRINTED_FOLDERS = ("analysis", "operator", "simulation", "trainer/pacekeeper/launcher")
"""The code on which a run depends."""
FIRST_FRESH_SEED = 1_000_000
OPEN_FINDINGS_FILE = Path(__file__).parent / "open.json"
"""Seeds with known violations that are neither fixed nor explained, and what is known of each."""


def main(arguments: list[str]) -> int:
    """Run a command. Return the exit status: 1 if an invariant was broken."""
    options = _build_parser().parse_args(arguments)
    match options.command:
        case "run":
            return _run_schedules(options)
        case "replay":
            return _replay_schedule(_load_schedule(options))
        case "shrink":
            return _shrink_schedule(_load_schedule(options), options)
        case "crash-test":
            return _run_crash_tests(options.scenario, options.jobs)
        case "compare":
            return _compare_worlds(options.seeds)
    return _print_coverage(options)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in (
        ("run", "many seeds"),
        ("coverage", "the same, and what they have reached of the operator"),
    ):
        command = commands.add_parser(name, help=description)
        command.add_argument("seeds", nargs="?", default="0-149", help="like 7, 3,5,8 or 0-149 (default)")
        command.add_argument("--fresh", type=int, default=0, metavar="N", help="also run N seeds drawn from the code")
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    for name, description in (
        ("replay", "one seed, with its log"),
        ("shrink", "the least that still breaks the same rule"),
    ):
        command = commands.add_parser(name, help=description)
        source = command.add_mutually_exclusive_group(required=True)
        source.add_argument("seed", nargs="?", type=int)
        source.add_argument("--json", metavar="FILE", help="a schedule; -: from standard input")
        source.add_argument(
            "--defect", choices=known_defects.DEFECT_SCENARIOS, metavar="NAME", help="the scenario of a fixed defect"
        )
        if name == "shrink":
            command.add_argument("--rule", help="default: the first that is broken")
            command.add_argument("--tries", type=int, default=300, help="maximum number of runs")
    command = commands.add_parser("crash-test", help="the operator is killed before and after each of its writes")
    command.add_argument("scenario", nargs="*", help=f"of {', '.join(crash_test.CRASH_TEST_SCENARIOS)}; default: all")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    command = commands.add_parser("compare", help="schedules in the simulation and on the test cluster, side by side")
    command.add_argument("seeds", nargs="?", default="1-20", help="like 7, 3,5,8 or 1-20 (default)")
    return parser


def _run_schedules(options: argparse.Namespace) -> int:
    fixed, fresh = _parse_seeds(options.seeds), _draw_fresh_seeds(options.fresh)
    open_findings = json.loads(OPEN_FINDINGS_FILE.read_text())
    started, failed, done = time.perf_counter(), 0, 0
    for outcome in batch.run_schedules([generate_schedule(seed) for seed in (*fixed, *fresh)], options.jobs):
        done += 1
        if outcome.violations and (note := open_findings.get(str(outcome.seed))):
            print(f"seed {outcome.seed}, an open finding: {note}")
        elif outcome.violations:
            failed += 1
            _print_outcome(outcome)
        elif done % 50 == 0:
            print(f"{done} of {len(fixed) + len(fresh)}, {failed} fail", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{done} schedules in {seconds:.1f} s, {done / seconds / options.jobs:.2f} a second and process: {failed} fail"
    )
    return 1 if failed else 0


def _print_outcome(outcome: RunOutcome) -> None:
    """Print a run's first violation on one line."""
    first = outcome.violations[0]
    message = f"{len(outcome.violations)} violations, the first: {first.rule}: {first.message}"
    print(f"seed {outcome.seed}: {message[:400]}", flush=True)


def _replay_schedule(schedule: Schedule) -> int:
    print(f"seed {schedule.seed}, for {schedule.aim}: {schedule.world}")
    for job in schedule.jobs:
        print(f"  {job}")
    for index, injection in enumerate(schedule.injections):
        print(f"  stroke {index}: {injection}")
    outcome = run_schedule(schedule, keep_log=True)
    print(*outcome.log, sep="\n")
    print(
        f"{outcome.virtual_seconds:.0f} simulated seconds in {outcome.real_seconds:.2f} s, "
        f"{outcome.requests} requests, {outcome.writes} writes, digest {outcome.digest}"
    )
    print(*(f"VIOLATED {violation}" for violation in outcome.violations), sep="\n")
    return 1 if outcome.violations else 0


def _shrink_schedule(schedule: Schedule, options: argparse.Namespace) -> int:
    """Print the smallest failing schedule as JSON, for `replay --json`."""
    rules = run_schedule(schedule).broken_rules
    rule = options.rule or next(iter(rules), "")
    if rule not in rules:
        print(f"no rule{f' {rule!r}' if rule else ''} is broken", file=sys.stderr)
        return 0
    print(f"rule: {rule}", file=sys.stderr)

    def breaks(candidate: Schedule) -> bool:
        broken = rule in run_schedule(candidate).broken_rules
        if broken:
            print(f"  still with {', '.join(candidate.kinds) or 'no fault'}", file=sys.stderr, flush=True)
        return broken

    print(json.dumps(shrink_schedule(schedule, breaks, options.tries).to_json()))
    return 1


def _run_crash_tests(names: Iterable[str], jobs: int) -> int:
    failed = 0
    for name in names or crash_test.CRASH_TEST_SCENARIOS:
        base = run_schedule(crash_test.CRASH_TEST_SCENARIOS[name])
        print(f"{name}: {base.writes} writes", flush=True)
        schedules = crash_test.build_crash_tests(crash_test.CRASH_TEST_SCENARIOS[name], base.writes)
        for schedule, outcome in zip(schedules, batch.run_schedules(schedules, jobs, in_order=True), strict=True):
            if outcome.violations:
                failed += 1
                print(f"  {schedule.injections[-1]}: {outcome.violations[0]}"[:400], flush=True)
        if base.violations:
            failed += 1
            _print_outcome(base)
    return 1 if failed else 0


def _compare_worlds(seeds: str) -> int:
    from .conformance.compare import compare_worlds  # it needs what tests need

    return compare_worlds(_parse_seeds(seeds))


def _print_coverage(options: argparse.Namespace) -> int:
    reached: Counter[str] = Counter()
    for outcome in batch.run_schedules(
        [generate_schedule(seed) for seed in (*_parse_seeds(options.seeds), *_draw_fresh_seeds(options.fresh))],
        options.jobs,
    ):
        reached.update(sorted(outcome.coverage))
        if outcome.violations:
            _print_outcome(outcome)
    for target in sorted(coverage.list_coverage_targets()):
        print(f"{reached[target]:6}  {target}")
    return 0


def _load_schedule(options: argparse.Namespace) -> Schedule:
    if options.defect is not None:
        return known_defects.DEFECT_SCENARIOS[options.defect].schedule
    if options.json is None:
        return generate_schedule(options.seed)
    text = sys.stdin.read() if options.json == "-" else Path(options.json).read_text()
    return Schedule.from_json(json.loads(text))


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds


def _draw_fresh_seeds(number: int) -> list[int]:
    """Return seeds that depend on the code: changed code has others, and unchanged code that passed passes again."""
    if not number:
        return []
    content = hashlib.sha256()
    for path in sorted(path for folder in FINGERPRINTED_FOLDERS for path in (REPOSITORY_ROOT / folder).rglob("*.py")):
        content.update(path.read_bytes())
    first = FIRST_FRESH_SEED + int(content.hexdigest()[:8], 16)
    print(f"fresh seeds: {first}-{first + number - 1}", flush=True)
    return list(range(first, first + number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
