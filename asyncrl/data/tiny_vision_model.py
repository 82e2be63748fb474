"""Make a Qwen2.5-VL, Qwen3-VL or Qwen3.5 folder small enough for one CPU core: random weights, a token per character.

As tiny_model.py, with a vision tower of patches of 4 x 4 pixels, of which 2 x 2 become a token, and the processor's
file. Images are resized to a multiple of 8 pixels a side, and are not made smaller or larger otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers

from asyncrl.data.tiny_model import CHARACTERS, make_tokenizer, mixture_entries, write_folder

VisionArchitecture = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]

IMAGE: Final = "<|image_pad|>"
VISION_TOKENS: Final = ("<|vision_start|>", IMAGE, "<|vision_end|>", "<|video_pad|>")
PATCH: Final = 4
MERGE: Final = 2

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{% else %}<user>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_vision_model(
    folder: Path,
    *,
    architecture: VisionArchitecture = "qwen2_5_vl",
    seed: int = 0,
    characters: str = CHARACTERS,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vision_layers: int = 2,
    vision_size: int = 32,
    max_positions: int = 512,
    initializer_range: float = 0.02,
    tie_word_embeddings: bool = False,
    entries: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, float32 weights, tokenizer, chat template and processor to ``folder``, and return ``folder``.

    Equal arguments write equal bytes. The vocabulary is SPECIAL_TOKENS, ``characters`` and VISION_TOKENS.

    entries  further entries of text_config
    """
    tokenizer = make_tokenizer(characters, max_positions=max_positions)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *VISION_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    is_hybrid = architecture.startswith("qwen3_5")
    half = hidden_size // num_heads // (4 if is_hybrid else 2)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    text: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision: dict[str, Any] = dict(
        depth=vision_layers,
        hidden_size=vision_size,
        intermediate_size=2 * vision_size,
        num_heads=2,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=2,
        out_hidden_size=hidden_size,
        initializer_range=initializer_range,
    )
    if architecture == "qwen2_5_vl":
        text |= {"rope_parameters": rope}
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [vision_layers - 1]}
        config_type: Any = transformers.Qwen2_5_VLConfig
    else:
        text |= {"rope_parameters": rope | {"mrope_interleaved": True}, "head_dim": hidden_size // num_heads}
        vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [] if is_hybrid else [0]}
        config_type = transformers.Qwen3VLConfig
    if architecture == "qwen3_vl_moe":  # a token uses two of eight experts
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size // 4}
        config_type = transformers.Qwen3VLMoeConfig
    if is_hybrid:  # half of every head is rotated
        text |= hybrid_entries(hidden_size) | {"partial_rotary_factor": 0.5}
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        config_type = transformers.Qwen3_5Config
    if architecture == "qwen3_5_moe":
        text |= mixture_entries(hidden_size) | {"shared_expert_intermediate_size": hidden_size}
        config_type = transformers.Qwen3_5MoeConfig
    text |= entries or {}
    config = config_type(
        architectures=[config_type.__name__.removesuffix("Config") + "ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        image_token_id=image,
        vision_end_token_id=end,
        video_token_id=video,
        tie_word_embeddings=tie_word_embeddings,
        dtype=torch.float32,
    )
    write_folder(folder, config, tokenizer, seed=seed)
    if is_hybrid:  # published ones have it, and SGLang reads it
        written = json.loads((folder / "config.json").read_text())
        written["text_config"]["full_attention_interval"] = text["full_attention_interval"]
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 2**20},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    return folder


def hybrid_entries(hidden_size: int) -> dict[str, Any]:
    """Return entries of config.json for linear attention in every second layer, two values for each of two keys."""
    return {
        "rms_norm_eps": 1e-3,  # the DeltaNet's norm amplifies rounding errors where a token reads next to nothing
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": hidden_size // 4,
        "linear_value_head_dim": hidden_size // 2,
    }
