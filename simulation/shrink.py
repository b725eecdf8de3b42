"""From a schedule that breaks a rule to a small one that still breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .faults.fault import Fault
from .faults.moments import AfterFault, AtTime
from .schedule import Schedule, FaultInjection

StillBreaks = Callable[[Schedule], bool]
"""Whether a schedule still breaks the rule."""
SHORTENING_FACTOR = 0.5
MIN_SHRUNK_SECONDS = 1.0


def shrink_schedule(schedule: Schedule, breaks: StillBreaks, tries: int = 300) -> Schedule:
    """The smallest that is found within so many runs: fewest faults first, then the simplest ones, then the smallest
    world."""
    left = tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in iterate_simpler(schedule):
            if left == 0:
                return schedule
            left -= 1
            if breaks(candidate):
                schedule, smaller = candidate, True
                break
    return schedule


def iterate_simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are a little simpler, the boldest first; each is smaller by some measure, so that this ends."""
    number = len(schedule.injections)
    size = number
    while size >= 1:
        for start in range(0, number, size):
            yield _remove_injections(schedule, range(start, min(start + size, number)))
        size //= 2
    for place, stroke in enumerate(schedule.injections):
        for other in _simplify_injection(stroke):
            yield replace(schedule, injections=(*schedule.injections[:place], other, *schedule.injections[place + 1 :]))
    yield from _simplify_world(schedule)


def _remove_injections(schedule: Schedule, places: range) -> Schedule:
    """Strokes that come after others are counted anew; one whose predecessor is gone goes, too."""
    gone = set(places)
    for place, stroke in enumerate(schedule.injections):
        if isinstance(stroke.trigger, AfterFault) and stroke.trigger.injection in gone:
            gone.add(place)
    kept = [place for place in range(len(schedule.injections)) if place not in gone]
    new_place = {old: new for new, old in enumerate(kept)}
    strokes = []
    for place in kept:
        stroke = schedule.injections[place]
        if isinstance(stroke.trigger, AfterFault):
            stroke = replace(stroke, when=replace(stroke.trigger, injection=new_place[stroke.trigger.injection]))
        strokes.append(stroke)
    return replace(schedule, injections=tuple(strokes))


def _simplify_injection(injection: FaultInjection) -> Iterator[FaultInjection]:
    if injection.seconds is not None and injection.seconds > MIN_SHRUNK_SECONDS:
        yield replace(injection, seconds=MIN_SHRUNK_SECONDS)
        yield replace(injection, seconds=round(max(MIN_SHRUNK_SECONDS, injection.seconds * SHORTENING_FACTOR), 1))
    if isinstance(injection.trigger, AtTime) and injection.trigger.seconds != round(injection.trigger.seconds):
        yield replace(injection, when=AtTime(float(round(injection.trigger.seconds))))
    for item in fields(injection.fault):
        if item.default != getattr(injection.fault, item.name):
            changed: Fault = replace(injection.fault, **{item.name: item.default})
            yield replace(injection, what=changed)


def _simplify_world(schedule: Schedule) -> Iterator[Schedule]:
    world, jobs = schedule.world, schedule.jobs
    if len(jobs) > 1:
        yield replace(schedule, jobs=jobs[:1])
    if world.operators > 1:
        yield replace(schedule, world=replace(world, operators=1))
    for place, job in enumerate(jobs):
        smaller = []
        if job.spares > 0:
            smaller.append(replace(job, spares=job.spares - 1))
        if job.replicas > 1:
            smaller.append(replace(job, replicas=job.replicas - 1))
        if job.ranks > 1:
            smaller.append(replace(job, ranks=1))
        if job.min_replicas is not None:
            smaller.append(replace(job, min_replicas=None))
        smaller.extend(
            replace(job, spec={name: held for name, held in job.spec.items() if name != key}) for key in job.spec
        )
        for other in smaller:
            if other.min_replicas is None or other.min_replicas <= other.replicas:
                yield replace(schedule, jobs=(*jobs[:place], other, *jobs[place + 1 :]))
    workers = sum(job.replicas + job.spares for job in jobs)
    if world.nodes > workers + 1:
        yield replace(schedule, world=replace(world, nodes=world.nodes - 1))
