"""Base class of training backends. backends/port.py specifies what backends must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from asyncrl.backends import frozen
from asyncrl.backends.gpu_memory import MemoryPlan, Phase, learner_bytes
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora, OptimizerSettings
from asyncrl.backends.port import Backend
from asyncrl.config.adapter import Adapter, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.tensors.device import require_gpu, resolve_device


class BackendAdapter(Adapter):
    """Defaults for a single-process backend."""

    section: ClassVar[str] = "learner"

    replays_experts: ClassVar[bool] = False
    """Whether the policy routes tokens to the experts given in a micro-batch (MicroBatch.experts)."""

    @classmethod
    def build(cls, run: RunConfig, *, algorithm: Algorithm, auxiliary: Mapping[str, AuxiliaryModel]) -> Backend:
        """Create the backend without starting it. ``auxiliary``: the algorithm's models besides the policy, by name."""
        return cast(Any, cls)(  # type: ignore[no-any-return]
            model_path=Path(run.model.path),
            algorithm=algorithm,
            optimizer=optimizer_settings(run),
            temperature=run.rollout.temperature,
            device=resolve_device(run.learner.device, section="learner"),
            dtype=run.model.dtype,
            threads=run.learner.threads,
            options=cls.options(run),
            **({"auxiliary": auxiliary} if auxiliary else {}),
            **({"exact_ranks": run.engine.options.get("tensor_parallel", 1)} if run.run.exact else {}),
        )

    @classmethod
    def check(cls, run: RunConfig) -> None:
        cls.options(run)
        not_megatron = 'is not Megatron; use "megatron" or remove it'
        for key, is_set, problem in (
            ("learner.ranks", run.learner.ranks > 1, 'runs in one process; use "megatron" or ranks = 1'),
            ("learner.machines", run.learner.machines > 1, 'runs in one process; use "megatron" or remove it'),
            ("learner.megatron", run.learner.megatron, not_megatron),
            *((key.replace(".path", ".megatron"), own, not_megatron) for key, own in run.own_megatron.items()),
            ("learner.lora", run.learner.lora.rank, 'has no adapters; use "megatron"'),
            ("weights.quantization", run.weights.quantization, 'quantizes nothing; use "megatron"'),
        ):
            if is_set:
                raise ConfigError(f'{key}: backend = "{run.learner.backend}" {problem}')
        frozen.check(run, are_fused=False)

    @classmethod
    def why_no_shared_prefixes(cls, run: RunConfig) -> str:
        """Return why the backend computes tokens again that sequences share (MicroBatch.shared); empty if it does
        not."""
        return f'learner.backend = "{run.learner.backend}" computes every sequence whole; "megatron" does not'

    @classmethod
    def check_algorithm(cls, run: RunConfig, algorithm: Algorithm) -> None:
        """Raise ConfigError for an algorithm that the backend cannot train with the run's settings."""

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        if run.learner.device == "cuda":
            require_gpu("learner")

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        return run.learner.ranks if run.learner.device != "cpu" else 0

    @classmethod
    def memory(cls, run: RunConfig, algorithm: Algorithm, *, gpu_bytes: int = 0) -> Sequence[Phase]:
        """Return what a rank needs, phase by phase, an estimate; empty if it is unknown, or the rank is on a CPU.

        gpu_bytes  of each of its GPUs, which are not those of this machine: ConfigError if they cannot be enough
        """
        return ()

    @classmethod
    def gpu_bytes(cls, run: RunConfig, algorithm: Algorithm, *, total: int = 0) -> int:
        """Return the GPU memory that a rank needs at most, an estimate: an engine on its GPU takes the rest.

        total  bytes of that GPU; 0: of this machine's
        """
        return learner_bytes(run, MemoryPlan(recomputes_all=False, needs_logits=algorithm.needs_logits))

    @classmethod
    def rank_here(cls, run: RunConfig) -> int:
        """Return the rank that this process was started as; by default 0, the learner."""
        return 0

    @classmethod
    def environments(cls, run: RunConfig, *, port: int) -> Sequence[Mapping[str, str]]:
        """Return the environment variables of each process of the learner that `asyncrl run` starts.

        There is one process per rank if learner.machines is more than 1. Otherwise the only one starts all ranks. They
        replace variables of the surroundings, for `asyncrl run` may itself be part of a job of several processes.

        port   where the first rank listens
        """
        return ({},)

    def serve(self) -> None:
        """Run as a rank other than the learner, until the learner says goodbye. Raises ConfigError when refused."""
        raise NotImplementedError


def optimizer_settings(run: RunConfig) -> OptimizerSettings:
    """Return the AdamW settings from [learner]."""
    learner = run.learner
    adapters = learner.lora
    lora = Lora(
        rank=adapters.rank,
        alpha=adapters.alpha,
        modules=adapters.modules,
        is_merged=adapters.publish == "merged",
    )
    return OptimizerSettings(
        weight_decay=learner.weight_decay,
        betas=(learner.betas[0], learner.betas[1]),
        eps=learner.eps,
        max_grad_norm=learner.max_grad_norm,
        freeze=learner.frozen,
        train_only=learner.train_only,
        lora=lora if adapters.rank else None,
        is_stateless=learner.reset_optimizer and learner.steps_per_batch == 1,
        is_saved=run.checkpoint.optimizer,
    )
