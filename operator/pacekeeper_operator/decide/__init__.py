"""Decisions: pure functions of an Observation and a Policy. Nothing here does I/O; time is part of the observation.

Two ordered lists say what a pass does. `STEPS`: each gives the draft of plan and bookkeeping as it shall be, under what
the steps before have left; one that fails costs its own work only. `CHECKS`: each looks for one kind of fault and
answers with a Decision, or None. To add a remedy: one check here, one module in `remedies`, one line in each list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..observation import Observation, Policy
from ..state import Draft
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
from .treat import Check

Step = Callable[[Observation, Policy], Draft]

CHECKS: tuple[Check, ...] = (
    start_failed.check,
    worker_lost.check,
    node_lost.check,
    frozen.check,
    gpu_error.check,
    crash.check,
    hang.check,
    round_failed.check,
    # Spares that have to leave go before anybody is moved to one.
    node_leaving.check,
    gpu_warning.check,
    # Exact, and so before another way to train.
    replan.check,
    # Of ways that were tried, and have made it worse.
    verify_ways.check,
    straggler.check,
    reroll.check,
    links.check,
    profile.check,
)
"""In order of certainty: what has gone explains why others crash or stall, so it is asked first."""

STEPS: tuple[tuple[str, Step], ...] = (
    # What errands have brought back: the API server's word on the template, what became of a node.
    ("news", news.step),
    # Faults that say nothing new, before anybody decides upon them.
    ("stale", stale.step),
    # What GPUs show when the job looks at them for the first time is no fault of this job's time.
    ("gpus", gpu_error.learn),
    # Started, suspended, resumed, complete, out of time.
    ("stages", stages.step),
    # Rounds that wait because those before them ended before their first step.
    ("back off", back_off.step),
    # Incidents that are over: before new decisions, so that these find a clean table.
    ("verify", verify.step),
    # What the ranks' connections show, before a decision names it.
    ("links", links.see),
    # And what that says of the fabric's links, for the joint plan of all jobs.
    ("ways", ways_seen.step),
    # The checks above, and what their answers do.
    ("treat", partial(treat.step, checks=CHECKS)),
    # Whether there is a straggler to be looked into, and the way back from a Local-SGD mode.
    ("suspect", straggler.suspect),
    ("way back", way_back.step),
    # The connections again, where other ways are being tried.
    ("ways tried", verify_ways.step),
    # A probe of what is slow between workers, for the incident that has just been written down.
    ("link probe", links.probe),
    # Behaviour windows: what the last one has come to is written down by now.
    ("profile", profile.step),
    # What the user wants of the mode goes before what the operator has chosen.
    ("wish", wish.step),
    # Nodes that failed before any rank is on them.
    ("preflight", preflight.step),
    # Who holds the ranks, now that it is known who cannot; and what launchers may do by themselves until the next pass.
    ("membership", membership.step),
    ("restarts", membership.allow_restarts),
    # By which ways they talk, once it is known who they are.
    ("paths", paths.step),
    # Once more: a decision may have ended what it dealt with.
    ("verify again", verify.step),
    # Which pods there shall be: last, since all of the above gives workers up or seats them.
    ("workforce", workforce.step),
)
