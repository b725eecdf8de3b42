"""The Fabric in force: what its links carry, what all jobs send through it, which ways that shall take, and its status.

Level-triggered, and nothing is kept that is not written elsewhere: ways stand in the jobs' plans, which each job's own
pass writes. A look that finds all as it was plans nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import kopf

from .. import metrics
from ..api import API_VERSION, FIELD_MANAGER_FABRIC, Fabric, FabricSpec, FabricStatus, PathControl
from ..cluster import FABRICS, Conflict, NotFound
from ..decide import fabric_status, traffic
from ..decide.link_state import DegradedLinks, find_degraded_links
from ..decide.wiring import LinkRates, build_wiring
from ..network import NO_FABRIC, JobName, JobTraffic, NetworkState
from ..observation import NodeView
from ..observe import traffic as sent
from ..observe.prometheus import LinkRatesResult
from .operator import Operator

FABRIC_POLL_SECONDS = 2.0
FABRIC_IDLE_POLL_SECONDS = 30.0
"""Between two looks where there is no Fabric: its watch tells of one at once."""
FABRIC_RETRY_SECONDS = 5.0
SLOW_PLANNING_SECONDS = 1.0
"""A plan that takes longer is told of while it is made."""
log = logging.getLogger(__name__)


async def run_fabric_loop(operator: Operator) -> None:
    """Looks at Fabrics until it is cancelled: again and again while there is one, and when one changes."""
    await operator.wait_until_listed()
    keeper = FabricReconciler(operator)
    while True:
        operator.fabrics_changed.clear()
        delay = FABRIC_RETRY_SECONDS
        try:
            delay = await keeper.reconcile()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics cannot be looked at, which is tried again: %s", error)
        except Exception:
            log.exception("Fabrics cannot be looked at, which is tried again")
        with suppress(TimeoutError):
            await operator.runtime.run_with_timeout(delay, operator.fabrics_changed.wait())


@dataclass(frozen=True)
class _PlanInputs:
    """What a plan is made from: where it is as before, so is the plan."""

    spec: FabricSpec
    rates: LinkRates
    doubts: DegradedLinks
    nodes: tuple[NodeView, ...]
    jobs: Mapping[JobName, JobTraffic]
    answers: Mapping[JobName, sent.EvidenceAnswers]


class FabricReconciler:
    """Looks at Fabrics. What it remembers saves work, no more."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._levels: tuple[str, ...] = ()  # whose labels nodes are known with
        self._rates: LinkRates = {}  # as the query has told them last
        self._planned: tuple[_PlanInputs, NetworkState] | None = None

    async def reconcile(self) -> float:
        """Seconds until the next look is wanted, if nothing changes."""
        operator = self._operator
        fabric = operator.fabric
        if self._levels != operator.levels:
            await operator.nodes.refresh(operator.cluster, ())  # for the labels that did not matter before
            self._levels = operator.levels
        if fabric is None:
            operator.network = NO_FABRIC
            metrics.publish_fabric_metrics("", None)
        else:
            await self._reconcile_fabric(fabric)
        for other in operator.fabrics:
            if other != fabric:
                await self._write_status(other, fabric_status.build_inactive_status(other, fabric, operator.runtime.now()))
        return FABRIC_IDLE_POLL_SECONDS if fabric is None else FABRIC_POLL_SECONDS

    async def _reconcile_fabric(self, fabric: Fabric) -> None:
        if not self._operator.settings.traffic_planning:
            control = replace(fabric.spec.path_control, mode=PathControl.OFF)
            fabric = replace(fabric, spec=replace(fabric.spec, path_control=control))
        operator, memory = self._operator, self._operator.jobs
        answer = await self._query_links(fabric)
        now = operator.runtime.now()
        jobs, answers = sent.collect_traffic(memory, now, acts=operator.acts), sent.collect_link_answers(memory)
        doubts = find_degraded_links(sent.collect_route_observations(jobs), now)
        network = await self._plan_network(
            fabric, _PlanInputs(fabric.spec, self._rates, doubts, tuple(operator.nodes), jobs, answers)
        )
        operator.network = network
        if fabric.spec.path_control.mode is PathControl.PROBE:
            self._wake_jobs(network)
        held = {seat.node for job in jobs.values() for seat in job.seats if seat.node}
        unlabelled = tuple(sorted(held - set(network.wiring.leaf_of)))
        seen = fabric_status.FabricState(network.wiring, network.traffic, unlabelled, answer.error)
        status = fabric_status.build_fabric_status(fabric, seen, operator.runtime.now())
        metrics.publish_fabric_metrics(fabric.name, status)
        await self._write_status(fabric, status)

    async def _query_links(self, fabric: Fabric) -> LinkRatesResult:
        """While nobody answers, links are as they were when somebody did."""
        if not fabric.spec.link_query:
            self._rates = {}
            return LinkRatesResult({})
        answer = await self._operator.prometheus.read_link_rates(fabric.spec.link_query)
        if answer.rates or not answer.error:
            self._rates = answer.rates
        return answer

    async def _plan_network(self, fabric: Fabric, inputs: _PlanInputs) -> NetworkState:
        if self._planned is None or self._planned[0] != inputs:
            runtime = self._operator.runtime
            began = runtime.monotonic()
            progress = runtime.start_task(self._report_planning(fabric, len(inputs.jobs)), "progress of the plan")
            try:
                self._planned = inputs, await runtime.compute_in_thread(lambda: _compute_network(inputs))
            finally:
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)  # nothing of it comes after what is told next
            if (took := runtime.monotonic() - began) > SLOW_PLANNING_SECONDS:
                log.info("Fabric %s: planned in %.1f s", fabric.name, took)
        return self._planned[1]

    async def _report_planning(self, fabric: Fabric, jobs: int) -> None:
        """Where it lasts. What has come of it is said by this look or, where that is what stood there before, by the
        next one."""
        runtime = self._operator.runtime
        await runtime.sleep(SLOW_PLANNING_SECONDS)
        words = f"the flows of {jobs} jobs are being planned, which takes longer than {SLOW_PLANNING_SECONDS:.0f} s"
        log.info("Fabric %s: %s", fabric.name, words)
        try:
            await self._write_status(fabric, fabric_status.build_planning_status(fabric, words, runtime.now()))
        except Exception as error:  # the plan goes on
            log.warning("Fabric %s: nobody can be told that it is being planned: %s", fabric.name, error)

    def _wake_jobs(self, network: NetworkState) -> None:
        """The jobs whose plans name other ways so far."""
        for name, job in network.jobs.items():
            if network.traffic is not None and network.traffic.ways[name] != job.ways:
                self._operator.jobs.wake(*name)

    async def _write_status(self, fabric: Fabric, status: FabricStatus) -> None:
        """By server-side apply, where it says something new; the UID keeps a Fabric's word from its successor."""
        if status == fabric.status:
            return
        body = {
            "apiVersion": API_VERSION,
            "kind": "Fabric",
            "metadata": {"name": fabric.name, "uid": fabric.uid},
            "status": status.to_json(),
        }
        with suppress(NotFound, Conflict):  # it has gone meanwhile
            await self._operator.cluster.apply(FABRICS, body, manager=FIELD_MANAGER_FABRIC, subresource="status")


def _compute_network(inputs: _PlanInputs) -> NetworkState:
    wiring = build_wiring(inputs.spec, inputs.nodes, inputs.rates, inputs.doubts)
    jobs = {name: sent.add_sent_bytes(job, inputs.answers.get(name, ())) for name, job in inputs.jobs.items()}
    return NetworkState(inputs.spec, wiring, jobs, traffic.plan_joint_traffic(wiring, list(jobs.values())))
