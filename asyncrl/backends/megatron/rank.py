"""One rank of the Megatron-Core learner: meets the others, holds its part of every model, executes rank 0's commands.

loaded_model.py (forward, export) and trained_model.py (step, restore, checkpoint parts) implement the operations.
"""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from asyncrl.backends import models
from asyncrl.backends.megatron import cpu_shim, process_groups
from asyncrl.backends.megatron.background_save import BackgroundSave, free_room
from asyncrl.backends.megatron.hooks import MegatronHooks, load_hooks
from asyncrl.backends.megatron.job import Command, ExpertLayers, Job
from asyncrl.backends.megatron.loaded_model import LoadedModel
from asyncrl.backends.megatron.log_filter import quiet, quiet_logs
from asyncrl.backends.megatron.rank_group import RankInfo
from asyncrl.backends.megatron.remote_parts import ExportedParts
from asyncrl.backends.megatron.saved_weights import RefreshedModel, SavedWeights
from asyncrl.backends.megatron.trained_model import TrainedModel
from asyncrl.backends.port import StepResult
from asyncrl.errors import BackendError, CheckpointError
from asyncrl.tensors.device import count_cpus, set_threads
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.snapshot import Snapshot


class MegatronRank:
    """One process of the learner: its copy or shard of the models, and its shard of the batch."""

    @quiet()
    def __init__(self, job: Job, info: RankInfo, *, store: Store) -> None:
        """store: by which the ranks have found each other"""
        quiet_logs()
        self._saving: BackgroundSave | None = None
        self._is_first = info.rank == 0
        self._local_ranks = info.local_ranks or info.ranks
        threads = job.threads
        if not threads and job.options.optimizer_device == "cpu":  # torch's default: 1 if torchrun starts the ranks
            threads = max(1, count_cpus() // self._local_ranks)
        set_threads(threads)
        self._room_for_saving: int | None = None
        self._hooks = load_hooks(job.options.hooks)
        self.parts = ExportedParts()
        self._device = device = use_device(job.device, info, gpu_bytes=job.gpu_bytes)
        self._memory = HostMemory(
            lambda: itertools.chain.from_iterable(one.tensors() for one in self._loaded.values()),
            scratch=lambda: itertools.chain.from_iterable(one.gradients() for one in self._trained.values()),
        )
        cpu_shim.use_device(device)
        try:
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "nccl",
                store=store,
                rank=info.rank,
                world_size=info.ranks,
                timeout=info.timeout,
            )
            process_groups.join(info, job.layout, overlaps_tensor_parallel=job.options.overlap_tensor_parallel)
            self._loaded = {
                name: _kind(model)(name, job, device)
                for name, model in job.models.items()
                if not model.is_base_of(job.models[models.POLICY])
            }
            self._trained = {name: model for name, model in self._loaded.items() if isinstance(model, TrainedModel)}
            self._saved = {name: model for name, model in self._loaded.items() if isinstance(model, SavedWeights)}
            for trained in self._trained.values():
                trained.before_update = self._wait_until_copied
            self._hooks.after_start({name: model.stages for name, model in self._loaded.items()})
        except BaseException:
            self.close()
            raise

    @quiet()
    def execute(self, command: Command) -> Any:
        """Execute a command together with the other ranks. Returns this rank's result; None is sent as Done."""
        match command.name:
            case "step":
                model = self._trained[command.model]
                if type(self._hooks) is not MegatronHooks:  # it may change the weights
                    model.finish_exports()
                    self._wait_until_copied()
                self._hooks.before_step(command.model, model.stages, model.adamws)
                return model.step(
                    command.micro_batches, batch_tokens=command.batch_tokens, learning_rate=command.learning_rate
                )
            case "reset_optimizer":
                for trained in self._trained.values():
                    trained.forget_moments()
                return None
            case "refresh_reference":
                reference = self._loaded["reference"]
                assert isinstance(reference, RefreshedModel)
                self._wait_until_copied()
                return reference.copy_from(self._loaded[models.POLICY])
            case "forward":
                if command.model not in self._loaded:
                    policy = self._loaded[models.POLICY]
                    self._hooks.before_forward(command.model, policy.stages)
                    return policy.forward_base(command.micro_batches)
                self._hooks.before_forward(command.model, self._loaded[command.model].stages)
                return self._loaded[command.model].forward(command.micro_batches, records=command.records)
            case "expert_layers":
                return ExpertLayers(layers=self._loaded[models.POLICY].expert_layers)
            case "export":
                return self._export(command)
            case "save":
                return self._save(Path(command.folder))
            case "finish_save":
                if self._saving is None:
                    raise CheckpointError("nothing is being saved")
                return self._saving.result(wait=command.waits)
            case "restore":
                self._wait_until_copied()
                for name, saved in self._saved.items():
                    saved.restore(models.saved_in(Path(command.folder), name))
                return None
            case "offload":
                return self._offload(command)
            case "onload":
                return self._memory.onload()
        raise BackendError(f"a learner's rank knows no command {command.name!r}")

    def require_restorable(self, folder: Path) -> None:
        """Raise CheckpointError if this rank can tell that the checkpoint is of another model. Changes nothing."""
        for name, model in self._saved.items():
            model.require_restorable(models.saved_in(folder, name))

    def _export(self, command: Command) -> Snapshot | None:
        """Export this rank's part. It stays in this process."""
        self.parts.keep_only(command.held)
        part = self._loaded[command.model].export()
        if self._is_first:
            return part
        self.parts.add(command.export, part)
        return None

    def _save(self, folder: Path) -> None:
        """Begin to save the state. It is copied and written while later commands run (finish_save)."""
        self._stop_saving()
        states = [model.state_to_save(models.saved_in(folder, name)) for name, model in self._saved.items()]
        if self._room_for_saving is None:  # once: torch keeps the memory of earlier copies, and uses it again
            self._room_for_saving = free_room(self._local_ranks)
        self._saving = BackgroundSave(states, rank=dist.get_rank(), room=self._room_for_saving)

    def _wait_until_copied(self) -> None:
        """Wait until what is being saved may change."""
        if self._saving is not None:
            self._saving.wait_until_copied()

    def _stop_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()

    def _offload(self, command: Command) -> StepResult:
        """Leave the GPU. Returns metrics of the memory that is in use there; none on a CPU.

        kept_memory_bytes  kept by torch in this process, besides the CUDA context and NCCL's buffers
        used_memory_bytes  used by all processes
        """
        self._wait_until_copied()
        process_groups.free_exchange()
        self.parts.keep_only(command.held)
        self._loaded[models.POLICY].routing.clear()  # the steps on its batch are done
        self._memory.offload()
        if self._device.type == "cpu":
            return StepResult(metrics={})
        free, total = torch.cuda.mem_get_info(self._device)
        used = {"kept": torch.cuda.memory_reserved(self._device), "used": total - free}
        rank = f"learner/rank{dist.get_rank()}"
        return StepResult(metrics={f"{rank}/{name}_memory_bytes": float(value) for name, value in used.items()})

    def close(self) -> None:
        """Destroy the process groups. They are global, and a later rank in this process needs new ones."""
        self._stop_saving()
        process_groups.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
            if self._is_first:  # the processes of other ranks end now
                gc.collect()  # gloo's sockets are in cycles: 70 descriptors a backend


def _kind(model: models.AuxiliaryModel) -> type[LoadedModel]:
    return TrainedModel if model.is_trained else RefreshedModel if model.is_refreshed else LoadedModel


def use_device(kind: str, info: RankInfo, *, gpu_bytes: int) -> torch.device:
    """Make the rank's device torch's own in this process.  kind: cpu or cuda;  gpu_bytes: see Job"""
    if kind == "cpu":
        return torch.device("cpu")
    # A launcher may show each rank only its own GPU.
    device = torch.device("cuda", info.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if gpu_bytes:  # at the limit torch first gives back what it keeps unused
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_bytes / total), device)
    return device
