"""Commands from the leader of a Megatron learner to the other ranks, and their replies. Plain data, cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.protocols.adapter import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of ``ranks``; host and port are the leader's torch.distributed.TCPStore.

    local_rank  among those of its machine, whose GPU of that number it takes; -1: all are on one machine
    """

    rank: int
    ranks: int
    local_rank: int = -1
    host: str
    port: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank needs to build the same models and optimizers."""

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
    is_fp8: bool = False
    """Whether exports are quantized."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A collective operation: step, rehearse, score, export, save, saved, restore,
    offload or onload.

    micro_batches  the receiver's shard
    waits          of "saved": until what "save" began is on disk
    """

    name: str
    model: str = POLICY
    micro_batches: tuple[MicroBatch, ...] = ()
    learning_rate: float = 0.0
    folder: str = ""
    waits: bool = False
    export: int = 0
    """Number of an export."""
    held: tuple[int, ...] = ()
    """Earlier exports whose parts are still needed."""

    @property
    def has_recorded(self) -> bool:
        """Whether somebody will read what the step thought of tokens of the shard."""
        return self.name == "step" and self.model == POLICY and any(one.recorded for one in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A follower's reply to "score".

    rows       f32[N] per micro-batch of its share; none where another rank has them
    documents  of a step with recorded ones: these, and f32[2, M] of each as ``rows`` (StepResult.tokens)
    problem    why there are none; so it answers to a step that failed too, with "" when that was not here
    """

    rows: tuple[NDArray[np.float32], ...] = ()
    documents: tuple[int, ...] = ()
    problem: str = ""
