"""One rank of the Megatron-Core learner: joins the others, holds its part of every model, runs the leader's commands.

loaded_model.py (score, export) and trained_model.py (step, restore, checkpoint parts) implement the operations.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from asyncrl.backends import models
from asyncrl.backends.megatron import cpu_shim, process_groups
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.background_save import BackgroundSave, complete
from asyncrl.backends.megatron.held_parts import HeldParts
from asyncrl.backends.megatron.loaded_model import LoadedModel
from asyncrl.backends.megatron.log_filter import quiet, quiet_logs
from asyncrl.backends.megatron.rank_commands import Command, Job, Left, Place, Scores
from asyncrl.backends.megatron.trained_model import TrainedModel
from asyncrl.backends.port import StepResult
from asyncrl.errors import CheckpointError
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.snapshot import Snapshot

log = logging.getLogger("asyncrl.learner")


class MegatronRank:
    """One process of the learner: its copy or shard of the models, and its shard of the batch."""

    @quiet()
    def __init__(self, job: Job, place: Place, *, store: Store | None = None) -> None:
        quiet_logs()
        self._saving: BackgroundSave | None = None
        if job.threads:
            torch.set_num_threads(job.threads)
        self._is_leader = place.rank == 0
        self.parts = HeldParts()
        self._is_scorer = place.rank in job.layout.scorers
        self._device = device = _device(job.device, place)
        self._memory = HostMemory(
            lambda: itertools.chain.from_iterable(one.tensors() for one in self._loaded.values()),
            scratch=lambda: itertools.chain.from_iterable(one.gradients() for one in self._loaded.values()),
        )
        cpu_shim.use_device(device)
        try:
            store = _join(place, device, store)
            self._agreement = Agreement(store, place, peers=job.layout.peers(place.rank))
            process_groups.join(place, job.layout, overlaps_tensor_parallel=job.overlaps_tensor_parallel)
            self._loaded = {
                name: (TrainedModel if model.is_trained else LoadedModel)(name, job, device, self._agreement)
                for name, model in job.models.items()
            }
        except BaseException:
            self.close()
            raise

    @property
    def rows_begun(self) -> int:
        """Number of forward passes that have begun on this rank."""
        return sum(model.rows_begun for model in self._loaded.values())

    @quiet()
    def obey(self, command: Command) -> Any:
        """Run a command together with the other ranks. Returns this rank's result."""
        trained = {name: model for name, model in self._loaded.items() if isinstance(model, TrainedModel)}
        if command.name == "step":
            return self._step(trained[command.model], command)
        if command.name == "score":
            return self._loaded[command.model].score(command.micro_batches)
        if command.name == "export":
            return self._export(command)
        if command.name == "offload":
            return self._leave(command)
        if command.name == "onload":
            return self._memory.come_back()
        folders = {name: models.saved_in(Path(command.folder), name) for name in trained}
        if command.name == "saved":
            return self._saved(folders, wait=command.waits)
        if command.name == "save":
            self._save(trained, folders)
        else:
            for name, model in trained.items():
                model.restore(folders[name])
        return None

    def require_restorable(self, folder: Path) -> None:
        """Raise CheckpointError if this rank can tell that the checkpoint is of another model. Changes nothing."""
        for name, model in self._loaded.items():
            if isinstance(model, TrainedModel):
                model.require_restorable(models.saved_in(folder, name))

    def _step(self, model: TrainedModel, command: Command) -> StepResult | Scores | None:
        """Run a step. A follower returns scores of recorded tokens if it reports for its copy of the model."""
        result = model.step(
            command.micro_batches,
            batch_tokens=command.batch_tokens,
            learning_rate=command.learning_rate,
        )
        if self._is_leader:
            return result
        if not command.has_recorded or not self._is_scorer:
            return None
        return Scores(documents=tuple(result.tokens), rows=tuple(result.tokens.values()))

    def _leave(self, command: Command) -> Left:
        process_groups.free_exchange()
        self.parts.forget(but=command.held)
        self._memory.leave()
        if self._device.type == "cpu":
            return Left()
        free, total = torch.cuda.mem_get_info(self._device)
        return Left(kept_bytes=torch.cuda.memory_reserved(self._device), used_bytes=total - free)

    def _export(self, command: Command) -> Snapshot:
        """Export this rank's part. A follower's part stays in this process."""
        self.parts.forget(but=command.held)
        part = self._loaded[command.model].export()
        if not self._is_leader:
            self.parts.hold(command.export, part)
        return part

    def _save(self, trained: Mapping[str, TrainedModel], folders: Mapping[str, Path]) -> None:
        """Copy the state to be saved. It is written while later commands run; ``_saved`` tells when it is done."""
        self._stop_saving()
        states = [model.saved(folders[name]) for name, model in trained.items()]
        self._saving = BackgroundSave(states, rank=dist.get_rank())

    def _saved(self, folders: Mapping[str, Path], *, wait: bool) -> dict[str, str] | None:
        """Agree that all ranks have written their files. Then the leader completes the checkpoint and returns SHA-256s.

        Returns None on followers, and while any rank is not done. Raises CheckpointError on the leader if a rank could
        not write; all ranks can then try again together.
        """
        saving = self._saving
        if saving is None:
            raise CheckpointError("nothing is being saved")
        if wait:
            saving.wait()
        is_done = saving.is_done  # read once, because it may change
        told = torch.tensor([float(is_done), float(is_done and bool(saving.problem))], device=self._device)
        dist.all_reduce(told)
        done, failed = (int(number) for number in told.tolist())
        if done < dist.get_world_size():
            return None
        self._saving = None
        if failed:
            where = next(iter(folders.values()))
            own = f"{where}: cannot write this rank's part: {saving.problem}" if saving.problem else ""
            problem = own or f"{where}: {failed} other ranks could not write their part"
            if self._is_leader:
                raise CheckpointError(problem)
            log.warning("%s", problem)
        if not self._is_leader:
            return None
        files = {}
        for folder in folders.values():  # last, and on the leader alone: if this fails, no other rank waits
            sums = complete(folder, ranks=dist.get_world_size())
            files.update({str(folder / file): sha256 for file, sha256 in sums.items()})
        return files

    def _stop_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()

    def close(self) -> None:
        """Destroy the process groups. They are global, and a later rank in this process needs new ones."""
        self._stop_saving()
        process_groups.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
            if self._is_leader:  # the processes of other ranks end now
                gc.collect()  # gloo's sockets are in cycles: 70 descriptors a backend


def _device(kind: str, place: Place) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    number = place.rank if place.local_rank < 0 else place.local_rank
    device = torch.device("cuda", number % torch.cuda.device_count())  # a launcher may show each rank only its own GPU
    torch.cuda.set_device(device)
    return device


def _join(place: Place, device: torch.device, store: Store | None) -> Store:
    """Initialise torch.distributed. Returns the store by which the ranks found each other."""
    timeout = timedelta(seconds=place.timeout_seconds)
    store = store or dist.TCPStore(place.host, place.port, None, False, timeout)  # type: ignore[attr-defined]
    assert store is not None
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        timeout=place.collective_timeout,
    )
    return store
