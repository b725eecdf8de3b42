"""A Hugging Face script: its Trainer trains a tiny GPT-2 with random weights: huggingface.py FOLDER."""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
texts = (torch.arange(64)[:, None] + torch.arange(16)) % 64
data = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=3,
    logging_steps=2,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
result = trainer.train()
weights = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"rank {trainer.args.process_index} {result.training_loss!r} {weights!r}")
