"""Models as scripts have them (options, torch.compile, activation checkpointing, GradScaler) in every mode.

Through Sync, EDiT, AsyncEDiT and back, with a synchronization after each step and outer SGD with learning rate 1, all
modes make the same steps: those of SGD in one process. So there is one reference for everything, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import pacekeeper as pk
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from testing.training.ranks import import_before_forks, run_ranks
from testing.training.sync_mode_jobs import list_mode_starts

BATCH, SIZE, STEPS, RATE = 8, 64, 16, 0.002
BLOCKS = 4
MOST_COMPILED = BLOCKS - 1
"""How often dynamo compiles one piece of code, here: fewer than there are blocks that share one."""
PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER, sync_every=1, sync_seconds=1e-6)
SWITCHES = {4: SyncMode.EDIT, 7: SyncMode.ASYNC_EDIT, 11: SyncMode.SYNC}
MODES = (SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT, SyncMode.SYNC)


COMPILER = (
    "torch._dynamo.backends.debugging",
    "torch._inductor.debug",
    "torch._inductor.lowering",
    "torch._inductor.quantized_lowerings",
)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """What the ranks would import, each by itself, when they compile their first piece of code."""
    import_before_forks(COMPILER)


class Points(torch.utils.data.Dataset[tuple[int, Tensor]]):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x).tanh()
        return out


class Net(nn.Module):
    def __init__(self, checkpointing: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 1)
        self.checkpointing = checkpointing
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        out: Tensor = self.head(x)
        return out


def compute_loss_sum(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().sum()


@dataclass
class Case:
    """What a script does with its model."""

    shard: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    compiled: str = ""
    """"blocks", or "wrapped" blocks; or the whole model "before" or "after" it is given to the job, or "in place"."""
    fullgraph: bool = False
    checkpointing: bool = False
    unused: bool = False
    scaled: bool = False
    """By a GradScaler. Rank 1's loss is infinite in some steps."""
    dtype: torch.dtype = torch.float64


@dataclass
class Seen:
    """By one rank."""

    used: list[list[int]] = field(default_factory=list)
    """Indices, by step."""
    skipped: list[bool] = field(default_factory=list)
    """Whether the optimizer left the step out."""
    graphs: list[int] = field(default_factory=list)
    """Compiled until the end of each step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)


def run_case(case: Case, runtime: Path) -> list[Seen]:
    def rank_main(rank: int) -> Seen:
        if rank == 0:
            write_json(RuntimeFolder(runtime).plan, PLAN.to_json())
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            from torch._dynamo.backends.debugging import aot_eager

            graphs.append(graph)
            return aot_eager(graph, inputs)

        job = pk.init(mesh={"sync": -1, "shard": case.shard}, snapshot_every=0)
        net: Any = Net(case.checkpointing, case.unused).to(case.dtype)
        give = job.replicate if case.shard == 1 else job.fully_shard
        if case.compiled == "blocks":
            for block in net.blocks:
                block.compile(backend=backend, fullgraph=case.fullgraph)
        if case.compiled == "wrapped":
            wrapped: list[Any] = [torch.compile(b, backend=backend, fullgraph=case.fullgraph) for b in net.blocks]
            net.blocks = nn.ModuleList(wrapped)
        if case.compiled == "in place":
            net.compile(backend=backend)
        net = torch.compile(net, backend=backend) if case.compiled == "before" else net
        net = give(net, units=lambda net: net.blocks, **case.options)
        net = torch.compile(net, backend=backend) if case.compiled == "after" else net
        outer = pk.OuterSGD(lr=1.0, momentum=0.0, penalty=pk.Penalty(enabled=False))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=RATE), outer, warmup_steps=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaled)
        loader = job.dataloader(Points(case.dtype), BATCH, max_microbatch=2)
        job.register(net=net, optimizer=optimizer, scaler=scaler, loader=loader)
        seen = Seen()
        stepped: list[int] = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        coming = dict(SWITCHES)
        for step in job.steps(loader, until=STEPS):
            seen.used.append([])
            stepped.clear()
            bad = case.scaled and rank == 1 and step.number % 4 == 2
            for indices, x in step.microbatches():
                loss = compute_loss_sum(net, x) * (float("inf") if bad else 1.0)
                scaler.scale(loss / step.total_weight).backward()
                seen.used[-1] += indices.tolist()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.skipped.append(not stepped)
            seen.graphs.append(len(graphs))
            if rank == 0 and coming and step.number >= min(coming):
                changed = replace(PLAN, version=1 + step.number, sync_mode=coming.pop(min(coming)))
                write_json(RuntimeFolder(runtime).plan, changed.to_json())
        names = {name.replace("_orig_mod.", "").replace("module.", ""): p for name, p in net.named_parameters()}
        for name, parameter in names.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            seen.parameters[name] = whole.detach().clone()
        return seen

    run = run_ranks(rank_main, 2 * case.shard, runtime=runtime)
    modes = list_mode_starts(runtime, 0)
    assert [mode for mode, _ in modes] == list(MODES), "the job went through all modes"
    return run


def compute_reference(run: list[Seen], shard: int) -> dict[str, Tensor]:
    """SGD in one process, with what the ranks that stepped have used, as parts of the whole batch."""
    net = Net().double()
    x = Points().x
    for number in range(len(run[0].used)):
        net.zero_grad()
        replicas = [run[first : first + shard] for first in range(0, len(run), shard)]
        for replica in replicas:
            assert len({seen.skipped[number] for seen in replica}) == 1
            if not replica[0].skipped[number]:
                indices = [index for seen in replica for index in seen.used[number]]
                assert len(indices) == BATCH // len(replicas)
                (compute_loss_sum(net, x[indices]) / BATCH).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def check_run(run: list[Seen], shard: int = 1, tolerance: float = 1e-10) -> None:
    wanted = compute_reference(run, shard)
    for seen in run:
        for name, parameter in wanted.items():
            its = seen.parameters[name].double()
            torch.testing.assert_close(its, parameter, rtol=tolerance, atol=tolerance, msg=name)


CASES = {
    "replicas, with a parameter that no loss needs": Case(
        options={"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}, unused=True
    ),
    "replicas, activations recomputed": Case(checkpointing=True),
    "shards that stay gathered": Case(2, {"reshard_after_forward": False, "shard_placement_fn": lambda _: Shard(0)}),
    "shards in the CPU's memory, activations recomputed": Case(
        2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, checkpointing=True
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mode_trains_as_one_process_does(case: Case, tmp_path: Path) -> None:
    check_run(run_case(case, tmp_path), case.shard)


def test_modes_train_in_mixed_precision(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = run_case(Case(2, {"mp_policy": policy}, dtype=torch.float32), tmp_path)
    assert {parameter.dtype for parameter in run[0].parameters.values()} == {torch.float32}
    check_run(run, 2, tolerance=0.01)


COMPILED = {
    "replicas, the model before": Case(compiled="before"),
    "replicas, the model after": Case(compiled="after"),
    "replicas, blocks": Case(compiled="blocks"),
    "replicas, blocks, fullgraph": Case(compiled="blocks", fullgraph=True),
    "replicas, the model in place, activations recomputed": Case(compiled="in place", checkpointing=True),
    "shards, blocks": Case(2, compiled="blocks"),
    "shards, blocks, fullgraph": Case(2, compiled="wrapped", fullgraph=True),
    "shards, the model after": Case(2, compiled="after"),
}


@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED.keys())
def test_a_compiled_model_trains_the_same_and_is_compiled_once(case: Case, tmp_path: Path) -> None:
    """Neither by a synchronization nor by a switch; and a model that has no graph break of its own has none of ours."""
    run = run_case(case, tmp_path)
    check_run(run, case.shard)
    for seen in run:
        assert seen.graphs[0] > 0
        assert len(set(seen.graphs)) == 1, seen.graphs
        if case.shard == 1:
            assert seen.graphs[0] == 1


@pytest.mark.parametrize("shard", [1, 2], ids=["replicas", "shards"])
def test_a_grad_scaler_leaves_steps_out_on_one_replica(shard: int, tmp_path: Path) -> None:
    """In Sync on all. Its scale is one again when Sync is back."""
    run = run_case(Case(shard, scaled=True), tmp_path)
    check_run(run, shard)
    skipped = [[number for number, was in enumerate(seen.skipped, 1) if was] for seen in run]
    assert skipped[0] == skipped[shard - 1] != skipped[-1]
    assert {2, 14} <= set(skipped[0])
    assert skipped[-1] == [2, 6, 10, 14] if shard == 1 else skipped[0]


def test_options_that_are_not_the_scripts_are_refused_by_name() -> None:
    without_gradients = Net().requires_grad_(False)
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("replicate", {"device_ids": [0]}, "device_ids is set to the job's device"),
        ("replicate", {"process_group": None}, "process_group is the group of all ranks; see pk.init"),
        ("replicate", {"static_graph": True}, "static_graph needs a first backward pass that reduces gradients"),
        ("replicate", {"bucket_mb": 3}, "replicate: the option 'bucket_mb' is unknown; it takes units,"),
        ("fully_shard", {"mesh": None}, "fully_shard: mesh is the job's"),
        ("fully_shard", {"find_unused_parameters": True}, "it takes units, ignored_params, mp_policy"),
        ("fully_shard", {"ignored_params": set(Net().parameters())}, "freeze them"),
    ]

    def rank_main(_: int) -> list[str]:
        job = pk.init()
        errors = []
        for call, options, _text in refused:
            with pytest.raises(InputError) as caught:
                getattr(job, call)(Net(), **options)
            errors.append(str(caught.value))
        job.fully_shard(
            without_gradients, units=lambda net: net.blocks, ignored_params=set(without_gradients.parameters())
        )
        return errors

    (errors,) = run_ranks(rank_main, 1)
    for error, (call, _, text) in zip(errors, refused, strict=True):
        assert error.startswith(call)
        assert text in error
