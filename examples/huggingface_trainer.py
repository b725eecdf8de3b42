"""A small GPT-2 with random weights, trained by Hugging Face's Trainer. The last two lines are for Pacekeeper.

pacekeeper run --local 2 examples/huggingface_trainer.py
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from pacekeeper.integrations.huggingface import HuggingFaceCallback, find_newest_checkpoint

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
texts = (torch.arange(256)[:, None] + torch.arange(16)) % 64
data = [{"input_ids": text, "labels": text} for text in texts]

folder = os.environ.get("PACEKEEPER_CHECKPOINT_PATH", "checkpoints")
arguments = TrainingArguments(
    output_dir=folder,
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
trainer.add_callback(HuggingFaceCallback())
trainer.train(resume_from_checkpoint=find_newest_checkpoint(folder))
