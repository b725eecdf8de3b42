"""Hugging Face's Trainer and Accelerate, the real ones, under `pacekeeper run`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_rank.records import Phase, RecordKind
from testing.training.frameworks import EXAMPLES, RANKS, TrainingOutcome, assert_same_weights, run_example
from testing.training.ranks import import_before_forks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

TRAINER = "huggingface_trainer.py"
STEPS = 48


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """So that none of the ranks has to: they are forked from this process."""
    import_before_forks(["transformers.trainer"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> TrainingOutcome:
    trained = run_example(TRAINER, tmp_path_factory.mktemp("calm"))
    assert trained.exit_code == 0, trained.log
    return trained


def list_steps(records: NDArray[np.void]) -> list[int]:
    return [int(step) for step in records[records["kind"] == RecordKind.STEP]["step"]]


def test_its_steps_phases_checkpoints_and_losses_are_recorded(calm: TrainingOutcome) -> None:
    for rank in range(RANKS):
        records = calm.read_records(rank)
        assert list_steps(records) == list(range(1, STEPS + 1))
        phases = records[records["kind"] == RecordKind.PHASE]
        assert (phases["phase"] == Phase.EVALUATE).sum() == 3  # of steps 20, 40 and the last
        assert (phases["phase"] == Phase.CHECKPOINT).sum() == 5  # of each tenth and the last
        assert (records["kind"] == RecordKind.LOSS).sum() == 9  # of each fifth
        assert calm.read_state(rank)["checkpoint_step"] == STEPS
        assert 3.0 < calm.read_state(rank)["loss"] < 3.4


def test_a_crashed_rank_goes_on_from_the_newest_checkpoint(calm: TrainingOutcome, tmp_path: Path) -> None:
    crashed = run_example(TRAINER, tmp_path, crash="1 1 25")
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 24" in crashed.log
    assert crashed.count_steps(0, 2) == STEPS - 20
    assert list_steps(crashed.read_records(0)) == list(range(21, STEPS + 1))
    assert crashed.read_state(0)["restored_step"] == 20
    assert_same_weights(calm, crashed)


def test_all_ranks_leave_after_a_checkpoint_if_one_receives_sigterm(calm: TrainingOutcome, tmp_path: Path) -> None:
    left = run_example(TRAINER, tmp_path, crash="1 1 25", SIGNAL="SIGTERM")
    assert left.exit_code == 0, left.log
    leaving = left.count_steps(0, 1)
    assert 25 < leaving < 30, "all have received it a step later, and no rank waits for the next regular checkpoint"
    assert left.count_steps(1, 1) == leaving
    assert left.count_steps(0, 2) == left.count_steps(1, 2) == STEPS - leaving
    assert_same_weights(calm, left)


def test_it_is_monitored_and_restarted_without_any_code(calm: TrainingOutcome, tmp_path: Path) -> None:
    text = (EXAMPLES / TRAINER).read_text()
    for ours, theirs in {
        "from pacekeeper.integrations.huggingface import HuggingFaceCallback, find_newest_checkpoint": (
            "from transformers.trainer_utils import get_last_checkpoint"
        ),
        "trainer.add_callback(HuggingFaceCallback())\n": "",
        "find_newest_checkpoint(folder)": "get_last_checkpoint(folder) if os.path.isdir(folder) else None",
    }.items():
        assert ours in text
        text = text.replace(ours, theirs)
    (tmp_path / "script.py").write_text("import pacekeeper.auto\n" + text)
    crashed = run_example(str(tmp_path / "script.py"), tmp_path, crash="1 1 25")
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 24" in crashed.log
    assert crashed.count_steps(0, 2) == STEPS - 20
    assert list_steps(crashed.read_records(0)) == list(range(1, STEPS - 20 + 1)), "of its round"
    assert_same_weights(calm, crashed)


def test_a_loop_of_accelerate_is_monitored_and_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    calm = run_example("accelerate_loop.py", tmp_path / "calm")
    assert calm.exit_code == 0, calm.log
    crashed = run_example("accelerate_loop.py", tmp_path / "crashed", crash="1 1 25")
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 24" in crashed.log
    assert (calm.count_steps(0, 1), crashed.count_steps(0, 2)) == (48, 28)
    assert_same_weights(calm, crashed)
