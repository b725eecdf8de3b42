"""Training loops that other people wrote: a rank is killed, and the job ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.training.frameworks import RANKS, assert_same_weights, run_example


@pytest.mark.oldest_torch
@pytest.mark.parametrize(
    ("example", "steps", "steps_after_crash"),
    [
        ("ddp_loop.py", 48, 28),
        ("fsdp2_loop.py", 40, 21),  # one is torch's own: it makes the optimizer's state before it is loaded
    ],
)
def test_a_plain_loop_goes_on_from_its_own_checkpoint(
    example: str, steps: int, steps_after_crash: int, tmp_path: Path
) -> None:
    calm = run_example(example, tmp_path / "calm")
    assert calm.exit_code == 0, calm.log
    crashed = run_example(example, tmp_path / "crashed", crash="1 1 25")  # checkpoints come every ten steps
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 24" in crashed.log, "its steps are watched"
    for rank in range(RANKS):
        assert calm.count_steps(rank, 1) == steps
        assert crashed.count_steps(rank, 2) == steps_after_crash
    assert_same_weights(calm, crashed)
