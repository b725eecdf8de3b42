"""The library that a training script uses to be steered: `pk.init()` and the `Job` that it returns.

Everything that the ranks do together happens at the boundary between two steps, in `Job.steps`: agreed there are shares,
snapshots, checkpoints and leaving, on one step of all ranks. Between two boundaries the script trains as it would alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Stop, WorkerPlan
from pacekeeper_analysis.records import Kind, Phase

from . import parallel
from .agreement import Agreed, Agreement, PlanFile
from .environment import LEFT_WHEN_TOLD, Environment
from .loader import Loader, Weight
from .recorder import Recorder
from .step import Step
from .watching import recorder as watch

Schedule = Callable[[int], float]
"""From the job's samples so far to a factor of the learning rate."""

_PHASES = {"eval": Phase.EVALUATE, "compile": Phase.COMPILE, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}


def init(
    *,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Job:
    """Joins this rank's process group and its job.

    It works under `pacekeeper run`, under torchrun, and under plain Python as the only rank.

    mesh: {"sync": ranks that hold replicas of each other, "shard": ranks that share one replica}; -1: all that are left.
    seed: of the order of samples; the same on all ranks.
    backend: of the process group; by default nccl for GPUs and gloo for CPUs.
    timeout: after which a collective that does not come to its end fails.
    Raises InputError that names the argument and the remedy.
    """
    environment = Environment.read()
    shape = _mesh_shape(mesh or {"sync": -1}, environment.world_size)
    recorder = watch()
    if not dist.is_initialized():
        backend = backend or ("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if environment.world_size == 1 else {}
        dist.init_process_group(backend, timeout=timeout, **alone)
    return Job(environment, recorder, shape, seed)


class Job:
    """One rank's view of the job."""

    def __init__(self, environment: Environment, recorder: Recorder, mesh: dict[str, int], seed: int) -> None:
        self.environment = environment
        self.recorder = recorder
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.step = 0
        """Completed optimizer steps of the job."""
        self.samples = 0
        """Samples of the whole job in the completed steps."""
        self.loss = float("nan")
        """Mean loss of the newest step that all ranks have reported, over the whole global batch; NaN: none was reported."""
        self.agreement = Agreement(recorder)
        self.loader: Loader
        self._mesh_shape = mesh
        self._seed = seed
        self._models: list[nn.Module] = []
        self._objects: dict[str, Any] = {}
        self._stepping = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._told_to_leave = False
        self._my_samples = 0
        self._refused = -1
        runtime = environment.runtime
        self._plan = PlanFile(runtime.plan if runtime and environment.rank == 0 else None, self.world_size)
        signal.signal(signal.SIGTERM, self._leave_soon)

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the job, in the dimension that `init` was given: "shard" or "sync"."""
        name = "shard" if self._mesh_shape["shard"] > 1 else "sync"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=(name,))

    def replicate(self, model: nn.Module) -> nn.Module:
        """`model` on each rank, kept alike by DistributedDataParallel. Gradients are summed over the ranks."""
        if self._mesh_shape["shard"] > 1:
            raise InputError('mesh: it has "shard" ranks; use job.fully_shard(model, units=…), or leave "shard" out')
        return self._add(parallel.replicate(model))

    def fully_shard(self, model: nn.Module, units: parallel.Units = nn.Module.children) -> nn.Module:
        """`model` sharded over the ranks by FSDP2. Gradients are summed over the ranks.

        units: the parts of the model that are gathered one at a time; its blocks, say.
        """
        if self._mesh_shape["sync"] > 1:
            raise InputError('mesh: init(mesh={"shard": -1}) is needed to shard over all ranks; or use job.replicate(model)')
        return self._add(parallel.shard(model, self.mesh, units))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Tells the job whose step completes a step of the job; the first one, where there are several."""
        if self._optimizer is None:
            self._optimizer = optimizer
            optimizer.register_step_pre_hook(lambda *_: self._stepping and self.recorder.optimizer_begins())
            optimizer.register_step_post_hook(lambda *_: self._complete_step())
        return optimizer

    def lr_lambda(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> LambdaLR:
        """A schedule whose learning rate is its initial value times `factor(samples of the job)`."""
        return LambdaLR(optimizer, lambda _: factor(self.samples))

    def dataloader(
        self,
        dataset: torch.utils.data.Dataset[Any],
        global_batch_size: int,
        max_microbatch: int,
        weight: Weight | None = None,
        shuffle: bool = True,
        **options: Any,
    ) -> Loader:
        """Deals each step's `global_batch_size` samples out to the ranks, by the shares that are in force.

        max_microbatch: samples of one forward pass that fit into a rank's memory.
        weight: from a batch to what its loss sum is divided by, such as its valid tokens; None: its samples.
        options: for torch's DataLoader, such as num_workers and collate_fn.
        """
        return Loader(
            dataset,
            global_batch_size=global_batch_size,
            max_microbatch=max_microbatch,
            weight=weight,
            rank=self.rank,
            world_size=self.world_size,
            seed=self._seed,
            shuffle=shuffle,
            **options,
        )

    def restore(self) -> int:
        """Goes back to the newest state of the job; returns its step, 0 where there is none."""
        return self.step

    def register(self, **objects: Any) -> None:
        """What belongs to a checkpoint: anything that has state_dict and load_state_dict. The names are part of it."""
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise InputError(f"{name}: {type(item).__name__} has no state_dict and load_state_dict; leave it out")
        self._objects.update(objects)

    def steps(self, loader: Loader, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps, up to number `until` of the job, restarts included; None: without end.

        Ends the process with exit code 143, after a checkpoint, when the job is told to leave (SIGTERM, suspend).
        """
        self.loader = loader
        loader.alike = self._mesh_shape["shard"] > 1
        state = self.recorder.ring.state
        state.global_batch = loader.global_batch_size
        self.recorder.restart_clock(self.step + 1)
        self._exchange(None)
        while until is None or self.step < until:
            self._apply(self.agreement.take())
            with self.recorder.loading():
                draw, batches = loader.next_step()
            step = Step(self, self.step + 1, draw, batches)
            state.share = draw.samples
            self._stepping = True
            yield step
            step.finish()
            self._complete_step()
            self._my_samples += step.samples
            state.samples = self._my_samples
            self._exchange(step)
        self.recorder.enter(Phase.FINISHED)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase other than training, with a deadline of its own: "eval", "compile", "checkpoint" or "data"."""
        if name not in _PHASES:
            raise InputError(f"phase {name!r} is unknown; take one of {', '.join(_PHASES)}")
        return self.recorder.during(_PHASES[name])

    def synchronise_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass reduces gradients over the ranks or only adds them up."""
        for model in self._models:
            parallel.synchronise_gradients(model, wanted)

    def checkpoint_if_due(self) -> None:
        """See Step.checkpoint."""

    def _add(self, model: nn.Module) -> nn.Module:
        self._models.append(model)
        return model

    def _complete_step(self) -> None:
        """The optimizer has stepped; the job has one more step and the samples of its global batch behind it."""
        if not self._stepping:
            return
        self._stepping = False
        self.step += 1
        self.samples += self.loader.global_batch_size
        self.loader.complete_step()
        self.recorder.end_step(self.recorder.ring.state.share)

    def _exchange(self, step: Step | None) -> None:
        """Begins to agree on what is in force after the next step."""
        plan = self._plan.read()
        loss = step.loss_sum if step else None
        if step and loss is not None:
            self._record_loss(step, loss)
        self.agreement.issue(
            Agreed(
                plan_version=plan.version,
                checkpoint_request=plan.checkpoint_request,
                suspend=plan.stop is Stop.SUSPEND,
                shares=self._good_shares(plan),
                leaving=int(self._told_to_leave),
                loss=loss or 0.0,
                weight=step.weight if step and loss is not None else 0.0,
            )
        )

    def _apply(self, agreed: Agreed) -> None:
        """At a boundary, on all ranks alike: follows what was agreed."""
        self.recorder.ring.state.plan_version = agreed.plan_version
        if agreed.weight > 0:
            self.loss = agreed.loss / agreed.weight
        if agreed.leaving or agreed.suspend:
            self._leave()
        if agreed.plan_version:  # without a plan, shares come from the checkpoint alone
            self.loader.set_shares(agreed.shares)

    def _good_shares(self, plan: WorkerPlan) -> tuple[int, ...] | None:
        """The plan's shares; the last good ones where those cannot be followed."""
        if plan.shares is not None:
            try:
                self.loader.check(plan.shares)
            except InputError as error:
                if plan.version != self._refused:
                    self._refused = plan.version
                    print(f"pacekeeper: plan {plan.version} not taken, the last good shares go on: {error}", file=sys.stderr)
                return self.loader.shares
        return plan.shares

    def _record_loss(self, step: Step, loss: float) -> None:
        mean = loss / step.weight
        self.recorder.ring.state.loss = mean
        end = self.recorder.last_step_end
        self.recorder.ring.write(Kind.LOSS, end, end, step.number, Phase.TRAIN, mean)

    def _leave_soon(self, *_: Any) -> None:
        self._told_to_leave = True

    def _leave(self) -> None:
        self.recorder.enter(Phase.FINISHED)
        sys.exit(LEFT_WHEN_TOLD)


def _mesh_shape(mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Both dimensions' sizes. Raises InputError where they do not fit the ranks."""
    unknown = mesh.keys() - {"sync", "shard"}
    if unknown:
        raise InputError(f'mesh: {sorted(unknown)} unknown; its dimensions are "sync" and "shard"')
    shape = {"sync": 1, "shard": 1} | dict(mesh)
    rest = [name for name, size in shape.items() if size == -1]
    if len(rest) == 2:
        raise InputError("mesh: only one dimension can be -1 (all that are left)")
    fixed = shape["sync"] * shape["shard"] if not rest else shape["sync"] * shape["shard"] * -1
    if fixed < 1 or (rest and world_size % fixed) or (not rest and fixed != world_size):
        raise InputError(f"mesh: {dict(mesh)} does not fit {world_size} ranks; use -1 for all that are left")
    if rest:
        shape[rest[0]] = world_size // fixed
    if shape["sync"] > 1 and shape["shard"] > 1:
        raise InputError(
            f"mesh: {dict(mesh)} mixes replicas and shards, which comes with the Local-SGD modes; "
            'use {"sync": -1} or {"shard": -1}'
        )
    return shape
