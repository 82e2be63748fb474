"""Checks shared by all engines: sampling parameters that can be trained on, valid prompts, complete weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, PromptError, WeightsError
from asyncrl.messages import SamplingParams, WeightVersion

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor names of a checkpoint and their shapes."""

WEIGHTS_FILE = "model.safetensors"


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse to sample for training from a truncated or penalised distribution. Raises ConfigError.

    The trainer recomputes log_softmax(logits / temperature) over the whole vocabulary. The tokens that top_p or top_k
    excluded are not recorded, nor is what a penalty took from each logit: the ratio of trainer to behavior would be
    wrong. An evaluation trains nothing.
    """
    if sampling.is_trained and sampling.changes:
        raise ConfigError(
            f"rollout: {sampling.changes} sample from a truncated or penalised distribution, whose logprobs the "
            "trainer cannot recompute; remove them and adjust temperature instead"
        )


def check_prompt(
    prompt_tokens: NDArray[np.int32], *, max_new_tokens: int, vocabulary_size: int, context_tokens: int
) -> None:
    """Refuse a prompt that the model cannot continue. Raises PromptError."""
    if not len(prompt_tokens):
        raise PromptError("the prompt is empty")
    low, high = int(prompt_tokens.min()), int(prompt_tokens.max())
    if low < 0 or high >= vocabulary_size:
        raise PromptError(
            f"the prompt holds token {low if low < 0 else high}; the model knows 0..{vocabulary_size - 1}"
        )
    if len(prompt_tokens) + max_new_tokens > context_tokens:
        raise PromptError(
            f"{len(prompt_tokens)} prompt tokens + max_new_tokens={max_new_tokens} exceed the model's context of "
            f"{context_tokens} tokens"
        )


def check_stop_tokens(sampling: SamplingParams, *, vocabulary_size: int) -> None:
    """Refuse stop tokens that the model does not have. Raises PromptError."""
    if unknown := [token for token in sampling.stop_token_ids if token >= vocabulary_size]:
        raise PromptError(f"stop_token_ids holds token {unknown[0]}; the model knows 0..{vocabulary_size - 1}")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face folder's tensors, from the headers alone. Raises WeightsError."""
    index = folder / f"{WEIGHTS_FILE}.index.json"
    try:
        names = [WEIGHTS_FILE]
        if not (folder / WEIGHTS_FILE).exists() and index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            with safetensors.safe_open(folder / name, framework="np") as file:
                shapes.update({key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{folder}: cannot read {WEIGHTS_FILE}: {error}") from error
    return shapes


def trained_shapes(shapes: Shapes, config: Mapping[str, Any]) -> Shapes:
    """Without those of layers behind ``num_hidden_layers``, which predict further tokens: no learner exports them."""
    num_layers = config.get("num_hidden_layers", 0)
    if not isinstance(num_layers, int) or not config.get("num_nextn_predict_layers"):
        return shapes
    further = tuple(f"model.layers.{num_layers + extra}." for extra in range(config["num_nextn_predict_layers"]))
    return {name: shape for name, shape in shapes.items() if not name.startswith(further)}


def check_weights(weights: WeightVersion, *, expected: Shapes, optional: frozenset[str] = frozenset()) -> Path:
    """The folder of a weight version, checked to hold exactly the ``expected`` tensors and shapes.

    ``optional`` names may be absent (tied to another tensor). Reads only the header; the weight channel verifies the
    checksum. Raises WeightsError.
    """
    folder = Path(weights.uri)
    where = f"weights {weights.incarnation}:{weights.policy_version} at {folder}"
    try:
        num_bytes = (folder / WEIGHTS_FILE).stat().st_size
    except OSError as error:
        raise WeightsError(f"{where}: {error}") from error
    if num_bytes != weights.num_bytes:
        raise WeightsError(f"{where}: {WEIGHTS_FILE} has {num_bytes} bytes, but {weights.num_bytes} were published")
    check_layout(read_shapes(folder), expected=expected, optional=optional, where=where)
    return folder


def check_layout(found: Shapes, *, expected: Shapes, optional: frozenset[str], where: str) -> None:
    """Raise WeightsError unless ``found`` matches ``expected`` exactly; ``optional`` tensors may be absent."""
    problems = [f"{name} is missing" for name in expected if name not in found and name not in optional]
    problems += [f"{name} is not in the model" for name in found if name not in expected and name not in optional]
    problems += [
        f"{name} has shape {list(shape)}, the model's is {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape != tuple(expected[name])
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsError(f"{where}: {'; '.join(problems[:3])}{more}")
