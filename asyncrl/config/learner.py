"""[learner] of the run file: what trains, in how many processes, by which optimizer, and whose answers it believes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.checks import positive, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    backend: str = "megatron"
    """megatron, reference (plain PyTorch, one process), or "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = 1
    """Processes of the learner; ranks / tensor_parallel of them train different data."""
    tensor_parallel: int = 1
    """Ranks that hold one copy of the model together, each a part of every layer."""
    gpus: tuple[int, ...] = ()
    """GPU of each rank, numbered from 0, when `asyncrl run` starts them; empty takes the first ones."""
    threads: int = 0
    """CPU threads of each rank; 0 leaves it to torch."""
    groups_per_batch: int = 16
    """Prompt groups trained per optimizer step."""
    micro_batch_tokens: int = 16_384
    """Packed tokens per forward pass; a longer trajectory gets a micro-batch of its own."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 10
    """So many steps in a row whose loss or gradient was not finite end the run; 0 goes on for ever."""
    quarantine_mismatch: float = 0.5
    """A worker whose fresh answers, scored again, are further than this off the trainer's logprobs (mean of the
    absolute difference in nats per token) is quarantined: named, told, and none of its groups trained. One whose
    answers are all of older versions is compared with the other workers. 0 is off. bfloat16 makes 0.02, a wrong
    temperature 0.3 and more, other weights whole nats."""
    rescore_every: int = 10
    """Steps between two such looks: two answers of each worker, a forward pass."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """See the Options class beside the backend."""

    def __post_init__(self) -> None:
        positive(self, "ranks", "tensor_parallel", "groups_per_batch", "micro_batch_tokens")
        positive(self, "learning_rate", "max_grad_norm", "eps", "rescore_every")
        require(
            self.ranks % self.tensor_parallel == 0,
            f"ranks must be a multiple of tensor_parallel ({self.tensor_parallel}), got {self.ranks}",
        )
        for name in ("threads", "warmup_steps", "weight_decay", "max_skipped_steps", "quarantine_mismatch"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas must be two numbers in [0, 1), got {list(self.betas)}",
        )

    @property
    def data_parallel(self) -> int:
        """Shares that a batch is dealt into: ranks / tensor_parallel."""
        return self.ranks // self.tensor_parallel
