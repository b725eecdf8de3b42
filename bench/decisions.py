"""How well the operator decides, in two parts.

*Decisions only*, on a coarse clock: slowdowns whose kind, depth and length are drawn (`scripts/decisions/draw.py`),
and the operator's own passes over what is observed of the job. For comparison: other policies, and a clairvoyant by
dynamic programming, the lower bound of the cost. And days without faults.

*In the simulator* (`scripts/decisions/simulated.py`): the whole operator, four ranks, one of them slow. Some of these
cases are played on the coarse clock as well, which shows how realistic that is.

QUICK=1: few scenarios of each, a smoke test. These play something else instead, on the coarse clock:

* SEEDS=4109-4158,64030: these scenarios; a seed is a thousand times the ranks (4, 64 or 1024), and a number below a
  thousand. With SALT=…, they are others. With SENSITIVITY=1, each constant of the policies is halved and doubled.
* SALT=… of `scripts/decisions/locked.json`: this batch, of which only aggregates are printed.
* CALM=4:100,64:10: hours without a fault, by ranks.

POLICIES=ours,estimator: these only. With SEEDS, CALM, or a locked SALT: NOISE=correlated,heavy, models of the noise
(`scripts/decisions/noise.py`); ABLATE=…: without these parts of the policies.

The last line of the output is the summary.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.scripts.decisions import agreement, draw, outcome_statistics, salts, sensitivity, simulated
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.noise import NoiseModel
from bench.scripts.decisions.outcome import USUAL_VARIANTS, Outcome, run_calm_scenario, run_policies
from bench.scripts.decisions.policies import DECIDING_POLICIES, OURS, POLICIES, USUAL_POLICIES, Variant
from bench.scripts.decisions.policy_run import PassIntervals
from bench.scripts.decisions.salts import Batch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    """How much is played."""

    seeds: Sequence[int]
    """Of scenarios: a thousand times the ranks, and a number below a thousand."""
    calm_hours: Mapping[int, float] = field(default_factory=dict)
    """By ranks, sampled as often as usual."""
    calm_days: int = 0
    """Of four ranks, sampled for a minute and a half twice an hour, in lots of DAYS_PER_LOT."""
    worlds: int | None = 0
    """Of the simulator, for each of its cases; 0: only those that are compared, in one; None: none."""


FULL = Sizes(
    (*range(1_024_000, 1_024_020), *range(64_000, 64_120), *range(4000, 4240)),
    {1024: 1.0, 64: 100.0, 4: 100.0},
    1000,
    simulated.SEED_COUNT,
)
QUICK = Sizes((*range(64_000, 64_005), *range(4000, 4014)), {64: 0.5, 4: 2.0})
DAYS_PER_LOT = 10
MAX_ALARMS_PER_HOUR = 0.05
"""Goal for a job in which nothing goes wrong, under each noise model."""
CALM_LOT_HOURS, FIRST_CALM_LOT = 5.0, 20_000
"""Hours of one job in a run of fault-free hours, and the seed of the first such job."""
FREQUENT_PASSES = PassIntervals(every=6)
"""At a job in which nothing happens: a window of steps is hardly longer."""
RARE_PASSES = PassIntervals(every=12, row=8, rest=1710)
"""Enough in a row to distinguish ranks that are slightly slow in each window from chance
(`observe.persistent_slowness`)."""


@dataclass(frozen=True)
class Settings:
    """What is played, under which policies. batch: it is locked, and only its aggregates may be printed."""

    sizes: Sizes
    variants: Mapping[str, Variant] = field(default_factory=lambda: USUAL_VARIANTS)
    salt: str = ""
    noise_models: tuple[NoiseModel, ...] = (NoiseModel.INDEPENDENT,)
    batch: Batch | None = None
    calm_hours: Mapping[int, float] | None = None
    """Of a run of its own."""
    is_sensitivity: bool = False

    @property
    def deciding(self) -> list[str]:
        """Names of the deciding policies."""
        return [name for name, variant in self.variants.items() if variant.policy in DECIDING_POLICIES]


def main() -> int:
    settings, start = read_settings(os.environ), time.perf_counter()
    with ProcessPoolExecutor(initializer=_init_worker) as pool:
        if settings.calm_hours is not None:
            summary = run_calm_hours(pool, settings)
        elif settings.is_sensitivity:
            summary = run_sensitivity(pool, settings)
        elif settings.batch is not None:
            summary = judge_batch(pool, settings, settings.batch)
        else:
            summary = run_bench(pool, settings)
    holds = dict(summary.pop("holds"))
    print(json.dumps({"bench": "decisions", **summary, "seconds": time.perf_counter() - start, "holds": holds}))
    return 0 if all(holds.values()) else 1


def run_bench(pool: ProcessPoolExecutor, settings: Settings) -> dict[str, Any]:
    """Play all scenarios, days without a fault, and the simulator's part, and print what they come to."""
    sizes, policy = settings.sizes, next(iter(settings.deciding), None)
    outcomes = _run_scenarios(pool, settings, settings.variants)
    for name in settings.deciding:
        lines = [*outcome_statistics.format_table(outcomes, name), "\nworst:"]
        print("\n".join([f"{name}:", *lines, *outcome_statistics.format_worst(outcomes, name), ""]), flush=True)
    aggregates = _print_aggregates(outcomes)
    if policy is None:
        return {"policies": aggregates, "holds": {}}
    calm_outcomes = list(
        _report_progress(
            "days without a fault",
            pool.map(partial(_run_calm_scenario, settings.variants), _draw_calm_scenarios(sizes)),
        )
    )
    cases = [] if sizes.worlds is None or OURS not in settings.variants else simulated.list_cases(sizes.worlds)
    played = list(_report_progress("simulated", pool.map(simulated.play_case, cases)))
    summary = {**outcome_statistics.build_summary(outcomes, calm_outcomes, policy), "policies": aggregates}
    holds = dict(summary.pop("holds"))  # type: ignore[call-overload]  # it is a dictionary
    simulated_metrics: dict[str, object] = {}
    if results := simulated.build_results(played):
        comparisons = agreement.compare_results(results)
        print("\nin the simulator, and on the coarse clock:")
        print("\n".join(comparison.description for comparison in comparisons))
        holds[f"the simulator within {agreement.MAX_DIFFERENCE:.0%}"] = all(
            comparison.agrees for comparison in comparisons
        )
    if sizes.worlds and results:
        print()
        simulated_metrics, simulated_holds = simulated.print_report(results)
        holds |= simulated_holds
    return {**summary, "simulated": simulated_metrics, "holds": holds}


def judge_batch(pool: ProcessPoolExecutor, settings: Settings, batch: Batch) -> dict[str, Any]:
    """Play a locked batch, record in its file that it has judged this commit, and print its aggregates."""
    outcomes = _run_scenarios(pool, settings, settings.variants)
    batch = salts.record_judgement(batch.salt, _find_commit())
    aggregates = _print_aggregates(outcomes)
    holds = {"the batch is not spent": not batch.is_spent}
    for name in settings.deciding:
        goals = outcome_statistics.check_cost_goals(outcome_statistics.compute_statistics(outcomes, name))
        holds |= {f"{name}: {goal}": is_reached for goal, is_reached in goals.items()}
    return {"salt": batch.salt, "judged": batch.judged, "policies": aggregates, "holds": holds}


def run_calm_hours(pool: ProcessPoolExecutor, settings: Settings) -> dict[str, Any]:
    """Play hours without a fault, by noise model, and print what the deciding policies do in one."""
    variants = {name: settings.variants[name] for name in settings.deciding}
    outcomes = list(
        _report_progress(
            "lots without a fault", pool.map(partial(_run_calm_scenario, variants), _draw_calm_lots(settings))
        )
    )
    rates = {
        f"{name}, {noise_model}": outcome_statistics.compute_calm_rates(
            [outcome for outcome in outcomes if outcome.scenario.noise_model is noise_model], name
        )
        for name in variants
        for noise_model in settings.noise_models
    }
    print("\n".join(outcome_statistics.format_markdown(rates)), flush=True)
    holds = {
        f"{name}: at most {MAX_ALARMS_PER_HOUR:g} alarms an hour": row["alarms an hour"] <= MAX_ALARMS_PER_HOUR
        for name, row in rates.items()
    }
    return {"calm": rates, "holds": holds}


def run_sensitivity(pool: ProcessPoolExecutor, settings: Settings) -> dict[str, Any]:
    """Play each deciding policy with each of its constants halved and doubled, and print a table."""
    policies = {}
    for name in settings.deciding:
        variants = sensitivity.build_variants(settings.variants[name])
        outcomes = _run_scenarios(pool, settings, variants)
        print("\n".join([*sensitivity.format_sensitivity(outcomes, name), ""]), flush=True)
        policies[name] = {variant: outcome_statistics.compute_aggregates(outcomes, variant) for variant in variants}
    return {"policies": policies, "holds": {}}


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings. Exit with an error, which names the variable and the remedy, if they are not valid."""
    salt = environment.get("SALT", "")
    batch = salts.find_batch(salt) if salt else None
    if batch is not None and not batch.looked:
        for name in ("SEEDS", "CALM", "SENSITIVITY"):
            if environment.get(name):
                sys.exit(
                    f"SALT={salt}: a locked batch is judged as a whole, and its scenarios are not printed; leave "
                    f"{name} out, or mark the batch as looked at in {salts.LOCKED_FILE.name}, which spends it"
                )
    calm_hours = _parse_calm_hours(environment["CALM"]) if environment.get("CALM") else None
    is_own_run = "SEEDS" in environment or calm_hours is not None or batch is not None
    for name in ("SALT", "NOISE", "ABLATE", "SENSITIVITY"):
        if environment.get(name) and not is_own_run:
            sys.exit(f"{name}={environment[name]}: give SEEDS, CALM, or a locked SALT with it")
    if calm_hours is not None and "SEEDS" in environment:
        sys.exit("CALM: fault-free hours are a run of their own; leave SEEDS out")
    if environment.get("SENSITIVITY") and "SEEDS" not in environment:
        sys.exit("SENSITIVITY: give the SEEDS to play")
    variants = _parse_policies(environment.get("POLICIES") or ",".join(USUAL_POLICIES), environment.get("ABLATE", ""))
    settings = Settings(
        _read_sizes(environment, batch, calm_hours is not None),
        variants,
        salt,
        _parse_noise_models(environment.get("NOISE") or NoiseModel.INDEPENDENT.value),
        None if batch is None or batch.looked else batch,
        calm_hours,
        bool(environment.get("SENSITIVITY")),
    )
    if not settings.deciding and (settings.is_sensitivity or calm_hours is not None):
        sys.exit(f"POLICIES={environment['POLICIES']}: give one that decides: {', '.join(DECIDING_POLICIES)}")
    return settings


def _read_sizes(environment: Mapping[str, str], batch: Batch | None, is_calm: bool) -> Sizes:
    if "SEEDS" in environment:
        return Sizes(_parse_seeds(environment["SEEDS"]), worlds=None)
    if batch is not None or is_calm:
        return Sizes(() if batch is None else batch.seeds, worlds=None)
    return QUICK if environment.get("QUICK") else FULL


def _parse_seeds(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",")]
    try:
        seeds = [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
    except ValueError:
        seeds = []
    if not seeds or not {seed // 1000 for seed in seeds} <= set(FULL.calm_hours):
        sys.exit(
            f"SEEDS={text}: each is a thousand times 4, 64 or 1024, and a number below a thousand: 4109-4158,64030"
        )
    return seeds


def _parse_calm_hours(text: str) -> dict[int, float]:
    try:
        hours = {int(ranks): float(value) for ranks, _, value in (part.partition(":") for part in text.split(","))}
    except ValueError:
        hours = {}
    if not hours or not set(hours) <= set(FULL.calm_hours) or not all(0 < value <= 1e5 for value in hours.values()):
        sys.exit(f"CALM={text}: give hours for 4, 64, or 1024 ranks: 4:100,64:10")
    return hours


def _parse_noise_models(text: str) -> tuple[NoiseModel, ...]:
    try:
        return tuple(dict.fromkeys(NoiseModel(name.strip()) for name in text.split(",")))
    except ValueError:
        sys.exit(f"NOISE={text}: give some of {', '.join(NoiseModel)}")


def _parse_policies(text: str, ablated_text: str) -> dict[str, Variant]:
    """Return the named policies, each without those of the named parts that it has."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in POLICIES]:
        sys.exit(f"POLICIES={text}: no policy {', '.join(unknown)}; there are: {', '.join(POLICIES)}")
    ablated = frozenset(part.strip() for part in ablated_text.split(",")) if ablated_text else frozenset[str]()
    parts = {name: DECIDING_POLICIES[name].parts for name in names if name in DECIDING_POLICIES}
    if unknown_parts := ablated.difference(*parts.values()):
        existing = "; ".join(f"{name} has {', '.join(sorted(parts[name])) or 'none'}" for name in parts)
        sys.exit(
            f"ABLATE={ablated_text}: no part {', '.join(sorted(unknown_parts))}; {existing or 'no policy decides'}"
        )
    return {name: Variant(name, ablated & parts.get(name, frozenset())) for name in names}


def _run_scenarios(pool: ProcessPoolExecutor, settings: Settings, variants: Mapping[str, Variant]) -> list[Outcome]:
    scenarios = _draw_scenarios(settings)
    return list(_report_progress("scenarios", pool.map(partial(_run_scenario, variants), scenarios)))


def _print_aggregates(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    aggregates = {name: outcome_statistics.compute_aggregates(outcomes, name) for name in outcomes[0].lost}
    print("\n".join(outcome_statistics.format_markdown(aggregates)), flush=True)
    return aggregates


def _find_commit() -> str:
    """Return the commit of the checkout, and whether it has changes; "unknown": it is no checkout."""
    try:
        git = partial(subprocess.run, cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        is_changed = bool(git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}, changed" if is_changed else commit


def _init_worker() -> None:
    gc.freeze()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)


def _report_progress(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The same, and how far they are."""
    start = time.perf_counter()
    for count, result in enumerate(results, start=1):
        if count % 10 == 0:
            print(f"{name}: {count}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        yield result


def _draw_scenarios(settings: Settings) -> list[Scenario]:
    """The longest first, so that no processor has a long one at the end."""
    return [
        draw.draw_scenario(seed, ranks=seed // 1000, salt=settings.salt, noise_model=noise_model)
        for seed in sorted(settings.sizes.seeds, reverse=True)
        for noise_model in settings.noise_models
    ]


def _draw_calm_scenarios(sizes: Sizes) -> list[tuple[Scenario, PassIntervals]]:
    frequent = [
        (draw.draw_healthy_scenario(ranks, hours, ranks), FREQUENT_PASSES) for ranks, hours in sizes.calm_hours.items()
    ]
    lot_count = sizes.calm_days // DAYS_PER_LOT
    return frequent + [
        (draw.draw_healthy_scenario(10_000 + lot, 24.0 * DAYS_PER_LOT, 4), RARE_PASSES) for lot in range(lot_count)
    ]


def _draw_calm_lots(settings: Settings) -> list[tuple[Scenario, PassIntervals]]:
    """Of many jobs, each for CALM_LOT_HOURS: jobs differ in noise, and in much else."""
    lots = []
    for ranks, hours in (settings.calm_hours or {}).items():
        begins = [CALM_LOT_HOURS * lot for lot in range(int(-(-hours // CALM_LOT_HOURS)))]
        for lot, begin in enumerate(begins):
            length = min(CALM_LOT_HOURS, hours - begin)
            for model in settings.noise_models:
                scenario = draw.draw_healthy_scenario(
                    FIRST_CALM_LOT + lot, length, ranks, salt=settings.salt, noise_model=model
                )
                lots.append((scenario, FREQUENT_PASSES))
    return lots


def _run_scenario(variants: Mapping[str, Variant], scenario: Scenario) -> Outcome:
    return run_policies(scenario, variants)


def _run_calm_scenario(variants: Mapping[str, Variant], case: tuple[Scenario, PassIntervals]) -> Outcome:
    return run_calm_scenario(*case, variants)


if __name__ == "__main__":
    sys.exit(main())
