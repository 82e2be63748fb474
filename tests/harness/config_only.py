"""Model folders of full size without a byte of weights: config.json, a tokenizer, and headers of tensors."""

from __future__ import annotations

import functools
import json
import re
import struct
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.data.tiny_model import make_tokenizer

QWEN3: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B-A22B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "Llama-3.3-70B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3-bf16": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163_840,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
"""As published on Hugging Face, reduced to what decides sizes."""


def write(name: str, folder: Path) -> Path:
    """Write the model of that name, with a tiny tokenizer, and return its folder. Its file of weights is a hole."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | {"dtype": "bfloat16"}))
    make_tokenizer().save_pretrained(folder)
    header, end = {}, 0
    for tensor, shape in shapes(name).items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@functools.cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes as Hugging Face has them, of one layer of each kind, repeated for all layers."""
    entries = CONFIGS[name]
    dense = entries.get("first_k_dense_replace", 0)
    config = transformers.AutoConfig.for_model(**(entries | {"num_hidden_layers": dense + 1, "layer_types": None}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    named = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    found: dict[str, tuple[int, ...]] = {}
    for key, tensor in revert_weight_conversion(model, named).items():
        layers = range(dense, entries["num_hidden_layers"]) if f".layers.{dense}." in key else [None]
        for layer in layers:
            found[key if layer is None else re.sub(r"\.layers\.\d+\.", f".layers.{layer}.", key)] = tuple(tensor.shape)
    return found
