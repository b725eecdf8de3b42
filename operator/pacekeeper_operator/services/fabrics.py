"""The active Fabric: the capacity of its links, the traffic of all jobs, the planned routes, and its status.

Level-triggered, without state of its own: routes are stored in the jobs' plans, which each job's own pass writes. A
pass without changes plans nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import kopf

from .. import metrics
from ..api.fabric import Fabric, FabricSpec, FabricStatus, PathControl
from ..api.names import API_VERSION, FIELD_MANAGER_FABRIC
from ..api.training_job import TrainingJob
from ..decide.network import fabric_status, traffic
from ..decide.network.link_state import DegradedLinks, find_degraded_links
from ..decide.network.wiring import LinkRates, build_wiring
from ..kube.client import FABRICS, Conflict, NotFound
from ..observe import traffic as sent
from ..observe.prometheus import LinkRatesResult
from ..state.cluster_view import NodeView
from ..state.network import NO_FABRIC, JobName, JobTraffic, NetworkState
from .operator import Operator

FABRIC_POLL_SECONDS = 2.0
FABRIC_IDLE_POLL_SECONDS = 30.0
"""Seconds between two passes without a Fabric; a watch reports a new one at once."""
FABRIC_RETRY_SECONDS = 5.0
SLOW_PLANNING_SECONDS = 1.0
"""Seconds after which a running plan computation is reported."""
JobValue = TypeVar("JobValue")
log = logging.getLogger(__name__)


async def run_fabric_loop(operator: Operator) -> None:
    """Reconcile Fabrics until cancelled: periodically while there is one, and when one changes."""
    await operator.stores.wait_until_listed()
    reconciler = FabricReconciler(operator)
    while True:
        operator.stores.fabrics_changed.clear()
        delay = FABRIC_RETRY_SECONDS
        try:
            delay = await reconciler.reconcile()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics cannot be reconciled; retrying: %s", error)
        except Exception:
            log.exception("Fabrics cannot be reconciled; retrying")
        with suppress(TimeoutError):
            await operator.runtime.run_with_timeout(delay, operator.stores.fabrics_changed.wait())


@dataclass(frozen=True)
class _PlanInputs:
    """The inputs of a plan: while they do not change, neither does the plan."""

    spec: FabricSpec
    rates: LinkRates
    doubts: DegradedLinks
    nodes: tuple[NodeView, ...]
    jobs: Mapping[JobName, JobTraffic]
    answers: Mapping[JobName, sent.EvidenceAnswers]


def update_traffic(operator: Operator, job: TrainingJob) -> None:
    """Update the job's traffic after its plan was written, so that later plans of other jobs avoid it at once."""
    name, network = (job.namespace, job.name), operator.network
    if network is None:
        return
    previous = network.jobs.get(name)
    current = sent.build_job_traffic(name, operator.jobs.get_or_create(job), operator.runtime.now(), acts=operator.acts)
    if current is not None:  # keep what the last pass measured
        current = (
            replace(current, bytes_sent=previous.bytes_sent, route_observations=previous.route_observations)
            if previous is not None
            else replace(current, route_observations=())
        )
    if current == previous:
        return
    jobs = _exclude_job(network.jobs, name)
    planned = network.traffic
    if planned is not None:  # the routes planned for it are outdated
        routes, due = _exclude_job(planned.routes, name), _exclude_job(planned.due, name)
        recommended = _exclude_job(planned.recommended, name)
        planned = replace(planned, routes=routes, due=due, recommended=recommended)
    jobs |= {} if current is None else {name: current}
    operator.network = replace(network, jobs=jobs, traffic=planned)


class FabricReconciler:
    """Reconciles Fabrics. Its state only saves work."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._levels: tuple[str, ...] = ()  # the labels with which nodes are cached
        self._rates: LinkRates = {}  # of the last answered query
        self._planned: tuple[_PlanInputs, NetworkState] | None = None

    async def reconcile(self) -> float:
        """Run one pass and return the seconds until the next one, if nothing changes."""
        operator = self._operator
        fabric = operator.stores.fabric
        if self._levels != operator.stores.levels:
            await operator.stores.nodes.refresh(operator.cluster, ())  # for labels that were dropped before
            self._levels = operator.stores.levels
        if fabric is None:
            operator.network = NO_FABRIC
            metrics.publish_fabric_metrics("", None)
        else:
            await self._reconcile_fabric(fabric)
        for other in operator.stores.fabrics:
            if other != fabric:
                await self._write_status(
                    other, fabric_status.build_inactive_status(other, fabric, operator.runtime.now())
                )
        return FABRIC_IDLE_POLL_SECONDS if fabric is None else FABRIC_POLL_SECONDS

    async def _reconcile_fabric(self, fabric: Fabric) -> None:
        if not self._operator.settings.traffic_planning:
            control = replace(fabric.spec.path_control, mode=PathControl.OFF)
            fabric = replace(fabric, spec=replace(fabric.spec, path_control=control))
        operator, registry = self._operator, self._operator.jobs
        link_rates = await self._query_links(fabric)
        now = operator.runtime.now()
        jobs, answers = sent.collect_traffic(registry, now, acts=operator.acts), sent.collect_link_answers(registry)
        degraded = find_degraded_links(sent.collect_route_observations(jobs), now)
        network = await self._plan_network(
            fabric, _PlanInputs(fabric.spec, self._rates, degraded, tuple(operator.stores.nodes), jobs, answers)
        )
        operator.network = network
        if fabric.spec.path_control.mode is PathControl.PROBE:
            self._wake_jobs(network)
        used_nodes = {node_ranks.node for job in jobs.values() for node_ranks in job.node_ranks if node_ranks.node}
        unlabeled = tuple(sorted(used_nodes - set(network.wiring.leaf_of)))
        state = fabric_status.FabricState(network.wiring, network.traffic, unlabeled, link_rates.error)
        status = fabric_status.build_fabric_status(fabric, state, operator.runtime.now())
        metrics.publish_fabric_metrics(fabric.name, status)
        await self._write_status(fabric, status)

    async def _query_links(self, fabric: Fabric) -> LinkRatesResult:
        """Query the link rates. While the query fails, the last rates stay."""
        if not fabric.spec.link_query:
            self._rates = {}
            return LinkRatesResult({})
        result = await self._operator.prometheus.client.read_link_rates(fabric.spec.link_query)
        if result.rates or not result.error:
            self._rates = result.rates
        return result

    async def _plan_network(self, fabric: Fabric, inputs: _PlanInputs) -> NetworkState:
        if self._planned is None or self._planned[0] != inputs:
            runtime = self._operator.runtime
            began = runtime.monotonic()
            progress = runtime.start_task(self._report_planning(fabric, len(inputs.jobs)), "planning progress")
            try:
                self._planned = inputs, await runtime.compute_in_thread(lambda: _compute_network(inputs))
            finally:
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)  # its status must not overwrite the next one
            if (elapsed := runtime.monotonic() - began) > SLOW_PLANNING_SECONDS:
                log.info("Fabric %s: planned in %.1f s", fabric.name, elapsed)
        return self._planned[1]

    async def _report_planning(self, fabric: Fabric, jobs: int) -> None:
        """Report a slow plan computation in the log and the status.

        This pass replaces the status. If the result equals the earlier status, the next pass does.
        """
        runtime = self._operator.runtime
        await runtime.sleep(SLOW_PLANNING_SECONDS)
        message = f"the flows of {jobs} jobs are being planned, for more than {SLOW_PLANNING_SECONDS:.0f} s so far"
        log.info("Fabric %s: %s", fabric.name, message)
        try:
            await self._write_status(fabric, fabric_status.build_planning_status(fabric, message, runtime.now()))
        except Exception as error:  # planning continues
            log.warning("Fabric %s: the status that a plan is being computed cannot be written: %s", fabric.name, error)

    def _wake_jobs(self, network: NetworkState) -> None:
        """Wake the jobs whose plans contain other routes."""
        for name, job in network.jobs.items():
            if network.traffic is not None and network.traffic.routes[name] != job.routes:
                self._operator.jobs.wake(*name)

    async def _write_status(self, fabric: Fabric, status: FabricStatus) -> None:
        """Write a changed status by server-side apply. The UID protects a new Fabric of the same name."""
        if status == fabric.status:
            return
        body = {
            "apiVersion": API_VERSION,
            "kind": "Fabric",
            "metadata": {"name": fabric.name, "uid": fabric.uid},
            "status": status.to_json(),
        }
        with suppress(NotFound, Conflict):  # it is gone
            await self._operator.cluster.apply(FABRICS, body, manager=FIELD_MANAGER_FABRIC, subresource="status")


def _compute_network(inputs: _PlanInputs) -> NetworkState:
    wiring = build_wiring(inputs.spec, inputs.nodes, inputs.rates, inputs.doubts)
    jobs = {name: sent.add_sent_bytes(job, inputs.answers.get(name, ())) for name, job in inputs.jobs.items()}
    return NetworkState(inputs.spec, wiring, jobs, traffic.plan_joint_traffic(wiring, list(jobs.values())))


def _exclude_job(jobs: Mapping[JobName, JobValue], name: JobName) -> dict[JobName, JobValue]:
    return {key: value for key, value in jobs.items() if key != name}
