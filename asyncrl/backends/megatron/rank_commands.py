"""Commands of rank 0 of a Megatron learner to all ranks, and their results. Plain data, cheap to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy import float32
from numpy.typing import NDArray

from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.config.adapter import Layout
from asyncrl.policies.batching.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a rank needs to build the same models and optimizers as the others."""

    models: Mapping[str, AuxiliaryModel]
    temperature: float
    device: str
    dtype: str
    threads: int
    layout: Layout
    is_distributed_optimizer: bool
    recompute: str
    is_offloading: bool
    transformer: Mapping[str, Any]
    overlaps_tensor_parallel: bool = False
    """Whether tensor-parallel ranks exchange rows by overlapped_linear.py where they can."""
    quantization: str = ""
    """Format of exports (tensors/quantized_model.py); empty: the folder's dtype."""
    aux_loss_coefficient: float = 0.0
    """Coefficient of the load-balancing loss of mixtures of experts (load_balance.py)."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What all ranks execute together.

    name           step (result: StepResult), score (Scores), export, save, finish_save (SavedPart), restore, offload
                   (OffloadReport) or onload
    micro_batches  the receiver's share
    batch_tokens   tokens of all shares, prompts included, without fillers
    waits          for finish_save: wait until this rank's part is on disk
    export         number of the export
    held           for export and offload: earlier exports whose parts are still needed
    """

    name: str
    model: str = POLICY
    micro_batches: tuple[MicroBatch, ...] = ()
    batch_tokens: int = 0
    learning_rate: float = 0.0
    folder: str = ""
    waits: bool = False
    export: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """rows: f32[N] per micro-batch of the rank's share; empty if another rank has them"""

    rows: tuple[NDArray[float32], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """A rank has left its GPU. Both numbers are 0 on a CPU.

    kept_bytes  GPU memory that torch keeps in this process, besides the CUDA context and NCCL's buffers
    used_bytes  used memory of this rank's GPU, by all processes
    """

    kept_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of commands without one."""


def offload_metrics(reports: Sequence[OffloadReport]) -> dict[str, float]:
    """Return metrics of the memory in use on each rank's GPU after the rank had left it; none on a CPU."""
    return {
        f"learner/rank{rank}/{name}_memory_bytes": float(num_bytes)
        for rank, report in enumerate(reports)
        for name, num_bytes in (("kept", report.kept_bytes), ("used", report.used_bytes))
        if report.used_bytes
    }
