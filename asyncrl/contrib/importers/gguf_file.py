"""Read a GGUF file in Hugging Face's terms: config, weights with their names and layout, and tokenizer.

Uses only the ``gguf`` package. transformers can read GGUF, but needs accelerate and takes <|im_start|> for the end
token of SmolLM2. For the layouts, see github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py; this file does the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from asyncrl.errors import ConfigError

_CONTROL_TOKEN, _USER_TOKEN = 3, 4
"""Values of tokenizer.ggml.token_type."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": rf"{_WORDS}|\p{{N}}|{_REST}", "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"}
"""Regular expressions that split text before BPE, by tokenizer.ggml.pre.

smollm is not one regular expression: it splits off single digits, then splits as GPT-2 does.
"""

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_CONFIGS: dict[str, tuple[Any, str]] = {
    "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
    "qwen2": (transformers.Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (transformers.Qwen3Config, "Qwen3ForCausalLM"),
}


class GGUFFile:
    """One GGUF file of a llama, qwen2 or qwen3 model. Raises ConfigError for anything it cannot convert."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{path}: not a GGUF file: {type(error).__name__}: {error}") from None
        self.architecture = str(self._get("general.architecture"))
        if self.architecture not in _CONFIGS:
            raise ConfigError(f"{path}: can import {', '.join(_CONFIGS)}; this is {self.architecture}")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "rope_freqs.weight" in self._tensors or self._model_key("rope.scaling.type", "none") != "none":
            raise ConfigError(f"{path}: RoPE scaling is not imported; take the model's Hugging Face folder")

    def config(self, *, dtype: Any) -> Any:
        """Return the model's transformers config."""
        config_type, architecture = _CONFIGS[self.architecture]
        heads, hidden = self._model_key("attention.head_count"), self._model_key("embedding_length")
        return config_type(
            architectures=[architecture],
            vocab_size=len(self._get("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=self._model_key("feed_forward_length"),
            num_hidden_layers=self._model_key("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._model_key("attention.head_count_kv", heads),
            head_dim=self._model_key("attention.key_length", hidden // heads),
            max_position_embeddings=self._model_key("context_length"),
            rms_norm_eps=float(f"{self._model_key('attention.layer_norm_rms_epsilon'):.6g}"),
            rope_parameters={"rope_type": "default", "rope_theta": self._model_key("rope.freq_base", 10_000.0)},
            tie_word_embeddings="output.weight" not in self._tensors,
            dtype=dtype,
            **self.token_ids(),
        )

    def token_ids(self) -> dict[str, int | None]:
        """Return the file's ids of the bos, eos and pad tokens. eos ends an answer."""
        return {
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._get("tokenizer.ggml.padding_token_id", None),
        }

    @property
    def num_tensors(self) -> int:
        return len(self._tensors)

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield every weight, dequantised, with its Hugging Face name and layout."""
        heads = self._model_key("attention.head_count")
        num_heads = {"attn_q": heads, "attn_k": self._model_key("attention.head_count_kv", heads)}
        for name, tensor in self._tensors.items():
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            kind = name.split(".")[-2]
            if self.architecture == "llama" and kind in num_heads:
                values = _undo_rope_order(values, num_heads[kind])
            yield self._hugging_face_name(name), values

    def tokenizer(self) -> Any:
        """Return the tokenizer with its special tokens and chat template."""
        if self._get("tokenizer.ggml.model") != "gpt2":
            raise ConfigError(f"{self.path}: imports byte-level BPE tokenizers only, not {self._tokenizer_kind()}")
        tokens: list[str] = self._get("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        kind = self._get("tokenizer.ggml.pre", "default")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self._pre_tokenizer(kind)
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, self._get("tokenizer.ggml.token_type"), strict=True):
            if kind in (_CONTROL_TOKEN, _USER_TOKEN):
                tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)])
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        if bos is not None and self._get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        ids = self.token_ids() | {"unk_token_id": self._get("tokenizer.ggml.unknown_token_id", None)}
        special = {key.removesuffix("_id"): tokens[index] for key, index in ids.items() if index is not None}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=self._get("tokenizer.chat_template", None),
            model_max_length=self._model_key("context_length"),
            clean_up_tokenization_spaces=False,
            **special,
        )

    def _pre_tokenizer(self, kind: str) -> Any:
        if kind == "smollm":
            return pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        if kind in _SPLITS:
            split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        known = ", ".join(["smollm", *_SPLITS])
        raise ConfigError(f"{self.path}: can import tokenizers of kind {known}; this one is {self._tokenizer_kind()}")

    def _tokenizer_kind(self) -> str:
        return f"{self._get('tokenizer.ggml.model', '?')}/{self._get('tokenizer.ggml.pre', 'default')}"

    def _hugging_face_name(self, name: str) -> str:
        *block, kind, suffix = name.split(".")
        names = _BLOCK_NAMES if block else _TOP_NAMES
        if kind not in names or (block and block[0] != "blk"):
            raise ConfigError(f"{self.path}: unknown tensor {name} in a {self.architecture} model")
        return f"model.layers.{block[1]}.{names[kind]}.{suffix}" if block else f"{names[kind]}.{suffix}"

    def _model_key(self, key: str, default: Any = ...) -> Any:
        return self._get(f"{self.architecture}.{key}", default)

    def _get(self, key: str, default: Any = ...) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is ...:
            raise ConfigError(f"{self.path}: the GGUF file has no {key}")
        return default


def _undo_rope_order(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order, [H*D, ...]: it interleaves the two halves of each head's rows.

    Hugging Face stores the halves one after the other.
    """
    rows = values.shape[0]
    split = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
