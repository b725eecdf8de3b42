"""Each defect that simulation has found does not come back; and with its mend undone, it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from pacekeeper.launcher.rendezvous import rounds as rounds_of_launchers
from pacekeeper_analysis.protocol.reports import FaultReport, LauncherState
from pacekeeper_analysis.stragglers import windows
from pacekeeper_operator import async_runtime
from pacekeeper_operator.decide import check_runner, remedies
from pacekeeper_operator.decide import decision as decisions
from pacekeeper_operator.decide.failures import crash, node_lost, start_failed, superseded_faults, unresponsive
from pacekeeper_operator.decide.lifecycle import lifecycle
from pacekeeper_operator.decide.nodes import node_probes, node_suspicion
from pacekeeper_operator.decide.placement import elastic_scaling, membership, workforce
from pacekeeper_operator.decide.remedies.action_result import ActionResult
from pacekeeper_operator.decide.stragglers import straggler
from pacekeeper_operator.endpoint import sidecars
from pacekeeper_operator.handlers import trainingjobs
from pacekeeper_operator.kube import leader_election, server_clock, store
from pacekeeper_operator.observe import gather, job_cache, peer_jobs, prometheus
from pacekeeper_operator.runtime import effect_runner, job_state, reconcile
from pacekeeper_operator.services import incidents, operator
from pacekeeper_operator.services.shared import passes, watched_stores
from pacekeeper_operator.state import cluster_view, desired_state, rounds
from pacekeeper_operator.state.job_metrics import GpuValue
from pacekeeper_operator.state.observation import Observation
from simulation.checkers import Violation
from simulation.run import run_schedule
from simulation.scenarios.known_defects import DEFECT_SCENARIOS, DefectScenario
from simulation.schedule import HEALED_BY_SECONDS
from simulation.world import EPOCH

Patch = pytest.MonkeyPatch
GRACE_SECONDS = 150.0
"""Virtual seconds after the last fault within which all is well again."""
UNDONE: dict[str, Callable[[Patch], None]] = {}


def undoes(name: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers what takes the mend of a scenario away."""

    def register(undo: Callable[[Patch], None]) -> Callable[[Patch], None]:
        UNDONE[name] = undo
        return undo

    return register


async def nothing(*_: Any) -> None:
    return None


@undoes("failed-list")
def _(patch: Patch) -> None:
    patch.setattr(watched_stores.WatchedStores, "wait_until_listed", nothing)


@undoes("broken-gpu")
def _(patch: Patch) -> None:
    def why_not_move(blame: crash._CrashHistory) -> str:
        return "" if blame.out_of_memory else "the worker is not at fault"

    patch.setattr(crash._CrashHistory, "reason_to_stay", property(why_not_move))


@undoes("two-signals")
def _(patch: Patch) -> None:
    def error_of(fault: FaultReport) -> str:
        return fault.error or crash._describe_exit(fault)

    patch.setattr(crash, "extract_error_signature", error_of)
    _nobody_has_trained(patch)


def _nobody_has_trained(patch: Patch) -> None:
    patch.setattr(desired_state.Lifecycle, "has_trained", False)


@undoes("outage-at-start")
@undoes("outage-spends-restarts")
def _(patch: Patch) -> None:
    patch.setattr(crash, "_is_patient", lambda *_: False)


@undoes("outage-at-import")
def _(patch: Patch) -> None:
    _nobody_has_trained(patch)


@undoes("probes-fail-alike")
def _(patch: Patch) -> None:
    patch.setattr(node_probes, "explain_inconclusive", lambda pod: (pod.inconclusive, ""))


@undoes("exporter-is-back")
def _(patch: Patch) -> None:
    """What was not there was 0."""
    errors = prometheus._QueryResult.collect_errors

    def since_nothing(answer: prometheus._QueryResult) -> tuple[GpuValue, ...]:
        return tuple(replace(value, previous_value=value.previous_value or 0.0) for value in errors(answer))

    patch.setattr(prometheus._QueryResult, "collect_errors", since_nothing)


@undoes("rack-loses-power")
def _(patch: Patch) -> None:
    """Nodes that a probe has cleared count no more."""

    def tripped(quarantine: Any, _node: Any, around: Any, *_: Any) -> str:
        return "many fail" if 1 + around.usage.count_unsettled(quarantine) >= around.rules.breaker_nodes else ""

    patch.setattr(node_suspicion, "_explain_breaker", tripped)


@undoes("clock-ahead")
@undoes("clock-ahead-of-an-end")
def _(patch: Patch) -> None:
    patch.setattr(server_clock.ServerClock, "agrees", True)


@undoes("clock-behind-at-an-end")
def _(patch: Patch) -> None:
    patch.setattr(lifecycle, "_date_end", lambda seen: seen.desired)


@undoes("peers-of-a-deleted-worker")
@undoes("peers-of-a-killed-launcher")
def _(patch: Patch) -> None:
    patch.setattr(superseded_faults, "_has_given_up_member", lambda _: False)


@undoes("incident-written-late")
def _(patch: Patch) -> None:
    patch.setattr(incidents, "_build_precondition", lambda _: {})


@undoes("hang-before-warm")
def _(patch: Patch) -> None:
    patch.setattr(start_failed, "WARM_UP_TIMEOUT_SECONDS", math.inf)


@undoes("older-job-cannot-begin")
def _(patch: Patch) -> None:
    def turn(job: Any, draft: Any) -> peer_jobs.PlacementTurn | None:
        return None if draft.plan.members else peer_jobs.PlacementTurn((job.created_at, job.uid), job.name)

    def shown(job: Any, draft: Any, _phase: Any) -> peer_jobs.JobSummary:
        return peer_jobs.JobSummary(job.uid, draft.state.incidents, turn(job, draft))

    patch.setattr(peer_jobs, "_build_placement_turn", turn)
    patch.setattr(peer_jobs.JobSummary, "from_job", staticmethod(shown))
    patch.setattr(workforce, "OLDER_JOB_TURN_SECONDS", math.inf)


@undoes("finished-and-lost")
@undoes("finished-unseen")
def _(patch: Patch) -> None:
    patch.setattr(membership, "_cannot_finish", lambda *_: False)


@undoes("finished-and-removed")
def _(patch: Patch) -> None:
    def ended_well(view: cluster_view.WorkerView, _membership: int) -> bool:
        return view.pod is not None and view.pod.exit_code == 0

    patch.setattr(lifecycle, "_has_finished", ended_well)


@undoes("all-lose-power")
def _(patch: Patch) -> None:
    patch.setattr(node_lost._LivenessSigns, "is_multi_node_failure", False)


@undoes("operator-cut-from-node")
@undoes("operator-cut-from-all")
def _(patch: Patch) -> None:
    def proof(_signs: Any, _policy: Any, view: cluster_view.WorkerView) -> str:
        return "no report arrives" if view.silent_seconds > node_lost.WORKER_SILENT_SECONDS else ""

    patch.setattr(node_lost, "_find_loss_proof", proof)


@undoes("silent-spare")
def _(patch: Patch) -> None:
    patch.setattr(cluster_view, "FRESH_WORKER_SECONDS", math.inf)
    patch.setattr(workforce, "FRESH_WORKER_SECONDS", math.inf)


@undoes("dead-spare-and-resume")
@undoes("suspended-and-lost")
def _(patch: Patch) -> None:
    patch.setattr(workforce, "is_end_unconfirmed", lambda *_: False)


@undoes("hang-after-joining")
def _(patch: Patch) -> None:
    begin = rounds.begin_round
    patch.setattr(rounds, "begin_round", lambda *given: _with_plan(begin(*given), step_seconds=None))


def _with_plan(draft: Any, **changes: Any) -> Any:
    return replace(draft, plan=replace(draft.plan, **changes))


@undoes("unresponsive")
def _(patch: Patch) -> None:
    patch.setattr(unresponsive, "_describe_unresponsive", lambda _: "")


@undoes("replaced-together")
def _(patch: Patch) -> None:
    def is_out_of_contact(turn: rounds_of_launchers._RoundPass) -> bool:
        seen, limit = turn.observation, turn.settings.contact_timeout
        has_ranks = turn.state.running is not None or turn.state.stage is LauncherState.LOST
        return has_ranks and min(seen.operator_age, seen.peers_age) > limit

    patch.setattr(rounds_of_launchers, "_is_out_of_contact", is_out_of_contact)


@undoes("shares-outlive-a-straggler")
def _(patch: Patch) -> None:
    """Steps with other shares stay in the window, and say how the ranks were."""
    patch.setattr(windows, "_find_share_change", lambda _: 0)


@undoes("stray-pod")
def _(patch: Patch) -> None:
    observe = gather.build_observation
    patch.setattr(gather, "build_observation", lambda *given: replace(observe(*given), stray_pods=()))


@undoes("slow-creation")
def _(patch: Patch) -> None:
    patch.setattr(effect_runner, "EFFECT_WAIT_SECONDS", 60.0)


@undoes("no-room-for-a-spare")
def _(patch: Patch) -> None:
    def put_off(_errands: effect_runner.EffectRunner, _effect: Any, tries: effect_runner._Attempts, words: str) -> None:
        tries.error = words

    patch.setattr(effect_runner.EffectRunner, "_schedule_retry", put_off)


@undoes("kept-off-for-good")
def _(patch: Patch) -> None:
    patch.setattr(workforce, "UNPLACED_POD_SECONDS", math.inf)


@undoes("created-anew")
def _(patch: Patch) -> None:
    patch.setattr(job_state, "_belongs_to", lambda *_: True)


@undoes("more-is-allowed")
def _(patch: Patch) -> None:
    def known(seen: Observation, _policy: Any, decision: Any) -> bool:
        return decision.incident_name(seen.job) in seen.state.incidents.list_names()

    patch.setattr(check_runner, "_is_known_decision", known)


@undoes("refused-by-kubelets")
def _(patch: Patch) -> None:
    patch.setattr(start_failed, "_decide_refused_pod", start_failed._decide_failed_start)
    _nobody_has_trained(patch)


@undoes("deleted-unattended")
def _(patch: Patch) -> None:
    patch.setattr(incidents, "_close_incident", nothing)
    patch.setattr(trainingjobs, "close_incidents", nothing)


@undoes("incident-without-bookkeeping")
def _(patch: Patch) -> None:
    patch.setattr(incidents, "supersede_unknown", nothing)


@undoes("rounds-from-one")
def _(patch: Patch) -> None:
    first = job_state.build_initial_state
    patch.setattr(job_state, "build_initial_state", lambda job, pods, now, _: first(job, pods, now))


@undoes("etcd-is-restored")
def _(patch: Patch) -> None:
    patch.setattr(store.ResourceStore, "reset_versions", lambda _: None)


@undoes("job-of-after-a-backup")
def _(patch: Patch) -> None:
    patch.setattr(job_state, "_require_same_job", nothing)


@undoes("bookkeeping-deleted")
def _(patch: Patch) -> None:
    patch.setattr(job_cache.JobRegistry, "verify_states", lambda *_: {})


@undoes("clocks-differ")
def _(patch: Patch) -> None:
    """A worker's word on when something was stands as it is."""

    def apply(_action: Any, decision: Any, seen: Observation) -> Any:
        draft = seen.desired.count_restart(decision.first_sign)
        return ActionResult(draft.with_budget(membership_restarts=draft.state.budget.membership_restarts + 1))

    patch.setitem(cast(Any, remedies.ACTION_HANDLERS), decisions.CountRestart, apply)
    patch.setattr(sidecars, "_convert_time", lambda at, *_: at)


@undoes("survivors-stand-still")
def _(patch: Patch) -> None:
    patch.setattr(elastic_scaling, "can_shrink", lambda *_: False)


@undoes("whole-replicas")
def _(patch: Patch) -> None:
    patch.setattr(elastic_scaling, "_count_replica_workers", lambda _: 1)


@undoes("clock-set-back")
def _(patch: Patch) -> None:
    """What is written is dated by the clock that may jump."""
    write = reconcile._patch_status

    async def by_the_wall(seen: Any, desk: Any, status: Any) -> None:
        runtime, steady = seen.runtime, seen.runtime.monotonic
        runtime.monotonic = runtime.now
        try:
            await write(seen, desk, status)
        finally:
            runtime.monotonic = steady

    patch.setattr(reconcile, "_patch_status", by_the_wall)


@undoes("woken-without-the-lease")
def _(patch: Patch) -> None:
    must_lead = operator.Operator.require_leadership

    def look(seen: operator.Operator) -> None:
        try:
            must_lead(seen)
        except Exception:
            seen.jobs.wake_all()  # as if no pass had noticed it yet
            raise

    async def begin_pass(seen: passes.PassScheduler) -> None:
        await seen.runtime.sleep(0.0)

    patch.setattr(operator.Operator, "require_leadership", look)
    patch.setattr(passes.PassScheduler, "wait_for_pass", begin_pass)


@undoes("lease-not-found")
def _(patch: Patch) -> None:
    """The task that renews the Lease ends with the API server's error, and a former leader goes on unnoticed."""

    async def attempt(lease: leader_election.LeaderElector) -> None:
        if await lease._acquire_or_renew():
            lease._renewed_at = math.inf

    patch.setattr(leader_election.LeaderElector, "_try_acquire_or_renew", attempt)
    patch.setattr(async_runtime.OperatorRuntime, "_on_task_done", lambda *_: None)


def play(scenario: DefectScenario) -> tuple[Violation, ...]:
    """Return what a run violates that ends as soon as its faults are over and the judges are content.

    Each defect shows within that time: `test_without_its_mend_it_does` plays the same."""
    outcome = run_schedule(
        scenario.schedule, patience=scenario.patience, run_to_end=False, seconds=HEALED_BY_SECONDS, grace=GRACE_SECONDS
    )
    if outcome.restarts <= scenario.restarts:
        return outcome.violations
    words = f"{outcome.restarts} have counted, and {scenario.restarts:g} may"
    return (*outcome.violations, Violation(outcome.virtual_seconds, "no restart counts without a cause", words))


@pytest.mark.parametrize("name", DEFECT_SCENARIOS)
def test_a_defect_does_not_come_back(name: str) -> None:
    assert play(DEFECT_SCENARIOS[name]) == ()


@pytest.mark.parametrize("name", DEFECT_SCENARIOS)
def test_without_its_mend_it_does(name: str, monkeypatch: Patch) -> None:
    UNDONE[name](monkeypatch)
    assert play(DEFECT_SCENARIOS[name]) != ()


@pytest.mark.parametrize("mended", [True, False])
def test_a_slow_node_whose_shares_fit_is_not_asked_about_all_the_time(mended: bool, monkeypatch: Patch) -> None:
    """No state of the cluster shows it: questions are counted, of 80 s in which its shares fit and nothing changes."""
    ask, asked = straggler._request_evidence, list[float]()

    def count(observation: Any, suspicion: Any) -> Any:
        asked.append(observation.now - EPOCH)
        return ask(observation, suspicion)

    monkeypatch.setattr(straggler, "_request_evidence", count)
    if not mended:
        monkeypatch.setattr(straggler, "_shares_fit", lambda *_: False)
    assert play(DEFECT_SCENARIOS["shares-outlive-a-straggler"]) == ()
    assert any(now < 200.0 for now in asked), "it was found"
    assert (sum(210.0 < now < 290.0 for now in asked) == 0) is mended
