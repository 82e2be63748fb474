"""Assembles Megatron-Core: GPTModel on packed rows, gradient buffers, optimizer, process groups.

The only file that imports megatron. Linear layers, embedding and blocks are Megatron's; the operations between matrix
products come from fused.py, attention from packed_attention.py, the output layer from token_logprobs.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncrl.backends import huggingface
from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.token_logprobs import linear_logprobs
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import attention
from asyncrl.backends.megatron.rank_commands import Job, Place
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.models import Head
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.errors import ConfigError

with quiet(), cpu_shim.without_compilation():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


@dataclass
class _RowParameters(PackedSeqParams):  # type: ignore[misc]
    """Carries attention's inputs through Megatron's layers, which treat the row as one dense sequence (sbhd)."""

    row: PackedRow | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None


class Norm(torch.nn.Module):
    """RMSNorm with Megatron's constructor."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.rms_norm(x, self.weight, self.eps)


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear layer preceded by its norm, like Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        normed = fused.rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        with _forgetting(self.config, normed, fused.rms_norm, x, self.layer_norm_weight, self.config.layernorm_epsilon):
            return super().forward(normed, *arguments, **options)


class GatedLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer preceded by SwiGLU; its input is gate and up, concatenated."""

    def forward(self, x: torch.Tensor) -> Any:
        gated = fused.swiglu(x)
        with _forgetting(self.config, gated, fused.swiglu, x):
            return super().forward(gated)


def _forgetting(config: TransformerConfig, result: torch.Tensor, function: Any, *arguments: Any) -> Any:
    """With selective recomputation, the backward pass of what follows recomputes ``result`` instead of keeping it."""
    if config.recompute_granularity != "selective" or not torch.is_grad_enabled():
        return nullcontext()
    return fused.remade(result, lambda: function(*arguments))


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention, with everything between its two linear layers in two kernels."""

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: _RowParameters, **__: Any) -> Any:
        assert packed_seq_params.row is not None
        assert packed_seq_params.rotary is not None
        mixed, _bias = self.linear_qkv(hidden)
        query, key, value = fused.heads(
            mixed.flatten(0, 1),
            *packed_seq_params.rotary,
            self.q_layernorm.weight if self.config.qk_layernorm else None,
            self.k_layernorm.weight if self.config.qk_layernorm else None,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
        )
        attended = attention(query, key, value, packed_seq_params.row)
        return self.linear_proj(attended.flatten(1)[:, None])


def _add(_training: bool, _fused: bool) -> Any:
    """Megatron's bias_dropout_add without bias and dropout."""
    return lambda output_and_bias, residual, _probability: output_and_bias[0] + residual


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layer specification: Megatron's parallel linears with our kernels.

    Transformer Engine's layers would need another function like this one (its modules take cu_seqlens instead of a
    PackedRow, and it fuses norms into linears under the same parameter names); untested, so not offered.
    """
    attention_spec = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedLinear,
            core_attention=IdentityOp,
            linear_proj=RowParallelLinear,
            q_layernorm=Norm if config.qk_layernorm else None,
            k_layernorm=Norm if config.qk_layernorm else None,
        ),
    )
    # The activation is the identity because GatedLinear applies it; this is the only way to override Megatron's own.
    mlp = MLPSubmodules(linear_fc1=NormedLinear, linear_fc2=GatedLinear, activation_func=IdentityOp)
    of_mlp = getattr(MLP, "as_mlp_submodule", None)  # megatron-core before 0.17 has specs instead of builders
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention_spec,
            self_attn_bda=_add,
            mlp=partial(of_mlp, submodules=mlp) if of_mlp else ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's GPTModel on one row of documents: positions restart in each; never materialises all logits."""

    def __init__(
        self, config: TransformerConfig, shape: huggingface.ModelShape, device: torch.device, *, head: Head
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_layers(config),
            vocab_size=huggingface.padded_vocabulary(shape, config.tensor_model_parallel_size),
            max_sequence_length=0,  # only used by learned positions
            position_embedding_type="none",  # rotary angles are computed below
            # With a value head there is no output layer; a shared one has no weight of its own.
            share_embeddings_and_output_weights=shape.is_tied or head == "values",
        )
        self._frequencies = shape.rope_frequencies.to(device)
        self._vocabulary_size = shape.vocabulary_size
        if head == "values":
            self.value_head = torch.nn.Linear(shape.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(self.value_head.weight)

    def logprobs(self, row: PackedRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of the tokens at ``row.rows``, f32[M] each, from the hidden state before each."""
        is_tied = self.share_embeddings_and_output_weights
        return linear_logprobs(
            self._hidden(row).index_select(0, row.rows - 1),
            self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight,
            row.tokens.index_select(0, row.rows),
            temperature=temperature,
            vocabulary_size=self._vocabulary_size,
            group=tensor_parallel_group(),
        )

    def values(self, row: PackedRow) -> torch.Tensor:
        """The value after each token, f32[N].

        Every tensor-parallel rank has the whole head and the same hidden states, hence the full gradient of both: do
        not sum it over these ranks.
        """
        return self._hidden(row).float() @ self.value_head.weight[0].float()

    def _hidden(self, row: PackedRow) -> torch.Tensor:
        """The last hidden state of every token, [N, H]."""
        hidden = self.embedding(input_ids=row.tokens[None], position_ids=row.positions[None])
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # frozen embeddings: recomputed layers get no gradients without one at their input
        rotary = fused.rotary(row.positions, self._frequencies)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=_RowParameters(qkv_format="sbhd", row=row, rotary=rotary),
        )
        return hidden.flatten(0, 1)  # type: ignore[no-any-return]


def join(place: Place, tensor_parallel: int) -> None:
    """Create Megatron's process groups; neighbouring ranks share a model."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        distributed_timeout_minutes=place.timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)  # nothing draws from it, but recomputation needs it to exist


def leave() -> None:
    """Destroy Megatron's process groups: they are global, and a later rank in this process needs new ones."""
    parallel_state.destroy_model_parallel()


def data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model and train different data."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group


def tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that together hold one copy of the model."""
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Sum main_grad over the ranks that hold the same parameter."""
    finalize_model_grads([model])


def build_model(job: Job, shape: huggingface.ModelShape, device: torch.device, *, head: Head) -> PackedGPT:
    """The model without its weights."""
    model = PackedGPT(_transformer_config(job, shape, job.torch_dtype), shape, device, head=head)
    model.to(device, job.torch_dtype)
    return model


def with_gradient_buffers(model: PackedGPT, job: Job) -> DistributedDataParallel:
    """Megatron's wrapper: a float32 main_grad per parameter, accumulated by every backward pass."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=job.is_distributed_optimizer,
        overlap_grad_reduce=data_parallel_group().size() > 1,
        # No overlap_param_gather: every step is followed by an export, which needs all parameters at once.
    )
    return DistributedDataParallel(model.config, config, model)


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _transformer_config(job: Job, shape: huggingface.ModelShape, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(**_own_fields(job, shape, dtype), **job.transformer)


def _own_fields(job: Job, shape: huggingface.ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.feed_forward_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_size,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=shape.has_qk_norm,
        add_qkv_bias=shape.has_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=True,  # means: the layer specification names the activation
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=job.tensor_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged
        perform_initialization=False,  # the folder's weights come next
        # These need kernels of Transformer Engine or Apex:
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        **_RECOMPUTE[job.recompute],
    )


_NOT_OURS: Final = re.compile(
    "pipeline_|.*_parallel|moe_|num_moe|expert_|fp8|fp4|cuda_graph|enable_cuda_graph|cpu_offloading|mtp_|multi_latent|"
    "inference_|flash_decode|tp_comm_|recompute_|.*_func$|timers|hierarchical_|heterogeneous"
)
"""Fields for what our model does not have, or for what is an option of ours: ranks, learner.options."""


def refuse_options(job: Job, shape: huggingface.ModelShape) -> None:
    """Raises ConfigError unless ``job.transformer`` are fields of TransformerConfig that are not ours, of values that
    Megatron takes."""
    known = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    own = _own_fields(job, shape, job.torch_dtype)
    for name, value in job.transformer.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"learner.megatron: {name} is no field of Megatron's TransformerConfig{hint}")
        if name in own:
            raise ConfigError(f"learner.megatron: {name} is set by asyncrl, from the model or other keys; remove it")
        if _NOT_OURS.match(name):
            raise ConfigError(f"learner.megatron: {name} is for what asyncrl's model does not do; remove it")
        default = known[name]
        if isinstance(default, bool | int | float) and isinstance(default, bool) != isinstance(value, bool):
            expected = "true or false" if isinstance(default, bool) else "a number"
            raise ConfigError(f"learner.megatron: {name} must be {expected}, got {value!r}")
    try:
        with quiet():
            _transformer_config(job, shape, job.torch_dtype)
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"learner.megatron: Megatron refuses {dict(job.transformer)}: {reason}") from error


def build_optimizer(job: Job, settings: OptimizerSettings, model: DistributedDataParallel, device: torch.device) -> Any:
    """Megatron's optimizer around torch's AdamW; the learning rate is set every step."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=job.torch_dtype == torch.bfloat16,
        params_dtype=job.torch_dtype,
        use_distributed_optimizer=job.is_distributed_optimizer,
    )
    with cpu_shim.cuda_type_names(device):
        chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers  # a second one would be for MoE experts
    for group in optimizer.optimizer.param_groups:
        group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return optimizer
