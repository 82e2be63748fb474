"""Timings of engines and the learner, and how to fit them to measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timings of one machine.

    seconds_per_token     a: reading the weights, once per decode step however many sequences run
    seconds_per_sequence  b: additional time of a decode step per running sequence
    capacity              sequences that run at once; further ones queue
    load_seconds          pause of decoding while new weights are loaded
    train_tokens_per_second, train_seconds   an optimizer step of T tokens on m machines takes T / (m x rate) + constant
    """

    seconds_per_token: float
    seconds_per_sequence: float
    capacity: int
    load_seconds: float
    train_tokens_per_second: float
    train_seconds: float

    def decode_step(self, running: int) -> float:
        return self.seconds_per_token + self.seconds_per_sequence * running

    def train_step(self, tokens: int, *, machines: int) -> float:
        return tokens / (machines * self.train_tokens_per_second) + self.train_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReading:
    """A measurement of an engine: ``running`` sequences on average, ``tokens`` in ``seconds``, including prefill."""

    running: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReading:
    """A measurement of one optimizer step of the smallest learner on ``tokens``, including prompts."""

    tokens: int
    seconds: float


def fit_decode(readings: Iterable[DecodeReading]) -> tuple[float, float]:
    """Fit (a, b) of a decode step of a + b x running seconds, both >= 0, to measurements at different ``running``.

    Least squares over the total seconds of each measurement, so long ones weigh more. The result is scaled so that all
    measurements together take as long as they did. Raises ValueError without a token.
    """
    given = [reading for reading in readings if reading.running > 0 and reading.seconds > 0]
    steps = np.array([reading.tokens / reading.running for reading in given])
    running = np.array([reading.running for reading in given])
    seconds = np.array([reading.seconds for reading in given])
    if not steps.sum() > 0:
        raise ValueError("the engine sampled no token")
    a, b = _positive_line(steps, steps * running, seconds)
    scale = seconds.sum() / (steps * (a + b * running)).sum()
    return a * scale, b * scale


def fit_training(readings: Iterable[TrainReading]) -> tuple[float, float]:
    """Fit (tokens per second, constant seconds) of an optimizer step to measurements at different ``tokens``.

    Raises ValueError without a token.
    """
    given = list(readings)
    if not given or not any(reading.tokens for reading in given):
        raise ValueError("the learner trained no token")
    tokens = np.array([float(reading.tokens) for reading in given])
    constant, per_token = _positive_line(np.ones(len(given)), tokens, np.array([one.seconds for one in given]))
    if per_token <= 0:  # too short to separate the two: attribute all time to the tokens
        constant, per_token = 0.0, float(sum(one.seconds for one in given) / tokens.sum())
    return 1 / per_token, constant


def _positive_line(
    first: NDArray[np.float64], second: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the least-squares fit of first x a + second x b = seconds, with a >= 0 and b >= 0."""
    both = np.stack([first, second], axis=1)
    a, b = np.linalg.lstsq(both, seconds, rcond=None)[0]
    if a < 0:
        return 0.0, float(second @ seconds / (second @ second))
    if b < 0:
        return float(first @ seconds / (first @ first)), 0.0
    return float(a), float(b)
