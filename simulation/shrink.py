"""From a schedule that breaks a rule to a small one that still breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .faults.fault import Fault
from .faults.moments import AfterFault, At
from .schedule import Schedule, Stroke

Breaks = Callable[[Schedule], bool]
"""Whether a schedule still breaks the rule."""
SHORTER = 0.5
SHORTEST_SECONDS = 1.0


def shrink(schedule: Schedule, breaks: Breaks, tries: int = 300) -> Schedule:
    """The smallest that is found within so many runs: fewest faults first, then the simplest ones, then the smallest
    world."""
    left = tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(schedule):
            if left == 0:
                return schedule
            left -= 1
            if breaks(candidate):
                schedule, smaller = candidate, True
                break
    return schedule


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are a little simpler, the boldest first; each is smaller by some measure, so that this ends."""
    number = len(schedule.strokes)
    size = number
    while size >= 1:
        for start in range(0, number, size):
            yield _without(schedule, range(start, min(start + size, number)))
        size //= 2
    for place, stroke in enumerate(schedule.strokes):
        for other in _simpler_stroke(stroke):
            yield replace(schedule, strokes=(*schedule.strokes[:place], other, *schedule.strokes[place + 1 :]))
    yield from _simpler_world(schedule)


def _without(schedule: Schedule, places: range) -> Schedule:
    """Strokes that come after others are counted anew; one whose predecessor is gone goes, too."""
    gone = set(places)
    for place, stroke in enumerate(schedule.strokes):
        if isinstance(stroke.when, AfterFault) and stroke.when.stroke in gone:
            gone.add(place)
    kept = [place for place in range(len(schedule.strokes)) if place not in gone]
    new_place = {old: new for new, old in enumerate(kept)}
    strokes = []
    for place in kept:
        stroke = schedule.strokes[place]
        if isinstance(stroke.when, AfterFault):
            stroke = replace(stroke, when=replace(stroke.when, stroke=new_place[stroke.when.stroke]))
        strokes.append(stroke)
    return replace(schedule, strokes=tuple(strokes))


def _simpler_stroke(stroke: Stroke) -> Iterator[Stroke]:
    if stroke.seconds is not None and stroke.seconds > SHORTEST_SECONDS:
        yield replace(stroke, seconds=SHORTEST_SECONDS)
        yield replace(stroke, seconds=round(max(SHORTEST_SECONDS, stroke.seconds * SHORTER), 1))
    if isinstance(stroke.when, At) and stroke.when.seconds != round(stroke.when.seconds):
        yield replace(stroke, when=At(float(round(stroke.when.seconds))))
    for item in fields(stroke.what):
        if item.default != getattr(stroke.what, item.name):
            changed: Fault = replace(stroke.what, **{item.name: item.default})
            yield replace(stroke, what=changed)


def _simpler_world(schedule: Schedule) -> Iterator[Schedule]:
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
