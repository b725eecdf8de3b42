"""Decisions: pure functions of an Observation and a Policy. Nothing here does I/O; time is part of the observation.

Two ordered lists define a pass:

* `STEPS`: each step returns a new desired state (plan and bookkeeping), based on the one that the step before returned.
  A step that fails loses only its own work.
* `CHECKS`: each check detects one kind of fault and returns a Decision, or None.

To add a remedy, add a check here, a module in `remedies`, and one line in each list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..state.desired_state import DesiredState
from ..state.observation import Observation
from ..state.policy import Policy
from . import check_runner
from .check_runner import DecisionCheck
from .failures import (
    back_off,
    crash,
    gpu_error,
    gpu_warning,
    hang,
    node_lost,
    round_failed,
    start_failed,
    superseded_faults,
    unresponsive,
    worker_lost,
)
from .lifecycle import effect_results, lifecycle, started_over
from .network import paths, replan, reroll, route_reports, route_trial, slow_communication
from .nodes import node_leaving
from .placement import checkpoint_server, membership, preflight, workforce
from .stragglers import profile, requested_sync_mode, revert_to_sync, shadow, straggler, verify

DecisionStep = Callable[[Observation, Policy], DesiredState]

CHECKS: tuple[DecisionCheck, ...] = (
    # Workers without ranks that failed, timed out, or were refused before they were ready.
    start_failed.check_failed_starts,
    # Members whose pods are gone, have ended, or are terminating.
    worker_lost.check_lost_workers,
    # Members that stopped responding, with or without their nodes.
    node_lost.check_lost_nodes,
    # Workers whose launcher is unresponsive, or whose ranks outlive SIGKILL.
    unresponsive.check_unresponsive_workers,
    # GPU errors that launchers or DCGM report.
    gpu_error.check_gpu_errors,
    # Ranks that exited with an error.
    crash.check_crashes,
    # Ranks that make no progress although all workers are present.
    hang.check_hangs,
    # Rounds that the launchers could not start.
    round_failed.check_failed_rounds,
    # Rounds that began from the start although the job had completed steps.
    started_over.check_started_over,
    # Workers on nodes that the platform drains. Spares that must leave go before a worker is moved to one.
    node_leaving.check_leaving_nodes,
    # GPUs that show signs of an upcoming fault.
    gpu_warning.check_gpu_warnings,
    # Better routes from joint planning. They keep training exact, so they come before another training strategy.
    replan.check_replanned_routes,
    # Trial routes that made steps longer: revert them.
    route_trial.check_worse_routes,
    # Slow ranks: another training strategy, or a spare.
    straggler.check_stragglers,
    # A slow link in a fabric that no Fabric object describes: new ports for that pair of ranks.
    reroll.check_port_reroll,
    # A worker whose side of a slow link was measured as slow: a spare.
    slow_communication.check_slow_link_sides,
    # What a profile window found where no open incident covers it.
    profile.check_profile,
)
"""The checks, most certain first: a lost worker explains why others crash or stall."""

STEPS: tuple[tuple[str, DecisionStep], ...] = (
    # Record effect results: whether the API server accepts the template, what became of a blamed node.
    ("effect results", effect_results.apply_effect_results),
    # Settle superseded faults, before a check decides about them.
    ("superseded faults", superseded_faults.settle_superseded_faults),
    # Record the GPU counters of new nodes as a baseline: older errors did not happen during this job.
    ("gpu baseline", gpu_error.record_gpu_baseline),
    # Advance the lifecycle: start, suspend, resume, completion, deadline.
    ("lifecycle", lifecycle.advance_lifecycle),
    # Raise the plan's version above those that workers follow, after etcd was restored from a backup.
    ("plan version", membership.raise_plan_version),
    # Begin a round that waited because the rounds before it ended before their first step.
    ("back off", back_off.advance_back_off),
    # Close incidents that are over, before new decisions are made.
    ("verify", verify.verify_incidents),
    # Record which connections are slow, before a decision names them.
    ("link evidence", slow_communication.record_link_evidence),
    # Record what the flows show about the fabric's links, for the joint plan of all jobs.
    ("route reports", route_reports.record_route_reports),
    # Run the checks above, and apply the actions of their decisions.
    ("checks", partial(check_runner.run_checks, checks=CHECKS)),
    # Start or drop the investigation of a straggler.
    ("investigation", straggler.update_investigation),
    # Decide whether to revert from a Local-SGD mode to sync.
    ("revert to sync", revert_to_sync.consider_revert_to_sync),
    # Request the throughput of the connections while other routes are on trial.
    ("route trial", route_trial.advance_route_trial),
    # Probe the slow link of the incident that was just recorded.
    ("link probe", slow_communication.advance_link_probe),
    # Begin or end a profile window. The result of the last one is recorded by now.
    ("profile", profile.advance_profile_window),
    # Apply `spec.syncMode`: the user's choice overrides the operator's.
    ("requested sync mode", requested_sync_mode.apply_requested_sync_mode),
    # Leave nodes that failed their preflight before a rank runs on them.
    ("preflight", preflight.apply_preflight),
    # Assign the ranks, now that it is known which workers cannot hold them.
    ("membership", membership.update_membership),
    # Set how many restarts the launchers may do by themselves until the next pass.
    ("restarts", membership.allow_restarts),
    # Plan the members' network paths, once the members are known.
    ("paths", paths.update_planned_paths),
    # Close incidents again: a decision of this pass may have ended one.
    ("verify again", verify.verify_incidents),
    # Request the steps that the estimator lacks. Requests of the steps above come first.
    ("estimator request", shadow.update_estimator_request),
    # List the pods that the job needs. Late, since the steps above give workers up or assign ranks to them.
    ("workforce", workforce.update_workforce),
    # Publish where the checkpoint server is, of a job whose claim only one node can mount.
    ("checkpoint server", checkpoint_server.update_checkpoint_server),
)
