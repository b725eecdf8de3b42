"""As examples/huggingface_trainer.py, by somebody who knows of Pacekeeper no more than its first line."""

import pacekeeper.auto  # isort: skip  # noqa: F401
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
texts = (torch.arange(256)[:, None] + torch.arange(16)) % 64
data = [{"input_ids": text, "labels": text} for text in texts]

output = os.environ["PACEKEEPER_CHECKPOINT_PATH"]
arguments = TrainingArguments(
    output_dir=output,
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    eval_strategy="steps",
    eval_steps=20,
    save_steps=10,
    logging_steps=5,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:32])
trainer.train(resume_from_checkpoint=os.path.isdir(output))
