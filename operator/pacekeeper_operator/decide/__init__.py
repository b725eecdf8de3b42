"""Decisions: pure functions of an Observation and a Policy. Nothing here does I/O; time is part of the observation.

Two ordered lists say what a pass does. `STEPS`: each gives the draft of plan and bookkeeping as it shall be, under what
the steps before have left; one that fails costs its own work only. `CHECKS`: each looks for one kind of fault and
answers with a Decision, or None. To add a remedy: one check here, one module in `remedies`, one line in each list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..observation import Observation, Policy
from ..state import DesiredState
from . import (
    back_off,
    crash,
    frozen,
    gpu_error,
    gpu_warning,
    hang,
    links,
    membership,
    news,
    node_leaving,
    node_lost,
    paths,
    preflight,
    profile,
    replan,
    reroll,
    round_failed,
    stages,
    stale,
    start_failed,
    straggler,
    treat,
    verify,
    verify_ways,
    way_back,
    ways_seen,
    wish,
    worker_lost,
    workforce,
)
from .treat import DecisionCheck

DecisionStep = Callable[[Observation, Policy], DesiredState]

CHECKS: tuple[DecisionCheck, ...] = (
    start_failed.check_failed_starts,
    worker_lost.check_lost_workers,
    node_lost.check_lost_nodes,
    frozen.check_unresponsive_workers,
    gpu_error.check_gpu_errors,
    crash.check_crashes,
    hang.check_hangs,
    round_failed.check_failed_rounds,
    # Spares that have to leave go before anybody is moved to one.
    node_leaving.check_leaving_nodes,
    gpu_warning.check_gpu_warnings,
    # Exact, and so before another way to train.
    replan.check_replanned_routes,
    # Of ways that were tried, and have made it worse.
    verify_ways.check_worse_routes,
    straggler.check_stragglers,
    reroll.check_port_reroll,
    links.check_slow_link_sides,
    profile.check_profile,
)
"""In order of certainty: what has gone explains why others crash or stall, so it is asked first."""

STEPS: tuple[tuple[str, DecisionStep], ...] = (
    # What errands have brought back: the API server's word on the template, what became of a node.
    ("news", news.apply_effect_results),
    # Faults that say nothing new, before anybody decides upon them.
    ("stale", stale.settle_superseded_faults),
    # What GPUs show when the job looks at them for the first time is no fault of this job's time.
    ("gpus", gpu_error.record_gpu_baseline),
    # Started, suspended, resumed, complete, out of time.
    ("stages", stages.advance_lifecycle),
    # Rounds that wait because those before them ended before their first step.
    ("back off", back_off.advance_back_off),
    # Incidents that are over: before new decisions, so that these find a clean table.
    ("verify", verify.verify_incidents),
    # What the ranks' connections show, before a decision names it.
    ("links", links.record_link_evidence),
    # And what that says of the fabric's links, for the joint plan of all jobs.
    ("ways", ways_seen.record_route_reports),
    # The checks above, and what their answers do.
    ("treat", partial(treat.run_checks, checks=CHECKS)),
    # Whether there is a straggler to be looked into, and the way back from a Local-SGD mode.
    ("suspect", straggler.update_investigation),
    ("way back", way_back.consider_revert_to_sync),
    # The connections again, where other ways are being tried.
    ("ways tried", verify_ways.advance_route_trial),
    # A probe of what is slow between workers, for the incident that has just been written down.
    ("link probe", links.advance_link_probe),
    # Behaviour windows: what the last one has come to is written down by now.
    ("profile", profile.advance_profile_window),
    # What the user wants of the mode goes before what the operator has chosen.
    ("wish", wish.apply_requested_sync_mode),
    # Nodes that failed before any rank is on them.
    ("preflight", preflight.apply_preflight),
    # Who holds the ranks, now that it is known who cannot; and what launchers may do by themselves until the next pass.
    ("membership", membership.update_membership),
    ("restarts", membership.allow_restarts),
    # By which ways they talk, once it is known who they are.
    ("paths", paths.update_planned_paths),
    # Once more: a decision may have ended what it dealt with.
    ("verify again", verify.verify_incidents),
    # Which pods there shall be: last, since all of the above gives workers up or seats them.
    ("workforce", workforce.update_workforce),
)
