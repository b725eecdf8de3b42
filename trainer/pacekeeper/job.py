"""The library that a training script uses to be steered: `pk.init()` and the `Job` that it returns.

Everything that the ranks do together happens between two steps, in `Job.steps`: see modes/ordinals.py.
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
from pacekeeper_analysis.lengths import SequenceCost
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import Phase

from .data.lengths import Lengths
from .data.loader import BatchSizes, Loader, RankTopology, Weight
from .device import select_device
from .environment import Environment
from .job_settings import Checkpoints, JobSettings, validate_training_config, resolve_mesh_shape, count_replica_ranks
from .keep.checkpoints import CheckpointFolder
from .keep.state import TrainingState
from .keep.store import StateStore
from .modes.agreement import Agreement
from .modes.conclusion import RoundLimits
from .modes.course import TrainingConfig
from .modes.follower import PlanReader
from .modes.mode import SyncComponents
from .modes.ordinals import SyncPoints
from .modes.progress import Progress
from .modes.retention import StateSaver
from .observe.recorder import Recorder
from .observe.watching import get_recorder as watch
from .registered import check_registered
from .replication.local_sgd import OuterSGD
from .replication.parallel import Units
from .replication.replication import Replication
from .step import Step
from .torch_internals import HashStore

Schedule = Callable[[int], float]
"""From the job's samples so far to a factor of the learning rate."""

_log = logging.getLogger(__name__)

_PROGRESS_NAME = "job"
"""Name of the job's own progress among what a checkpoint holds."""

_PHASES = {"eval": Phase.EVALUATE, "compile": Phase.COMPILE, "checkpoint": Phase.CHECKPOINT, "data": Phase.DATA}


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
    seconds), where no plan says so (spec.syncMode, `pacekeeper run --local N --sync-mode`), such as under torchrun;
    None: as the checkpoint says, at first "Sync".
    device: that this rank trains on, `Job.device`: "cpu", "cuda" (the GPU with the number of LOCAL_RANK) or one GPU,
    such as "cuda:0"; None: a GPU where there is one.
    backend: of the process group; by default nccl for tensors on GPUs and gloo for those on CPUs.
    timeout: after which a collective that does not come to its end fails.
    Raises InputError that names the argument and the remedy; where `checkpoints` is another job's folder, before
    anything is changed there.
    """
    environment = Environment.read()
    mesh = mesh or {"sync": -1}
    shape = resolve_mesh_shape(mesh, environment.world_size)
    if checkpoints is None and environment.checkpoint_path is not None:
        checkpoints = Checkpoints(
            environment.checkpoint_path,
            environment.checkpoint_every,
            environment.checkpoint_keep,
            environment.checkpoint_adopt,
            environment.checkpoint_read_only,
        )
    if snapshot_every is not None and snapshot_every < 0:
        raise InputError(f"snapshot_every={snapshot_every} must be 0 (none), a number of steps, or None")
    if checkpoints is not None and checkpoints.every < 0:
        raise InputError(f"checkpoints.every={checkpoints.every} must be 0 (only when asked for) or a number of steps")
    course = validate_training_config(sync_mode, sync_every, sync_seconds)
    folder = _open_checkpoint_folder(checkpoints, environment) if checkpoints else None
    selected = select_device(device, environment.device_index)
    if selected.type == "cpu" and "nccl" in (backend or ""):
        raise InputError(
            f'backend={backend!r}: NCCL needs a GPU, this rank trains on the CPU; leave it out, or say "gloo"'
        )
    recorder = watch()
    recorder.ring.state.device_ns = time.monotonic_ns()
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
    checkpoint_every = checkpoints.every if checkpoints else 0
    least = count_replica_ranks(mesh, environment.world_size)
    settings = JobSettings(selected, shape, least, seed, folder, checkpoint_every, snapshot_every, course)
    return Job(environment, recorder, settings)


def _open_checkpoint_folder(checkpoints: Checkpoints, environment: Environment) -> CheckpointFolder:
    """Raises InputError where it is another job's, or cannot be written."""
    return CheckpointFolder(
        Path(checkpoints.path),
        environment.round,
        checkpoints.keep,
        environment.job,
        checkpoints.adopt or environment.checkpoint_adopt,
        checkpoints.read_only or environment.checkpoint_read_only,
    )


class Job:
    """One rank's view of the job."""

    def __init__(self, environment: Environment, recorder: Recorder, settings: JobSettings) -> None:
        self.environment = environment
        self.recorder = recorder
        recorder.managed = True
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.device = settings.device
        """That this rank trains on: where the model goes, and what the script makes itself."""
        self._agreement = Agreement(recorder)
        self._progress = Progress()
        self._replication = Replication(self.rank, settings.mesh, settings.device)
        self._settings = settings
        self._objects: dict[str, Any] = {}
        self._retention: StateSaver | None = None
        """None: nothing was restored yet."""
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepped: set[torch.optim.Optimizer] = set()
        """Of them, those that have in the present step."""
        self._warmup_steps = 0
        self._schedules: list[tuple[LambdaLR, Schedule]] = []
        self._sync_points: SyncPoints | None = None
        self._leave_requested = False
        signal.signal(signal.SIGTERM, self._request_leave)
        self._replication.create_groups()
        recorder.ring.state.joined_ns = time.monotonic_ns()

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
        return self._sync_points.loss if self._sync_points else math.nan

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
        """Tells the job which optimizer trains. The first one's step completes a step of the job; where there are
        more, each steps once. When all have stepped, ranks in Local-SGD modes synchronise: what else changes parameters
        belongs before.

        outer: how synchronisations of the Local-SGD modes move the parameters; None: `OuterSGD()`.
        warmup_steps: of the job, that are always in Sync: Local-SGD begins badly from untrained parameters (arXiv
        2412.07210, section 3.2).
        """
        if not self._optimizers:
            self._warmup_steps = warmup_steps
            optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins())
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(lambda *_: self._optimizer_stepped(optimizer))
        self._replication.add_optimizer(optimizer, outer)
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
        static_shapes: bool = False,
        **options: Any,
    ) -> Loader:
        """Deals each step's `global_batch_size` samples out to the ranks, by the shares that are in force.

        dataset: with an index and a length; or an iterable, the same on all ranks, which each of them runs through
        and takes its part of: keep what it yields cheap, and do the rest in collate_fn.
        max_microbatch: samples of one forward pass that fit into a rank's memory.
        weight: from a batch to what its loss sum is divided by, such as its valid tokens; None: its samples. It is
        given batches on the host.
        shuffle: whether each epoch has an order of its own; an iterable has its own always.
        lengths: of the samples, by their index (one number each, or a function): who takes which of a global batch's
        samples is then chosen so that ranks, and microbatches, take equally long. None: they are dealt as they come.
        cost: of a sequence, by its length, until the plan knows better; None: as its length.
        static_shapes: every microbatch has max_microbatch samples, which the global batch is a multiple of; shares come
        in whole microbatches. So what is compiled for one shape serves all.
        options: for torch's DataLoader, such as num_workers and collate_fn.
        """
        return Loader(
            dataset,
            BatchSizes(global_batch_size, max_microbatch, static_shapes),
            RankTopology(self.rank, self.world_size, self._replication.shape["shard"]),
            weight=weight,
            device=self.device,
            seed=self._settings.seed,
            shuffle=shuffle,
            lengths=lengths,
            cost=cost,
            **options,
        )

    def register(self, **objects: Any) -> None:
        """What belongs to a checkpoint: anything that has state_dict and load_state_dict. The names are part of it.

        Before `restore`, or instead of giving it there. Raises InputError.
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
        """Registers `objects`, and goes back to the newest state that all ranks can have: of the snapshots, or of the
        newest good checkpoint. Collective.

        Returns its step; 0: there is none, and the training begins. Where a script does not call it, `steps` does.
        Raises InputError where the checkpoint is another model's, or where an object's state cannot be kept.
        """
        if self._retention is not None:
            raise InputError("restore(): the job's state is restored already; call it once, before the first step")
        self.register(**objects)
        settings = self._settings
        state = TrainingState({**self._objects, _PROGRESS_NAME: self._progress}, self._replication, self.rank)
        store = StateStore(self.environment, self._agreement, state, settings.folder)
        snapshot_every = settings.snapshot_every if self._objects else 0
        retention = StateSaver(
            store, self.recorder, self._progress, self._replication, settings.checkpoint_every, snapshot_every
        )
        step = retention.restore()
        self._retention = retention
        return step

    def steps(self, loader: Loader, until: int | None = None) -> Iterator[Step]:
        """Optimizer steps, up to number `until` of the job, restarts included; None: without end.

        In every mode that is `until` global batches of samples. Ends the process with exit code 143, after a
        checkpoint, when the job is told to leave (SIGTERM, suspend). Raises InputError where the job's state is kept,
        and what it trains with is not all registered.
        """
        if self._objects or self._settings.folder is not None:
            check_registered(self._objects, self._replication.models, self._optimizers, loader)
        if self._retention is None:
            self.restore()
        retention = self._retention
        assert retention is not None, "restore() makes it"
        ordinals = self._sync_points = self._create_sync_points(loader, until, retention)
        ordinals.open_first_period()
        while not ordinals.finished:
            step = ordinals.next_step()
            if step is not None:
                self._stepped.clear()
                try:
                    yield step
                except GeneratorExit:  # the script leaves the loop: what is being written is not to be lost
                    retention.wait()
                    raise
                step.finish()
                ordinals.complete_step()
            ordinals.pass_boundary()
        ordinals.close()
        retention.finish()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase other than training, with a deadline of its own: "eval", "compile", "checkpoint" or "data"."""
        if name not in _PHASES:
            raise InputError(f"phase {name!r} is unknown; take one of {', '.join(_PHASES)}")
        return self.recorder.run_phase(_PHASES[name])

    def _create_sync_points(self, loader: Loader, until: int | None, retention: StateSaver) -> SyncPoints:
        progress = self._progress
        progress.begin_round(loader.global_batch_size)
        self.recorder.ring.state.global_batch = loader.global_batch_size
        self.recorder.ring.state.share_grain = loader.share_granularity
        self.recorder.ring.state.total_steps = until or 0
        self.recorder.ring.state.replica_ranks = self._settings.replica_ranks
        self.recorder.restart_clock(progress.step + 1)

        def check(course: TrainingConfig) -> None:
            if course.shares is not None:
                loader.check_shares(course.shares)
            if course.sequence_cost is not None:
                loader.check_cost()
            if course.sync_mode is not SyncMode.SYNC:
                self._replication.check_local_sgd()

        try:
            check(progress.training_config)
        except InputError:  # of another number of ranks, or of another script
            progress.training_config = TrainingConfig()
        if self._settings.training_config is not None:
            check(self._settings.training_config)
            progress.training_config = self._settings.training_config
            runtime = self.environment.runtime
            if self.rank == 0 and runtime is not None and runtime.plan.exists():
                _log.warning(
                    "sync_mode of pk.init is passed over: the plan says how to train; see spec.syncMode of the "
                    "TrainingJob, or pacekeeper run --local N --sync-mode"
                )
        parts = SyncComponents(
            agreement=self._agreement,
            recorder=self.recorder,
            progress=progress,
            replication=self._replication,
            state_saver=retention,
            loader=loader,
            plan_reader=PlanReader(self.environment.runtime if self.rank == 0 else None, check),
            is_leave_requested=lambda: self._leave_requested,
            on_settled=self._adjust_schedules,
        )
        return SyncPoints(parts, RoundLimits(None if until is None else progress.compute_samples_at(until), self._warmup_steps))

    def _adjust_schedules(self) -> None:
        """The job's samples have changed by what the peers have done: to the learning rates that belong to them."""
        for schedule, factor in self._schedules:
            for group, initial in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = initial * factor(self.samples)

    def _optimizer_begins(self) -> None:
        if self._sync_points is not None:
            self._sync_points.optimizer_begins()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The job's first optimizer completes a step; the ranks may meet when all have stepped."""
        if self._sync_points is None:
            return
        self._stepped.add(optimizer)
        if optimizer is self._optimizers[0]:
            self._sync_points.complete_step()
        if self._stepped.issuperset(self._optimizers):
            self._sync_points.finish_optimizer_steps()

    def _request_leave(self, *_: Any) -> None:
        self._leave_requested = True
