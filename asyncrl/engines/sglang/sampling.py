"""SamplingParams as an SGLang server's /generate takes them."""

from __future__ import annotations

from typing import Any

from asyncrl.messages import SamplingParams


def sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Every parameter is said: a server may have defaults of its own, from the model's generation_config.json."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_new_tokens": sampling.min_new_tokens,
    }
