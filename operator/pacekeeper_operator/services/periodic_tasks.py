"""What the leader does periodically: start queries of Prometheus, check the pause, clean up Incidents, count jobs."""

from __future__ import annotations

import logging

import kopf

from .. import metrics
from ..api.names import PAUSE_CONFIG_MAP
from ..api.training_job import JobPhase
from ..kube.client import CONFIG_MAPS, TRAINING_JOBS, WATCHED_JOBS
from . import incidents
from .operator import PAUSE_UNKNOWN, Operator
from .shared.prometheus_poller import MONITORED_PHASES

RETENTION_INTERVAL_SECONDS = 600.0
FIRST_RETENTION_DELAY_SECONDS = 60.0
"""Seconds between an operator's first two cleanups of Incidents: it removes what expired while no operator ran."""
log = logging.getLogger(__name__)


async def run_periodic_tasks(operator: Operator) -> None:
    """Query Prometheus while a job trains, check the pause, and clean up Incidents, until cancelled."""
    settings, runtime, clock_agreed_before = operator.settings, operator.runtime, True
    paused_at, incidents_at, pause = (
        -RETENTION_INTERVAL_SECONDS,
        -RETENTION_INTERVAL_SECONDS,
        FIRST_RETENTION_DELAY_SECONDS,
    )
    while True:
        now = runtime.monotonic()
        try:
            if operator.paused == PAUSE_UNKNOWN or now - paused_at > 2 * settings.sample_seconds:
                await _check_pause(operator)
                paused_at = now
            operator.prometheus.start_query()
            if now - incidents_at > pause:
                trusted_now = runtime.now() if operator.clock.agrees else None
                await operator.node_histories.clean_up()
                kinds = (TRAINING_JOBS, WATCHED_JOBS) if settings.watch_enabled else (TRAINING_JOBS,)
                await incidents.clean_up_incidents(operator.cluster, settings.watch_namespaces, trusted_now, kinds)
                pause = FIRST_RETENTION_DELAY_SECONDS if incidents_at < 0 else RETENTION_INTERVAL_SECONDS
                incidents_at = now
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("periodic tasks failed; retrying: %s", error)
        _count_jobs(operator)
        clock_agreed_before = _check_clock(operator, clock_agreed_before)
        operator.last_tick_at = now
        await runtime.sleep(settings.sample_seconds)


async def _check_pause(operator: Operator) -> None:
    """Read whether remedies are paused. Until the first successful read, they are."""
    settings = operator.settings
    config_map = await operator.cluster.find(CONFIG_MAPS, PAUSE_CONFIG_MAP, settings.namespace)
    if settings.paused:
        paused = "remedies are paused by the operator's settings"
    elif config_map is not None:
        reason = (config_map.get("data") or {}).get("reason", "no reason given")
        paused = f"remedies are paused by ConfigMap {settings.namespace}/{PAUSE_CONFIG_MAP}: {reason}"
    else:
        paused = ""
    if paused != operator.paused:
        operator.paused = paused
        operator.jobs.wake_all()


def _check_clock(operator: Operator, agreed_before: bool) -> bool:
    """Log a change of whether the clocks agree, and return whether they do."""
    clock = operator.clock
    metrics.CLOCK_AHEAD_SECONDS.set(clock.seconds_ahead)
    agrees = clock.agrees
    if agrees == agreed_before:
        return agrees
    if agrees:
        log.warning("this node's clock agrees with the API server's again")
        return agrees
    log.warning(
        "this node's clock is %.0f s ahead of the API server's: until they agree, no job fails by its deadline, "
        "and nothing that has expired is deleted; check the time service of the operator's node",
        clock.seconds_ahead,
    )
    return agrees


def _count_jobs(operator: Operator) -> None:
    phases = [cache.phase for _, cache in operator.jobs]
    operator.passes.active_jobs = sum(phase in MONITORED_PHASES for phase in phases)
    for phase in JobPhase:
        metrics.JOBS_BY_PHASE.labels(phase).set(phases.count(phase))
    metrics.WORKERS_REPORTING.set(sum(cache.reporting_members for _, cache in operator.jobs))
