"""What engines and the learner take, and how it follows from what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one machine takes.

    seconds_per_token     a: reading the weights, once a decode step however many sequences run
    seconds_per_sequence  b: each running sequence's own part of a decode step
    capacity              sequences that run at once; more of them queue
    load_seconds          decoding stands still while new weights are loaded
    train_tokens_per_second, train_seconds   an optimizer step of T tokens on m machines: T / (m x rate) + constant
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
    """What an engine did for a while: ``running`` sequences on average, ``tokens`` in ``seconds``, prefill included."""

    running: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReading:
    """One optimizer step of the smallest learner on ``tokens``, prompts included."""

    tokens: int
    seconds: float


def fit_decode(readings: Iterable[DecodeReading]) -> tuple[float, float]:
    """(a, b) of a decode step of a + b x running seconds, both >= 0, from readings at different ``running``.

    Least squares over the readings' whole seconds, so that long ones weigh more; then scaled so that all readings
    together take as long as they took. Raises ValueError without a token.
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
    """(tokens a second, constant seconds) of an optimizer step, from readings at different ``tokens``.

    Raises ValueError without one.
    """
    given = list(readings)
    if not given or not any(reading.tokens for reading in given):
        raise ValueError("the learner trained no token")
    tokens = np.array([float(reading.tokens) for reading in given])
    constant, per_token = _positive_line(np.ones(len(given)), tokens, np.array([one.seconds for one in given]))
    if per_token <= 0:  # too short to tell them apart: all of it grows with the tokens
        constant, per_token = 0.0, float(sum(one.seconds for one in given) / tokens.sum())
    return 1 / per_token, constant


def _positive_line(
    first: NDArray[np.float64], second: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[float, float]:
    """Least squares of first x a + second x b = seconds, with neither below 0."""
    both = np.stack([first, second], axis=1)
    a, b = np.linalg.lstsq(both, seconds, rcond=None)[0]
    if a < 0:
        return 0.0, float(second @ seconds / (second @ second))
    if b < 0:
        return float(first @ seconds / (first @ first)), 0.0
    return float(a), float(b)
