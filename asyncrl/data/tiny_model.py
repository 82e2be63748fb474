"""Make a Hugging Face model folder small enough to train on one CPU core: random weights, one token per character.

The demo and the tests use it, so they need no download. Its initial policy is nearly uniform over the vocabulary,
because small weights give small logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import safetensors.torch
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.core_model_loading import revert_weight_conversion

Architecture = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "glm4",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "deepseek_v32",
    "minimax_m2",
    "gpt_oss",
]

DIGITS = "0123456789"
CHARACTERS = DIGITS + "abcdefghijklmnopqrstuvwxyz +-*=>?.,\n"
"""Default characters of a tiny model."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<user>", "<assistant>")
"""Token ids 0 to 3; characters have ids from 4 on. Characters outside the vocabulary produce no tokens."""

_CONFIGS: Final[dict[str, str]] = {
    "qwen3": "Qwen3Config",
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "glm4": "Glm4Config",
    "gemma3": "Gemma3TextConfig",
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "glm4_moe": "Glm4MoeConfig",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "glm_moe_dsa": "GlmMoeDsaConfig",
    "deepseek_v3": "DeepseekV3Config",
    "deepseek_v32": "DeepseekV32Config",
    "minimax_m2": "MiniMaxM2Config",
    "gpt_oss": "GptOssConfig",
}
"""Class names. Importing the classes here would load the code of all these models, which takes three seconds."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    architecture: Architecture | str = "qwen3",
    seed: int = 0,
    characters: str = CHARACTERS,
    phrases: Sequence[str] = (),
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 512,
    initializer_range: float = 0.02,
    tie_word_embeddings: bool = False,
    entries: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, float32 weights, tokenizer and generation config to ``folder``, and return ``folder``.

    Equal arguments write equal bytes. The vocabulary is SPECIAL_TOKENS, ``characters`` and ``phrases``.

    architecture  or the name of a configuration class of transformers, such as Phi3Config
    entries       further entries of config.json
    """
    tokenizer = make_tokenizer(characters, phrases=phrases, max_positions=max_positions)
    config_type = getattr(transformers, _CONFIGS.get(architecture, architecture))
    settings: dict[str, Any] = dict(
        architectures=[config_type.__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    config = config_type(**{**settings, **family_entries(architecture, hidden_size, num_heads), **(entries or {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # transformers sets the <pad> row to zero. A random policy samples <pad>, and behind RMSNorm the gradient of a
        # zero row is a thousand times larger than that of other rows. Clipping would suppress the rest of the batch.
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.pad_token_id].normal_(std=initializer_range)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in _tied_names(model)}
    weights = {name: one.contiguous() for name, one in revert_weight_conversion(model, named).items()}  # for experts
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def family_entries(architecture: str, hidden_size: int, num_heads: int) -> dict[str, Any]:
    """Return further entries of config.json. A token uses two of eight experts, or four of sixteen."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden_size // 2, "norm_topk_prob": True}
    if architecture == "qwen3_moe":
        return {**experts, "num_experts": 8}
    alone = {"num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": hidden_size // 2}
    if architecture == "mixtral":
        return alone
    if architecture == "minimax_m2":  # half of every head is rotated: SGLang reads rotary_dim
        rotated = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        engine = {"rotary_dim": hidden_size // num_heads // 2, "use_qk_norm": True, "use_routing_bias": True}
        return {**alone, **engine, "scoring_func": "sigmoid", "rope_parameters": rotated}
    if architecture == "qwen2_moe":
        return {**experts, "num_experts": 8, "shared_expert_intermediate_size": hidden_size, "norm_topk_prob": False}
    hybrid = {  # every second layer has linear attention, with two values for each of two keys
        "rms_norm_eps": 1e-3,  # the DeltaNet's norm amplifies rounding errors where a token reads next to nothing
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": hidden_size // 4,
        "linear_value_head_dim": hidden_size // 2,
    }
    if architecture == "qwen3_5":
        return hybrid
    if architecture in ("qwen3_next", "qwen3_5_moe"):
        return {**hybrid, **experts, "num_experts": 8, "shared_expert_intermediate_size": hidden_size}
    shared = {**experts, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    if architecture == "mistral":
        return {"sliding_window": None}
    if architecture == "gpt_oss":  # every second layer sees 8 tokens; SGLang reads swiglu_limit, transformers has 7
        return {
            **alone,
            "sliding_window": 8,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        }
    if architecture == "gemma3":  # every second layer sees 8 tokens
        return {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": hidden_size}
    if architecture == "glm4":
        return {"attention_bias": True}
    if architecture == "glm4_moe":
        return {**shared, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True}
    head = hidden_size // num_heads
    latent = {
        "num_key_value_heads": num_heads,
        "head_dim": head // 2,  # transformers' name for the rotated part
        "q_lora_rank": hidden_size // 2,
        "kv_lora_rank": hidden_size // 2,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
    }
    if architecture == "glm4_moe_lite":  # transformers' norms within attention have 1e-6, whatever rms_norm_eps is
        return {**shared, **latent, "rms_norm_eps": 1e-6}
    indexer = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": head}  # few heads often give 0
    if architecture == "glm_moe_dsa":  # every second layer uses the choice of the one before
        freq = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
        return {**shared, **latent, **indexer, **freq, "num_experts": 8, "rms_norm_eps": 1e-6}
    grouped = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    if architecture == "deepseek_v3":
        return {**shared, **grouped, **latent}
    if architecture == "deepseek_v32":
        return {**shared, **grouped, **latent, **indexer, "num_experts": 16}
    return {}


def make_tokenizer(characters: str = CHARACTERS, *, phrases: Sequence[str] = (), max_positions: int = 512) -> Any:
    """Return a tokenizer with one token per (ASCII) character and per phrase, <eos>, <pad>, and a chat template.

    It is byte-level BPE without merges, because transformers always builds byte-level BPE for model type qwen2.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [letter for character in characters for letter in byte_level.pre_tokenize_str(character)[0][0]]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys((*SPECIAL_TOKENS, *letters)))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def _tied_names(model: Any) -> set[str]:
    """Return the weights that share another weight's storage and are not written."""
    return set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
