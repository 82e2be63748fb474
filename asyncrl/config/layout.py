"""How the ranks of a learner share the model and the batch.

Ranks are numbered as in Megatron: tensor-parallel ranks are adjacent, then come context, data and pipeline ranks, the
last being farthest apart. Experts are distributed over the same ranks in a second scheme: expert-tensor-parallel ranks
are adjacent, then come expert-parallel ranks and ranks that hold the same experts.

Tests: tests/unit/config/test_staleness.py; tests/unit/backends/megatron/test_layouts.py trains with these layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the groups of ranks. Most are keys of [learner] with the suffix ``_parallel``.

    tensor            ranks that share every layer
    pipeline          stages; each holds a part of the layers
    virtual_pipeline  interleaved parts of the model on each stage; 1 is off
    context           ranks that share every packed row
    expert            ranks over which the experts of a layer are distributed
    expert_tensor     ranks that share one expert
    is_sequence_parallel  tensor-parallel ranks split the row between their matrix products

    Raises ConfigError for sizes that do not divide the ranks.
    """

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    is_sequence_parallel: bool = False

    def __post_init__(self) -> None:
        self._require_multiple("tensor", "context", "pipeline")
        self._require_multiple("expert_tensor", "expert", "pipeline")
        require(
            self.virtual_pipeline == 1 or self.pipeline > 1,
            f"virtual_pipeline = {self.virtual_pipeline} interleaves the stages of a pipeline; "
            "set pipeline_parallel to 2 or more, or remove it",
        )
        require(
            not self.is_sequence_parallel or self.tensor > 1,
            'sequence_parallel = "on" is for tensor-parallel ranks; set tensor_parallel to 2 or more, or remove it',
        )

    def _require_multiple(self, *sizes: str) -> None:
        product = math.prod(getattr(self, size) for size in sizes)
        keys = " x ".join(_KEYS[size] for size in sizes if getattr(self, size) > 1)
        require(self.ranks % product == 0, f"ranks must be a multiple of {keys} ({product}), got {self.ranks}")

    @property
    def data_parallel(self) -> int:
        """Copies of the model, each of which trains its own share of the batch."""
        return self.ranks // (self.tensor * self.context * self.pipeline)

    @property
    def row_multiple(self) -> int:
        """The length of a packed row must be a multiple of this, so that all ranks get pieces of equal length."""
        pieces = 2 * self.context if self.context > 1 else 1
        return math.lcm(pieces, self.context * (self.tensor if self.is_sequence_parallel else 1))

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def share(self, rank: int) -> int:
        """Return which share of the batch a rank trains, in [0, data_parallel)."""
        return rank // (self.tensor * self.context) % self.data_parallel

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank, in [0, pipeline)."""
        return rank // (self.tensor * self.context * self.data_parallel)

    @property
    def output_ranks(self) -> Sequence[int]:
        """The rank of each share that has its outputs: the first rank of the share on the last stage."""
        last = [rank for rank in range(self.ranks) if self.stage(rank) == self.pipeline - 1]
        return last[:: self.tensor * self.context]

    def is_exporter(self, rank: int) -> bool:
        """Whether a rank exports a part of the model: the first ``exporters_of_stage`` ranks of each stage do."""
        return rank % (self.ranks // self.pipeline) < self.exporters_of_stage

    @property
    def exporters(self) -> int:
        """Total number of ranks that export a part of the model."""
        return self.pipeline * self.exporters_of_stage

    @property
    def exporters_of_stage(self) -> int:
        """Number of ranks that together hold a whole stage.

        They share its layers, or share its experts and each hold the rest.
        """
        return max(self.tensor, self.expert * self.expert_tensor)


_KEYS = {
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "virtual_pipeline": "virtual_pipeline",
    "context": "context_parallel",
    "expert": "expert_parallel",
    "expert_tensor": "expert_tensor_parallel",
}
