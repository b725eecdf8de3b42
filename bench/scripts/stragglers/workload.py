"""What every side trains: a tiny GPT on the same samples in the same order, at the pace that the draws set.

The real work of a step takes milliseconds. The rest of the drawn seconds is slept away, layer by layer as an
accelerator would take it, a third in the forward pass and two thirds in the backward pass, so that communication can be
overlapped as in a real job, and two cores are enough for four ranks.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from .diaries import DiaryEntry
from .draws import Costs

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 2, 2
HELD_OUT_SEQUENCES = 128
"""Sequences."""
FORWARD_SHARE = 1 / 3
"""Share of a step's seconds that belongs to the forward pass."""

Sample = tuple[int, Tensor, Tensor]


class StepPacer:
    """Makes each local step take the seconds that its samples have drawn, and writes the rank's diary."""

    def __init__(self, costs: Costs, rank: int, unit_seconds: float) -> None:
        """`unit_seconds`: of a sample of cost 1; 0: no sleep at all, the diary has the draws in any case."""
        self.diary: list[DiaryEntry] = []
        self.period = 1
        self._costs = costs[rank]
        self._unit_seconds = unit_seconds
        self._samples: tuple[int, ...] = ()
        self._cost = self._began = self._worked = self._compute = 0.0

    def begin(self, samples: Sequence[int]) -> None:
        """Of a local step, just before its forward pass."""
        self._samples = tuple(samples)
        self._cost = float(self._costs[list(samples)].sum())
        self._began, self._worked = time.monotonic(), time.thread_time()

    def reach(self, share: float) -> None:
        """Sleeps until this share of the step's drawn seconds is over."""
        remaining = self._began + share * self._cost * self._unit_seconds - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def mark_computed(self) -> None:
        """The backward pass is over, but for what waits for other ranks."""
        self._compute = time.thread_time() - self._worked

    def end(self) -> None:
        """Of the local step: before the optimizer's step, which may bring a synchronization with it."""
        self.diary.append(DiaryEntry(time.monotonic(), self._samples, self._cost, self._compute, self.period))


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.forward_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        out: Tensor = x + self.contract(F.gelu(self.expand(self.forward_norm(x))))
        return out


class GPT(nn.Module):
    """Bytes (batch, length) → logits of the next byte (batch, length, 256); its layers keep the pace while training."""

    def __init__(self, pacer: StepPacer | None = None) -> None:
        super().__init__()
        self.pacer = pacer
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for index, block in enumerate(self.blocks):
            self._delay_backward(x, 1 - (1 - FORWARD_SHARE) * index / LAYERS)
            x = block(x)
            if self.pacer is not None and torch.is_grad_enabled():
                self.pacer.reach(FORWARD_SHARE * (index + 1) / LAYERS)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _delay_backward(self, x: Tensor, share: float) -> None:
        """When the gradient comes back to `x`, this share of the step is over."""
        if (pacer := self.pacer) is not None and x.requires_grad:

            def on_gradient(_: Tensor) -> None:
                pacer.reach(share)
                if share == 1:
                    pacer.mark_computed()

            x.register_hook(on_gradient)


class SourceCode(Dataset[Sample]):
    """Stretches of the standard library's source code, in an order that `seed` draws, each with the bytes that follow.

    Position in the stream → (position, bytes, next bytes). A stream longer than the text begins it again.
    """

    def __init__(self, samples: int, seed: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
        self._bytes = torch.frombuffer(text, dtype=torch.uint8)
        stretches = (len(text) - 1) // CONTEXT
        order = torch.randperm(stretches - HELD_OUT_SEQUENCES, generator=torch.Generator().manual_seed(seed))
        self._order = order.repeat(-(-samples // len(order)))[:samples]
        self._held_out = range(stretches - HELD_OUT_SEQUENCES, stretches)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> Sample:
        return position, *self._read_stretch(int(self._order[position]))

    def batch(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        _, x, y = zip(*(self[position] for position in positions), strict=True)
        return torch.stack(x), torch.stack(y)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """HELD_OUT_SEQUENCES sequences that no rank trains on."""
        x, y = zip(*(self._read_stretch(number) for number in self._held_out), strict=True)
        return torch.stack(x), torch.stack(y)

    def _read_stretch(self, number: int) -> tuple[Tensor, Tensor]:
        window = self._bytes[number * CONTEXT : (number + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def compute_loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Over samples; of each, the mean over its bytes, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / CONTEXT


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Every side's inner one."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


class LossSnapshots:
    """Copies of the common parameters along the run, whose held-out loss is computed when the run is over."""

    def __init__(self) -> None:
        self._snapshots: list[tuple[int, dict[str, Tensor]]] = []

    def add_snapshot(self, period: int, model: nn.Module) -> None:
        """After `period`, with the parameters common to all ranks."""
        self._snapshots.append((period, {name: value.clone() for name, value in model.state_dict().items()}))

    @torch.no_grad()
    def losses(self, data: SourceCode) -> list[tuple[int, float]]:
        """Period and mean held-out loss in nats a byte."""
        model, result = GPT(), []
        x, y = data.held_out()
        for period, parameters in self._snapshots:
            model.load_state_dict(parameters)
            result.append((period, float(compute_loss_sum(model, x, y)) / HELD_OUT_SEQUENCES))
        return result
