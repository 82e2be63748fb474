"""[learner] of the run file: backend, processes, batch, optimizer, and when a worker is quarantined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from asyncrl.config.checks import MOST_THREADS, NonNegative, OrOff, Positive, Range, compile_pattern, require
from asyncrl.config.layout import Layout

VISION_TOWER: Final = r"^(model\.)?visual\."
"""Matches the names of a vision tower's weights."""
SMALLER_ROWS: Final = 4096
"""learner.micro_batch_tokens that is recommended where memory is short: less speed is lost than by full recomputation
(docs/results/performance.md, "One GPU")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Train low-rank adapters (arXiv:2106.09685) of the policy instead of its own weights."""

    rank: OrOff[int] = 0
    """Rank of the adapters; 0: train the model itself."""
    alpha: Positive[float] = 32.0
    """The output of an adapter is multiplied by alpha / rank."""
    modules: tuple[str, ...] = ("all-linear",)
    """Matrices of the layers that get an adapter, by the last part of their Hugging Face names, such as ["q_proj",
    "k_proj", "v_proj"]. "all-linear": all except embeddings, the output layer, routers, and experts whose files have
    all of a layer in one tensor."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines receive for each version. merged: the whole model with the adapters merged in, over any channel.
    adapter: only the adapters; generation does not pause, and each answer is of the version with which it began."""

    def __post_init__(self) -> None:
        require(bool(self.modules), 'modules is empty; "all-linear" selects all')
        require(
            self.rank > 0 or self.publish == "merged", 'publish = "adapter" needs a rank > 0: rank 0 trains no adapters'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection:
    backend: str = "megatron"
    """Training backend: a name, or "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if there are any."""
    ranks: Positive[int] = 1
    """Number of learner processes. tensor_parallel x context_parallel x pipeline_parallel ranks hold one copy of the
    model; each copy trains different data."""
    machines: Positive[int] = 1
    """1: the learner process starts its other ranks itself. More: `asyncrl run` starts them in this many groups of
    equal size, with launcher "ray" each on its own machine. Without Ray, start `asyncrl learner` with torchrun on
    each machine."""
    tensor_parallel: Positive[int] = 1
    """Ranks that share every layer; each holds a part of its matrices."""
    sequence_parallel: Literal["auto", "on", "off"] = "auto"
    """on: tensor-parallel ranks also split the tokens where they do not split matrices, which saves memory. auto: on if
    there are tensor-parallel ranks."""
    pipeline_parallel: Positive[int] = 1
    """Pipeline stages. Each stage holds some consecutive layers. Stages idle at both ends of a step; more micro-batches
    per step for each copy of the model reduce that idle time."""
    virtual_pipeline: Positive[int] = 1
    """Parts of the layers on each stage, interleaved with those of the other stages. More parts reduce idle time and
    increase communication."""
    context_parallel: Positive[int] = 1
    """Ranks that share every packed row, for sequences that do not fit on one rank. In layers with linear attention
    they share its key heads, those of a tensor-parallel rank."""
    expert_parallel: Positive[int] = 1
    """Ranks over which the experts of each layer are distributed, in a mixture of experts."""
    expert_tensor_parallel: Positive[int] = 1
    """Ranks that share every expert, each with a part of its intermediate size; all of them get its tokens. For experts
    too large for one rank: expert_parallel, which distributes whole experts, exchanges less."""
    gpus: tuple[int, ...] = ()
    """GPU of each rank, counted from 0, when `asyncrl run` starts the ranks; empty: the first GPUs."""
    threads: Annotated[int, Range(low=0, high=MOST_THREADS)] = 0
    """CPU threads of each rank; 0: PyTorch's default, at most a container's limit."""
    profile_steps: tuple[Positive[int], ...] = ()
    """Steps to profile on the learner's first rank, such as [10, 11]. Traces (and memory snapshots on a GPU) go to
    profile/ of the run's folder."""
    groups_per_batch: Positive[int] = 16
    """Prompt groups per step of the run. A step trains one batch and makes one policy version."""
    steps_per_batch: Positive[int] = 1
    """Optimizer steps on each batch, each on a mini-batch of whole groups. Clipping has an effect from the second
    on. Staleness, run.steps, schedules, checkpoints and metrics count batches."""
    micro_batch_tokens: Positive[int] = 16_384
    """Packed tokens per forward pass. A longer trajectory gets its own micro-batch."""
    shared_prefixes: Literal["auto", "on", "off"] = "auto"
    """Compute tokens once that several sequences of a batch begin with, with the numbers of whole sequences up to
    rounding. auto: where backend and models can, for batches in which it costs less. on: the same, and refused where
    they cannot."""
    learning_rate: Positive[float] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative[int] = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the policy's learning rate after the warm-up."""
    min_learning_rate: float = 0.0
    """Final learning rate of the decay."""
    decay_steps: NonNegative[int] = 0
    """Step at which the decay ends, counted from the start of the warm-up; 0: run.steps. If you plan to resume with
    more steps, set this to the total number of steps."""
    weight_decay: NonNegative[float] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: Positive[float] = 1e-8
    """Epsilon of AdamW."""
    reset_optimizer: bool = False
    """Start AdamW anew for every batch: moments and step counts of 0. With steps_per_batch = 1 its moments are never
    kept, which saves 8 bytes a parameter, and every update is about learning_rate x the sign of the gradient."""
    max_grad_norm: Positive[float] = 1.0
    """Gradients are clipped to this norm."""
    freeze: tuple[str, ...] = ()
    """Regular expressions, such as "embed_tokens" or "layers\\.[0-9]\\.". Parameters of the policy whose Hugging Face
    name matches one of them are not trained."""
    train_only: tuple[str, ...] = ()
    """Regular expressions: train only the parameters whose name matches one of them, except those of freeze; empty:
    all."""
    train_vision: bool = False
    """Train the vision tower of a model that reads images, too. false: it is frozen."""
    lora: LoraSection = field(default_factory=LoraSection)
    """Train low-rank adapters instead of the policy's own weights."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig by name, for learner.backend = "megatron". Fields that asyncrl sets itself
    are refused."""
    experts_directory: str = ""
    """Folder on a local disk for the experts (rollout.routing_replay) of groups that wait to be trained: hundreds of
    bytes a token for large mixtures. Their files are mapped and deleted at once. Empty: they stay in memory."""
    max_skipped_steps: NonNegative[int] = 10
    """The run ends after this many consecutive steps with a non-finite loss or gradient; 0: never."""
    quarantine_mismatch: NonNegative[float] = 0.5
    """Quarantine a worker whose fresh answers differ from the trainer's logprobs by more than this (mean
    |difference| in nats per token): its groups are no longer trained. 0 is off. Typical: bfloat16 0.02, a wrong
    temperature 0.3 or more, wrong weights several nats."""
    logprob_check_every: Positive[int] = 10
    """Steps between these comparisons. Each takes two answers per worker and one forward pass."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the backend."""

    def __post_init__(self) -> None:
        _ = self.layout  # raises ConfigError if the sizes do not fit
        require(
            self.ranks % self.machines == 0, f"ranks must be a multiple of machines ({self.machines}), got {self.ranks}"
        )
        for key in ("freeze", "train_only"):
            for pattern in getattr(self, key):
                require(bool(pattern), f"{key} holds an empty pattern, which is in every name")
                compile_pattern(pattern, key)
        require(
            self.groups_per_batch % self.steps_per_batch == 0,
            f"groups_per_batch must be a multiple of steps_per_batch ({self.steps_per_batch}), got "
            f"{self.groups_per_batch}",
        )
        require(
            0 <= self.min_learning_rate <= self.learning_rate,
            f"min_learning_rate must be >= 0 and <= learning_rate ({self.learning_rate:g}), got "
            f"{self.min_learning_rate:g}",
        )
        require(
            self.schedule != "constant" or not (self.min_learning_rate or self.decay_steps),
            'min_learning_rate and decay_steps need a schedule that decays; use schedule = "cosine" or "linear"',
        )
        require(
            self.decay_steps == 0 or self.decay_steps > self.warmup_steps,
            f"decay_steps must be > warmup_steps ({self.warmup_steps}), got {self.decay_steps}",
        )
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas must be two numbers in [0, 1), got {list(self.betas)}",
        )

    @property
    def frozen(self) -> tuple[str, ...]:
        """Regular expressions of all that is not trained: ``freeze``, and the vision tower."""
        return self.freeze if self.train_vision else (*self.freeze, VISION_TOWER)

    @property
    def layout(self) -> Layout:
        """How the ranks share the model and the batch."""
        return Layout(
            ranks=self.ranks,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            virtual_pipeline=self.virtual_pipeline,
            context=self.context_parallel,
            expert=self.expert_parallel,
            expert_tensor=self.expert_tensor_parallel,
            is_sequence_parallel=self.sequence_parallel == "on"
            or (self.sequence_parallel == "auto" and self.tensor_parallel > 1),
        )

    @property
    def data_parallel(self) -> int:
        """Copies of the model, each of which trains its own share of the batch."""
        return self.layout.data_parallel
