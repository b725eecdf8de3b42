"""The Fabric in force: what its links carry, what all jobs send through it, which ways that shall take, and its status.

Level-triggered, and nothing is kept that is not written elsewhere: ways stand in the jobs' plans, which each job's own
pass writes. A look that finds all as it was plans nothing.
"""

from __future__ import annotations

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
        network = await self._plan(_Inputs(fabric.spec, self._rates, doubts, tuple(operator.nodes), jobs, answers))
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

    async def _plan(self, inputs: _Inputs) -> Network:
        if self._planned is None or self._planned[0] != inputs:
            self._planned = inputs, await self._operator.runtime.compute(lambda: _plan(inputs))
        return self._planned[1]

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
