"""Behaviour windows in the operator: patterns are localised in a thread of their own, and kept for people."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pacekeeper_analysis.behaviour.localise import localize_in_table, describe_localization
from pacekeeper_analysis.behaviour.page import write_profile_page
from pacekeeper_analysis.behaviour.table import read_table

from ..api import API_VERSION, LABEL_JOB
from ..cluster import PROFILE_WINDOWS, INCIDENT_OBJECTS, Conflict, NotFound, Object
from ..effects import SaveProfile, LocalizeProfile
from ..observation import LocalizedProfile
from ..runtime import OperatorRuntime
from . import events
from .desk import JobContext
from .operator import Operator

log = logging.getLogger(__name__)


async def localize_profile(operator: Operator, desk: JobContext, effect: LocalizeProfile) -> None:
    """What it brings back is news for the next pass."""
    answers = dict(sorted(desk.cache.profile_answers.items()))
    desk.cache.localized_profile = await operator.runtime.compute_in_thread(
        lambda: compute_localized_profile(effect, yield_between_ranks(operator.runtime, answers), answers)
    )
    found = desk.cache.localized_profile.localization
    note = "; ".join(describe_localization(found)[:2])
    await events.emit_job_event(operator, desk.job, "BehaviourWindow", note, "ProfileRanks")


async def save_profile(operator: Operator, desk: JobContext, effect: SaveProfile) -> None:
    """It goes with its incident. Where this cluster has no such objects, it is not kept."""
    done = desk.cache.localized_profile
    if done is None or done.window != effect.window or not done.page:
        return
    incident = await operator.cluster.get(INCIDENT_OBJECTS, effect.incident, desk.job.namespace)
    try:
        await operator.cluster.create(PROFILE_WINDOWS, _build_profile_window(desk, incident, done))
    except Conflict:
        log.info("the behaviour window of %s is kept already", effect.incident)
    except NotFound:
        log.warning("a behaviour window is not kept: there are no BehaviourWindows; apply crds/behaviourwindows.yaml")
    desk.cache.localized_profile = replace(done, page="")


def compute_localized_profile(effect: LocalizeProfile, read: Iterator[tuple[int, bytes]], answers: Mapping[int, bytes]) -> LocalizedProfile:
    table = read_table(read)
    found = localize_in_table(table, effect.expected)
    return LocalizedProfile(effect.window, found, write_profile_page(found, table, answers).decode())


def yield_between_ranks(runtime: OperatorRuntime, answers: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Polls are answered between two ranks."""
    for item in answers.items():
        runtime.yield_thread()
        yield item


def _build_profile_window(desk: JobContext, incident: Object, done: LocalizedProfile) -> Object:
    metadata = incident["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": "Incident", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": API_VERSION,
        "kind": "BehaviourWindow",
        "metadata": {
            "name": metadata["name"],
            "namespace": desk.job.namespace,
            "labels": {LABEL_JOB: desk.job.name},
            "ownerReferences": [owner],
        },
        "spec": {"window": done.window, "content": done.page},
    }
