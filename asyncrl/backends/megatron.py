"""The Megatron-Core backend: GPTModel on packed rows, Megatron's gradient buffers and (distributed) optimizer.

Only this file imports megatron. ``MegatronRank`` is one process of the learner and does the same on every rank;
``MegatronBackend`` is rank 0 as the learner sees it and leads the others. Gradients are the *sum* over ranks and
micro-batches of loss x weight: the weights already carry the whole batch's denominators.
Tests: tests/test_backend_contract.py (equal to the reference), tests/test_megatron.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import huggingface, megatron_cpu, micro_batches, optimizer_state
from asyncrl.backends.megatron_ranks import Command, Followers, Job, Place
from asyncrl.backends.optimizer_settings import OptimizerSettings, is_trainable, step_metrics
from asyncrl.backends.packed_attention import PackedAttention, PackedDocuments
from asyncrl.backends.token_logprobs import token_logprobs
from asyncrl.errors import BackendError
from asyncrl.policies import diagnostics
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult

with megatron_cpu.megatron_imports():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the megatron backend."""

    distributed_optimizer: bool = True
    """With more than one rank: each keeps and updates its part of the float32 weights and AdamW's moments."""
    recompute: Literal["none", "full"] = "none"
    """full: keep one activation per layer and compute the rest again; a third more work, a fraction of the memory."""
    timeout_seconds: float = 600.0
    """A rank that makes the others wait longer than this is given up."""


class MegatronBackend:
    """Data-parallel training; rank 0 runs in the caller's process. One per process, as Megatron's state is global."""

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: Algorithm,
        optimizer: OptimizerSettings,
        temperature: float,
        device: str,
        dtype: str,
        threads: int,
        options: Options,
        ranks: int = 1,
    ) -> None:
        self._job = Job(
            model_path=model_path,
            algorithm=algorithm,
            optimizer=optimizer,
            temperature=temperature,
            device=device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
            dtype=dtype,
            threads=threads,
            is_distributed_optimizer=options.distributed_optimizer and ranks > 1,
            is_recomputing=options.recompute == "full",
        )
        self._timeout_seconds = options.timeout_seconds
        self._ranks = ranks
        self._followers: Followers | None = None
        self._own: MegatronRank | None = None

    def start(self) -> None:
        if dist.is_initialized():
            raise BackendError("torch.distributed is in use in this process; a MegatronBackend needs it for itself")
        huggingface.read_shape(self._job.model_path)  # a wrong model is told before any process starts
        timeout = timedelta(seconds=self._timeout_seconds)
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        places = [
            Place(rank=rank, ranks=self._ranks, host="127.0.0.1", port=store.port, timeout_seconds=self._timeout_seconds)
            for rank in range(self._ranks)
        ]
        if self._ranks > 1:
            self._followers = Followers(self._job, places[1:])
            self._followers.wait_until_ready()
        with self._blaming_followers():
            self._own = MegatronRank(self._job, places[0], store=store)
