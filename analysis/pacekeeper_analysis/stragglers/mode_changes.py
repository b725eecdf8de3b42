"""When the sync mode may change: one rule for the operator and for a run on one machine."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.reports import RankWindow
from .strategies import Bottleneck, Strategy, propose_revert_to_sync

SYNC_MODE_COOL_DOWN_SECONDS = 15.0
"""Least time that a mode, or a smaller number of workers, stays. It is longer where changes follow each other."""
MIN_MODE_CHANGE_VOTES = 2
"""Answers in a row that must propose another mode: one may be chance."""
MIN_VOLATILE_VOTE_STEPS = 32
"""Steps over which answers must show no slow ranks that come and go.

In a window of eight, all ranks may have been spared, or hit alike.
"""
VOLATILE_SLOWDOWN = 1.3
"""Slowdown from which slow ranks that come and go are more than what shared processors always show."""
SYNC_COST_RATIO = 1.3
"""Factor by which the S that is computed from the time of a synchronization is too high.

A synchronization does more than the all-reduce of a step. A link that is still slightly slow brings the mode back, and
each such return doubles the time it stays.
"""


def propose_lasting_revert(
    windows: Sequence[RankWindow], *, threshold: float, bottleneck: Bottleneck, global_batch: int | None = None
) -> Strategy | None:
    """Propose to revert to synchronous SGD, as `propose_revert_to_sync`, by what machines always show.

    `bottleneck` led to the present mode. Slow ranks that come and go must then be half as bad as what leads there.
    """
    halved = 1 + (VOLATILE_SLOWDOWN - 1) / 2
    return propose_revert_to_sync(
        windows,
        threshold=threshold,
        bottleneck=bottleneck,
        global_batch=global_batch,
        usual_slowdowns={
            Bottleneck.VOLATILE: halved if bottleneck is Bottleneck.VOLATILE else VOLATILE_SLOWDOWN,
            Bottleneck.COMMUNICATION: SYNC_COST_RATIO,
        },
    )


def is_mode_change_confirmed(bottleneck: Bottleneck, votes: int, first_vote_step: int, step: int) -> bool:
    """Return whether enough answers in a row have proposed another mode.

    `first_vote_step`: the step at the first of them. `step`: the present one.
    """
    return votes >= MIN_MODE_CHANGE_VOTES and (
        bottleneck is not Bottleneck.VOLATILE or step >= first_vote_step + MIN_VOLATILE_VOTE_STEPS
    )
