"""Reduces a schedule that breaks a rule to a small one that still breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .faults.fault import Fault
from .faults.triggers import AfterFault, AtTime
from .schedule import FaultInjection, Schedule

StillBreaks = Callable[[Schedule], bool]
"""Returns whether a schedule still breaks the rule."""
SHORTENING_FACTOR = 0.5
MIN_SHRUNK_SECONDS = 1.0


def shrink_schedule(schedule: Schedule, breaks: StillBreaks, tries: int = 300) -> Schedule:
    """Return the smallest schedule that is found within `tries` runs.

    It reduces the number of faults first, then simplifies them, then the world.
    """
    remaining_tries = tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in iterate_simpler(schedule):
            if remaining_tries == 0:
                return schedule
            remaining_tries -= 1
            if breaks(candidate):
                schedule, smaller = candidate, True
                break
    return schedule


def iterate_simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules that are slightly simpler, boldest first. Each is smaller by some measure, so that this ends."""
    number = len(schedule.injections)
    size = number
    while size >= 1:
        for start in range(0, number, size):
            yield _remove_injections(schedule, range(start, min(start + size, number)))
        size //= 2
    for index, injection in enumerate(schedule.injections):
        for simpler in _simplify_injection(injection):
            yield replace(
                schedule, injections=(*schedule.injections[:index], simpler, *schedule.injections[index + 1 :])
            )
    yield from _simplify_world(schedule)


def _remove_injections(schedule: Schedule, indexes: range) -> Schedule:
    """Remove injections, and those that are triggered by a removed one. Renumber the references of the others."""
    removed = set(indexes)
    for index, injection in enumerate(schedule.injections):
        if isinstance(injection.trigger, AfterFault) and injection.trigger.injection in removed:
            removed.add(index)
    retained = [index for index in range(len(schedule.injections)) if index not in removed]
    new_index = {old: new for new, old in enumerate(retained)}
    injections = []
    for index in retained:
        injection = schedule.injections[index]
        if isinstance(injection.trigger, AfterFault):
            injection = replace(
                injection, trigger=replace(injection.trigger, injection=new_index[injection.trigger.injection])
            )
        injections.append(injection)
    return replace(schedule, injections=tuple(injections))


def _simplify_injection(injection: FaultInjection) -> Iterator[FaultInjection]:
    if injection.seconds is not None and injection.seconds > MIN_SHRUNK_SECONDS:
        yield replace(injection, seconds=MIN_SHRUNK_SECONDS)
        yield replace(injection, seconds=round(max(MIN_SHRUNK_SECONDS, injection.seconds * SHORTENING_FACTOR), 1))
    if isinstance(injection.trigger, AtTime) and injection.trigger.seconds != round(injection.trigger.seconds):
        yield replace(injection, trigger=AtTime(float(round(injection.trigger.seconds))))
    for item in fields(injection.fault):
        if item.default != getattr(injection.fault, item.name):
            changed: Fault = replace(injection.fault, **{item.name: item.default})
            yield replace(injection, fault=changed)


def _simplify_world(schedule: Schedule) -> Iterator[Schedule]:
    world, jobs = schedule.world, schedule.jobs
    if len(jobs) > 1:
        yield replace(schedule, jobs=jobs[:1])
    if world.operators > 1:
        yield replace(schedule, world=replace(world, operators=1))
    for index, job in enumerate(jobs):
        simpler_jobs = []
        if job.spares > 0:
            simpler_jobs.append(replace(job, spares=job.spares - 1))
        if job.replicas > 1:
            simpler_jobs.append(replace(job, replicas=job.replicas - 1))
        if job.ranks > 1:
            simpler_jobs.append(replace(job, ranks=1))
        if job.min_replicas is not None:
            simpler_jobs.append(replace(job, min_replicas=None))
        simpler_jobs.extend(
            replace(job, spec={name: value for name, value in job.spec.items() if name != key}) for key in job.spec
        )
        for simpler_job in simpler_jobs:
            if simpler_job.min_replicas is None or simpler_job.min_replicas <= simpler_job.replicas:
                yield replace(schedule, jobs=(*jobs[:index], simpler_job, *jobs[index + 1 :]))
    workers = sum(job.replicas + job.spares for job in jobs)
    if world.nodes > workers + 1:
        yield replace(schedule, world=replace(world, nodes=world.nodes - 1))
