"""Builds requests to an SGLang server's /generate, with SamplingParams in its format."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import SamplingParams


def sampling_params(sampling: SamplingParams, *, vocabulary_size: int) -> dict[str, Any]:
    """Set every parameter explicitly: the server may take defaults from the model's generation_config.json."""
    keeps_all = not 0 < sampling.top_k < vocabulary_size  # a number of more than 32 bits ends the server
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if keeps_all else sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_new_tokens": sampling.min_new_tokens,
    }


def generate_request(
    prompt_tokens: NDArray[np.int32],
    sampling: SamplingParams,
    *,
    vocabulary_size: int,
    stream: bool,
    stream_interval: int | None,
    tells_experts: bool,
    extra_key: str,
) -> dict[str, Any]:
    """Return the body of a POST to /generate. If ``stream_interval`` is None, the server uses its own."""
    interval = {} if stream_interval is None else {"stream_interval": stream_interval}
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": prompt_tokens.tolist(),
        "sampling_params": sampling_params(sampling, vocabulary_size=vocabulary_size) | interval,
        "return_logprob": True,
        "return_routed_experts": tells_experts,
        "stream": stream,
        "extra_key": extra_key,
    }
