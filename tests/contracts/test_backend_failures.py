"""An error in a step or in scoring leaves the weights of a lone rank as they were, and does not affect the next step.

Several ranks end with it: tests/unit/backends/megatron/test_ranks.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.backends.port import Backend
from asyncrl.errors import AsyncRLError
from asyncrl.policies.batching.packing import MicroBatch
from tests.harness.backends import LEARNING_RATE, distance, sequences, shares, started, tiny_model, weights

KINDS = ("reference", "megatron-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def broken(kind: str, number: int, *, max_tokens: int) -> list[list[MicroBatch]]:
    """Return a batch in which the last token of sequence ``number`` has no embedding."""
    made = sequences(3)
    tokens = np.array(made[number].tokens)
    tokens[-1] = 10**6
    made[number] = dataclasses.replace(made[number], tokens=tokens)
    return shares(kind, made, max_tokens=max_tokens)


def fail(backend: Backend, kind: str, *, max_tokens: int) -> None:
    """Step and score with a bad sequence at several positions. The errors are those of torch, whatever they are."""
    for number in (0, 1, 7):
        cut = broken(kind, number, max_tokens=max_tokens)
        for call in (lambda cut: backend.step(cut, learning_rate=LEARNING_RATE), backend.forward):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever torch raises
                call(cut)
            assert not isinstance(caught.value, AsyncRLError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_step_changes_neither_weights_nor_optimizer(kind: str, folder: Path) -> None:
    def trained(*, with_failures: bool) -> Any:
        with started(kind, folder) as backend:
            for step in range(3):
                if with_failures:  # also before the first step, in which ranks learn what to wait for
                    fail(backend, kind, max_tokens=(1000, 40)[step % 2])
                backend.step(shares(kind, sequences(step), max_tokens=40), learning_rate=LEARNING_RATE)
            return weights(backend)

    assert distance(trained(with_failures=False), trained(with_failures=True)) == 0.0
