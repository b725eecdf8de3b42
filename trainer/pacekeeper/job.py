"""The library that a training script uses to be steered: `pk.init()` and the `Job` that it returns.

Everything that the ranks do together happens at the boundary between two steps, in `Job.steps`: agreed there are
shares, snapshots, checkpoints and leaving, on one step of all ranks. Between two boundaries the script trains as it
would alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Stop, WorkerPlan
from pacekeeper_analysis.records import Kind, Phase

from . import parallel
from .agreement import Agreed, Agreement, PlanFile
from .checkpoints import CheckpointFolder
from .environment import LEFT_WHEN_TOLD, Environment
from .keeper import Keeper
from .loader import Loader, Weight
from .recorder import Recorder
from .snapshots import interval
from .step import Step
from .watching import recorder as watch

Schedule = Callable[[int], float]
"""From the job's samples so far to a factor of the learning rate."""

_log = logging.getLogger(__name__)
_PHASES = {"eval": Phase.EVALUATE, "compile": Phase.COMPILE, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, and how often. A TrainingJob says it in spec.checkpoint; here for scripts without one."""

    path: Path
    every: int = 100
    """Steps."""
    keep: int = 3
    """The newest ones; older ones are deleted."""


def init(
    *,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    snapshot_every: int | None = None,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Job:
    """Joins this rank's process group and its job.

    It works under `pacekeeper run`, under torchrun, and under plain Python as the only rank.

    mesh: {"sync": ranks that hold replicas of each other, "shard": ranks that share one replica}; -1: all that are
    left.
    seed: of the order of samples; the same on all ranks.
    checkpoints: None: as the TrainingJob says (PACEKEEPER_CHECKPOINT_PATH and its like), or none.
    snapshot_every: steps between snapshots in shared memory; 0: none; None: as often as 1 % of the training time
    allows.
    backend: of the process group; by default nccl for GPUs and gloo for CPUs.
    timeout: after which a collective that does not come to its end fails.
    Raises InputError that names the argument and the remedy.
    """
    environment = Environment.read()
    shape = _mesh_shape(mesh or {"sync": -1}, environment.world_size)
    if checkpoints is None and environment.checkpoint_path is not None:
        checkpoints = Checkpoints(
            environment.checkpoint_path, environment.checkpoint_every, environment.checkpoint_keep
        )
    if snapshot_every is not None and snapshot_every < 0:
        raise InputError(f"snapshot_every={snapshot_every} must be 0 (none), a number of steps, or None")
    folder = CheckpointFolder(checkpoints.path, environment.round, checkpoints.keep) if checkpoints else None
    recorder = watch()
    if not dist.is_initialized():
        backend = backend or ("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    if folder and environment.rank == 0:
        folder.own()
    return Job(environment, recorder, shape, seed, folder, checkpoints.every if checkpoints else 0, snapshot_every)


class Job:
    """One rank's view of the job."""

    def __init__(
        self,
        environment: Environment,
        recorder: Recorder,
        mesh: dict[str, int],
        seed: int,
        folder: CheckpointFolder | None,
        checkpoint_every: int,
        snapshot_every: int | None,
    ) -> None:
        self.environment = environment
        self.recorder = recorder
        recorder.steered = True
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.step = 0
        """Completed optimizer steps of the job."""
        self.samples = 0
        """Samples of the whole job in the completed steps."""
        self.loss = float("nan")
        """Mean loss over the whole global batch, of the newest step that all ranks have reported; NaN: none was."""
        self.agreement = Agreement(recorder)
        self.loader: Loader
        self._mesh_shape = mesh
        self._seed = seed
        self._folder = folder
        self._checkpoint_every = checkpoint_every
        self._snapshot_every = snapshot_every
        self._keeper: Keeper | None = None
        self._checkpointed = 0
        self._answered = 0
        self._models: list[nn.Module] = []
        self._objects: dict[str, Any] = {}
        self._stepping = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._told_to_leave = False
        self._my_samples = 0
        self._share = 0
        self._step_seconds = 0.0
        self._stepped_at = time.perf_counter()
        self._began_at = 0
        self._refused = -1
        runtime = environment.runtime
        self._plan = PlanFile(runtime.plan if runtime and environment.rank == 0 else None, self.world_size)
        signal.signal(signal.SIGTERM, self._leave_soon)

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the job, in the dimension that `init` was given: "shard" or "sync"."""
        name = "shard" if self._mesh_shape["shard"] > 1 else "sync"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device, mesh_dim_names=(name,))

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
            raise InputError(
                'mesh: init(mesh={"shard": -1}) is needed to shard over all ranks; or use job.replicate(model)'
            )
        return self._add(parallel.shard(model, self.mesh, units))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Tells the job whose step completes a step of the job; the first one, where there are several."""
        if self._optimizer is None:
            self._optimizer = optimizer
            optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins())
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

    def register(self, **objects: Any) -> None:
        """What belongs to a checkpoint: anything that has state_dict and load_state_dict. The names are part of it."""
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise InputError(f"{name}: {type(item).__name__} has no state_dict and load_state_dict; leave it out")
        self._objects.update(objects)

    def restore(self) -> int:
        """Goes back to the newest state that all ranks can have: of the snapshots, or of the newest good checkpoint.

        Returns its step; 0: there is none, and the training begins. Call it when everything is registered. Raises
        InputError where the checkpoint is another model's.
        """
        state = self.recorder.ring.state
        with self.recorder.during(Phase.RESTORE):
            restored = self._keep().restore()
        if restored is not None:
            step, self._my_samples, newest = restored
            assert self.step == step, "the job's own counters are part of its state"
            self._checkpointed = state.checkpoint_step = newest
            state.samples = self._my_samples
        state.restored_step = self.step
        return self.step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples, "answered": self._answered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.samples, self._answered = state["step"], state["samples"], state["answered"]

    def steps(self, loader: Loader, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps, up to number `until` of the job, restarts included; None: without end.

        Ends the process with exit code 143, after a checkpoint, when the job is told to leave (SIGTERM, suspend).
        """
        self.loader = loader
        loader.replica_size = self._mesh_shape["shard"]
        state = self.recorder.ring.state
        state.global_batch = loader.global_batch_size
        self.recorder.restart_clock(self.step + 1)
        self._began_at = self.step
        self._exchange(None)
        step: Step | None = None
        while True:
            self._boundary(self.agreement.take())
            if until is not None and self.step >= until:
                break
            self._exchange(step)
            step = self.recorder.load(self._next_step)
            self._share = state.share = step.samples
            self._stepping = True
            try:
                yield step
            except GeneratorExit:  # the script leaves the loop: what is being written is not to be lost
                self._keep().wait_for_checkpoint()
                raise
            step.finish()
            self._complete_step()
        self._finish()

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
        """Takes the checkpoint of this step, where one is due and not yet taken."""
        if self._checkpoint_every and self.step % self._checkpoint_every == 0:
            self._checkpoint()

    def _add(self, model: nn.Module) -> nn.Module:
        self._models.append(model)
        return model

    def _optimizer_begins(self) -> None:
        if self._stepping:
            self.recorder.optimizer_begins()

    def _complete_step(self) -> None:
        """The optimizer has stepped; the job has one more step and the samples of its global batch behind it."""
        if not self._stepping:
            return
        self._stepping = False
        self.step += 1
        self.samples += self.loader.global_batch_size
        self.loader.complete_step()
        now = time.perf_counter()
        self._step_seconds, self._stepped_at = now - self._stepped_at, now
        self._my_samples += self._share
        self.recorder.ring.state.samples = self._my_samples
        self.recorder.end_step(self._share)

    def _next_step(self) -> Step:
        drawn = self.loader.next_step()
        assert drawn is not None, "what is dealt by shares has no end"
        return Step(self, self.step + 1, *drawn)

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
                snapshot_every=self._snapshot_interval(),
                leaving=int(self._told_to_leave),
                loss=loss or 0.0,
                weight=step.weight if step and loss is not None else 0.0,
            )
        )

    def _boundary(self, agreed: Agreed) -> None:
        """Between two steps, on all ranks alike: follows what was agreed, and keeps the state."""
        state = self.recorder.ring.state
        state.plan_version = agreed.plan_version
        if agreed.weight > 0:
            self.loss = agreed.loss / agreed.weight
        if agreed.leaving or agreed.suspend:
            self._leave(snapshot=agreed.snapshot_every > 0)
        if agreed.checkpoint_request > self._answered:
            self._answered = agreed.checkpoint_request
            self._checkpoint()
        self.checkpoint_if_due()
        if (settled := self._keep().settle()) >= 0:
            state.snapshot_step = settled
        if agreed.snapshot_every and self.step > self._began_at and self.step % agreed.snapshot_every == 0:
            self._keep().snapshot(self.step, self._my_samples)
        if agreed.plan_version:  # without a plan, shares come from the checkpoint alone
            self.loader.set_shares(agreed.shares)

    def _checkpoint(self) -> None:
        """Of the present state, unless there is one; it is published in the background."""
        answered = self._answered
        if self._folder is None or self.step <= self._checkpointed:
            self._keep().wait_for_checkpoint()
            self.recorder.ring.state.checkpoint_request = answered
            return
        self._checkpointed = self.step
        with self.recorder.during(Phase.CHECKPOINT):
            self._keep().checkpoint(self.step, self._my_samples, lambda step: self._published(step, answered))

    def _published(self, step: int, answered: int) -> None:
        state = self.recorder.ring.state
        state.checkpoint_step = step
        state.checkpoint_request = answered

    def _finish(self) -> None:
        """The last step is done: its state is kept, then the rank has nothing left to do."""
        self._checkpoint()
        with self.recorder.during(Phase.CHECKPOINT):
            self._keep().wait_for_checkpoint()
        self.recorder.enter(Phase.FINISHED)

    def _good_shares(self, plan: WorkerPlan) -> tuple[int, ...] | None:
        """The plan's shares; the last good ones where those cannot be followed."""
        if plan.shares is not None:
            try:
                self.loader.check(plan.shares)
            except InputError as error:
                if plan.version != self._refused:
                    self._refused = plan.version
                    _log.warning("plan %d not taken, the last good shares go on: %s", plan.version, error)
                return self.loader.shares
        return plan.shares

    def _snapshot_interval(self) -> int:
        """Rank 0's word on how often to take snapshots; 0: never, or it is for rank 0 to say."""
        if self.rank > 0 or self.environment.runtime is None or not self._objects:
            return 0
        if self._snapshot_every is not None:
            return self._snapshot_every
        return interval(self._keep().snapshot_seconds, self._step_seconds)

    def _record_loss(self, step: Step, loss: float) -> None:
        mean = loss / step.weight
        self.recorder.ring.state.loss = mean
        end = self.recorder.last_step_end
        self.recorder.ring.write(Kind.LOSS, end, end, step.number, Phase.TRAIN, mean)

    def _leave_soon(self, *_: Any) -> None:
        self._told_to_leave = True

    def _leave(self, snapshot: bool) -> None:
        """Told to leave, all ranks keep the state and end."""
        if snapshot:
            self._keep().snapshot(self.step, self._my_samples)
            self._keep().settle()
        self._finish()
        sys.exit(LEFT_WHEN_TOLD)

    def _keep(self) -> Keeper:
        """Made when it is first needed: by then everything is registered."""
        if self._keeper is None:
            objects = {**self._objects, "job": self}
            mesh = self.mesh if self._mesh_shape["shard"] > 1 else None
            self._keeper = Keeper(self.environment, self.agreement, objects, self._folder, mesh)
        return self._keeper


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
