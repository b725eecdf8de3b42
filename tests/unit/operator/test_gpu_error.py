"""GPUs that report errors: what that changes inside of a job, and what is said of their nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.reports import Fault, FaultKind
from pacekeeper_operator.api import Class, Outcome, Remedy, Witness
from pacekeeper_operator.decide.think import Thought, think
from pacekeeper_operator.decide.workforce import missing
from pacekeeper_operator.observation import GpuValue, Observation
from pacekeeper_operator.state import Draft
from tests.support.worlds import NOW, change_members, change_worker, decisions, policy, stalls, training


def seats(draft: Draft) -> list[str]:
    return [member.worker for member in draft.plan.members]


def again(thought: Thought, world: Observation, **changes: object) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_draft(thought.draft), **changes)  # type: ignore[arg-type]


class TestGpuError:
    def with_value(self, world: Observation, metric: str, value: float, node: str = "node-1") -> Observation:
        return replace(world, metrics=replace(world.metrics, gpu=(GpuValue(node, "0", metric, value),)))

    def test_a_fatal_xid_means_checkpoint_spare_and_quarantine(self) -> None:
        world = self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        thought = think(world, policy())
        assert thought.draft.plan.checkpoint_request == 1
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-1"]
        answered = change_members(again(thought, world), checkpoint_request=1)
        assert seats(think(answered, policy()).draft)[1] == "j-w4-0"

    def test_a_spare_on_a_broken_gpu_goes_and_the_job_does_not_look_like_recovering(self) -> None:
        thought = think(self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, node="node-4"), policy())
        (incident,) = thought.draft.state.incidents.current
        assert (incident.remedy, incident.outcome) == (Remedy.REPLACE_WORKER, Outcome.RECOVERED)
        assert thought.draft.state.placement.failed_starts == 0
        assert [worker.name for worker in missing(thought.observation)] == ["j-w4-1"]
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-4"]

    def test_without_leave_to_replace_the_node_alone_is_dealt_with(self) -> None:
        allowed = policy(allow=frozenset({Remedy.RESTART_RANKS}))
        thought = think(self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 79.0), allowed)
        (incident,) = thought.draft.state.incidents.current
        assert incident.remedy is None
        assert incident.outcome is not None
        assert thought.draft.plan.membership == 1

    @pytest.mark.parametrize("xid", [13, 31, 43, 45, 68])
    def test_an_xid_of_the_application_touches_nothing(self, xid: int) -> None:
        thought = think(self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), policy())
        assert not thought.draft.state.incidents.quarantines
        assert thought.draft.plan.membership == 1
        assert thought.draft.state.incidents.current[0].class_ is Class.APPLICATION

    @pytest.mark.parametrize("xid", range(144, 151))
    def test_an_nvlink_fault_moves_the_worker_and_a_probe_decides_upon_the_node(self, xid: int) -> None:
        """A link has two ends."""
        world, value = training(), GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", float(xid), vouched=True)
        thought = think(replace(world, metrics=replace(world.metrics, gpu=(value,))), policy())
        (incident,) = thought.draft.state.incidents.current
        assert (incident.class_, incident.remedy) == (Class.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        (wanted,) = thought.draft.state.incidents.quarantines
        assert wanted.witness is Witness.NONE

    @pytest.mark.parametrize("xid", [155, 160, 999])
    def test_an_xid_that_the_table_does_not_hold_touches_nothing_and_is_not_the_scripts(self, xid: int) -> None:
        thought = think(self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), policy())
        assert not thought.draft.state.incidents.quarantines
        assert thought.draft.plan.membership == 1
        assert thought.draft.state.incidents.current[0].class_ is Class.UNKNOWN

    def test_unknown_xids_of_many_nodes_are_one_incident(self) -> None:
        world = training()
        values = tuple(GpuValue(f"node-{i}", "0", "DCGM_FI_DEV_XID_ERRORS", 999.0) for i in range(3))
        thought = think(replace(world, metrics=replace(world.metrics, gpu=values)), policy())
        (incident,) = thought.draft.state.incidents.current
        assert incident.class_ is Class.UNKNOWN

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
        world = training()
        shown = GpuValue("node-1", "0", metric, value, vouched=True, before=before)
        thought = think(replace(world, metrics=replace(world.metrics, gpu=(shown,))), policy())
        assert bool(decisions(thought)) is news
        assert bool(thought.draft.state.incidents.quarantines) is news

    def test_what_the_job_has_seen_itself_counts_however_long_ago_it_changed(self) -> None:
        world = training()
        seen = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        world = world.with_draft(world.draft.with_gpus(values=seen))
        shown = GpuValue("node-1", "0", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 3.0, before=3.0)
        assert decisions(think(replace(world, metrics=replace(world.metrics, gpu=(shown,))), policy()))

    def test_mig_instances_of_a_gpu_are_told_apart(self) -> None:
        """Their XIDs are sticky, and differ: each is news once."""
        world = training()
        values = tuple(
            GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", xid, instance=instance)
            for xid, instance in ((45.0, "1"), (31.0, "2"))
        )
        world = replace(world, metrics=replace(world.metrics, gpu=values))
        thought = think(world, policy())
        for now in (1, 2):
            thought = think(replace(again(thought, world), now=NOW + now), policy())
        assert not decisions(thought)

    def test_a_counter_that_falls_is_no_error(self) -> None:
        world = self.with_value(training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0)
        seen = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        assert not decisions(think(world.with_draft(world.draft.with_gpus(values=seen)), policy()))

    def test_a_job_that_stands_still_gets_no_checkpoint_and_waits_for_none(self) -> None:
        world = self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        world = again(think(world, policy()), world, faults=stalls(world, culprit=1))
        thought = think(world, policy())
        assert seats(thought.draft)[1] == "j-w4-0"
        assert len(thought.draft.state.incidents.current) == 1

    def test_a_gauge_that_never_resets_fires_once(self) -> None:
        world = self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 45.0)
        thought = think(world, policy())
        assert len(decisions(thought)) == 1
        assert not decisions(think(replace(again(thought, world), now=NOW + 1), policy()))

    def test_what_a_node_showed_before_the_job_came_is_no_news(self) -> None:
        world = training()
        world = world.with_draft(world.draft.with_gpus(nodes=()))
        assert not decisions(think(self.with_value(world, "DCGM_FI_DEV_XID_ERRORS", 79.0), policy()))

    def test_an_uncorrectable_memory_error_is_fatal(self) -> None:
        thought = think(self.with_value(training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0), policy())
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-1"]

    def test_a_node_without_a_worker_of_the_job_is_not_its_business(self) -> None:
        assert not decisions(think(self.with_value(training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, "node-9"), policy()))

    def test_the_launchers_own_word_is_enough(self) -> None:
        fault = Fault("g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="XID 79 on GPU-4711")
        thought = think(replace(training(), faults=(fault,)), policy())
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-1"]
        assert "g" in thought.draft.state.incidents.settled
        assert "XID 79 on GPU-4711" in thought.draft.state.incidents.current[0].evidence

    def test_a_launchers_word_is_none_against_its_node(self) -> None:
        """It helps inside of the job at once; of the node it is a suspicion, as anybody could raise it."""
        fault = Fault("g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79)
        thought = think(replace(training(), faults=(fault,)), policy())
        (wanted,) = thought.draft.state.incidents.quarantines
        assert (wanted.node, wanted.witness) == ("node-1", Witness.NONE)
        assert thought.draft.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_the_node_that_is_suspected_is_the_api_servers_word(self) -> None:
        """Not the one that the template asked for, nor any that the report may name."""
        world = change_worker(training(), "j-w1-0", pod={"node": "node-1"})
        worker = world.state.placement.worker("j-w1-0")
        assert worker is not None
        world = world.with_draft(world.draft.with_worker(replace(worker, node="node-1")))
        fault = Fault("node-7/0/XID", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="node-7")
        thought = think(replace(world, faults=(fault,)), policy())
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-1"]

    @pytest.mark.parametrize(("vouched", "witness"), [(True, Witness.GPU_SERIES), (False, Witness.NONE)])
    def test_series_are_a_witness_where_the_platform_vouches_for_them(self, vouched: bool, witness: Witness) -> None:
        world = training()
        value = GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0, vouched=vouched)
        thought = think(replace(world, metrics=replace(world.metrics, gpu=(value,))), policy())
        (wanted,) = thought.draft.state.incidents.quarantines
        assert wanted.witness is witness
        assert thought.draft.plan.checkpoint_request == 1, "the job is healed either way"
