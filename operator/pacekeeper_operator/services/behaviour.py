"""Behaviour windows in the operator: patterns are localised in a thread of their own, and kept for people."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pacekeeper_analysis.behaviour.localise import judge, sentences
from pacekeeper_analysis.behaviour.page import page
from pacekeeper_analysis.behaviour.table import read_table

from ..api import API_VERSION, LABEL_JOB
from ..cluster import BEHAVIOURS, INCIDENTS, Conflict, NotFound, Object
from ..effects import KeepBehaviour, Localise
from ..observation import Localised
from ..runtime import Runtime
from . import events
from .desk import Desk
from .operator import Operator

log = logging.getLogger(__name__)


async def localise(operator: Operator, desk: Desk, effect: Localise) -> None:
    """What it brings back is news for the next pass."""
    answers = dict(sorted(desk.memory.patterns.items()))
    desk.memory.localised = await operator.runtime.compute(
        lambda: localised(effect, leisurely(operator.runtime, answers), answers)
    )
    found = desk.memory.localised.localisation
    note = "; ".join(sentences(found)[:2])
    await events.tell(operator, desk.job, "BehaviourWindow", note, "ProfileRanks")


async def keep(operator: Operator, desk: Desk, effect: KeepBehaviour) -> None:
    """It goes with its incident. Where this cluster has no such objects, it is not kept."""
    done = desk.memory.localised
    if done is None or done.window != effect.window or not done.page:
        return
    incident = await operator.cluster.get(INCIDENTS, effect.incident, desk.job.namespace)
    try:
        await operator.cluster.create(BEHAVIOURS, _body(desk, incident, done))
    except Conflict:
        log.info("the behaviour window of %s is kept already", effect.incident)
    except NotFound:
        log.warning("a behaviour window is not kept: there are no BehaviourWindows; apply crds/behaviourwindows.yaml")
    desk.memory.localised = replace(done, page="")


def localised(effect: Localise, read: Iterator[tuple[int, bytes]], answers: Mapping[int, bytes]) -> Localised:
    table = read_table(read)
    found = judge(table, effect.expected)
    return Localised(effect.window, found, page(found, table, answers).decode())


def leisurely(runtime: Runtime, answers: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Polls are answered between two ranks."""
    for item in answers.items():
        runtime.give_way()
        yield item


def _body(desk: Desk, incident: Object, done: Localised) -> Object:
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
