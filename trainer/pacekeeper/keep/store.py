"""Keeps the job's state and gives it back, from the snapshot in shared memory or the volume's checkpoint: the newer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum, auto
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from pacekeeper.data.loader import Loader
from pacekeeper.environment import Environment
from pacekeeper.exchange import broadcast, gather
from pacekeeper.modes.agreement import Agreement, new_cpu_group
from pacekeeper.modes.progress import Progress
from pacekeeper.plain import allow, pack, take_apart
from pacekeeper.plain import unpack as unpack_plain
from pacekeeper.replication.parallel import equalise_buffers, unwrap
from pacekeeper.replication.replication import Replication
from pacekeeper.torch_internals import tree_map_only
from pacekeeper_analysis.errors import InputError

from .checkpoints import CheckpointFolder, FileSum, Manifest, checksum
from .distributed_checkpoint import INDEX, TORCHS_INDEX, Failed, load, save
from .news import culprit, open_news
from .rank_state import RANK_STATE_BYTES, capture_rank_state, describe, differences, fingerprint, restore_rank_state
from .snapshots import NOTHING, SLOTS, Slot, Snapshots, Version, choose, receive_or_send, unpack

_RANK_STATE = "rank_state"
_OUTER = "pacekeeper.outer"
"""Name of an outer optimizer and what goes with it: there once the job has been in a Local-SGD mode, and optional."""
_SLOW_SECONDS = 10.0
"""Training that waits for a checkpoint's end for so long says so: a volume may hang instead of failing."""
_log = logging.getLogger(__name__)


class WriteOutcome(Enum):
    """What came of writing a checkpoint: the same on all ranks, unless it is LOST."""

    KEPT = auto()
    """Or nothing was being written."""
    FAILED = auto()
    """A file could not be written or read. Another attempt may succeed."""
    OVER = auto()
    """A later round has begun: this one keeps nothing any more."""
    LOST = auto()
    """This rank could not reach its peers to hear of it."""


allow(WriteOutcome, FileSum, Manifest)


class Keeper:
    """One rank's part in keeping the state of the registered objects."""

    def __init__(
        self,
        environment: Environment,
        agreement: Agreement,
        objects: Mapping[str, Any],
        folder: CheckpointFolder | None,
        replication: Replication,
    ) -> None:
        """`objects`: by the names that they have in checkpoints.

        Raises InputError where one has a state that cannot be kept.
        """
        self._environment = environment
        self._agreement = agreement
        self._rank, self._world_size = environment.rank, environment.world_size
        self._wrapped = [item for item in objects.values() if isinstance(item, nn.Module)]
        self._models = {name: unwrap(item) for name, item in objects.items() if isinstance(item, nn.Module)}
        self._optimizers = _optimizers(objects)
        self._others = _others(objects)
        self._folder = folder
        self._replication = replication
        self._sharded = any(isinstance(model, FSDPModule) for model in self._models.values())
        self._description = describe(list(self._models.values()))
        self._snapshots = self._open_snapshots()
        self._keeps_snapshots = self._snapshots is not None and (self._sharded or environment.local_rank == 0)
        self._exchange: tuple[dist.Work, torch.Tensor, Slot | None] | None = None
        self._group: dist.ProcessGroup | None = None
        self._writing: threading.Thread | None = None
        self.news = open_news(environment)
        self._outcome = WriteOutcome.KEPT
        self._snapshot_costs: deque[float] = deque(maxlen=5)
        self._snapshots_taken = 0
        if self._snapshots is not None or folder is not None:
            take_apart(self._state(), [])  # what cannot be kept is said now, not after the first hundred steps

    # Snapshots

    def snapshot(self, step: int, samples: int) -> None:
        """Copies the state after `step` into shared memory; `settle` makes it valid. Collective.

        samples: of this rank, since the job's beginning.
        """
        self.settle()
        self._equalise_buffers()
        slot = None
        if self._snapshots is not None and self._keeps_snapshots:
            try:
                start = time.perf_counter()
                slot = self._snapshots.write(step, self._state())
                self._snapshots_taken += 1
                if self._snapshots_taken > SLOTS:  # the first ones make their slots, which is dear
                    self._snapshot_costs.append(time.perf_counter() - start)
            except OSError as error:
                self._keeps_snapshots = False
                _log.warning("no more snapshots on rank %d: %s; give the runtime volume more memory", self._rank, error)
        mine = torch.frombuffer(bytearray(capture_rank_state(samples)), dtype=torch.uint8)
        everybody = torch.empty(self._world_size * RANK_STATE_BYTES, dtype=torch.uint8)
        work = dist.all_gather_into_tensor(everybody, mine, group=self._agreement.group, async_op=True)
        assert work is not None
        self._exchange = (work, everybody, slot)

    @property
    def can_snapshot(self) -> bool:
        return self._snapshots is not None

    @property
    def snapshot_seconds(self) -> float:
        """What a snapshot costs the training; 0: not known yet."""
        return median(self._snapshot_costs) if self._snapshot_costs else 0.0

    def settle(self) -> int:
        """Makes the newest snapshot valid, now that all rank states have come; returns its step, -1 without one."""
        if self._exchange is None:
            return -1
        (work, rank_states, slot), self._exchange = self._exchange, None
        self._agreement.wait(work)
        return -1 if slot is None else slot.publish(rank_states)

    # Checkpoints

    @property
    def has_folder(self) -> bool:
        return self._folder is not None

    def checkpoint(self, step: int, samples: int, published: Callable[[int], None]) -> None:
        """Copies the state after `step` and writes it in the background; calls `published` from there. Collective.

        `wait_for_checkpoint` comes first: it says what came of the one before.
        """
        assert self._writing is None, "wait_for_checkpoint() comes first"
        if self._folder is None:
            return
        if self._group is None:
            self._group = new_cpu_group("pacekeeper checkpoints")
        self._equalise_buffers()
        state = self._checkpoint_state(self._outer(), self._rank_state(samples))
        staged = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self._writing = threading.Thread(
            target=self._write, args=(self._folder, step, staged, published), name="checkpoint", daemon=True
        )
        self._writing.start()

    def wait_for_checkpoint(self) -> WriteOutcome:
        """Until the checkpoint that is being written is published, or given up; rank 0's log has the reason."""
        if self._writing is not None:
            self._writing.join(_SLOW_SECONDS)
            if self._writing.is_alive():
                self._tell_of_slow_volume()
            self._writing.join()
            self._writing = None
        outcome, self._outcome = self._outcome, WriteOutcome.KEPT
        return outcome

    def _write(
        self, folder: CheckpointFolder, step: int, state: dict[str, Any], published: Callable[[int], None]
    ) -> None:
        try:
            outcome, reason = self._attempt(folder, step, state)
        except Exception as error:  # the training goes on; if a peer is gone, it will not come far
            outcome, reason = WriteOutcome.LOST, _reason(self._rank, error)
        if outcome is WriteOutcome.KEPT:
            published(step)
            self.news.kept(step)
        elif self._rank == 0 or outcome is WriteOutcome.LOST:
            _log.warning("the checkpoint of step %d is not published: %s", step, reason)
        if outcome is WriteOutcome.FAILED:
            self.news.failed(f"{folder.path}: step {step}: {reason}", culprit(reason))
        self._outcome = outcome

    def _tell_of_slow_volume(self) -> None:
        assert self._folder is not None, "something is being written"
        waits = f"the training waits for the last checkpoint, which is still being written after {_SLOW_SECONDS:g} s"
        self.news.failed(f"{self._folder.path}: {waits}")

    def _attempt(self, folder: CheckpointFolder, step: int, state: dict[str, Any]) -> tuple[WriteOutcome, str]:
        """What came of it, and why: rank 0's word, the same on all ranks.

        No rank leaves before the last collective, whatever fails on it: its peers would wait for it in there.
        """
        group = self._group
        assert group is not None, "checkpoint() makes it"
        mine: dict[str, FileSum] | str
        try:
            partial = folder.partial(step)
            save(state, partial, group)
            mine = {path.name: checksum(path) for path in partial.glob(f"__{self._rank}_*.distcp")}
        except Exception as error:
            mine = _reason(self._rank, error)
        everybody = gather(mine, group)
        said: tuple[WriteOutcome, str] = broadcast(
            self._publish(folder, step, everybody) if self._rank == 0 else None, group
        )
        return said

    def _publish(
        self, folder: CheckpointFolder, step: int, everybody: Sequence[dict[str, FileSum] | str]
    ) -> tuple[WriteOutcome, str]:
        """Rank 0's part. everybody: what each rank has written, or why it could not."""
        failures = [part for part in everybody if isinstance(part, str)]
        if not failures:
            try:
                files = {name: entry for part in everybody if isinstance(part, dict) for name, entry in part.items()}
                files |= {name: checksum(folder.partial(step) / name) for name in (INDEX, TORCHS_INDEX)}
                manifest = Manifest(
                    step=step,
                    round=folder.round,
                    world_size=self._world_size,
                    model=self._description,
                    objects=tuple(sorted({*self._names(), *self._outer()})),
                    files=files,
                )
                if folder.publish(manifest):
                    return WriteOutcome.KEPT, ""
                return WriteOutcome.OVER, f"round {folder.round} is over: a later one has begun"
            except Exception as error:  # the peers wait for the outcome
                failures = [_reason(0, error)]
        folder.discard(step)  # by now nobody writes there any more
        return WriteOutcome.FAILED, "; ".join(dict.fromkeys(failures))

    # Restoring

    def restore(self) -> tuple[int, int, int] | None:
        """Brings back the newest state that all ranks can have. Collective.

        Returns its step, this rank's samples, and the step of the newest checkpoint on the volume (-1: none); None
        where there is nothing to bring back. Raises InputError where the checkpoint is another model's, before anything
        is changed.
        """
        version, source = self._newest_snapshot()
        manifests: list[Manifest] = []
        if self._folder is not None:
            manifests = broadcast(self._folder.published() if self._rank == 0 else None, self._agreement.group)
        newest = -1
        for manifest in manifests:
            if self._all_agree(
                self._folder is not None and self._folder.intact(manifest, self._rank, self._world_size)
            ):
                newest = manifest.step
                self._check_model(manifest)
                if manifest.step > version.step:
                    return manifest.step, self._load_checkpoint(manifest), newest
                break
            if self._rank == 0:
                _log.warning("the checkpoint of step %d is torn; looking for an older one", manifest.step)
        if version == NOTHING:
            return None
        return version.step, self._load_snapshot(version, source), newest

    def _newest_snapshot(self) -> tuple[Version, int]:
        """The newest snapshot that all ranks can have, and a rank that holds it."""
        held = self._snapshots.held() if self._snapshots is not None else [NOTHING, NOTHING]
        mine = torch.tensor([number for version in held for number in (version.step, version.round)])
        everybody = torch.empty(self._world_size * len(mine), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, mine, group=self._agreement.group)
        of_ranks = everybody.view(self._world_size, len(held), 2).tolist()
        return choose([[Version(*version) for version in rank] for rank in of_ranks], self._sharded)

    def _load_snapshot(self, version: Version, source: int) -> int:
        have = self._snapshots is not None and version in self._snapshots.held()
        slot = self._snapshots.read(version) if self._snapshots is not None and have else None
        if not self._all_agree(have):
            slot = receive_or_send(slot, source, self._agreement.group)
        assert slot is not None
        state, rank_states = unpack(slot, self._replication.mesh["shard"] if self._sharded else None)
        for name, item in {**self._models, **self._optimizers, **self._others, **self._outer(state)}.items():
            item.load_state_dict(state[name])
        return restore_rank_state(rank_states[self._rank % len(rank_states)])

    def _load_checkpoint(self, manifest: Manifest) -> int:
        assert self._folder is not None
        outer = self._outer(manifest.objects)
        state = self._checkpoint_state(outer, b"", rank_of_state=self._rank % manifest.world_size)
        load(state, self._folder.folder(manifest))
        for name, model in self._models.items():
            set_model_state_dict(model, state[name])
        for name, optimizer in {**self._optimizers, **_optimizers(outer)}.items():
            set_optimizer_state_dict(self._model_of(optimizer), optimizer, state[name])
        for name, other in {**self._others, **_others(outer)}.items():
            other.load_state_dict(unpack_plain(state[name]))
        packed, buffers = unpack_plain(state[f"{_RANK_STATE}.{self._rank % manifest.world_size}"])
        for name, its in buffers.items():
            self._models[name].load_state_dict(its, strict=False)
        return restore_rank_state(packed)

    def _check_model(self, manifest: Manifest) -> None:
        different = differences(self._description, manifest.model)
        ours, theirs = self._names(), {name for name in manifest.objects if not name.startswith(_OUTER)}
        if ours != theirs:
            different = different or f"registered are {sorted(ours)}, in the checkpoint {sorted(theirs)}"
        if different:
            assert self._folder is not None
            raise InputError(
                f"spec.checkpoint.path: {self._folder.folder(manifest)} is of another model: {different}. "
                "Give this job a path of its own, or the model that was trained there"
            )

    # The state itself

    def equalise_others(self) -> None:
        """Gives all ranks rank 0's learning rates, schedules, gradient scalers and the like, which may count a rank's
        own steps. Collective."""
        common = (Loader, Progress)
        others = {name: other.state_dict() for name, other in self._others.items() if not isinstance(other, common)}
        others, settings = broadcast((others, self._replication.settings()), self._agreement.group)
        for name, state in others.items():
            self._others[name].load_state_dict(state)
        self._replication.set_settings(settings)

    def _equalise_buffers(self) -> None:
        for model in self._wrapped:
            equalise_buffers(model)

    def _names(self) -> set[str]:
        return {*self._models, *self._optimizers, *self._others}

    def _outer(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The outer optimizers, and what their penalties have learnt, where there are any; by their names.

        names: of what is to be restored; they are made where it has them. Collective then.
        """
        if names is None and not self._replication.has_outer_state:
            return {}
        if names is not None and f"{_OUTER}.0" not in names:
            return {}
        found: dict[str, Any] = {}
        for number, replicas in enumerate(self._replication.replicas):
            found[f"{_OUTER}.{number}"] = replicas.outer
            found[f"{_OUTER}.{number}.penalty"] = replicas
        return found

    def _state(self) -> dict[str, Any]:
        """As the objects give it: quick, and for the same ranks only."""
        objects = {**self._models, **self._optimizers, **self._others, **self._outer()}
        return {name: item.state_dict() for name, item in objects.items()}

    def _checkpoint_state(
        self, outer: Mapping[str, Any], rank_state: bytes, rank_of_state: int | None = None
    ) -> dict[str, Any]:
        """By parameter names, as torch.distributed.checkpoint wants it: for any number of ranks."""
        state: dict[str, Any] = {name: get_model_state_dict(model) for name, model in self._models.items()}
        for name, optimizer in {**self._optimizers, **_optimizers(outer)}.items():
            state[name] = get_optimizer_state_dict(self._model_of(optimizer), optimizer)
        for name, other in {**self._others, **_others(outer)}.items():
            state[name] = pack(other.state_dict())
        state[f"{_RANK_STATE}.{self._rank if rank_of_state is None else rank_of_state}"] = rank_state
        return state

    def _rank_state(self, samples: int) -> bytes:
        """What this rank has of its own.

        The buffers of sharded models are among it: FSDP leaves them to each rank, a checkpoint keeps one rank's only.
        """
        buffers = {}
        if self._sharded:
            for name, model in self._models.items():
                own = dict(model.named_buffers()).keys() & model.state_dict().keys()
                buffers[name] = {key: model.state_dict()[key].cpu() for key in own}
        return pack((capture_rank_state(samples), buffers))

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        first = optimizer.param_groups[0]["params"][0]
        for model in self._models.values():
            if any(parameter is first for parameter in model.parameters()):
                return model
        raise InputError("register(): an optimizer without its model; register the model whose parameters it has")

    def _open_snapshots(self) -> Snapshots | None:
        runtime = self._environment.runtime
        if runtime is None:
            return None
        return Snapshots(
            runtime.snapshots,
            f"shard-{self._rank}-of-{self._world_size}" if self._sharded else "replica",
            round_=self._environment.round,
            world_size=self._world_size,
            fingerprint=fingerprint(self._description),
        )

    def _all_agree(self, mine: bool) -> bool:
        """Whether it holds on all ranks. Collective."""
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._agreement.group)
        return bool(votes.item())


def _optimizers(objects: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    return {name: item for name, item in objects.items() if isinstance(item, torch.optim.Optimizer)}


def _others(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in objects.items() if not isinstance(item, (torch.optim.Optimizer, nn.Module))}


def _reason(rank: int, error: Exception) -> str:
    """In one line, for all ranks' ears. What comes to all ranks alike says itself on which it began."""
    return str(error) if isinstance(error, Failed) else f"rank {rank}: {type(error).__name__}: {error}"
