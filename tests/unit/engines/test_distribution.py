"""The next token's distribution in evaluations, and while an answer is not allowed to end."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.engines.inprocess.decoder import reshape_logits
from asyncrl.engines.validation import check_sampling
from asyncrl.errors import ConfigError
from asyncrl.messages import SamplingParams

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))


def probabilities(tokens: list[int] | None = None, **options: float) -> list[float]:
    sampling = SamplingParams(max_new_tokens=8, is_trained=False, **options)  # type: ignore[arg-type]
    logits = reshape_logits(LOGITS, sampling, tokens or [], ends={0})
    found: list[float] = torch.softmax(logits / (sampling.temperature or 1.0), -1).tolist()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"min_new_tokens": 1}, [0, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_probabilities_by_hand(options: dict[str, float], expected: list[float]) -> None:
    assert probabilities(**options) == pytest.approx(expected, abs=1e-6)


def test_penalties_take_from_the_logits_of_the_answers_tokens() -> None:
    both = probabilities([1, 1], presence_penalty=1.0, frequency_penalty=0.5)
    assert both[1] / both[0] == pytest.approx(0.3 / 0.4 * math.exp(-2), rel=1e-5)
    repeated = probabilities([1, 1], repetition_penalty=2.0)  # log 0.3 < 0, so the penalty multiplies
    assert repeated[1] / repeated[0] == pytest.approx(0.3**2 / 0.4, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}]
)
def test_what_is_trained_is_never_sampled_from_another_distribution(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="truncated or penalised"):
        check_sampling(SamplingParams(max_new_tokens=4, **options))  # type: ignore[arg-type]
    check_sampling(SamplingParams(max_new_tokens=4, is_trained=False, **options))  # type: ignore[arg-type]
