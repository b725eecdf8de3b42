"""A byte-level GPT that learns the Python standard library's source code: the training script of the demo.

    pacekeeper run --local 4 examples/gpt.py --steps 300

It also runs as a single process (`python examples/gpt.py`) and under torchrun, on GPUs where there are some.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Dataset, Subset

import pacekeeper as pk


@dataclass(frozen=True)
class Config:
    """Sizes of the model; a token is a byte."""

    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.forward_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = F.gelu(self.expand(self.forward_norm(x)))
        return x + F.dropout(self.contract(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """Bytes (batch, length) → logits of the next byte (batch, length, 256)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()  # the loss adds up thousands of them: not in bfloat16


class SourceCode(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of `context` bytes, each with the bytes that follow."""

    def __init__(self, context: int, limit: int) -> None:
        """Reads the standard library's modules in order of their names, `limit` bytes at most."""
        self.context = context
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= limit:
                break
        self.bytes = torch.frombuffer(text[:limit], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def main() -> None:
    arguments = parse_arguments()
    job = pk.init(seed=arguments.seed, mesh=build_mesh_shape(arguments.shard), snapshot_every=arguments.snapshot_every)
    on_gpu = job.device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    mixed = torch.autocast(job.device.type, dtype, enabled=dtype is not torch.float32)
    config = Config(arguments.context, arguments.width, arguments.heads, arguments.layers, arguments.dropout)
    model: nn.Module = GPT(config)
    if arguments.shard == 1:
        model = job.replicate(model, units=lambda gpt: gpt.blocks)
    else:  # gathered in the small type, which halves what is sent; summed up in the wide one
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = job.fully_shard(model, units=lambda gpt: gpt.blocks, mp_policy=policy)
    optimizer = job.optimizer(
        torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.01, fused=on_gpu),
        outer=pk.OuterSGD(lr=arguments.outer_learning_rate, momentum=arguments.outer_momentum),
        warmup_steps=arguments.warmup_steps,
    )
    schedule = job.lr_lambda(optimizer, warmup_cosine(arguments.steps * arguments.global_batch))

    source = SourceCode(config.context, arguments.bytes)
    held_out = max(arguments.global_batch, len(source) // 50)
    training = Subset(source, range(len(source) - held_out))
    evaluation = Subset(source, range(len(source) - held_out, len(source)))
    loader = job.dataloader(training, arguments.global_batch, max_microbatch=arguments.max_microbatch)
    restored = job.restore(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    if job.rank == 0:
        print(f"{len(training)} sequences, {job.world_size} ranks, beginning behind step {restored}", flush=True)

    since = time.perf_counter()
    for step in job.steps(loader, until=arguments.steps):
        for x, y in step.microbatches():
            with mixed:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / config.context
            step.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step.due("eval", every=arguments.eval_every):
            with job.phase("eval"), mixed:
                held_out_loss = evaluate_model(model, evaluation, job)
            if job.rank == 0:
                print(f"step {job.step}: held-out loss {held_out_loss:.4f}", flush=True)
            if arguments.stop_file is not None and reduce_any(arguments.stop_file.exists(), job):
                break
        if job.rank == 0 and step.number % arguments.print_every == 0:
            now = time.perf_counter()
            milliseconds, since = (now - since) / arguments.print_every * 1000, now
            print(f"step {step.number}: loss {job.loss:.4f}, {milliseconds:.1f} ms a step", flush=True)
    if job.rank == 0:
        print(f"done: {job.step} steps, {job.samples} samples, loss {job.loss:.4f}", flush=True)


@torch.no_grad()
def evaluate_model(model: nn.Module, held_out: Subset[tuple[Tensor, Tensor]], job: pk.Job) -> float:
    """Mean loss in nats a byte over the same few held-out sequences each time; each rank takes its part of them."""
    model.eval()
    x, y = torch.utils.data.default_collate([held_out[i] for i in range(job.rank, 8 * job.world_size, job.world_size)])
    loss = F.cross_entropy(model(x.to(job.device)).flatten(0, 1), y.to(job.device).flatten())
    dist.all_reduce(loss)
    model.train()
    return loss.item() / job.world_size


def reduce_any(wanted: bool, job: pk.Job) -> bool:
    """Return whether any rank wants it; the ranks may check at different times."""
    votes = torch.tensor(int(wanted), device=job.device)
    dist.all_reduce(votes)
    return votes.item() > 0


def build_mesh_shape(shard: int) -> dict[str, int]:
    """`shard` ranks share a replica (-1: all ranks share one), and there are as many replicas as that allows."""
    return {"shard": -1} if shard == -1 else {"sync": -1, "shard": shard}


def warmup_cosine(samples: int) -> pk.Schedule:
    """From 0 to 1 over the first 5 % of the samples, then down to 0.1 along a cosine."""

    def factor(seen: int) -> float:
        warmup = 0.05 * samples
        if seen < warmup:
            return (seen + 1) / warmup
        progress = min(1.0, (seen - warmup) / (samples - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the whole job, restarts included")
    parser.add_argument("--global-batch", type=int, default=32, help="sequences a step, over all ranks")
    parser.add_argument("--max-microbatch", type=int, default=32, help="sequences of one forward pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of most computation")
    parser.add_argument("--context", type=int, default=Config.context, help="bytes of a sequence")
    parser.add_argument("--width", type=int, default=Config.width)
    parser.add_argument("--heads", type=int, default=Config.heads)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--dropout", type=float, default=Config.dropout)
    parser.add_argument("--bytes", type=int, default=2_000_000, help="of source code to learn")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--stop-file", type=Path, help="once it exists, training ends behind the next evaluation")
    parser.add_argument("--snapshot-every", type=int, help="steps (default: as often as 1 %% of the time allows)")
    parser.add_argument("--print-every", type=int, default=10, help="steps")
    parser.add_argument(
        "--shard", type=int, nargs="?", const=-1, default=1, help="ranks that share a replica by FSDP2; no number: all"
    )
    parser.add_argument("--warmup-steps", type=int, default=20, help="in Sync, before a Local-SGD mode may begin")
    parser.add_argument("--outer-learning-rate", type=float, default=0.7, help="of Local-SGD modes")
    parser.add_argument("--outer-momentum", type=float, default=0.8, help="of Local-SGD modes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
