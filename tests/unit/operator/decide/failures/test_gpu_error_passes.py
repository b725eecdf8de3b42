"""GPUs that report errors: what that changes inside of a job, and what is said of their nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.api.incident import IncidentClass, IncidentOutcome
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.placement.workforce import list_missing_workers
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.job_metrics import GpuValue
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    change_worker,
    list_decisions,
)


def seats(draft: DesiredState) -> list[str]:
    return [member.worker for member in draft.plan.members]


def again(thought: PassResult, world: Observation, **changes: object) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_desired(thought.desired), **changes)  # type: ignore[arg-type]


class TestGpuError:
    def with_value(self, world: Observation, metric: str, value: float, node: str = "node-1") -> Observation:
        return replace(world, metrics=replace(world.metrics, gpu_values=(GpuValue(node, "0", metric, value),)))

    def test_a_fatal_xid_means_checkpoint_spare_and_quarantine(self) -> None:
        world = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.checkpoint_request == 1
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-1"]
        answered = change_members(again(thought, world), checkpoint={"request": 1})
        assert seats(evaluate_job(answered, build_policy()).desired)[1] == "j-w4-0"

    def test_a_spare_on_a_broken_gpu_goes_and_the_job_does_not_look_like_recovering(self) -> None:
        thought = evaluate_job(
            self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, node="node-4"), build_policy()
        )
        (incident,) = thought.desired.state.incidents.current
        assert (incident.remedy, incident.outcome) == (Remedy.REPLACE_WORKER, IncidentOutcome.RECOVERED)
        assert thought.desired.state.placement.failed_starts == 0
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w4-1"]
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-4"]

    def test_without_leave_to_replace_the_node_alone_is_dealt_with(self) -> None:
        allowed = build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        thought = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0), allowed)
        (incident,) = thought.desired.state.incidents.current
        assert incident.remedy is None
        assert incident.outcome is not None
        assert thought.desired.plan.membership == 1

    @pytest.mark.parametrize("xid", [13, 31, 43, 45, 68])
    def test_an_xid_of_the_application_touches_nothing(self, xid: int) -> None:
        thought = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), build_policy())
        assert not thought.desired.state.incidents.quarantine_requests
        assert thought.desired.plan.membership == 1
        assert thought.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION

    @pytest.mark.parametrize("xid", range(144, 151))
    def test_an_nvlink_fault_moves_the_worker_and_a_probe_decides_upon_the_node(self, xid: int) -> None:
        """A link has two ends."""
        world, value = build_training(), GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", float(xid), trusted=True)
        thought = evaluate_job(replace(world, metrics=replace(world.metrics, gpu_values=(value,))), build_policy())
        (incident,) = thought.desired.state.incidents.current
        assert (incident.class_, incident.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        (wanted,) = thought.desired.state.incidents.quarantine_requests
        assert wanted.witness is Witness.NONE

    @pytest.mark.parametrize("xid", [155, 160, 999])
    def test_an_xid_that_the_table_does_not_hold_touches_nothing_and_is_not_the_scripts(self, xid: int) -> None:
        thought = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), build_policy())
        assert not thought.desired.state.incidents.quarantine_requests
        assert thought.desired.plan.membership == 1
        assert thought.desired.state.incidents.current[0].class_ is IncidentClass.UNKNOWN

    def test_unknown_xids_of_many_nodes_are_one_incident(self) -> None:
        world = build_training()
        values = tuple(GpuValue(f"node-{i}", "0", "DCGM_FI_DEV_XID_ERRORS", 999.0) for i in range(3))
        thought = evaluate_job(replace(world, metrics=replace(world.metrics, gpu_values=values)), build_policy())
        (incident,) = thought.desired.state.incidents.current
        assert incident.class_ is IncidentClass.UNKNOWN

    @pytest.mark.parametrize(
        ("metric", "before", "value", "news"),
        [
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", None, 5.0, False),  # the exporter was away, and is back
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 5.0, 5.0, False),  # and has been for a while
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 5.0, 6.0, True),
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0, 1.0, True),
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 6.0, 5.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", None, 79.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", 79.0, 79.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", 45.0, 79.0, True),
            ("DCGM_FI_DEV_ROW_REMAP_FAILURE", None, 1.0, False),
        ],
    )
    def test_a_series_that_the_job_has_not_seen_is_news_where_it_has_changed_lately(
        self, metric: str, before: float | None, value: float, news: bool
    ) -> None:
        world = build_training()
        shown = GpuValue("node-1", "0", metric, value, trusted=True, previous_value=before)
        thought = evaluate_job(replace(world, metrics=replace(world.metrics, gpu_values=(shown,))), build_policy())
        assert bool(list_decisions(thought)) is news
        assert bool(thought.desired.state.incidents.quarantine_requests) is news

    def test_what_the_job_has_seen_itself_counts_however_long_ago_it_changed(self) -> None:
        world = build_training()
        seen = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        world = world.with_desired(world.desired.with_gpus(values=seen))
        shown = GpuValue("node-1", "0", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 3.0, previous_value=3.0)
        assert list_decisions(
            evaluate_job(replace(world, metrics=replace(world.metrics, gpu_values=(shown,))), build_policy())
        )

    def test_mig_instances_of_a_gpu_are_told_apart(self) -> None:
        """Their XIDs are sticky, and differ: each is news once."""
        world = build_training()
        values = tuple(
            GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", xid, instance=instance)
            for xid, instance in ((45.0, "1"), (31.0, "2"))
        )
        world = replace(world, metrics=replace(world.metrics, gpu_values=values))
        thought = evaluate_job(world, build_policy())
        for now in (1, 2):
            thought = evaluate_job(replace(again(thought, world), now=NOW + now), build_policy())
        assert not list_decisions(thought)

    def test_a_counter_that_falls_is_no_error(self) -> None:
        world = self.with_value(build_training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0)
        seen = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        assert not list_decisions(
            evaluate_job(world.with_desired(world.desired.with_gpus(values=seen)), build_policy())
        )

    def test_a_job_that_stands_still_gets_no_checkpoint_and_waits_for_none(self) -> None:
        world = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        world = again(evaluate_job(world, build_policy()), world, faults=build_stalls(world, culprit=1))
        thought = evaluate_job(world, build_policy())
        assert seats(thought.desired)[1] == "j-w4-0"
        assert len(thought.desired.state.incidents.current) == 1

    def test_a_gauge_that_never_resets_fires_once(self) -> None:
        world = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 45.0)
        thought = evaluate_job(world, build_policy())
        assert len(list_decisions(thought)) == 1
        assert not list_decisions(evaluate_job(replace(again(thought, world), now=NOW + 1), build_policy()))

    def test_what_a_node_showed_before_the_job_came_is_no_news(self) -> None:
        world = build_training()
        world = world.with_desired(world.desired.with_gpus(nodes=()))
        assert not list_decisions(evaluate_job(self.with_value(world, "DCGM_FI_DEV_XID_ERRORS", 79.0), build_policy()))

    def test_an_uncorrectable_memory_error_is_fatal(self) -> None:
        thought = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0), build_policy())
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-1"]

    def test_a_node_without_a_worker_of_the_job_is_not_its_business(self) -> None:
        assert not list_decisions(
            evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, "node-9"), build_policy())
        )

    def test_the_launchers_own_word_is_enough(self) -> None:
        fault = FaultReport(
            "g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="XID 79 on GPU-4711"
        )
        thought = evaluate_job(replace(build_training(), faults=(fault,)), build_policy())
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-1"]
        assert "g" in thought.desired.state.incidents.settled_faults
        assert "XID 79 on GPU-4711" in thought.desired.state.incidents.current[0].evidence

    def test_a_launchers_word_is_none_against_its_node(self) -> None:
        """It helps inside of the job at once; of the node it is a suspicion, as anybody could raise it."""
        fault = FaultReport("g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79)
        thought = evaluate_job(replace(build_training(), faults=(fault,)), build_policy())
        (wanted,) = thought.desired.state.incidents.quarantine_requests
        assert (wanted.node, wanted.witness) == ("node-1", Witness.NONE)
        assert thought.desired.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_the_node_that_is_suspected_is_the_api_servers_word(self) -> None:
        """Not the one that the template asked for, nor any that the report may name."""
        world = change_worker(build_training(), "j-w1-0", pod={"node": "node-1"})
        worker = world.state.placement.find_worker("j-w1-0")
        assert worker is not None
        world = world.with_desired(world.desired.with_worker(replace(worker, node="node-1")))
        fault = FaultReport("node-7/0/XID", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="node-7")
        thought = evaluate_job(replace(world, faults=(fault,)), build_policy())
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-1"]

    @pytest.mark.parametrize(("vouched", "witness"), [(True, Witness.GPU_SERIES), (False, Witness.NONE)])
    def test_series_are_a_witness_where_the_platform_vouches_for_them(self, vouched: bool, witness: Witness) -> None:
        world = build_training()
        value = GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0, trusted=vouched)
        thought = evaluate_job(replace(world, metrics=replace(world.metrics, gpu_values=(value,))), build_policy())
        (wanted,) = thought.desired.state.incidents.quarantine_requests
        assert wanted.witness is witness
        assert thought.desired.plan.checkpoint_request == 1, "the job is healed either way"
