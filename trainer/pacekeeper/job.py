"""API of a managed training script: `pk.init()` and the `Job` that it returns.

Everything that the ranks do together happens between two steps, in `Job.steps`: see sync/sync_points.py.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers.length_cost import SequenceCost
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Phase

from .checkpointing.state_store import StateStore
from .checkpointing.storage.checkpoint_folder import CheckpointFolder
from .checkpointing.storage.checkpoint_storage import CheckpointStorage
from .checkpointing.storage.object_checkpoints import ObjectCheckpoints
from .checkpointing.storage.object_store import open_object_store
from .checkpointing.training_state import TrainingState
from .data.lengths import Lengths
from .data.loader import BatchSizes, Loader, RankTopology, SampleOrder, Weight
from .device import select_device
from .environment import Environment
from .job_settings import Checkpoints, JobSettings, count_replica_ranks, resolve_mesh_shape, validate_training_config
from .observe.monitoring import get_recorder as watch
from .registration import check_registered
from .replication.local_sgd import OuterSGD
from .replication.parallel import Units
from .replication.replication import Replication
from .step import Step
from .sync.agreement import Agreement
from .sync.plan_reader import PlanReader
from .sync.progress import Progress
from .sync.state_saver import StateSaver
from .sync.sync_decision import RoundLimits
from .sync.sync_points import SyncPoints
from .sync.sync_strategy import SyncComponents
from .sync.training_config import TrainingConfig
from .torch_internals import HashStore

Schedule = Callable[[int], float]
"""A function from the samples that the job has used to a factor of the learning rate."""

_log = logging.getLogger(__name__)

FILE_SCHEME = "file://"
"""Scheme of a mounted folder, which has renames and durable writes: it is used as a path."""
_PROGRESS_NAME = "job"
"""Name of the job's own progress in a checkpoint."""

_PHASES = {"eval": Phase.EVALUATE, "compile": Phase.COMPILE, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}


def init(  # noqa: PLR0913  # the public entry, with keywords alone, as torch's init_process_group
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
    """Join this rank's process group and its job. Call it before anything that uses CUDA.

    It works under `pacekeeper run`, under torchrun, and under plain Python with a single rank.

    `mesh`: {"sync": number of replicas, "shard": ranks that share one replica}. -1 means all remaining ranks.
    `seed`: seed of the order of samples; the same on all ranks.
    `checkpoints`: None takes the settings of the TrainingJob (PACEKEEPER_CHECKPOINT_PATH and related variables), or
    none.
    `snapshot_every`: steps between snapshots in shared memory. 0 disables them. None takes them as often as 1 % of the
    training time allows.
    `sync_mode`: "Sync", "EDiT" (synchronizes every `sync_every` steps) or "AsyncEDiT" (every `sync_seconds` seconds).
    It applies only if no plan sets the mode (spec.syncMode, `pacekeeper run --local N --sync-mode`), for example under
    torchrun. None takes the mode of the checkpoint, initially "Sync".
    `device`: the device that this rank trains on (`Job.device`): "cpu", "cuda" (the GPU with the number LOCAL_RANK) or
    one GPU, such as "cuda:0". None takes a GPU if there is one.
    `backend`: backend of the process group. The default is nccl for tensors on GPUs and gloo for tensors on CPUs.
    `timeout`: time after which an incomplete collective fails.

    Raises InputError that names the argument and the remedy. If `checkpoints` is the folder of another job, it is
    raised before anything changes there.
    """
    environment = Environment.read()
    mesh = mesh or {"sync": -1}
    shape = resolve_mesh_shape(mesh, environment.world_size)
    location = environment.checkpoint_uri or environment.checkpoint_path
    if checkpoints is None and location:
        checkpoints = Checkpoints(
            location,
            environment.checkpoint_every,
            environment.checkpoint_keep,
            environment.checkpoint_adopt,
            environment.checkpoint_read_only,
        )
    if snapshot_every is not None and snapshot_every < 0:
        raise InputError(f"snapshot_every={snapshot_every} must be 0 (none), a number of steps, or None")
    if checkpoints is not None and checkpoints.every < 0:
        raise InputError(f"checkpoints.every={checkpoints.every} must be 0 (only when asked for) or a number of steps")
    config = validate_training_config(sync_mode, sync_every, sync_seconds)
    folder = _open_checkpoint_storage(checkpoints, environment) if checkpoints else None
    selected = select_device(device, environment.device_index)
    if selected.type == "cpu" and "nccl" in (backend or ""):
        raise InputError(
            f'backend={backend!r}: NCCL needs a GPU, but this rank trains on the CPU; omit backend or set "gloo"'
        )
    recorder = watch()
    recorder.ring.state.device_ns = time.monotonic_ns()
    if not dist.is_initialized():
        backend = backend or ("gloo" if selected.type == "cpu" else "cuda:nccl,cpu:gloo")
        is_single_process = "RANK" not in os.environ
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=HashStore() if is_single_process else None,
            rank=0 if is_single_process else -1,
            world_size=1 if is_single_process else -1,
            device_id=selected if "nccl" in backend else None,
        )
    checkpoint_every = checkpoints.every if checkpoints else 0
    replica_ranks = count_replica_ranks(mesh, environment.world_size)
    settings = JobSettings(selected, shape, replica_ranks, seed, folder, checkpoint_every, snapshot_every, config)
    return Job(environment, recorder, settings)


def _open_checkpoint_storage(checkpoints: Checkpoints, environment: Environment) -> CheckpointStorage:
    """Open the storage. Raises InputError if another job owns it, or if it is not writable."""
    location = str(checkpoints.path)
    adopt = checkpoints.adopt or environment.checkpoint_adopt
    read_only = checkpoints.read_only or environment.checkpoint_read_only
    if "://" in location and not location.startswith(FILE_SCHEME):
        store = open_object_store(location)
        return ObjectCheckpoints(
            store, environment.round, checkpoints.keep, environment.job, adopt, read_only, rank=environment.rank
        )
    path = Path(location.removeprefix(FILE_SCHEME))
    return CheckpointFolder(path, environment.round, checkpoints.keep, environment.job, adopt, read_only)


class Job:
    """One rank's view of the job."""

    def __init__(self, environment: Environment, recorder: Recorder, settings: JobSettings) -> None:
        self.environment = environment
        self.recorder = recorder
        recorder.managed = True
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.device = settings.device
        """The device that this rank trains on. Move the model and the script's own tensors to it."""
        self._agreement = Agreement(recorder)
        self._progress = Progress()
        self._replication = Replication(self.rank, settings.mesh, settings.device)
        self._settings = settings
        self._objects: dict[str, Any] = {}
        self._retention: StateSaver | None = None
        """None: no state was restored yet."""
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepped: set[torch.optim.Optimizer] = set()
        """The optimizers that have stepped in the present step."""
        self._warmup_steps = 0
        self._schedules: list[tuple[LambdaLR, Schedule]] = []
        self._sync_points: SyncPoints | None = None
        self._leave_requested = False
        signal.signal(signal.SIGTERM, self._request_leave)
        self._replication.create_groups()
        recorder.ring.state.joined_ns = time.monotonic_ns()

    @property
    def step(self) -> int:
        """Number of completed optimizer steps of the job: the global batches that it has used.

        In Local-SGD modes it is exact at synchronizations. In between, this rank's own steps are added.
        """
        return self._progress.step

    @property
    def samples(self) -> int:
        """Number of samples that the whole job has used in the completed steps."""
        return self._progress.samples

    @property
    def loss(self) -> float:
        """Mean loss over the newest step, or interval between synchronizations, that all ranks have reported.

        It is NaN until the first report.
        """
        return self._sync_points.loss if self._sync_points else math.nan

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the job, with the dimensions "sync" and "shard". The first access is collective."""
        return self._replication.mesh

    def replicate(self, model: nn.Module, units: Units = nn.Module.children, **options: Any) -> nn.Module:
        """Return `model` on this rank's device in DistributedDataParallel. Gradients are summed over the ranks.

        `units`: function that lists the parts of the model that Local-SGD modes synchronize one at a time, in the order
        of the forward pass; for example its blocks.
        `options`: options of DistributedDataParallel: broadcast_buffers, bucket_cap_mb, find_unused_parameters,
        gradient_as_bucket_view, init_sync.

        Apply torch.compile to the blocks or to the whole model, before or after this call. Compiled code that has run
        before this call does not see the replication.

        Raises InputError for other options.
        """
        return self._replication.replicate(model, units, options)

    def fully_shard(self, model: nn.Module, units: Units = nn.Module.children, **options: Any) -> nn.Module:
        """Shard `model` with FSDP2 over the ranks of the mesh dimension "shard". Gradients are summed over the ranks.

        `units`: function that lists the parts of the model that are gathered, and in Local-SGD modes synchronized, one
        at a time; for example its blocks.
        `options`: FSDP2's mp_policy, reshard_after_forward, offload_policy, shard_placement_fn, and ignored_params that
        are frozen.

        torch.compile: see `replicate`. Raises InputError for other options.
        """
        return self._replication.fully_shard(model, units, options)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, outer: OuterSGD | None = None, warmup_steps: int = 100
    ) -> torch.optim.Optimizer:
        """Register an optimizer that trains the job, and return it.

        The step of the first optimizer completes a step of the job. If there are more optimizers, each steps once per
        step of the job. In Local-SGD modes the ranks synchronize when all optimizers have stepped: change parameters by
        other means before that.

        `outer`: how synchronizations of the Local-SGD modes update the parameters. None means `OuterSGD()`.
        `warmup_steps`: first steps of the job, which always run in Sync: Local-SGD starts badly from untrained
        parameters (arXiv 2412.07210, section 3.2).
        """
        if not self._optimizers:
            self._warmup_steps = warmup_steps
            optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins())
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(lambda *_: self._optimizer_stepped(optimizer))
        self._replication.add_optimizer(optimizer, outer)
        return optimizer

    def lr_lambda(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> LambdaLR:
        """Return a scheduler that sets the learning rate to its initial value times `factor(samples of the job)`."""
        schedule = LambdaLR(optimizer, lambda _: factor(self.samples))
        self._schedules.append((schedule, factor))
        return schedule

    def dataloader(  # noqa: PLR0913  # public, and like torch's DataLoader
        self,
        dataset: torch.utils.data.Dataset[Any] | Iterable[Any],
        global_batch_size: int,
        max_microbatch: int,
        weight: Weight | None = None,
        shuffle: bool = True,
        lengths: Lengths | None = None,
        cost: SequenceCost | None = None,
        static_shapes: bool = False,
        **options: Any,
    ) -> Loader:
        """Return a loader that distributes each step's `global_batch_size` samples over the ranks by current shares.

        `dataset`: a dataset with an index and a length, or an iterable that is the same on all ranks. Each rank
        iterates over the whole iterable and takes its part: keep iteration cheap, and do the rest in collate_fn.
        `max_microbatch`: largest number of samples of one forward pass that fit into a rank's memory.
        `weight`: function from a batch to the divisor of its loss sum, such as its number of valid tokens. It gets
        batches on the host. None: the number of samples.
        `shuffle`: whether each epoch has a different order. An iterable defines its own order.
        `lengths`: lengths of the samples by index (one number each, or a function). Samples of a global batch are then
        assigned so that ranks, and microbatches, take equally long. None: they are assigned in order.
        `cost`: cost of a sequence by its length, until the plan has a better estimate. None: proportional to the
        length.
        `static_shapes`: every microbatch has max_microbatch samples; the global batch is a multiple of that, and shares
        are whole microbatches. Code that is compiled for one shape then serves all of them.
        `options`: options for torch's DataLoader, such as num_workers and collate_fn.
        """
        return Loader(
            dataset,
            BatchSizes(global_batch_size, max_microbatch, static_shapes),
            RankTopology(self.rank, self.world_size, self._replication.shape["shard"]),
            SampleOrder(self._settings.seed, shuffle, lengths, cost),
            weight=weight,
            device=self.device,
            **options,
        )

    def register(self, **objects: Any) -> None:
        """Register objects that belong to a checkpoint: anything that has state_dict and load_state_dict.

        The names become part of the checkpoint. Call it before `restore`, or pass the objects to `restore` instead.
        Raises InputError.
        """
        if self._retention is not None:
            raise InputError(f"{', '.join(objects)}: the job's state is restored already; register it before restore()")
        if _PROGRESS_NAME in objects:
            raise InputError(f"{_PROGRESS_NAME}: under this name the job keeps its own progress; take another one")
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise InputError(f"{name}: {type(item).__name__} has no state_dict and load_state_dict; leave it out")
        self._objects.update(objects)

    def restore(self, **objects: Any) -> int:
        """Register `objects`, and restore the newest state that all ranks have. Collective.

        The state comes from the snapshots or from the newest valid checkpoint. Returns its step; 0 means that there is
        none and the training begins. If a script does not call it, `steps` does. Raises InputError if the checkpoint is
        of another model, or if the state of an object cannot be saved.
        """
        if self._retention is not None:
            raise InputError("restore(): the job's state is restored already; call it once, before the first step")
        self.register(**objects)
        settings = self._settings
        state = TrainingState({**self._objects, _PROGRESS_NAME: self._progress}, self._replication, self.rank)
        store = StateStore(self.environment, self._agreement, state, settings.folder)
        snapshot_every = settings.snapshot_every if self._objects else 0
        state_saver = StateSaver(
            store, self.recorder, self._progress, self._replication, settings.checkpoint_every, snapshot_every
        )
        step = state_saver.restore()
        self._retention = state_saver
        return step

    def steps(self, loader: Loader, until: int | None = None) -> Iterator[Step]:
        """Yield optimizer steps, up to step `until` of the job, restarts included. None: without end.

        In every mode that is `until` global batches of samples. If the job has to leave (SIGTERM, suspend), the process
        exits with code 143 after a checkpoint. Raises InputError if the job's state is saved but something that the job
        trains with is not registered.
        """
        if self._objects or self._settings.folder is not None:
            check_registered(self._objects, self._replication.models, self._optimizers, loader)
        if self._retention is None:
            self.restore()
        state_saver = self._retention
        assert state_saver is not None, "restore() makes it"
        sync_points = self._sync_points = self._create_sync_points(loader, until, state_saver)
        sync_points.open_first_period()
        while not sync_points.finished:
            step = sync_points.next_step()
            if step is not None:
                self._stepped.clear()
                try:
                    yield step
                except GeneratorExit:  # the script leaves the loop: finish the checkpoint that is being written
                    state_saver.wait()
                    raise
                step.finish()
                sync_points.complete_step()
            sync_points.pass_boundary()
        sync_points.close()
        state_saver.finish()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for a phase other than training: "eval", "compile", "checkpoint" or "data".

        Each phase has its own deadline. Raises InputError for other names.
        """
        if name not in _PHASES:
            raise InputError(f"phase {name!r} is unknown; take one of {', '.join(_PHASES)}")
        return self.recorder.run_phase(_PHASES[name])

    def _create_sync_points(self, loader: Loader, until: int | None, state_saver: StateSaver) -> SyncPoints:
        progress = self._progress
        progress.begin_round(loader.global_batch_size)
        self.recorder.ring.state.global_batch = loader.global_batch_size
        self.recorder.ring.state.share_granularity = loader.share_granularity
        self.recorder.ring.state.total_steps = until or 0
        self.recorder.ring.state.replica_ranks = self._settings.replica_ranks
        self.recorder.restart_clock(progress.step + 1)

        def check(config: TrainingConfig) -> None:
            if config.shares is not None:
                loader.check_shares(config.shares)
            if config.sequence_cost is not None:
                loader.check_cost()
            if config.sync_mode is not SyncMode.SYNC:
                self._replication.check_local_sgd()

        try:
            check(progress.training_config)
        except InputError:  # it belongs to another number of ranks, or to another script
            progress.training_config = TrainingConfig()
        if self._settings.training_config is not None:
            check(self._settings.training_config)
            progress.training_config = self._settings.training_config
            runtime = self.environment.runtime
            if self.rank == 0 and runtime is not None and runtime.plan.exists():
                _log.warning(
                    "ignoring sync_mode of pk.init: the plan sets the mode; use spec.syncMode of the "
                    "TrainingJob, or pacekeeper run --local N --sync-mode"
                )
        components = SyncComponents(
            agreement=self._agreement,
            recorder=self.recorder,
            progress=progress,
            replication=self._replication,
            state_saver=state_saver,
            loader=loader,
            plan_reader=PlanReader(self.environment.runtime if self.rank == 0 else None, check),
            is_leave_requested=lambda: self._leave_requested,
            on_settled=self._adjust_schedules,
        )
        return SyncPoints(
            components, RoundLimits(None if until is None else progress.compute_samples_at(until), self._warmup_steps)
        )

    def _adjust_schedules(self) -> None:
        """Adjust the learning rates after the work of other ranks has changed the job's samples."""
        for schedule, factor in self._schedules:
            for group, initial in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = initial * factor(self.samples)

    def _optimizer_begins(self) -> None:
        if self._sync_points is not None:
            self._sync_points.optimizer_begins()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step at the first optimizer; synchronize, if due, when all optimizers have stepped."""
        if self._sync_points is None:
            return
        self._stepped.add(optimizer)
        if optimizer is self._optimizers[0]:
            self._sync_points.complete_step()
        if self._stepped.issuperset(self._optimizers):
            self._sync_points.finish_optimizer_steps()

    def _request_leave(self, *_: Any) -> None:
        self._leave_requested = True
