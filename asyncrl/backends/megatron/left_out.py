"""Why no key decides some fields of Megatron's OptimizerConfig and DistributedDataParallelConfig, and flags of its
schedule. transformer_config.KEYS has the others. Test: tests/unit/backends/megatron/test_left_out.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_REASONS: Final[Mapping[str, str]] = {
    "optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_nesterov muon_scale_mode "
    "muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor "
    "muon_scalar_optimizer adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps lion_beta1 lion_beta2 "
    "soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo use_layer_wise_distributed_optimizer": "the "
    "optimizer is AdamW, whose state every layout and checkpoint here knows; SGD, Muon, Lion and SOAP are not built in",
    "decoupled_lr decoupled_min_lr": "all weights have one learning rate",
    "apply_wd_to_qk_layernorm": "weights of one dimension, and biases of experts, never decay",
    "decoupled_weight_decay": "AdamW's decay is always decoupled; Adam is learner.weight_decay = 0",
    "start_weight_decay end_weight_decay weight_decay_incr_style": "weight decay is constant",
    "lr_warmup_fraction lr_warmup_init lr_warmup_samples lr_decay_samples": "a warm-up begins at 0 and is counted in "
    "steps, as learner.warmup_steps and learner.decay_steps",
    "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples": "schedules are constant, linear and cosine",
    "override_opt_param_scheduler use_checkpoint_opt_param_scheduler": "a resumed run follows the schedule of its run "
    "file",
    "fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis": "model.dtype is bfloat16 or "
    "float32, which need no loss scale",
    "fp8_recipe fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag "
    "keep_fp8_transpose_cache": "training in FP8 or FP4 needs Transformer Engine's layers; "
    'weights.quantization = "fp8" is for engines',
    "main_params_dtype store_param_remainders": "main weights are float32",
    "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
    "pin_cpu_params": "learner.options.optimizer_device runs all of AdamW on the host, with torch's fused AdamW and "
    "copies beside it, and learner.options.offload_optimizer keeps all moments there for an update on the GPU",
    "overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather": "every step is followed by an "
    "export to the engines, which needs all weights at once",
    "overlap_grad_reduce": "on wherever several ranks hold the same weights",
    "num_distributed_optimizer_instances": "all ranks that hold the same weights share their moments",
    "check_for_nan_in_grad check_for_large_grads": "always: a step whose loss or gradients are not finite changes "
    "nothing (learner.max_skipped_steps)",
    "grad_norm_skip_threshold": "gradients are clipped (learner.max_grad_norm), and no step is left out for large ones",
    "param_name_patterns_for_fp32_local_accumulation": "all gradients have learner.options.gradients_dtype",
    "optimizer_cuda_graph": "the update is not a CUDA graph",
    "bucket_size num_buckets pad_buckets_for_high_nccl_busbw suggested_communication_unit_size "
    "reduce_scatter_with_fp32_accumulation nccl_ub disable_symmetric_registration": "gradients are exchanged in "
    "Megatron's own sizes and ways",
    "average_in_collective gradient_reduce_div_fusion": "gradients are sums; losses carry the weights of their tokens",
    "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
    "preserve_fp32_weights fsdp_double_buffer fsdp_manual_registration fsdp_all_gather_in_start_param_sync "
    "fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_cuda_graph_mode megatron_fsdp_grad_comm_dtype "
    "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype "
    "megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad": "no FSDP: "
    "learner.options.distributed_optimizer and Megatron's layouts save what it saves",
    "delay_wgrad_compute": "needs Transformer Engine's layers",
    "log_num_zeros_in_grad": "not counted; grad_norm is a metric",
    "barrier_with_L1_time timers config_logger_dir": "`asyncrl trace` and learner.profile_steps say where time goes",
}

LEFT_OUT: Final[Mapping[str, str]] = {name: why for names, why in _REASONS.items() for name in names.split()}
"""Megatron's name -> why nothing sets it."""
