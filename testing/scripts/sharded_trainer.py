"""Hugging Face's Trainer with FSDP2 on the CPU. As a script, it knows of Pacekeeper only `import pacekeeper.auto`.

In the script's first round, uploads of saves from step 2 on do not end. They do once a later round has resumed, whose
step is written to $FOLDER/resumed-<rank>.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
    trainer_utils,
)

STEPS = 5
"""It saves after each."""


class ShardedTrainer(Trainer):
    """Has what the Trainer has with `fsdp=True` on GPUs; on CPUs, it ignores that."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            cpu_ram_efficient_loading=False,
        )
        self.is_fsdp_enabled = True


def make_trainer(
    output_dir: Path, trainer_class: type[ShardedTrainer] = ShardedTrainer, **arguments: Any
) -> ShardedTrainer:
    """A deterministic training of a small model with dropout, so that random states count."""
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    texts = (torch.arange(64)[:, None] + torch.arange(8)) % 64
    data: Any = [{"input_ids": text, "labels": text} for text in texts]
    settings = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    return trainer_class(model, settings, train_dataset=data)


def block_uploads(is_released: Path) -> None:
    """From here on, uploads of saves from step 2 on wait for a file."""
    write_data: Any = FileSystemWriter.write_data

    def write_later(self: Any, *arguments: Any) -> Any:
        while not is_released.exists() and "/checkpoint-1/" not in str(self.checkpoint_id):
            time.sleep(0.005)
        return write_data(self, *arguments)

    setattr(FileSystemWriter, "write_data", write_later)  # noqa: B010  # of another signature


class ReleasingCallback(TrainerCallback):
    """Lets uploads go on once the training has resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if os.environ["PACEKEEPER_ROUND"] != "1":
            (self.folder / f"resumed-{args.process_index}").write_text(str(state.global_step))
            (self.folder / "released").touch()


if __name__ == "__main__":
    import pacekeeper.auto  # noqa: F401

    folder = Path(os.environ["FOLDER"])
    block_uploads(folder / "released")
    output_dir = folder / "output"
    trainer = make_trainer(output_dir)
    trainer.add_callback(ReleasingCallback(folder))
    get_last_checkpoint: Any = trainer_utils.get_last_checkpoint
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir) if output_dir.is_dir() else None)
    model = trainer.model
