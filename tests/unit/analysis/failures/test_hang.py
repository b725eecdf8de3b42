"""Which ranks are blamed for a hang, and which are not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pacekeeper_analysis.failures.hang import HangKind, diagnose_hang
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.reports import DEBUGGER_WAIT, BlockedConnection, FaultKind, FaultReport, RankState

WAITING = RankState(
    rank=0,
    phase="TRAIN",
    phase_seconds=9.0,
    step=41,
    collective="ALL_REDUCE",
    group=1,
    sequence=100,
    collectives_entered=100,
    waiting_seconds=3.0,
    process_state="S",
    moving=False,
    stack='File "/lib/torch/distributed/distributed_c10d.py", line 12 in all_reduce',
)
OUTSIDE = replace(
    WAITING, collective="NONE", sequence=99, collectives_entered=99, stack="File train.py, line 9, in spin"
)


def build_stalls(*states: RankState, round_number: int = 1) -> list[FaultReport]:
    """One worker a rank, each with its own report; `states` in rank order."""
    return [
        FaultReport(
            f"w{rank}-stall", FaultKind.STALLED, f"w{rank}", round_number, 10.0, ranks=(replace(state, rank=rank),)
        )
        for rank, state in enumerate(states)
    ]


def test_the_rank_that_never_entered_is_blamed() -> None:
    found = diagnose_hang(build_stalls(WAITING, WAITING, OUTSIDE, WAITING), world_size=4)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (2,))
    assert "line 9, in spin" in found.evidence[0]


def test_a_stopped_process_is_blamed_even_inside_the_collective() -> None:
    found = diagnose_hang(build_stalls(WAITING, replace(WAITING, process_state="T", stack=""), WAITING), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.STOPPED, (1,))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/clones/pacekeeper/job/train.py", HangKind.NEVER_ENTERED),
        ("/lib/python3.11/site-packages/pacekeeper/step.py", None),
        ("/clones/pacekeeper/trainer/pacekeeper/step.py", None),
        ("/lib/python3.11/site-packages/pacekeeper_rank/recorder.py", None),
        ("/clones/pacekeeper/trainer/pacekeeper_rank/recorder.py", None),
        ("/pacekeeper/payload/importlib_bootstrap/_pacekeeper_rank/recorder.py", None),
    ],
)
def test_a_script_may_lie_in_a_folder_of_any_name(file: str, kind: HangKind | None) -> None:
    """With a collective under way it counts as inside, and only its stack shows where it stands."""
    standing = replace(WAITING, stack=f'File "{file}", line 9 in spin')
    found = diagnose_hang(build_stalls(WAITING, standing, WAITING), world_size=3)
    assert (None if found is None else found.kind) == kind


def test_no_rank_is_blamed_before_all_have_reported() -> None:
    assert diagnose_hang(build_stalls(WAITING, WAITING, OUTSIDE), world_size=4) is None


@pytest.mark.parametrize("phase", ["COMPILE", "EVALUATE", "CHECKPOINT", "DATA", "START", "RESTORE"])
def test_a_long_phase_excuses_every_rank(phase: str) -> None:
    busy = replace(OUTSIDE, phase=phase, phase_seconds=60.0)
    assert diagnose_hang(build_stalls(WAITING, busy, WAITING), world_size=3) is None


def test_a_phase_beyond_its_ceiling_excuses_no_rank() -> None:
    stuck = replace(OUTSIDE, phase="DATA", phase_seconds=2000.0)
    found = diagnose_hang(build_stalls(WAITING, stuck, WAITING), world_size=3, ceiling_seconds=1800.0)
    assert found is not None
    assert found.ranks == (1,)


def test_a_rank_that_still_works_outside_of_collectives_is_slow_and_not_hung() -> None:
    assert diagnose_hang(build_stalls(WAITING, replace(OUTSIDE, moving=True), WAITING), world_size=3) is None


@pytest.mark.parametrize("elsewhere", [OUTSIDE, replace(WAITING, stack='File "/w/train.py", line 9 in upload')])
def test_a_rank_with_an_external_wait_has_its_time_and_is_shown_how_to_get_more(
    elsewhere: RankState,
) -> None:
    waits = replace(elsewhere, waits_for="a child process (7 ffmpeg)", excused=True)
    assert diagnose_hang(build_stalls(WAITING, waits, WAITING), world_size=3) is None
    assert diagnose_hang(build_stalls(waits), world_size=1) is None
    found = diagnose_hang(build_stalls(WAITING, replace(waits, excused=False), WAITING), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))
    for part in ("a child process (7 ffmpeg)", "hangSeconds", "job.phase"):
        assert part in found.evidence[0]


@pytest.mark.parametrize("debugged", [OUTSIDE, replace(WAITING, process_state="t", stack="")])
def test_no_rank_is_blamed_while_a_debugger_is_attached_to_one(debugged: RankState) -> None:
    looked_into = replace(debugged, waits_for=DEBUGGER_WAIT, excused=True, waiting_seconds=9_000.0)
    assert diagnose_hang(build_stalls(replace(WAITING, waiting_seconds=9_000.0), looked_into), world_size=2) is None


def test_a_wait_in_the_library_is_a_wait_for_ranks_that_are_evaluated_themselves() -> None:
    """Over sockets, for example for the ranks' agreement: no wait for anything else."""
    asking = replace(
        OUTSIDE, excused=True, waits_for="a socket", stack='File "/x-packages/pacekeeper/exchange.py", line 5'
    )
    found = diagnose_hang(build_stalls(asking, asking), world_size=2)
    assert found is not None


ENDED = replace(OUTSIDE, ended=True, process_state="", stack="", step=60)


@pytest.mark.parametrize(
    "last",
    [
        OUTSIDE,
        replace(OUTSIDE, phase="FINISHED", phase_seconds=90_000.0, overdue=True),
        replace(OUTSIDE, process_state="D", waiting_seconds=9_000.0),
    ],
)
def test_ranks_outside_of_collectives_may_take_any_time_once_a_rank_has_finished(last: RankState) -> None:
    """Exports, uploads, threads at the end."""
    assert diagnose_hang(build_stalls(last, ENDED, ENDED), world_size=3) is None


def test_a_rank_that_has_finished_training_is_not_blamed() -> None:
    finished = replace(OUTSIDE, phase="FINISHED", phase_seconds=90_000.0, overdue=True)
    assert diagnose_hang(build_stalls(finished, finished), world_size=2) is None
    assert diagnose_hang(build_stalls(finished, OUTSIDE), world_size=2) is None
    found = diagnose_hang(build_stalls(replace(finished, process_state="T"), OUTSIDE), world_size=2)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.STOPPED, (0,))


def test_a_collective_without_an_exited_rank_never_ends() -> None:
    all_three = (Communicator(1, "0-2", "data"),)
    reports = [
        replace(fault, communicators=all_three) for fault in build_stalls(replace(WAITING, step=60), ENDED, OUTSIDE)
    ]
    found = diagnose_hang(reports, world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))
    assert "exited with code 0 after step 60" in found.evidence[0]


def test_a_rank_that_waits_for_an_exporting_rank_does_not_wait_for_an_exited_one() -> None:
    """The barrier is of two ranks, and the third is no member of it."""
    pair = (Communicator(8, "0-1", "data"),)
    waiting = replace(WAITING, group=8, sequence=5)
    reports = [
        replace(fault, communicators=pair) for fault in build_stalls(waiting, replace(OUTSIDE, moving=True), ENDED)
    ]
    assert diagnose_hang(reports, world_size=3) is None


def test_a_collective_that_differs_from_the_peers_is_a_mismatch() -> None:
    found = diagnose_hang(build_stalls(WAITING, WAITING, replace(WAITING, collective="BROADCAST")), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (2,))


def test_the_odd_rank_is_the_one_that_differs_from_all_others() -> None:
    pair = replace(WAITING, group=8, sequence=5)
    gathering = replace(pair, collective="ALL_GATHER")
    others = [WAITING] * 3
    for states, odd in (([pair, gathering, *others], 1), ([gathering, pair, *others], 0)):
        reports = [replace(fault, communicators=(Communicator(8, "0-1", "data"),)) for fault in build_stalls(*states)]
        found = diagnose_hang(reports, world_size=5)
        assert found is not None
        assert (found.kind, found.ranks) == (HangKind.MISMATCH, (odd,))
    of_two = [
        replace(fault, communicators=(Communicator(8, "0-1", "data"),)) for fault in build_stalls(pair, gathering)
    ]
    both = diagnose_hang(of_two, world_size=2)
    assert both is not None
    assert (both.kind, both.ranks) == (HangKind.MISMATCH, (0, 1)), "the reports do not show which"


def test_one_behind_in_the_same_group_is_a_mismatch() -> None:
    found = diagnose_hang(build_stalls(WAITING, replace(WAITING, sequence=99), WAITING), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (1,))


def test_a_stopped_process_is_blamed_before_all_have_reported() -> None:
    """In the first steps of a round its peers have long deadlines, and nothing to report."""
    stopped = replace(OUTSIDE, rank=2, process_state="T", stack="", phase="START")
    found = diagnose_hang(build_stalls(WAITING, WAITING, stopped)[2:], world_size=4)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.STOPPED, (2,))


def test_all_inside_the_same_collective_is_a_link_and_no_ranks_fault() -> None:
    assert diagnose_hang(build_stalls(WAITING, WAITING, WAITING), world_size=3) is None, (
        "bytes may still come over a slow link"
    )
    long = replace(WAITING, waiting_seconds=10.5)
    found = diagnose_hang(build_stalls(long, long, long), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.COMMUNICATION, ())


@pytest.mark.parametrize(("seconds", "expected"), [(0.9, False), (2.1, True)])
def test_a_connection_without_progress_is_not_waited_for(seconds: float, expected: bool) -> None:
    reports = build_stalls(WAITING, WAITING, WAITING)
    reports[1] = replace(reports[1], blocked=(BlockedConnection(1, "10.0.0.3:5000", seconds),))
    found = diagnose_hang(reports, world_size=3)
    assert (found is not None and found.kind is HangKind.COMMUNICATION) == expected
    late = replace(reports[1], name="later", noticed_at=13.0, blocked=())
    assert diagnose_hang([*reports, late], world_size=3) is None, "it came through after all"
    culprit = [*reports[:2], replace(build_stalls(WAITING, WAITING, OUTSIDE)[2])]
    held = diagnose_hang(culprit, world_size=3)
    assert held is not None
    assert (held.kind, held.ranks) == (HangKind.NEVER_ENTERED, (2,)), "a rank that never came goes before all else"


def test_reports_of_an_earlier_round_do_not_count() -> None:
    old = build_stalls(WAITING, OUTSIDE, WAITING)
    assert diagnose_hang([*old, *build_stalls(WAITING, WAITING, round_number=2)], world_size=3) is None


def test_the_newest_report_of_a_rank_counts() -> None:
    first = build_stalls(WAITING, replace(OUTSIDE, moving=True), WAITING)
    later = [
        replace(fault, name=fault.name + "-2", noticed_at=11.0) for fault in build_stalls(WAITING, OUTSIDE, WAITING)
    ]
    found = diagnose_hang([*later, *first], world_size=3)
    assert found is not None
    assert found.ranks == (1,)


ON_GPU = replace(
    WAITING,
    device="STARTED",
    device_collective="ALL_REDUCE",
    device_group=7,
    device_sequence=50,
    stack="in synchronize",
)
"""Its host has issued collectives ahead and waits for its GPU, whose all-reduce waits for a peer."""
BEFORE = replace(ON_GPU, device="SCHEDULED")


@pytest.mark.parametrize("ahead", [-2, 0, 2])
def test_a_gpu_that_has_not_begun_its_peers_collective_is_blamed(ahead: int) -> None:
    """However far its host has run ahead."""
    culprit = replace(BEFORE, sequence=100 + ahead, collectives_entered=100 + ahead)
    found = diagnose_hang(build_stalls(ON_GPU, ON_GPU, culprit, ON_GPU), world_size=4)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.KERNEL, (2,))
    assert "its GPU still before ALL_REDUCE 50" in found.evidence[0]


def test_hosts_that_have_run_ahead_differently_are_no_mismatch_while_their_gpus_are_in_the_same_collective() -> None:
    ranks = [replace(ON_GPU, sequence=100 + rank, waiting_seconds=11.0) for rank in range(3)]
    found = diagnose_hang(build_stalls(*ranks), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.COMMUNICATION, ())
    assert "ALL_REDUCE 50" in found.evidence[0]


@pytest.mark.parametrize("changes", [{"device_sequence": 49}, {"device_collective": "BROADCAST"}])
def test_a_gpu_in_a_different_collective_than_its_peers_is_a_mismatch(changes: dict[str, object]) -> None:
    odd = replace(ON_GPU, **changes)  # type: ignore[arg-type]  # fields of RankState
    found = diagnose_hang(build_stalls(ON_GPU, odd, ON_GPU), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (1,))


def test_sends_and_receives_are_numbered_by_each_rank_separately() -> None:
    """As in a pipeline, whose middle sends and receives more."""
    ranks = [replace(ON_GPU, device_group=0, device_sequence=rank, device_collective="RECV") for rank in range(3)]
    assert diagnose_hang(build_stalls(*ranks), world_size=3) is None


@pytest.mark.parametrize("host", [{"collective": "NONE"}, {"collective": "ALL_REDUCE"}])
def test_a_rank_with_an_idle_gpu_never_entered_its_peers_collective(host: dict[str, str]) -> None:
    """Its host may still report the last collective, whose end it has not noticed."""
    culprit = replace(OUTSIDE, device="IDLE", **host)  # type: ignore[arg-type]  # fields of RankState
    found = diagnose_hang(build_stalls(ON_GPU, culprit, ON_GPU), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))
    moving = replace(culprit, moving=True)
    assert diagnose_hang(build_stalls(ON_GPU, moving, ON_GPU), world_size=3) is None


def test_an_idle_gpu_is_no_sign_against_a_rank_that_waits_for_others_on_its_host() -> None:
    waiting = replace(WAITING, collective="BARRIER", device="IDLE")
    found = diagnose_hang(build_stalls(waiting, replace(OUTSIDE, device="IDLE"), waiting), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))
    found = diagnose_hang(build_stalls(waiting, BEFORE, waiting), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.KERNEL, (1,))


def test_a_rank_that_still_works_is_not_blamed_for_its_gpu() -> None:
    assert diagnose_hang(build_stalls(ON_GPU, replace(BEFORE, moving=True), ON_GPU), world_size=3) is None


def test_no_rank_is_blamed_before_all_gpus_have_been_checked() -> None:
    """Unless it lasts: a rank that holds Python's lock cannot report further, and no report of it is needed."""
    unknown = replace(OUTSIDE, device="RUNNING")
    assert diagnose_hang(build_stalls(ON_GPU, unknown, ON_GPU), world_size=3) is None
    found = diagnose_hang(build_stalls(ON_GPU, replace(unknown, waiting_seconds=10.5), ON_GPU), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))


def test_a_loader_that_exceeds_its_limit_is_blamed() -> None:
    stuck = replace(OUTSIDE, phase="DATA", phase_seconds=61.0, overdue=True)
    found = diagnose_hang(build_stalls(WAITING, stuck, WAITING), world_size=3)
    assert found is not None
    assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (1,))
    assert "in phase DATA" in found.evidence[0]
    assert diagnose_hang(build_stalls(WAITING, replace(stuck, moving=True), WAITING), world_size=3) is None


@pytest.mark.parametrize("device", ["NONE", "IDLE"])
def test_thousands_of_ranks_are_evaluated_in_a_moment(device: str) -> None:
    """Each in a group of its own, or each with a host that has to be compared with all others of its group."""
    groups = 8192 if device == "NONE" else 1
    ranks = tuple(replace(WAITING, rank=rank, group=rank % groups, device=device) for rank in range(8192))
    began = time.process_time()
    assert diagnose_hang(build_stalls(*ranks), world_size=len(ranks)) is None
    assert time.process_time() - began < 3.0, "it takes 0.2 s; by the square of the ranks, 8 s"
