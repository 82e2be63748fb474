"""Model folders of vision-language models of real sizes with random weights. See shapes.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_QWEN2_5: Final = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}

VISION_SHAPES: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "tiny-Qwen2.5-VL": (
        "Qwen2_5_VL",
        {
            **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        {
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14},
            **{"window_size": 112, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        },
    ),
    "Qwen2.5-VL-3B": (
        "Qwen2_5_VL",
        {
            **{**_QWEN2_5, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36},
            **{"num_attention_heads": 16, "num_key_value_heads": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {
            **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
            **{"window_size": 112, "out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31]},
        },
    ),
    "Qwen3-VL-4B": (
        "Qwen3VL",
        {
            **{"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6},
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
                "mrope_interleaved": True,  # as published: SGLang reads it, transformers takes it for granted
            },
        },
        {
            **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16},
            **{"out_hidden_size": 2560, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
        },
    ),
}
"""Class of transformers, text_config and vision_config: the published sizes, in vision_config those that differ from
transformers' defaults."""


def make_vision_model(name: str, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """Write config, weights (normal, 0.02; tied embeddings), tokenizer and processor to ``folder``, and return it."""
    import torch
    import transformers

    from asyncrl.data.tiny_model import make_tokenizer, write_weights
    from asyncrl.data.tiny_vision_model import CHAT_TEMPLATE, VISION_TOKENS

    kind, text, vision = VISION_SHAPES[name]
    tokenizer = make_tokenizer(max_positions=text["max_position_embeddings"])
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *VISION_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    vision_start, image, vision_end, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForConditionalGeneration"],
        text_config={**text, **ends, "bos_token_id": None},
        vision_config=vision,
        tie_word_embeddings=True,
        dtype=getattr(torch, dtype),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.GenerationConfig(**ends).save_pretrained(folder)
    write_weights(model.cpu(), folder)
    seen = config.vision_config
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": seen.patch_size,
        "merge_size": seen.spatial_merge_size,
        "temporal_patch_size": seen.temporal_patch_size,
        "size": {"shortest_edge": 4 * (seen.patch_size * seen.spatial_merge_size) ** 2, "longest_edge": 2**20},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    return folder
