"""Commands from the leader of a Megatron learner to the other ranks, and their replies. Plain data, cheap to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.config.adapter import Layout
from asyncrl.policies.batching.packing import MicroBatch

_LEADER_FIRST_SECONDS: Final = 60.0
"""By this much later than others the leader may begin to wait for a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one rank among ``ranks``. host and port are those of the leader's torch.distributed.TCPStore.

    local_rank  index among the ranks of its machine, and of its GPU; -1 if all ranks are on one machine
    """

    rank: int
    ranks: int
    local_rank: int = -1
    host: str
    port: int
    timeout_seconds: float

    @property
    def collective_timeout(self) -> timedelta:
        """Longer, so that the leader gives up before any collective does: it ends all ranks, and says why."""
        return timedelta(seconds=self.timeout_seconds + _LEADER_FIRST_SECONDS)


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
    """A collective operation: step, score, export, save, saved, restore, offload or onload.

    micro_batches  the receiver's shard
    batch_tokens   tokens of all shards, prompts included, without fillers
    waits          for "saved": wait until the state from "save" is on disk
    """

    name: str
    model: str = POLICY
    micro_batches: tuple[MicroBatch, ...] = ()
    batch_tokens: int = 0
    learning_rate: float = 0.0
    folder: str = ""
    waits: bool = False
    export: int = 0
    """Number of the export."""
    held: tuple[int, ...] = ()
    """For "export" and "offload": earlier exports whose parts are still needed."""

    @property
    def has_recorded(self) -> bool:
        """Whether the step must return logprobs and entropy of recorded documents in the shard."""
        return self.name == "step" and self.model == POLICY and any(one.recorded for one in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A follower's reply to "score", to a step with recorded documents, or to a failed step.

    rows       f32[N] per micro-batch of its share; empty if another rank has them
    documents  for a step with recorded documents: these; ``rows`` has f32[2, M] of each (StepResult.tokens)
    problem    error on this rank; for a failed step "" if the error was on another rank
    """

    rows: tuple[NDArray[np.float32], ...] = ()
    documents: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A rank's result of "offload", and a follower's reply: it has left its GPU. Both numbers are 0 on a CPU.

    kept_bytes  GPU memory that torch keeps in this process, besides the CUDA context and NCCL's buffers
    used_bytes  used memory of this rank's GPU, by all processes
    """

    kept_bytes: int = 0
    used_bytes: int = 0


def left_behind(ranks: Sequence[Left]) -> dict[str, float]:
    """Return metrics of the memory in use on each rank's GPU after the rank had left it; none on a CPU."""
    return {
        f"learner/rank{rank}/{name}_memory_bytes": float(num_bytes)
        for rank, left in enumerate(ranks)
        for name, num_bytes in (("kept", left.kept_bytes), ("used", left.used_bytes))
        if left.used_bytes
    }
