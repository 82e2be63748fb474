"""Changes the distribution of the next token: for evaluations, and to exclude end tokens before min_new_tokens.

The order is SGLang's: penalties on the logits, then temperature, top_k and top_p. Penalties count the tokens of the
answer only, without the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from asyncrl.messages import SamplingParams


def reshaped(
    logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int], *, ends: Collection[int]
) -> torch.Tensor:
    """Return logits [V] whose softmax, after division by the temperature, is the sampling distribution.

    tokens  the answer so far
    ends    tokens that end an answer
    """
    if len(tokens) < sampling.min_new_tokens:
        logits = logits.clone()
        logits[list(ends)] = -torch.inf
    if not sampling.changes and sampling.temperature:
        return logits
    logits = _penalised(logits, sampling, tokens)
    if not sampling.temperature:
        return torch.full_like(logits, -torch.inf).index_fill_(0, logits.argmax(keepdim=True), 0.0)
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        values, order = torch.softmax(logits / sampling.temperature, -1).sort(descending=True)
        is_out = values.cumsum(-1) - values > sampling.top_p  # keeps the first token that exceeds top_p
        logits = logits.index_fill(0, order[is_out], -torch.inf)
    return logits


def _penalised(logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int]) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits)).to(logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.repetition_penalty == 1:
        return logits
    scaled = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty)
    return torch.where(counts > 0, scaled, logits)
