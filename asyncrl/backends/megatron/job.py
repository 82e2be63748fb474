"""What the ranks of a Megatron learner are built from, what rank 0 commands, and what they answer. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from numpy import float32
from numpy.typing import NDArray

from asyncrl.backends.families.family import Family
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.config.adapter import Layout
from asyncrl.config.checks import NonNegative, Range
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors import int4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the megatron backend."""

    distributed_optimizer: bool = True
    """With several ranks, shard the float32 weights and AdamW's moments over them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. selective: only cheap activations (norms and gates); saves a fifth of the memory at
    almost no cost. full: all but one activation per layer; a third more work, and more than smaller
    learner.micro_batch_tokens cost.
    """
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory: 8 bytes a parameter, which every step copies to the device and back."""
    optimizer_device: Literal["learner", "cpu"] = "learner"
    """Where AdamW runs. cpu: in host memory, with main weights and moments (12 bytes a parameter), on all of a
    rank's threads; a GPU then holds 2 bytes of weights and 2 or 4 of gradients a parameter (gradients_dtype), and
    waits for the update."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format in which AdamW's moments are kept between updates. bfloat16 saves 4 bytes a parameter and rounds them
    after every update, as Megatron's precision-aware optimizer; with offload_optimizer, half as much is copied."""
    gradients_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients of bfloat16 weights are added up over rows and over ranks. bfloat16 halves what
    ranks exchange, saves 2 bytes a parameter during the passes (not on a lone rank), and rounds every partial sum to
    8 bits."""
    exports: Literal["auto", "device", "host"] = "auto"
    """Where the weights of a new version are copied, for the engines to take while training goes on. device: beside
    the weights; while an older version is still in use there, to the host. host: to pinned host memory, at the speed
    of the bus. auto: device, if a copy fits there."""
    overlap_tensor_parallel: bool = True
    """Tensor-parallel ranks exchange rows during products, if their GPUs can access each other's memory."""
    aux_loss_coefficient: NonNegative[float] = 0.0
    """Coefficient of the load-balancing loss of mixtures of experts (Switch Transformer, arXiv:2101.03961), averaged
    over the batch by tokens, prompts included, and summed over layers. 0, usual for reinforcement learning, is off."""
    draft_coefficient: NonNegative[float] = 0.0
    """Train the model's multi-token-prediction layers, with which engines speculate, on the policy's tokens: this
    factor of their mean negative log likelihood. slime's --mtp-loss-scaling-factor is 0.2. The policy itself gets no
    gradient of it. 0: they are left out of the model."""
    fake_quantization: Literal["auto", "off"] = "auto"
    """Quantization-aware training. auto: where engines get experts in 4 bits (weights.quantization = "int4" or
    "int4_group32"), every pass rounds the policy's experts to the same numbers, with straight-through gradients.
    off: engines alone round."""
    linear_attention: Literal["auto", "torch"] = "auto"
    """Kernels of linear attention (Qwen3-Next, Qwen3.5). auto: flash-linear-attention on CUDA in 16 bits, if it is
    installed and computes what plain torch does in a first try. torch: plain torch."""
    replay_own_routing: bool = False
    """With several optimizer steps per batch: all of them route a token to the experts that the learner chose when
    it computed the batch's logprobs. Tokens that the engine routed (rollout.routing_replay) keep the engine's
    experts."""
    hooks: str = ""
    """"package.module:Class", derived from asyncrl.backends.megatron.hooks.MegatronHooks: your code on every rank after
    the start, before logprobs are computed, and before an optimizer step. Empty: none."""
    timeout_seconds: Annotated[float, Range(low=1, high=1_000_000)] = 600.0
    """Timeout for ranks waiting for one another, in seconds: 1 to 1000000. A rank that makes no progress for so long
    ends the learner; one that dies does so at once."""

    def __post_init__(self) -> None:
        if self.optimizer_device == "cpu" and self.offload_optimizer:
            raise ConfigError('offload_optimizer: with optimizer_device = "cpu" no moments are on the GPU; remove it')


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a rank needs to build the same models and optimizers as the others.

    transformer   extra fields of Megatron's TransformerConfig, for all models
    quantization  format of exports (tensors/quantized_model.py); empty: dtype
    family        the run's own family of models (model.family)
    takes_turns   the models leave the device while engines read an export, which is then a copy of everything
    exports_to    memory for copies of exports: device or host
    gpu_bytes     that torch may keep of each GPU; 0: all
    """

    models: Mapping[str, AuxiliaryModel]
    temperature: float
    device: str
    dtype: str
    threads: int
    layout: Layout
    options: Options
    transformer: Mapping[str, Any] = field(default_factory=dict)
    quantization: str = ""
    takes_turns: bool = False
    exports_to: Literal["device", "host"] = "device"
    gpu_bytes: int = 0
    family: Family | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def rounding_group(self) -> int:
        """Numbers of a row that share a scale, if the policy's experts are rounded to 4 bits in every pass, else 0."""
        return int4.GROUPS.get(self.quantization, 0) if self.options.fake_quantization == "auto" else 0

    @property
    def trained(self) -> dict[str, AuxiliaryModel]:
        return {name: model for name, model in self.models.items() if model.is_trained}

    @property
    def saved(self) -> dict[str, AuxiliaryModel]:
        return {name: model for name, model in self.models.items() if model.is_saved}

    @property
    def is_distributed_optimizer(self) -> bool:
        """Whether the ranks that hold the same weights share their optimizer's state."""
        return self.options.distributed_optimizer and self.layout.data_parallel * self.layout.context > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Sizes of a rank's share of a batch, which follows its command (feeding.py).

    share_bytes   of the encoded share
    expert_bytes  of the experts behind it, at the next multiple of eight
    layers        number of layers whose experts these are
    of_machine    ranks of a machine, by which all ranks know who passes on to whom
    """

    share_bytes: int
    expert_bytes: int
    layers: int
    of_machine: int

    @property
    def experts_start(self) -> int:
        return -(-self.share_bytes // 8) * 8

    @property
    def num_bytes(self) -> int:
        return self.experts_start + self.expert_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What all ranks execute together.

    name           step, reset_optimizer, refresh_reference, forward, export, save, finish_save, restore, offload,
                   onload or expert_layers
    micro_batches  the receiver's share, or
    feed           how long it is, where it follows
    batch_tokens   tokens of all shares, prompts included, without fillers
    records        for forward: remember to which experts each token is routed, for the steps that follow
    waits          for finish_save: wait until this rank's part is on disk
    export         number of the export
    held           for export and offload: earlier exports whose parts are still needed
    """

    name: str
    model: str = POLICY
    micro_batches: tuple[MicroBatch, ...] = ()
    feed: Feed | None = None
    batch_tokens: int = 0
    learning_rate: float = 0.0
    records: bool = False
    folder: str = ""
    waits: bool = False
    export: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The result of forward.  rows: f32[N] per micro-batch of the rank's share; empty if another rank has them"""

    rows: tuple[NDArray[float32], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The result of expert_layers.  layers: numbers of the layers of this rank's stage that have experts; None: all"""

    layers: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of commands without one."""
