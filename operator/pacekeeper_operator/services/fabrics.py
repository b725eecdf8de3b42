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
from ..decide.link_state import Doubts, judge
from ..decide.wiring import LinkRates, wire
from ..network import NO_FABRIC, JobName, JobTraffic, Network
from ..observation import NodeView
from ..observe import traffic as sent
from ..observe.prometheus import LinkAnswer
from .operator import Operator

LOOK_SECONDS = 2.0
IDLE_SECONDS = 30.0
"""Between two looks where there is no Fabric: its watch tells of one at once."""
RETRY_SECONDS = 5.0
PATIENCE_SECONDS = 1.0
"""A plan that takes longer is told of while it is made."""
log = logging.getLogger(__name__)


async def watch_over(operator: Operator) -> None:
    """Looks at Fabrics until it is cancelled: again and again while there is one, and when one changes."""
    await operator.know()
    keeper = Keeper(operator)
    while True:
        operator.fabrics_changed.clear()
        delay = RETRY_SECONDS
        try:
            delay = await keeper.look()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics cannot be looked at, which is tried again: %s", error)
        except Exception:
            log.exception("Fabrics cannot be looked at, which is tried again")
        with suppress(TimeoutError):
            await operator.runtime.within(delay, operator.fabrics_changed.wait())


@dataclass(frozen=True)
class _Inputs:
    """What a plan is made from: where it is as before, so is the plan."""

    spec: FabricSpec
    rates: LinkRates
    doubts: Doubts
    nodes: tuple[NodeView, ...]
    jobs: Mapping[JobName, JobTraffic]
    answers: Mapping[JobName, sent.Answers]


class Keeper:
    """Looks at Fabrics. What it remembers saves work, no more."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._levels: tuple[str, ...] = ()  # whose labels nodes are known with
        self._rates: LinkRates = {}  # as the query has told them last
        self._planned: tuple[_Inputs, Network] | None = None

    async def look(self) -> float:
        """Seconds until the next look is wanted, if nothing changes."""
        operator = self._operator
        fabric = operator.fabric
        if self._levels != operator.levels:
            await operator.nodes.read(operator.cluster, ())  # for the labels that did not matter before
            self._levels = operator.levels
        if fabric is None:
            operator.network = NO_FABRIC
            metrics.show_fabric("", None)
        else:
            await self._keep(fabric)
        for other in operator.fabrics:
            if other != fabric:
                await self._tell(other, fabric_status.report_idle(other, fabric, operator.runtime.now()))
        return IDLE_SECONDS if fabric is None else LOOK_SECONDS

    async def _keep(self, fabric: Fabric) -> None:
        if not self._operator.settings.traffic_planning:
            control = replace(fabric.spec.path_control, mode=PathControl.OFF)
            fabric = replace(fabric, spec=replace(fabric.spec, path_control=control))
        operator, memory = self._operator, self._operator.memory
        answer = await self._ask(fabric)
        now = operator.runtime.now()
        jobs, answers = sent.of_jobs(memory, now, acts=operator.acts), sent.answers_of(memory)
        doubts = judge(sent.words_of(jobs), now)
        network = await self._plan(
            fabric, _Inputs(fabric.spec, self._rates, doubts, tuple(operator.nodes), jobs, answers)
        )
        operator.network = network
        if fabric.spec.path_control.mode is PathControl.PROBE:
            self._wake(network)
        held = {seat.node for job in jobs.values() for seat in job.seats if seat.node}
        unlabelled = tuple(sorted(held - set(network.wiring.leaf_of)))
        seen = fabric_status.Seen(network.wiring, network.traffic, unlabelled, answer.trouble)
        status = fabric_status.report(fabric, seen, operator.runtime.now())
        metrics.show_fabric(fabric.name, status)
        await self._tell(fabric, status)

    async def _ask(self, fabric: Fabric) -> LinkAnswer:
        """While nobody answers, links are as they were when somebody did."""
        if not fabric.spec.link_query:
            self._rates = {}
            return LinkAnswer({})
        answer = await self._operator.prometheus.link_rates(fabric.spec.link_query)
        if answer.rates or not answer.trouble:
            self._rates = answer.rates
        return answer

    async def _plan(self, fabric: Fabric, inputs: _Inputs) -> Network:
        if self._planned is None or self._planned[0] != inputs:
            runtime = self._operator.runtime
            began = runtime.monotonic()
            progress = runtime.start(self._tell_of_planning(fabric, len(inputs.jobs)), "progress of the plan")
            try:
                self._planned = inputs, await runtime.compute(lambda: _plan(inputs))
            finally:
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)  # nothing of it comes after what is told next
            if (took := runtime.monotonic() - began) > PATIENCE_SECONDS:
                log.info("Fabric %s: planned in %.1f s", fabric.name, took)
        return self._planned[1]

    async def _tell_of_planning(self, fabric: Fabric, jobs: int) -> None:
        """Where it lasts. What has come of it is said by this look or, where that is what stood there before, by the
        next one."""
        runtime = self._operator.runtime
        await runtime.sleep(PATIENCE_SECONDS)
        words = f"the flows of {jobs} jobs are being planned, which takes longer than {PATIENCE_SECONDS:.0f} s"
        log.info("Fabric %s: %s", fabric.name, words)
        try:
            await self._tell(fabric, fabric_status.report_planning(fabric, words, runtime.now()))
        except Exception as error:  # the plan goes on
            log.warning("Fabric %s: nobody can be told that it is being planned: %s", fabric.name, error)

    def _wake(self, network: Network) -> None:
        """The jobs whose plans name other ways so far."""
        for name, job in network.jobs.items():
            if network.traffic is not None and network.traffic.ways[name] != job.ways:
                self._operator.memory.wake(*name)

    async def _tell(self, fabric: Fabric, status: FabricStatus) -> None:
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


def _plan(inputs: _Inputs) -> Network:
    wiring = wire(inputs.spec, inputs.nodes, inputs.rates, inputs.doubts)
    jobs = {name: sent.with_bytes(job, inputs.answers.get(name, ())) for name, job in inputs.jobs.items()}
    return Network(inputs.spec, wiring, jobs, traffic.plan(wiring, list(jobs.values())))
