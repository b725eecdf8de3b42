"""Scenarios in the simulation."""

from __future__ import annotations

import gc
from collections.abc import Callable

from pacekeeper_operator.api.names import LABEL_JOB
from pacekeeper_operator.state.desired_state import DesiredState

from .. import checkers
from ..faults.context import PERSON_MANAGER, FaultContext
from ..faults.fault import Fault, HealCallback
from ..faults.targets import TargetMissing
from ..schedule import Schedule
from ..world import NAMESPACE, World
from .scenario import CONFORMANCE_STEP_SECONDS, WORKER_GRACE_SECONDS, ConformanceScenario
from .scenario_run import Object, SequenceEntry, run_scenario


def run_in_simulation(
    scenario: ConformanceScenario, on_entry: Callable[[str], None] = lambda _: None
) -> tuple[SequenceEntry, ...]:
    """Run a scenario. The entries end with the checker's violations, which the test cluster does not have."""
    schedule = Schedule(scenario.seed, world=scenario.world_settings, jobs=(scenario.job,))
    world = World(scenario.seed, scenario.world_settings)
    checker = checkers.start_checker(world, schedule)
    target = SimulatedTarget(world, FaultContext(world, schedule.jobs))
    gc.collect()
    gc.disable()  # garbage of killed processes must not cause error messages of the operator
    try:
        entries = world.run(run_scenario(target, scenario, lambda entry: on_entry(f"{world.now():9.3f}  {entry}")))
        violations = tuple(f"VIOLATED {violation.rule}: {violation.message}" for violation in checker.violations)
    finally:
        world.loop.close()
        gc.enable()
    return (*entries, *violations)


class SimulatedTarget:
    """One job in a simulated world."""

    def __init__(self, world: World, context: FaultContext) -> None:
        self._world = world
        self._context = context

    def create_job(self) -> None:
        """Create the job. Step time and grace period are those of the cluster."""
        body = self._context.get_job_settings(0).build_manifest()
        pod = body["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = WORKER_GRACE_SECONDS
        pod["containers"][0]["env"] = [{"name": "STEP_SECONDS", "value": str(CONFORMANCE_STEP_SECONDS)}]
        self._world.api.create("trainingjobs", body, manager=PERSON_MANAGER)

    def strike(self, fault: Fault) -> HealCallback | None:
        return fault.inject(self._context)

    def kill_operator(self) -> None:
        leader = self._world.deployment.leader
        if leader is not None:
            leader.kill()

    def restart_operator(self) -> None:
        """Do nothing: the simulated kubelet restarts it."""

    def read_job(self) -> Object:
        return self._context.get_job(0)

    def read_desired(self) -> DesiredState | None:
        try:
            return self._context.read_desired(0)
        except TargetMissing:
            return None

    def list_incidents(self) -> list[Object]:
        return list(self._world.api.list_all("incidents", NAMESPACE))

    def list_pods(self) -> frozenset[str]:
        pods = self._world.api.list_all("pods", NAMESPACE)
        return frozenset(pod["metadata"]["name"] for pod in pods if LABEL_JOB in pod["metadata"].get("labels", {}))
