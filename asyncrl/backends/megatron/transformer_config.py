"""Megatron-Core's TransformerConfig for a model and a job, and the fields that users may set (learner.megatron)."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import torch
import torch.nn.functional as F

from asyncrl.backends.families.shape import Experts, ModelShape
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.left_out import LEFT_OUT
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.config.adapter import Layout
from asyncrl.errors import ConfigError

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": []},  # our layers recompute by themselves
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(job: Job, shape: ModelShape, *, own: Mapping[str, Any]) -> TransformerConfig:
    """own: fields of this model alone, over those of the job"""
    given = {"moe_token_dispatcher_type": "alltoall", **job.transformer, **own}  # ranks may have rows of many lengths
    return TransformerConfig(**_own_fields(job, shape, job.torch_dtype), **given)


def _own_fields(job: Job, shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.feed_forward_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_size,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=shape.has_zero_centered_norms,
        qk_layernorm=shape.has_qk_norm,
        attention_output_gate=shape.has_output_gate,
        rotary_interleaved=shape.is_interleaved,
        add_qkv_bias=shape.has_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu if shape.activation == "silu" else F.gelu,
        use_te_activation_func=True,  # means that the layer specification provides the activation
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged
        perform_initialization=False,  # weights are loaded from the folder
        # These need kernels of Transformer Engine or Apex:
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        **_RECOMPUTE[job.options.recompute],
        **_parallel_fields(job.layout),
        **(_mixture_fields(job, shape, shape.experts) if shape.experts else {}),
    )


def _mixture_fields(job: Job, shape: ModelShape, experts: Experts) -> dict[str, Any]:
    return dict(
        num_moe_experts=experts.num_experts,
        moe_layer_freq=[int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        moe_ffn_hidden_size=experts.feed_forward_size,
        moe_router_topk=experts.experts_per_token,
        moe_router_score_function=experts.scores,
        moe_router_pre_softmax=not experts.is_normalized,  # a softmax over the chosen experts alone is normalised
        moe_router_topk_scaling_factor=experts.scale if experts.scale != 1.0 else None,
        moe_router_enable_expert_bias=experts.has_bias,
        moe_router_bias_update_rate=0.0,  # the bias is frozen: load balance is a matter of pretraining
        moe_router_num_groups=experts.num_groups if experts.num_groups > 1 else None,
        moe_router_group_topk=experts.groups_per_token if experts.num_groups > 1 else None,
        moe_shared_expert_intermediate_size=experts.shared_size or None,
        moe_shared_expert_gate=experts.has_shared_gate,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # Megatron's own is scaled for pretraining; load_balance.py has ours
        moe_aux_loss_coeff=job.options.aux_loss_coefficient,
    )


def _parallel_fields(layout: Layout) -> dict[str, Any]:
    is_interleaved = layout.virtual_pipeline > 1
    return dict(
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.is_sequence_parallel,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if is_interleaved else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        variable_seq_lengths=layout.pipeline > 1,
        # With two stages the previous stage is also the next one, and a batched call mixes up both directions, silently
        # if all rows have one length. Megatron allows overlap only with interleaved stages.
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        batch_p2p_sync=False,
    )


_NOT_OURS: Final = re.compile(
    "pipeline_|.*_parallel|moe_|num_moe|expert_|fp8|fp4|cuda_graph|enable_cuda_graph|cpu_offloading|mtp_|multi_latent|"
    "microbatch_group_size|num_microbatches_with|inference_|flash_decode|tp_comm_|recompute_|.*_func$|timers|"
    "hierarchical_|heterogeneous|"
    # what a layer computes: our layers follow config.json and would ignore these
    "activation_func|glu_|softmax_|window_|qk_|no_rope|mrope_|log_max_attention|"
    "attention_softmax|apply_|fp32_residual|fp16|.*autocast|first_last_layers_bf16|num_layers_at_|quant_recipe|"
    "experimental_|dsa_|linear_|mamba_|use_mamba|is_hybrid|.*kitchen|external_cuda_graph|config_logger_|test_mode"
)
"""Fields for features that our model does not have, that it ignores, or that asyncrl sets by options: ranks,
learner.options."""


_DISPATCHERS: Final = ("moe_token_dispatcher", "moe_flex_", "moe_enable_deepep", "moe_deepep_", "moe_hybridep_")
"""Starts of fields for the exchange of tokens between ranks that share experts."""
_OF_FLEX: Final = frozenset(("moe_deepep_num_sms", "moe_flex_dispatcher_backend"))
_EXCHANGES: Final = (("moe_token_dispatcher_type", "alltoall"), ("moe_flex_dispatcher_backend", "deepep"))
"""Those that need nothing. HybridEP was never tried with rows of different lengths."""


KEYS: Final[Mapping[str, str]] = {
    "lr": "learner.learning_rate",
    "min_lr": "learner.min_learning_rate",
    "lr_decay_style": "learner.schedule",
    "lr_decay_iters": "learner.decay_steps",
    "lr_warmup_iters": "learner.warmup_steps",
    "weight_decay": "learner.weight_decay",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "learner.betas"),
    "adam_eps": "learner.eps",
    "clip_grad": "learner.max_grad_norm",
    "use_distributed_optimizer": "learner.options.distributed_optimizer",
    "optimizer_cpu_offload": "learner.options.optimizer_device",
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"), "learner.options.moments_dtype"
    ),
    **dict.fromkeys(
        ("main_grads_dtype", "grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32"),
        "learner.options.gradients_dtype",
    ),
    "tensor_model_parallel_size": "learner.tensor_parallel",
    "sequence_parallel": "learner.sequence_parallel",
    "pipeline_model_parallel_size": "learner.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "learner.virtual_pipeline",
    "context_parallel_size": "learner.context_parallel",
    "expert_model_parallel_size": "learner.expert_parallel",
    "expert_tensor_parallel_size": "learner.expert_tensor_parallel",
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
        "learner.options.recompute",
    ),
    "moe_aux_loss_coeff": "learner.options.aux_loss_coefficient",
    **dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor"), "learner.options.draft_coefficient"),
    **dict.fromkeys(("bf16", "params_dtype"), "model.dtype"),
    "distributed_timeout_minutes": "learner.options.timeout_seconds",
    "seed": "run.seed",
}
"""Megatron's name -> the key of the run file that decides it."""


_KINDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: ""}


def _expected_instead(annotation: Any, value: object) -> str:
    """Describe the values that a field takes; "" if ``value`` is one of them, or only Megatron can tell."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    types = [kind for kind in kinds if get_origin(kind) is not Literal]
    if (
        not _KINDS.keys() >= set(types)
        or value in words
        or type(value) in types
        or (type(value) is int and float in types)
    ):
        return ""
    return " or ".join([*(f'"{word}"' for word in words), *filter(None, (_KINDS[kind] for kind in types))])


def refuse_options(job: Job, shape: ModelShape, *, where: str, own: Mapping[str, Any]) -> None:
    """Raise ConfigError unless ``job.transformer`` and ``own`` hold valid values for fields of TransformerConfig that
    users may set.

    where  the run file's key for the model
    own    fields of this model alone, over those of the job
    """
    _refuse_fields(job.transformer, job, shape, key="learner.megatron")
    section = where.removesuffix(".path")
    key = f"{section}.megatron" if own else "learner.megatron"
    _refuse_fields(own, job, shape, key=key)
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    fields = {**job.transformer, **own}
    if job.layout.virtual_pipeline > 1 and job.layout.pipeline == 2 and {first, last} <= fields.keys():
        raise ConfigError(
            f"{key}: {first} and {last} leave no stage between them, which Megatron needs with "
            "virtual_pipeline; remove one of the two"
        )
    if fields.get("moe_token_dispatcher_type") != "flex" and (unread := _OF_FLEX & fields.keys()):
        raise ConfigError(
            f'{key}: {min(unread)} is read with moe_token_dispatcher_type = "flex" alone; set that, or remove the field'
        )
    try:
        with quiet():
            transformer_config(job, shape, own=own)
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        mend = "" if where == "model.path" else f"; set {section}.megatron"
        raise ConfigError(f"{key}: Megatron refuses {fields} for {where}: {reason}{mend}") from error


def _why_no_exchange(name: str, value: object, job: Job) -> str:
    """Return why a field cannot decide how ranks that share experts exchange tokens; "" if it can."""
    if name == "moe_deepep_num_sms" or (name, value) in _EXCHANGES:
        return ""
    if (name, value) != ("moe_token_dispatcher_type", "flex"):
        return 'tokens travel by Megatron\'s all-to-all, or by DeepEP (moe_token_dispatcher_type = "flex"); remove it'
    if job.layout.expert == 1:
        return "no ranks exchange tokens with learner.expert_parallel = 1; remove it"
    if job.layout.expert_tensor > 1:
        return "DeepEP was never tried with learner.expert_tensor_parallel; remove one of them"
    if importlib.util.find_spec("deep_ep") is None:
        return '"flex" needs DeepEP, and its package deep_ep is not installed; install it, or remove the field'
    if job.torch_dtype != torch.bfloat16:
        return 'DeepEP sends bfloat16; set model.dtype = "bfloat16", or remove the field'
    return ""


def _refuse_fields(fields: Mapping[str, Any], job: Job, shape: ModelShape, *, key: str) -> None:
    """Raise ConfigError for names or values of fields that users may not set.  key: where the run file has them"""
    known = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}
    ours = _own_fields(job, shape, job.torch_dtype)
    for name, value in fields.items():
        if name in KEYS:
            raise ConfigError(f"{key}: {name} is {KEYS[name]} here; set that instead")
        if name in LEFT_OUT and name not in known:
            raise ConfigError(f"{key}: {name}: {LEFT_OUT[name]}; remove it")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}: {name} is not a field of Megatron's TransformerConfig{hint}")
        if name.startswith(_DISPATCHERS) and (problem := _why_no_exchange(name, value, job)):
            raise ConfigError(f"{key}: {name}: {problem}")
        if name in ours:
            raise ConfigError(f"{key}: {name} is set by asyncrl, from the model or other keys; remove it")
        if name.startswith(("fp8", "fp4")):
            raise ConfigError(
                f"{key}: {name} is for Transformer Engine's layers, and asyncrl's learner has layers of its "
                'own, in model.dtype; remove it (weights.quantization = "fp8" is for engines)'
            )
        if _NOT_OURS.match(name) and not name.startswith(_DISPATCHERS):
            raise ConfigError(
                f"{key}: {name} is for a feature that asyncrl does not support or sets by another key; remove it"
            )
        if expected := _expected_instead(known[name], value):
            raise ConfigError(f"{key}: {name} must be {expected}, got {value!r}")
