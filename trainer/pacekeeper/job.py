"""The library that a training script uses to be steered: `pk.init()` and the `Job` that it returns.

Everything that the ranks do together happens between two steps, in `Job.steps`: see ordinals.py.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.lengths import SequenceCost
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import Phase

from .data.lengths import Lengths
from .data.loader import Loader, Weight
from .device import select_device
from .environment import Environment
from .keep.checkpoints import CheckpointFolder
from .keep.retention import Retention
from .keep.store import Keeper
from .modes.agreement import Agreement
from .modes.course import MODES, Course
from .modes.follower import PlanFollower
from .modes.ordinals import Ordinals
from .modes.progress import Progress
from .observe.recorder import Recorder
from .observe.watching import recorder as watch
from .replication.local_sgd import OuterSGD
from .replication.parallel import Units
from .replication.replication import Replication
from .step import Step
from .torch_internals import HashStore

Schedule = Callable[[int], float]
"""From the job's samples so far to a factor of the learning rate."""

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
    sync_mode: str | None = None,
    sync_every: int = 16,
    sync_seconds: float = 2.0,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Job:
    """Joins this rank's process group and its job. Call it before anything that uses CUDA.

    It works under `pacekeeper run`, under torchrun, and under plain Python as the only rank.

    mesh: {"sync": ranks that hold replicas of each other, "shard": ranks that share one replica}; -1: all that are
    left.
    seed: of the order of samples; the same on all ranks.
    checkpoints: None: as the TrainingJob says (PACEKEEPER_CHECKPOINT_PATH and its like), or none.
    snapshot_every: steps between snapshots in shared memory; 0: none; None: as often as 1 % of the training time
    allows.
    sync_mode, sync_every, sync_seconds: "Sync", "EDiT" (synchronises every so many steps) or "AsyncEDiT" (every so many
    seconds), where no operator says otherwise, such as under torchrun; None: as the checkpoint says, at first "Sync".
    device: that this rank trains on, `Job.device`: "cpu", "cuda" (the GPU with the number of LOCAL_RANK) or one GPU,
    such as "cuda:0"; None: a GPU where there is one.
    backend: of the process group; by default nccl for tensors on GPUs and gloo for those on CPUs.
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
    course = _course(sync_mode, sync_every, sync_seconds)
    folder = CheckpointFolder(checkpoints.path, environment.round, checkpoints.keep) if checkpoints else None
    selected = select_device(device, environment.local_rank)
    recorder = watch()
    if not dist.is_initialized():
        backend = backend or ("gloo" if selected.type == "cpu" else "cuda:nccl,cpu:gloo")
        alone = "RANK" not in os.environ
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=HashStore() if alone else None,
            rank=0 if alone else -1,
            world_size=1 if alone else -1,
            device_id=selected if "nccl" in backend else None,
        )
    if folder and environment.rank == 0:
        folder.own()
    checkpoint_every = checkpoints.every if checkpoints else 0
    return Job(environment, recorder, selected, shape, seed, folder, checkpoint_every, snapshot_every, course)


class Job:
    """One rank's view of the job."""

    def __init__(
        self,
        environment: Environment,
        recorder: Recorder,
        device: torch.device,
        mesh: dict[str, int],
        seed: int,
        folder: CheckpointFolder | None,
        checkpoint_every: int,
        snapshot_every: int | None,
        course: Course | None,
    ) -> None:
        self.environment = environment
        self.recorder = recorder
        recorder.steered = True
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.device = device
        """That this rank trains on: where the model goes, and what the script makes itself."""
        self._agreement = Agreement(recorder)
        self._progress = Progress()
        self._replication = Replication(self.rank, mesh, device)
        self._seed = seed
        self._folder = folder
        self._checkpoint_every = checkpoint_every
        self._snapshot_every = snapshot_every
        self._course = course
        self._objects: dict[str, Any] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._warmup_steps = 0
        self._schedules: list[tuple[LambdaLR, Schedule]] = []
        self._ordinals: Ordinals | None = None
        self._told_to_leave = False
        signal.signal(signal.SIGTERM, self._leave_soon)

    @property
    def step(self) -> int:
        """Completed optimizer steps of the job: global batches that it has used.

        In Local-SGD modes it is exact at synchronisations, and from there on this rank's steps are counted.
        """
        return self._progress.step

    @property
    def samples(self) -> int:
        """Samples of the whole job in the completed steps."""
        return self._progress.samples

    @property
    def loss(self) -> float:
        """Mean loss over the newest step, or interval between synchronisations, that all ranks have reported; NaN: none
        was."""
        return self._ordinals.loss if self._ordinals else math.nan

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the job, in the dimensions "sync" and "shard". Collective where it is first asked for."""
        return self._replication.mesh

    def replicate(self, model: nn.Module, units: Units = nn.Module.children, **options: Any) -> nn.Module:
        """`model` on each rank's device, kept alike by DistributedDataParallel. Gradients are summed over the ranks.

        units: the parts of the model that Local-SGD modes synchronise one at a time, in the order of the forward pass;
        its blocks, say. options: DistributedDataParallel's broadcast_buffers, bucket_cap_mb, find_unused_parameters,
        gradient_as_bucket_view, init_sync. torch.compile: of the blocks or of all, before or after this; but code that
        has run before it does not know of it. Raises InputError for other options.
        """
        return self._replication.replicate(model, units, options)

    def fully_shard(self, model: nn.Module, units: Units = nn.Module.children, **options: Any) -> nn.Module:
        """`model` sharded by FSDP2 over the ranks of the mesh's "shard". Gradients are summed over the ranks.

        units: the parts of the model that are gathered, and in Local-SGD modes synchronised, one at a time; its blocks,
        say. options: FSDP2's mp_policy, reshard_after_forward, offload_policy, shard_placement_fn, and ignored_params
        that are frozen. torch.compile: as for `replicate`. Raises InputError for other options.
        """
        return self._replication.fully_shard(model, units, options)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, outer: OuterSGD | None = None, warmup_steps: int = 100
    ) -> torch.optim.Optimizer:
        """Tells the job which optimizer trains. The first one's step completes a step of the job.

        outer: how synchronisations of the Local-SGD modes move the parameters; None: `OuterSGD()`.
        warmup_steps: of the job, that are always in Sync: Local-SGD begins badly from untrained parameters (arXiv
        2412.07210, section 3.2).
        """
        if self._optimizer is None:
            self._optimizer = optimizer
            self._warmup_steps = warmup_steps
            optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins())
            optimizer.register_step_post_hook(lambda *_: self._complete_step())
        self._replication.train_with(optimizer, outer)
        return optimizer

    def lr_lambda(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> LambdaLR:
        """A schedule whose learning rate is its initial value times `factor(samples of the job)`."""
        schedule = LambdaLR(optimizer, lambda _: factor(self.samples))
        self._schedules.append((schedule, factor))
        return schedule

    def dataloader(
        self,
        dataset: torch.utils.data.Dataset[Any] | Iterable[Any],
        global_batch_size: int,
        max_microbatch: int,
        weight: Weight | None = None,
        shuffle: bool = True,
        lengths: Lengths | None = None,
        cost: SequenceCost | None = None,
        **options: Any,
    ) -> Loader:
        """Deals each step's `global_batch_size` samples out to the ranks, by the shares that are in force.

        dataset: with an index and a length; or an iterable, the same on all ranks, which each of them runs through
        and takes its part of: keep what it yields cheap, and do the rest in collate_fn.
        max_microbatch: samples of one forward pass that fit into a rank's memory.
        weight: from a batch to what its loss sum is divided by, such as its valid tokens; None: its samples.
        shuffle: whether each epoch has an order of its own; an iterable has its own always.
        lengths: of the samples, by their index (one number each, or a function): who takes which of a global batch's
        samples is then chosen so that ranks, and microbatches, take equally long. None: they are dealt as they come.
        cost: of a sequence, by its length, until the plan knows better; None: as its length.
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
            lengths=lengths,
            cost=cost,
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
        return self._retention.restore()

    def steps(self, loader: Loader, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps, up to number `until` of the job, restarts included; None: without end.

        In every mode that is `until` global batches of samples. Ends the process with exit code 143, after a
        checkpoint, when the job is told to leave (SIGTERM, suspend).
        """
        ordinals = self._ordinals = self._begin(loader, until)
        ordinals.open()
        while not ordinals.finished:
            step = ordinals.next_step()
            if step is not None:
                try:
                    yield step
                except GeneratorExit:  # the script leaves the loop: what is being written is not to be lost
                    self._retention.wait()
                    raise
                step.finish()
                ordinals.complete_step()
            ordinals.pass_boundary()
        ordinals.close()
        self._retention.finish()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase other than training, with a deadline of its own: "eval", "compile", "checkpoint" or "data"."""
        if name not in _PHASES:
            raise InputError(f"phase {name!r} is unknown; take one of {', '.join(_PHASES)}")
        return self.recorder.during(_PHASES[name])

    def _begin(self, loader: Loader, until: int | None) -> Ordinals:
        loader.replica_size = self._replication.shape["shard"]
        progress = self._progress
        progress.begin(loader.global_batch_size)
        self.recorder.ring.state.global_batch = loader.global_batch_size
        self.recorder.restart_clock(progress.step + 1)

        def check(course: Course) -> None:
            if course.shares is not None:
                loader.check(course.shares)
            if course.sequence_cost is not None:
                loader.check_cost()
            if course.sync_mode is not SyncMode.SYNC:
                self._replication.check_local()

        try:
            check(progress.course)
        except InputError:  # of another number of ranks, or of another script
            progress.course = Course()
        if self._course is not None:
            check(self._course)
            progress.course = self._course
        return Ordinals(
            rank=self.rank,
            agreement=self._agreement,
            plan=PlanFollower(self.environment.runtime if self.rank == 0 else None, check),
            recorder=self.recorder,
            progress=progress,
            replication=self._replication,
            retention=self._retention,
            loader=loader,
            until=until,
            warmup_steps=self._warmup_steps,
            told_to_leave=lambda: self._told_to_leave,
            settled=self._adjust_schedules,
        )

    @cached_property
    def _retention(self) -> Retention:
        """Made when it is first needed: by then everything is registered."""
        objects = {**self._objects, "job": self._progress}
        keeper = Keeper(self.environment, self._agreement, objects, self._folder, self._replication)
        snapshot_every = self._snapshot_every if self._objects else 0
        return Retention(
            keeper, self.recorder, self._progress, self._replication, self._checkpoint_every, snapshot_every
        )

    def _adjust_schedules(self) -> None:
        """The job's samples have changed by what the peers have done: to the learning rates that belong to them."""
        for schedule, factor in self._schedules:
            for group, initial in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = initial * factor(self.samples)

    def _optimizer_begins(self) -> None:
        if self._ordinals is not None and self._ordinals.stepping:
            self.recorder.optimizer_begins()

    def _complete_step(self) -> None:
        if self._ordinals is not None:
            self._ordinals.complete_step()

    def _leave_soon(self, *_: Any) -> None:
        self._told_to_leave = True


def _course(sync_mode: str | None, sync_every: int, sync_seconds: float) -> Course | None:
    """None: the script says nothing. Raises InputError."""
    if sync_mode is None:
        return None
    if sync_mode not in MODES:
        raise InputError(f"sync_mode={sync_mode!r} is unknown; take one of {', '.join(MODES)}")
    if sync_every < 1 or not sync_seconds > 0:
        raise InputError(f"sync_every={sync_every} must be 1 step or more, sync_seconds={sync_seconds} above 0")
    return Course(SyncMode(sync_mode), sync_every, sync_seconds)


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
    return shape
