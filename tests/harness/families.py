"""Tiny models of every family that the learner trains, each with the entries of config.json that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.data.tiny_model import make_tiny_model, mixture_entries
from asyncrl.data.tiny_vision_model import hybrid_entries

ARCHITECTURES: Final = (
    *("qwen3", "qwen2", "llama", "mistral", "glm4", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32"),
    *("minimax_m2", "gpt_oss"),
)


def make_tiny_family(
    folder: Path,
    *,
    architecture: str = "qwen3",
    hidden_size: int = 64,
    num_heads: int = 4,
    entries: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Path:
    """As make_tiny_model, for any of ARCHITECTURES."""
    its = {**_entries(architecture, hidden_size, num_heads), **(entries or {})}
    return make_tiny_model(
        folder, architecture=architecture, hidden_size=hidden_size, num_heads=num_heads, entries=its, **sizes
    )


def _entries(architecture: str, hidden_size: int, num_heads: int) -> dict[str, Any]:
    """A token uses two of eight experts, or four of sixteen."""
    mixture, hybrid, head = mixture_entries(hidden_size), hybrid_entries(hidden_size), hidden_size // num_heads
    shared_expert = {**mixture, "shared_expert_intermediate_size": hidden_size}
    alone = {"num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": hidden_size // 2}
    shared = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden_size // 2, "norm_topk_prob": True}
    shared |= {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    grouped = {**shared, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    latent = {
        "num_key_value_heads": num_heads,
        "head_dim": head // 2,  # transformers' name for the rotated part
        "q_lora_rank": hidden_size // 2,
        "kv_lora_rank": hidden_size // 2,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
    }
    indexer = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": head}  # few heads often give 0
    match architecture:
        case "mistral":
            return {"sliding_window": None}
        case "glm4":
            return {"attention_bias": True}
        case "gemma3":  # every second layer sees 8 tokens
            return {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": hidden_size}
        case "mixtral":
            return alone
        case "minimax_m2":  # half of every head is rotated: SGLang reads rotary_dim
            rotated = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            engine = {"rotary_dim": head // 2, "use_qk_norm": True, "use_routing_bias": True}
            return {**alone, **engine, "scoring_func": "sigmoid", "rope_parameters": rotated}
        case "gpt_oss":  # every second layer sees 8 tokens; SGLang reads swiglu_limit, transformers has 7
            yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
            rope = {**yarn, "original_max_position_embeddings": 16}
            return {**alone, "sliding_window": 8, "swiglu_limit": 7.0, "rope_parameters": rope}
        case "qwen2_moe":
            return {**shared_expert, "norm_topk_prob": False}
        case "qwen3_5":
            return hybrid
        case "qwen3_next" | "qwen3_5_moe":
            return {**hybrid, **shared_expert}
        case "glm4_moe":
            return {**shared, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True}
        case "glm4_moe_lite":  # transformers' norms within attention have 1e-6, whatever rms_norm_eps is
            return {**shared, **latent, "rms_norm_eps": 1e-6}
        case "glm_moe_dsa":  # every second layer uses the choice of the one before
            freq = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
            return {**shared, **latent, **indexer, **freq, "num_experts": 8, "rms_norm_eps": 1e-6}
        case "deepseek_v3":
            return {**grouped, **latent}
        case "deepseek_v32":
            return {**grouped, **latent, **indexer, "num_experts": 16}
    return {}
