"""Profile windows in the operator: patterns are localized in a separate thread, and stored for users."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pacekeeper_analysis.profiling.localize import describe_localization, localize_in_table
from pacekeeper_analysis.profiling.page import write_profile_page
from pacekeeper_analysis.profiling.table import read_table

from ..api.names import API_VERSION, LABEL_JOB
from ..api.training_job import JobKind
from ..async_runtime import OperatorRuntime
from ..decide.effects import LocalizeProfile, SaveProfile
from ..kube.client import INCIDENT_OBJECTS, PROFILE_WINDOWS, Conflict, NotFound, Object
from ..services import events
from ..services.operator import Operator
from ..state.effect_results import LocalizedProfile
from .job_context import JobContext

log = logging.getLogger(__name__)


async def localize_profile(operator: Operator, context: JobContext, effect: LocalizeProfile) -> None:
    """Localize the patterns of the profile window, and store the result for the next pass."""
    answers = dict(sorted(context.cache.profile.by_rank.items()))
    context.cache.profile.localized = await operator.runtime.compute_in_thread(
        lambda: compute_localized_profile(effect, yield_between_ranks(operator.runtime, answers), answers)
    )
    if context.job.kind is JobKind.WATCHED_JOB:
        return  # its Incident reports the result
    localization = context.cache.profile.localized.localization
    note = "; ".join(describe_localization(localization)[:2])
    await events.emit_job_event(operator, context.job, "ProfileWindow", note, "ProfileRanks")


async def save_profile(operator: Operator, context: JobContext, effect: SaveProfile) -> None:
    """Store the profile's page as a ProfileWindow that its Incident owns.

    If the cluster does not serve ProfileWindows, the page is dropped.
    """
    profile = context.cache.profile.localized
    if profile is None or profile.window != effect.window or not profile.page:
        return
    incident = await operator.cluster.get(INCIDENT_OBJECTS, effect.incident, context.job.namespace)
    try:
        await operator.cluster.create(PROFILE_WINDOWS, _build_profile_window(context, incident, profile))
    except Conflict:
        log.info("the ProfileWindow of %s exists already", effect.incident)
    except NotFound:
        log.warning("a ProfileWindow is not stored: its definition is missing; apply crds/profilewindows.yaml")
    context.cache.profile.localized = replace(profile, page="")


def compute_localized_profile(
    effect: LocalizeProfile, rank_answers: Iterator[tuple[int, bytes]], answers: Mapping[int, bytes]
) -> LocalizedProfile:
    table = read_table(rank_answers)
    localization = localize_in_table(table, effect.expected)
    return LocalizedProfile(effect.window, localization, write_profile_page(localization, table, answers).decode())


def yield_between_ranks(runtime: OperatorRuntime, answers: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the answers by rank, and let the event loop run between two of them."""
    for item in answers.items():
        runtime.yield_thread()
        yield item


def _build_profile_window(context: JobContext, incident: Object, profile: LocalizedProfile) -> Object:
    metadata = incident["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": "Incident", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": API_VERSION,
        "kind": "ProfileWindow",
        "metadata": {
            "name": metadata["name"],
            "namespace": context.job.namespace,
            "labels": {LABEL_JOB: context.job.name},
            "ownerReferences": [owner],
        },
        "spec": {"window": profile.window, "content": profile.page},
    }
