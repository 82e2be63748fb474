"""Make a Hugging Face model folder small enough to train on one CPU core: random weights, one token per character.

The demo and the tests use it, so they need no download. Its initial policy is nearly uniform over the vocabulary,
because small weights give small logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.tensors.transformers_models import by_names_in_files, has_vision

DIGITS = "0123456789"
CHARACTERS = DIGITS + "abcdefghijklmnopqrstuvwxyz +-*=>?.,\n"
"""Default characters of a tiny model."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<user>", "<assistant>")
"""Token ids 0 to 3; characters have ids from 4 on. Characters outside the vocabulary produce no tokens."""

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
    architecture: str = "qwen3",
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

    architecture  model type of transformers, or the name of a configuration class, such as Phi3Config
    entries       further entries of config.json, which most families need
    """
    tokenizer = make_tokenizer(characters, phrases=phrases, max_positions=max_positions)
    known: Any = transformers.CONFIG_MAPPING
    name = architecture + "_text" * (f"{architecture}_text" in known)  # without the tower
    config_type = known[name] if name in known else getattr(transformers, architecture)
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
    mixture = mixture_entries(hidden_size) if architecture == "qwen3_moe" else {}
    write_folder(folder, config_type(**{**settings, **mixture, **(entries or {})}), tokenizer, seed=seed)
    return folder


def mixture_entries(hidden_size: int) -> dict[str, Any]:
    """Return entries of config.json for a mixture in which a token uses two of eight experts."""
    moe_size = hidden_size // 2
    return {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": moe_size, "norm_topk_prob": True}


def write_folder(folder: Path, config: Any, tokenizer: Any, *, seed: int) -> None:
    """Write a model of random weights with its config and tokenizer to ``folder``."""
    kind = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
        # transformers sets the <pad> row to zero. A random policy samples <pad>, and behind RMSNorm the gradient of a
        # zero row is a thousand times larger than that of other rows. Clipping would suppress the rest of the batch.
        with torch.no_grad():
            pad = model.get_input_embeddings().weight[tokenizer.pad_token_id]
            pad.normal_(std=config.get_text_config().initializer_range)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    write_weights(model, folder)
    tokenizer.save_pretrained(folder)


def write_weights(model: Any, folder: Path) -> None:
    """Write weights as published files hold them: save_pretrained turns the matrices of Qwen3-VL's experts."""
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else ()  # they share another's storage
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    found = by_names_in_files(named, model_type=model.config.model_type)
    weights = {name: tensor.contiguous() for name, tensor in found.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
