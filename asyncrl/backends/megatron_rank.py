"""One process of the Megatron-Core learner: meets the others, holds its part of every model, obeys the leader.

What is done with a model is in megatron_loaded.py (score, export) and megatron_trained.py (step, save, restore).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from asyncrl.backends import megatron_cpu, megatron_model, models
from asyncrl.backends.followers import Command, Job, Place, Scores
from asyncrl.backends.megatron_loaded import LoadedModel
from asyncrl.backends.megatron_noise import quiet, quiet_logs
from asyncrl.backends.megatron_trained import TrainedModel


class MegatronRank:
    """One process of the learner: its copy or shard of the models, its share of the batch."""

    @quiet()
    def __init__(self, job: Job, place: Place, *, store: Store | None = None) -> None:
        quiet_logs()
        if job.threads:
            torch.set_num_threads(job.threads)
        device = _device(job.device, place)
        megatron_cpu.use_device(device)
        try:
            _join(place, device, store)
            megatron_model.join(place, job.tensor_parallel)
            self._loaded = {
                name: (TrainedModel if model.is_trained else LoadedModel)(name, job, device)
                for name, model in job.models.items()
            }
        except BaseException:
            self.close()
            raise

    @quiet()
    def obey(self, command: Command) -> Any:
        """Do what every rank named does now; what comes of it here."""
        trained = {name: model for name, model in self._loaded.items() if isinstance(model, TrainedModel)}
        if command.name == "step":
            return trained[command.model].step(command.micro_batches, learning_rate=command.learning_rate)
        if command.name == "score":
            return self._score(command)
        if command.name == "export":
            return self._loaded[command.model].export()
        for name, model in trained.items():
            folder = models.saved_in(Path(command.folder), name)
            {"save": model.save, "restore": model.restore}[command.name](folder)
        return None

    def _score(self, command: Command) -> Scores | None:
        """None on all but the first of the tensor-parallel ranks, which all have the same."""
        rows = self._loaded[command.model].score(command.micro_batches)
        return Scores(rows=rows) if megatron_model.tensor_parallel_group().rank() == 0 else None

    def close(self) -> None:
        """Leave the process groups; Megatron's are global, and another rank may be made after this."""
        megatron_model.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(kind: str, place: Place) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(place: Place, device: torch.device, store: Store | None) -> None:
    """Meet the other ranks."""
    timeout = timedelta(seconds=place.timeout_seconds)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store or dist.TCPStore(place.host, place.port, None, False, timeout),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.ranks,
        timeout=timeout,
    )
