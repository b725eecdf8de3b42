"""Lightning, the real one, under `pacekeeper run`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pacekeeper_rank.records import Phase, RecordKind
from testing.training.frameworks import EXAMPLES, RANKS, TrainingOutcome, assert_same_weights, run_example
from testing.training.ranks import import_before_forks

pytestmark = pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="Lightning is not installed")

TRAINER = "lightning_trainer.py"
STEPS, EPOCH = 64, 16


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """So that none of the ranks has to: they are forked from this process."""
    import_before_forks(["pytorch_lightning"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> TrainingOutcome:
    trained = run_example(TRAINER, tmp_path_factory.mktemp("calm"))
    assert trained.exit_code == 0, trained.log
    return trained


def test_its_steps_phases_checkpoints_and_losses_are_recorded(calm: TrainingOutcome) -> None:
    for rank in range(RANKS):
        records = calm.read_records(rank)
        assert records[records["kind"] == RecordKind.STEP]["step"].tolist() == list(range(1, STEPS + 1))
        phases = records[records["kind"] == RecordKind.PHASE]
        assert (phases["phase"] == Phase.EVALUATE).sum() == 1 + STEPS // EPOCH  # Lightning tries one first
        checkpoints = phases[phases["phase"] == Phase.CHECKPOINT]
        assert set(checkpoints["step"].tolist()) == {epoch * EPOCH + 1 for epoch in range(1, 5)}
        assert (records["kind"] == RecordKind.LOSS).sum() == STEPS // 5
        assert calm.read_state(rank)["checkpoint_step"] == STEPS


def test_a_crashed_rank_goes_on_from_the_last_checkpoint(calm: TrainingOutcome, tmp_path: Path) -> None:
    crashed = run_example(TRAINER, tmp_path, crash="1 1 40")
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 39" in crashed.log
    assert crashed.count_steps(0, 2) == STEPS - 2 * EPOCH
    assert crashed.read_state(0)["restored_step"] == 2 * EPOCH
    assert_same_weights(calm, crashed)


def test_all_ranks_leave_after_a_checkpoint_if_one_receives_sigterm(tmp_path: Path) -> None:
    """In the middle of an epoch, whose samples Lightning distributes again: the steps are right, not the weights."""
    left = run_example(TRAINER, tmp_path, crash="1 1 25", SIGNAL="SIGTERM")
    assert left.exit_code == 0, left.log
    leaving = left.count_steps(0, 1)
    assert 25 < leaving < 30
    assert left.count_steps(1, 1) == leaving
    assert left.count_steps(0, 2) == left.count_steps(1, 2) == STEPS - leaving
    assert left.read_state(1)["restored_step"] == leaving


def test_it_is_monitored_and_restarted_without_any_code(calm: TrainingOutcome, tmp_path: Path) -> None:
    text = (EXAMPLES / TRAINER).read_text().replace("LightningCallback(), ", "")
    text = text.replace("from pacekeeper.integrations.lightning import LightningCallback", "import pacekeeper.auto")
    assert "LightningCallback()" not in text
    (tmp_path / "script.py").write_text(text)
    crashed = run_example(str(tmp_path / "script.py"), tmp_path, crash="1 1 40")
    assert crashed.exit_code == 0, crashed.log
    assert "rank 1 was killed by SIGKILL in round 1 after step 39" in crashed.log
    assert_same_weights(calm, crashed)


def test_without_a_last_checkpoint_it_names_what_is_missing(tmp_path: Path) -> None:
    text = (EXAMPLES / TRAINER).read_text().replace(", save_last=True", "")
    (tmp_path / "script.py").write_text(text)
    refused = run_example(str(tmp_path / "script.py"), tmp_path)
    assert refused.exit_code == 1
    assert "add ModelCheckpoint(folder, save_last=True), and call fit(" in refused.log
