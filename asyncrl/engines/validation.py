"""Checks shared by all engines: sampling parameters that can be trained on, valid prompts, complete weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, PromptError, WeightsError
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import Shapes, check_layout, read_shapes


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse penalties when sampling for training. Raises ConfigError.

    The trainer recomputes log_softmax(logits / temperature) over the support of each token, and not what a penalty
    subtracted from each logit: the ratio of trainer to behavior would be wrong. An evaluation trains nothing.
    """
    if sampling.is_trained and sampling.penalties:
        raise ConfigError(
            f"rollout: {sampling.penalties} changes every logit by what the answer holds so far, which the trainer "
            "cannot recompute; remove it and punish repetition in the reward"
        )


def check_prompt(
    prompt_tokens: NDArray[np.int32], *, max_new_tokens: int, vocabulary_size: int, context_tokens: int
) -> None:
    """Refuse a prompt that the engine cannot continue. Raises PromptError."""
    if not len(prompt_tokens):
        raise PromptError("the prompt is empty")
    low, high = int(prompt_tokens.min()), int(prompt_tokens.max())
    if low < 0 or high >= vocabulary_size:
        raise PromptError(
            f"the prompt holds token {low if low < 0 else high}; the model knows 0..{vocabulary_size - 1}"
        )
    if len(prompt_tokens) + max_new_tokens > context_tokens:
        raise PromptError(
            f"{len(prompt_tokens)} prompt tokens + max_new_tokens={max_new_tokens} exceed the engine's context of "
            f"{context_tokens} tokens"
        )


def check_stop_tokens(sampling: SamplingParams, *, vocabulary_size: int) -> None:
    """Refuse stop tokens that the model does not have. Raises PromptError."""
    if unknown := [token for token in sampling.stop_token_ids if token >= vocabulary_size]:
        raise PromptError(f"stop_token_ids holds token {unknown[0]}; the model knows 0..{vocabulary_size - 1}")


def check_weights(weights: WeightVersion, *, expected: Shapes, optional: frozenset[str] = frozenset()) -> Path:
    """Check that a weight version holds exactly the ``expected`` tensors and shapes. Returns its folder.

    ``optional`` tensors may be absent (tied to another tensor). Reads only the header; the weight channel verifies the
    checksum. Raises WeightsError.
    """
    folder = Path(weights.uri)
    where = f"weights {weights.incarnation}:{weights.policy_version} at {folder}"
    try:
        num_bytes = weight_files.num_bytes(folder)
    except OSError as error:
        raise WeightsError(f"{where}: {error}") from error
    if num_bytes != weights.num_bytes:
        raise WeightsError(f"{where}: has {num_bytes} bytes of weights, but {weights.num_bytes} were published")
    try:
        check_layout(read_shapes(folder), expected=expected, optional=optional, where=where)
    except WeightsError as error:
        raise WeightsError(f"{error}; is this worker's model.path the model that the learner trains?") from None
    return folder
