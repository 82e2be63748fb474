"""Tiny models on disk for engine tests, and the Hugging Face logprobs that engines must agree with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.messages import WeightVersion

VOCABULARY = 320
EOS = 1
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 16}),
}


def make_model(folder: Path, *, seed: int = 0, architecture: str = "qwen3", tied: bool = False, **shape: int) -> Path:
    """A random model with a byte-level tokenizer, as a Hugging Face folder."""
    config_class, model_class, extra = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **extra, "tie_word_embeddings": tied, **shape})
    model = model_class(config)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


def version_of(folder: Path, policy_version: int, *, run_epoch: int = 0) -> WeightVersion:
    """The message that announces the weights in ``folder``."""
    data = (folder / "model.safetensors").read_bytes()
    return WeightVersion(
        run_epoch=run_epoch,
        policy_version=policy_version,
        uri=str(folder),
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
    )


class Reference:
    """The model of a folder, straight from Hugging Face."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """log_softmax(logits / temperature) of each of ``tokens`` after the prompt, f32[T]."""
        ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
        with torch.no_grad():
            logits = self.model(ids[None]).logits[0].float()
        table = torch.log_softmax(logits / temperature, -1)
        return table[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()
