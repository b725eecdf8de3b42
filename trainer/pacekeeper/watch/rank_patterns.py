"""The pattern of a watched rank: of what it has sampled in a profile window, and its ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pacekeeper.observe.profiling.known_spans import collect_known_spans, find_complete_start, select_steps
from pacekeeper_analysis.profiling.pattern import RankPattern
from pacekeeper_analysis.profiling.reduce import StackSamples, WindowRecording, reduce_window
from pacekeeper_analysis.protocol.requests import SourceNaming
from pacekeeper_analysis.protocol.watched_container import ProfileRecording, RankDescription


def build_rank_pattern(
    recording: ProfileRecording, records: NDArray[np.void], rank: RankDescription
) -> RankPattern | None:
    """Return the pattern; None: no step was complete in the window. `records`: of the rank's ring, oldest first.

    Steps are those that the rank counts. Kernels of a GPU are not sampled, so that its time belongs to the Python
    function that waits for it.
    """
    between = max(recording.began_ns, find_complete_start(records)), recording.ended_ns
    steps = select_steps(records, between)
    if steps is None:
        return None
    waits = list(zip(recording.wait_begins_ns, recording.wait_ends_ns, strict=True))
    return reduce_window(
        WindowRecording(
            rank=rank.rank,
            round=rank.restart + 1,
            first_step=steps.first,
            step_seconds=steps.seconds,
            own_seconds=steps.own_seconds,
            lengths=steps.lengths,
            samples=0,
            stack_samples=_select_samples(recording, between),
            spans=collect_known_spans(records, waits, (), between),
            sources=SourceNaming.SHOW,
        )
    )


def _select_samples(recording: ProfileRecording, between: tuple[int, int]) -> StackSamples:
    stacks: Sequence[tuple[str, ...]] = [
        tuple(recording.names[number] for number in stack) for stack in recording.stacks
    ]
    samples = zip(recording.taken_ns, recording.ran_ns, recording.stack_of_sample, strict=True)
    return StackSamples.from_lists([sample for sample in samples if between[0] <= sample[0] < between[1]], stacks)
